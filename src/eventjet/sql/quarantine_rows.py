"""Rows of `eventjet_quarantine` as values: what a batch, a load or a retry does to them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from eventjet.sql.own_tables import quarantine

PARKED, BLOCKED, RETRY, RETRIED, DROPPED = "parked", "blocked", "retry", "retried", "dropped"
BLOCKING = (PARKED, BLOCKED, RETRY)
"""Resolutions that block an aggregate: the first of its rows is parked or to be tried again, the rest are blocked."""
VERDICTS = (RETRY, RETRIED, DROPPED)
"""Resolutions that began with somebody's verdict."""


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


@dataclass(frozen=True, slots=True)
class QuarantineChanges:
    """What a batch does to the quarantine; no position is in two of these."""

    parked: Sequence[Parked] = ()
    """To insert, or to put in the place of what was there."""
    freed: Sequence[int] = ()
    """Positions that were blocked by a parked one and are taken: to delete."""
    resolved: Sequence[tuple[int, str]] = ()
    """Positions with their new resolution."""


COLUMNS = tuple(one.name for one in fields(Parked))
INSERT = f"insert into {quarantine.name} (projection, revision, {', '.join(COLUMNS)}, parked_at)"
REPLACE = (
    "on conflict (projection, revision, position) do update set "
    + ", ".join(f"{name} = excluded.{name}" for name in (*COLUMNS[1:], "parked_at"))
    + ", resolved_at = null"
)
