"""Roles of NATS users as the docs show them, for a test's own stream."""

from __future__ import annotations

import json
from pathlib import Path

from tests.docs.pages import blocks_of

PAGE = Path(__file__).parents[2] / "docs/how-to/spark-cluster.md"
ADMIN = "admin"


def with_rebuild_role(stream: str, password: str) -> str:
    """A server's configuration: the user `rebuild` of the docs, and `admin` who may do anything."""
    (shown,) = [block.text for block in blocks_of(PAGE) if block.language == "conf"]
    role = shown.replace("$REBUILD_PASSWORD", json.dumps(password)).replace(".bank", f".{stream}")
    head = "authorization { users: ["
    assert role.startswith(head)
    return role.replace(head, f"authorization {{ timeout: 30, users: [\n  {{ user: {ADMIN}, password: {ADMIN} }}", 1)
