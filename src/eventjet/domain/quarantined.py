"""The row that a quarantine keeps for an event that could not be handled, and the states of such a row. PURE.

The same for the quarantine of a projection, in SQL, and for that of a reactor or a process, beside its cursor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

QUARANTINED, BLOCKED, RETRY, RETRIED, DROPPED = "quarantined", "blocked", "retry", "retried", "dropped"
BLOCKING = (QUARANTINED, BLOCKED, RETRY)
"""Resolutions that block an aggregate: its first row is `quarantined` or `retry`, the others are `blocked`."""
DECIDED_RESOLUTIONS = (RETRY, RETRIED, DROPPED)
"""Resolutions that an operator asked for."""

AggregateKey: TypeAlias = tuple[str, str]
"""(aggregate, aggregate id); for a subject that names neither, `?` and the subject."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An event in the quarantine; an event blocked behind another has no reason, traceback or payload."""

    position: int
    aggregate: str
    aggregate_id: str
    event_id: str
    event_type: str
    resolution: str
    reason: str = ""
    traceback: str = ""
    payload: bytes | None = None
