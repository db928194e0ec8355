"""What is kept of an event that could not be taken, and the words for what becomes of it. PURE.

The same for the quarantine of a projection, in SQL, and for that of a reactor or a process, beside its cursor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

PARKED, BLOCKED, RETRY, RETRIED, DROPPED = "parked", "blocked", "retry", "retried", "dropped"
BLOCKING = (PARKED, BLOCKED, RETRY)
"""Resolutions that block an aggregate: the first of its rows is parked or to be tried again, the rest are blocked."""
VERDICTS = (RETRY, RETRIED, DROPPED)
"""Resolutions that began with somebody's verdict."""

AggregateKey: TypeAlias = tuple[str, str]
"""(aggregate, aggregate id); of a subject that names neither, `?` and the subject."""


@dataclass(frozen=True, slots=True)
class Parked:
    """An event as the quarantine keeps it. One that is blocked by another has no reason, traceback or payload."""

    position: int
    aggregate: str
    aggregate_id: str
    event_id: str
    event_type: str
    resolution: str
    reason: str = ""
    traceback: str = ""
    payload: bytes | None = None
