"""What people see of the quarantine, and the verdicts they give: to try a parked event again, or to drop it.

A verdict is given with the checkpoint locked, and deposes its owner: the worker that holds the lease is fenced, and the
next term begins with carrying the verdict out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select, update

from eventjet.errors import UsageError
from eventjet.quarantine.rows import of
from eventjet.sql import checkpoint, transitions
from eventjet.sql.own_tables import Clock, quarantine
from eventjet.sql.statements import BLOCKED, BLOCKING, DROPPED, PARKED, RETRY

_q = quarantine.c
_SHOWN = (
    _q.projection, _q.revision, _q.position, _q.aggregate, _q.aggregate_id, _q.event_id, _q.event_type, _q.resolution,
    _q.reason, _q.parked_at, _q.resolved_at,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Listed:
    """One event of the quarantine, without what is large."""

    projection: str
    revision: int
    position: int
    aggregate: str
    aggregate_id: str
    event_id: str
    event_type: str
    resolution: str
    reason: str
    parked_at: float
    """Seconds since 1970."""
    resolved_at: float | None
    blocked: int
    """Events of its aggregate that wait for it."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One event of the quarantine, whole."""

    event: Listed
    traceback: str
    payload: bytes | None
    blocked_by: int | None
    """The parked event that it waits for."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a verdict."""

    position: int
    resolution: str
    reason: str
    next: int | None
    """The event that blocks its aggregate now, if there is one."""
    next_resolution: str | None
    next_reason: str

    @property
    def is_open(self) -> bool:
        """Whether a worker is still to carry it out."""
        return RETRY in (self.resolution, self.next_resolution)


def listed(connection: Connection, names: Collection[str], *, resolved: bool = False) -> list[Listed]:
    """The parked events of some projections, those to be tried again among them; with `resolved` history too."""
    counted = (
        select(_q.projection, _q.revision, _q.aggregate, _q.aggregate_id, func.count())
        .where(_q.projection.in_(names), _q.resolution == BLOCKED)
        .group_by(_q.projection, _q.revision, _q.aggregate, _q.aggregate_id)
    )
    blocked: dict[Any, int] = {tuple(row[:4]): row[4] for row in connection.execute(counted)}
    which = _q.resolution != BLOCKED if resolved else _q.resolution.in_((PARKED, RETRY))
    query = select(*_SHOWN).where(_q.projection.in_(names), which)
    return [
        _listed(row, blocked.get((row[0], row[1], row[3], row[4]), 0) if row[7] in BLOCKING else 0)
        for row in connection.execute(query.order_by(_q.projection, _q.revision, _q.position))
    ]


def shown(connection: Connection, name: str, revision: int, position: int) -> Shown | None:
    """One event; None when the quarantine does not have it."""
    query = select(*_SHOWN, _q.traceback, _q.payload).where(of(name, revision), _q.position == position)
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    resolution, head = row[7], _heads(connection, name, revision).get((row[3], row[4]))
    waiting = 0
    if resolution in (PARKED, RETRY):
        same = (_q.aggregate == row[3], _q.aggregate_id == row[4], _q.resolution == BLOCKED)
        waiting = connection.scalar(select(func.count()).where(of(name, revision), *same)) or 0
    blocked_by = head[0] if resolution == BLOCKED and head is not None else None
    return Shown(_listed(row[:-2], waiting), row[-2], row[-1], blocked_by)


def retry(connection: Connection, name: str, revision: int, positions: Sequence[int] | None) -> list[int]:
    """Have parked events tried again (None: all there are); returns their positions. Raises `UsageError`."""
    found = _locked(connection, name, revision)
    chosen = sorted(found) if positions is None else list(dict.fromkeys(positions))
    _check(connection, name, revision, chosen, found)
    if chosen:
        _resolve(connection, name, revision, chosen, RETRY)
        transitions.depose(connection, name, revision)
    return chosen


def drop(connection: Connection, name: str, revision: int, positions: Sequence[int]) -> list[int]:
    """Give parked events up for good, and have the ones that they blocked tried. Raises `UsageError`."""
    found = _locked(connection, name, revision)
    chosen = list(dict.fromkeys(positions))
    _check(connection, name, revision, chosen, found)
    _resolve(connection, name, revision, chosen, DROPPED)
    following: list[int] = []
    for position in chosen:
        aggregate, aggregate_id = found[position]
        blocked = select(func.min(_q.position)).where(
            of(name, revision),
            _q.aggregate == aggregate,
            _q.aggregate_id == aggregate_id,
            _q.resolution == BLOCKED,
        )
        following += [one for one in connection.scalars(blocked) if one is not None]
    _resolve(connection, name, revision, following, RETRY)
    transitions.depose(connection, name, revision)
    return chosen


def outcomes(connection: Connection, name: str, revision: int, positions: Sequence[int]) -> list[Outcome]:
    """What became of each so far."""
    heads = _heads(connection, name, revision)
    query = select(_q.position, _q.resolution, _q.reason, _q.aggregate, _q.aggregate_id).where(
        of(name, revision), _q.resolution != BLOCKED
    )
    rows = {row[0]: row for row in connection.execute(query)}
    found: list[Outcome] = []
    for position in positions:
        row = rows.get(position)
        if row is not None:
            head, resolution, reason = heads.get((row[3], row[4]), (None, None, ""))
            found.append(Outcome(position, row[1], row[2], head, resolution, reason))
    return found


def _heads(connection: Connection, name: str, revision: int) -> dict[tuple[str, str], tuple[int, str, str]]:
    """Aggregate → (position, resolution, reason) of what blocks it."""
    query = select(_q.aggregate, _q.aggregate_id, _q.position, _q.resolution, _q.reason).where(
        of(name, revision), _q.resolution.in_((PARKED, RETRY))
    )
    rows = connection.execute(query.order_by(_q.position.desc()))
    return {(row[0], row[1]): (row[2], row[3], row[4]) for row in rows}


def _listed(row: Any, blocked: int) -> Listed:
    whole: Any = (*row, blocked)
    return Listed(*whole)


def _locked(connection: Connection, name: str, revision: int) -> dict[int, tuple[str, str]]:
    """Position → aggregate of what is parked or to be tried again, and stays so until the transaction ends."""
    checkpoint.lock(connection, name, revision)
    return {head[0]: key for key, head in _heads(connection, name, revision).items()}


def _check(connection: Connection, name: str, revision: int, chosen: Sequence[int], found: Collection[int]) -> None:
    for position in chosen:
        if position in found:
            continue
        there = shown(connection, name, revision, position)
        if there is None:
            reason = "is not in its quarantine"
        elif there.blocked_by is not None:
            reason = f"waits for the parked event at position {there.blocked_by}; give your verdict on that one"
        else:
            reason = f"is {there.event.resolution} already"
        raise UsageError(
            f"The event at position {position} of projection {name!r} {reason}. "
            f"Look at `eventjet quarantine list {name} --all`."
        )


def _resolve(connection: Connection, name: str, revision: int, positions: Sequence[int], resolution: str) -> None:
    values = {"resolution": resolution, "resolved_at": Clock()}
    for start in range(0, len(positions), 500):
        some = _q.position.in_(positions[start : start + 500])
        connection.execute(update(quarantine).where(of(name, revision), some).values(**values))
