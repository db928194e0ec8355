"""PURE: whether a stream still holds its log, from the recorded beginning on."""

from __future__ import annotations

from eventjet.errors import LogIncomplete
from eventjet.jetstream.api import StreamState

FIRST = "eventjet.first"
"""Key of the log's first position in the stream's metadata: 1, or where the archive began that it was restored from."""
MISSING = "eventjet.missing"
"""Key of how many positions after the first one somebody has said may be missing: 0 where it is not there."""


def first_position(state: StreamState) -> int:
    """Where the log is to begin."""
    return _number(state, FIRST) or int(state.config.get("first_seq") or 0) or 1


def accepted(state: StreamState) -> int:
    """How many positions after the first one somebody has said may be missing."""
    return _number(state, MISSING)


def loss(state: StreamState) -> str:
    """What is gone from the log, in words; empty for a whole one."""
    expected, first = first_position(state), max(state.first, 1)
    gone: list[str] = []
    if first > expected:
        gone.append(f"{_positions(expected, first - 1)} from its beginning")
    if state.deleted > accepted(state):
        gone.append(f"{state.deleted:,} between {first:,} and {state.last:,}")
    if not gone:
        return ""
    limits = [f"{name} is {state.config[name]}" for name in _LIMITS if int(state.config.get(name) or 0) > 0]
    if (retention := state.config.get("retention", "limits")) != "limits":
        limits.append(f"retention is {retention}")
    limited = f" ({', '.join(limits)})" if limits else ""
    return f"{' and '.join(gone)} are gone{limited}"


def check_whole(state: StreamState) -> None:
    """Raise `LogIncomplete` unless everything is there."""
    if gone := loss(state):
        raise LogIncomplete(f"The log {state.name!r}", gone)


_LIMITS = ("max_msgs", "max_bytes", "max_age", "max_msgs_per_subject")
"""Settings by which the server drops the oldest events."""


def _positions(first: int, last: int) -> str:
    return f"position {first:,}" if first == last else f"positions {first:,} to {last:,}"


def _number(state: StreamState, key: str) -> int:
    text = state.metadata.get(key, "")
    return int(text) if text.isascii() and text.isdecimal() else 0
