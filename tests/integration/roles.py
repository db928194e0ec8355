"""The role of a rebuild as `eventjet nats-config` gives it, for a test's own stream."""

from __future__ import annotations

import json

from eventjet.operations.roles import REBUILD, roles_of, user_lines

ADMIN = "admin"
INBOX = f"_INBOX_{REBUILD}"


def with_rebuild_role(stream: str, password: str) -> str:
    """The user `rebuild` beside the durable `balances-r1`, and `admin` who may do anything."""
    (role,) = [one for one in roles_of(stream, (), ("balances-r1",)) if one.name == REBUILD]
    return f"""{role.variable}: {json.dumps(password)}
authorization {{ timeout: 30, users: [
  {{ user: {ADMIN}, password: {ADMIN} }}
{user_lines(role)}
] }}"""
