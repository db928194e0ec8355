"""The rebuild role of `eventjet nats-config`, for the stream of a test."""

from __future__ import annotations

import json

from eventjet.operations.roles import REBUILD, roles_of, user_lines

ADMIN = "admin"
INBOX = f"_INBOX_{REBUILD}"


def with_rebuild_role(stream: str, password: str) -> str:
    """Return a configuration with the user `rebuild` for the durable `balances-r1`, and an unrestricted `admin`."""
    (role,) = [candidate for candidate in roles_of(stream, (), ("balances-r1",)) if candidate.name == REBUILD]
    return f"""{role.variable}: {json.dumps(password)}
authorization {{ timeout: 30, users: [
  {{ user: {ADMIN}, password: {ADMIN} }}
{user_lines(role)}
] }}"""
