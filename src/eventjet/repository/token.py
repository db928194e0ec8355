"""PURE: where a write is in the log, as text that fits an HTTP header: `bank:1234`."""

from __future__ import annotations

import re

from eventjet.errors import UsageError

_TOKEN = re.compile(r"([a-z][a-z0-9_]{0,62}):(0|[1-9][0-9]{0,18})", re.ASCII)
_POSITION_MAX = 2**63 - 1


def token_at(app: str, position: int) -> str:
    """The token of a position in an app's log."""
    return f"{app}:{position}"


def position_in(token: str, app: str) -> int:
    """The position that a token names; raises `UsageError` for what is no token, or one of another app."""
    found = _TOKEN.fullmatch(token.strip(" \t"))
    if found is None or int(found[2]) > _POSITION_MAX:
        raise UsageError(f"{token[:80]!r} is not a token. Hand on `Committed.token` as it is, for instance {app}:1234.")
    if found[1] != app:
        raise UsageError(
            f"The token {found[0]!r} is of the app {found[1]!r}, and this connection is of {app!r}. "
            "Hand it to a process of the app that made it."
        )
    return int(found[2])
