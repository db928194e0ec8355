"""PURE: what eventjet needs of a NATS server, by what that says of itself when it greets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eventjet.codec.subjects import SERVER_MESSAGE_MAX
from eventjet.errors import Unreachable

MINIMUM_SERVER = (2, 14, 4)
"""Atomic batches came with 2.12; distinct expectations in one batch are right from 2.14.4 on (nats-server #8376)."""
RECOMMENDED_SERVER = (2, 15, 1)
"""What tests run on. From 2.15 on several replicas sync once for each entry of their Raft log (nats-server #8447)."""


def version_of(info: Mapping[str, Any]) -> tuple[int, ...]:
    """Of 2.15.1 its numbers, and those of 2.15.0 of 2.15.0-RC.1; empty where it says none."""
    return tuple(map(int, re.findall(r"\d+", str(info.get("version", "")).partition("-")[0])))


def shown_version(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def check_server(where: str, info: Mapping[str, Any]) -> None:
    """Raise `Unreachable` for a server that is too old, or takes too small messages."""
    check_version(where, info)
    if info.get("max_payload", 0) < SERVER_MESSAGE_MAX:
        raise Unreachable(
            where,
            f"it takes messages of {info.get('max_payload', 0):,} bytes, and events may have {SERVER_MESSAGE_MAX:,}",
            "Set `max_payload: 1MB` in its configuration.",
        )


def check_version(where: str, info: Mapping[str, Any]) -> None:
    """Raise `Unreachable` for a server that is too old."""
    if version_of(info) < MINIMUM_SERVER:
        needed = shown_version(MINIMUM_SERVER)
        raise Unreachable(
            where,
            f"it is version {info.get('version', '')}, and eventjet needs {needed}: older ones reject or misjudge "
            "atomic batches",
            f"Upgrade nats-server to {needed} or newer.",
        )
