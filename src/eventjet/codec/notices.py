"""PURE: what a worker tells after a commit, over core NATS: how far a projection is true.

Nobody may rely on it: core NATS loses messages. It only says when looking at the checkpoint is worth while.
"""

from __future__ import annotations


def notice_subject(app: str, projection: str) -> str:
    """Where the notices of one projection go; outside the app's stream."""
    return f"_EJ.{app}.projected.{projection}"


def notice(revision: int, position: int) -> bytes:
    """A revision is true up to a position."""
    return b"%d %d" % (revision, position)


def read_notice(payload: bytes) -> tuple[int, int] | None:
    """(revision, position); None for anything else. What a later version may append is passed over."""
    parts = payload.split(b" ", 2)
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()) or len(payload) > 200:
        return None
    return int(parts[0]), int(parts[1])
