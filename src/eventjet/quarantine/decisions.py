"""What people look at in the quarantine and decide about it.

A decision is made with the checkpoint locked, and raises its epoch: the worker that holds the lease is fenced, and the
next term begins with carrying the decision out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select, update

from eventjet.errors import UsageError
from eventjet.quarantine.fold import BEHIND, DROPPED, HOLDING, PARKED, RETRY
from eventjet.quarantine.rows import of
from eventjet.sql import checkpoint, transitions
from eventjet.sql.clock import Clock
from eventjet.sql.own_tables import quarantine

_q = quarantine.c
_SHOWN = (
    _q.projection, _q.revision, _q.position, _q.aggregate, _q.aggregate_id, _q.event_id, _q.event_type, _q.decision,
    _q.reason, _q.parked_at, _q.decided_at,
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
    decision: str
    reason: str
    parked_at: float
    """Seconds since 1970."""
    decided_at: float | None
    behind: int
    """Events of its aggregate that wait behind it."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One event of the quarantine, whole."""

    event: Listed
    traceback: str
    payload: bytes | None
    held_by: int | None
    """The parked event that it is behind."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a decision."""

    position: int
    decision: str
    reason: str
    next: int | None
    """The event that holds its aggregate back now, if there is one."""
    next_decision: str | None
    next_reason: str

    @property
    def is_open(self) -> bool:
        """Whether a worker is still to carry it out."""
        return RETRY in (self.decision, self.next_decision)


def listed(connection: Connection, names: Collection[str], *, decided: bool = False) -> list[Listed]:
    """The parked events of some projections, those to be tried again among them; with `decided` history too."""
    counted = (
        select(_q.projection, _q.revision, _q.aggregate, _q.aggregate_id, func.count())
        .where(_q.projection.in_(names), _q.decision == BEHIND)
        .group_by(_q.projection, _q.revision, _q.aggregate, _q.aggregate_id)
    )
    behind: dict[Any, int] = {tuple(row[:4]): row[4] for row in connection.execute(counted)}
    which = _q.decision != BEHIND if decided else _q.decision.in_((PARKED, RETRY))
    query = select(*_SHOWN).where(_q.projection.in_(names), which)
    return [
        _listed(row, behind.get((row[0], row[1], row[3], row[4]), 0) if row[7] in HOLDING else 0)
        for row in connection.execute(query.order_by(_q.projection, _q.revision, _q.position))
    ]


def shown(connection: Connection, name: str, revision: int, position: int) -> Shown | None:
    """One event; None when the quarantine does not have it."""
    query = select(*_SHOWN, _q.traceback, _q.payload).where(of(name, revision), _q.position == position)
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    decision, head = row[7], _heads(connection, name, revision).get((row[3], row[4]))
    waiting = 0
    if decision in (PARKED, RETRY):
        same = (_q.aggregate == row[3], _q.aggregate_id == row[4], _q.decision == BEHIND)
        waiting = connection.scalar(select(func.count()).where(of(name, revision), *same)) or 0
    held_by = head[0] if decision == BEHIND and head is not None else None
    return Shown(_listed(row[:-2], waiting), row[-2], row[-1], held_by)


def retry(connection: Connection, name: str, revision: int, positions: Sequence[int] | None) -> list[int]:
    """Have parked events tried again (None: all there are); returns their positions. Raises `UsageError`."""
    found = _locked(connection, name, revision)
    chosen = sorted(found) if positions is None else list(dict.fromkeys(positions))
    _check(connection, name, revision, chosen, found)
    if chosen:
        _decide(connection, name, revision, chosen, RETRY)
        transitions.depose(connection, name, revision)
    return chosen


def drop(connection: Connection, name: str, revision: int, positions: Sequence[int]) -> list[int]:
    """Give parked events up for good, and have the ones behind them tried. Raises `UsageError`."""
    found = _locked(connection, name, revision)
    chosen = list(dict.fromkeys(positions))
    _check(connection, name, revision, chosen, found)
    _decide(connection, name, revision, chosen, DROPPED)
    following: list[int] = []
    for position in chosen:
        aggregate, aggregate_id = found[position]
        behind = select(func.min(_q.position)).where(
            of(name, revision),
            _q.aggregate == aggregate,
            _q.aggregate_id == aggregate_id,
            _q.decision == BEHIND,
        )
        following += [one for one in connection.scalars(behind) if one is not None]
    _decide(connection, name, revision, following, RETRY)
    transitions.depose(connection, name, revision)
    return chosen


def outcomes(connection: Connection, name: str, revision: int, positions: Sequence[int]) -> list[Outcome]:
    """What became of each so far."""
    heads = _heads(connection, name, revision)
    query = select(_q.position, _q.decision, _q.reason, _q.aggregate, _q.aggregate_id).where(
        of(name, revision), _q.decision != BEHIND
    )
    rows = {row[0]: row for row in connection.execute(query)}
    found: list[Outcome] = []
    for position in positions:
        row = rows.get(position)
        if row is not None:
            head, decision, reason = heads.get((row[3], row[4]), (None, None, ""))
            found.append(Outcome(position, row[1], row[2], head, decision, reason))
    return found


def _heads(connection: Connection, name: str, revision: int) -> dict[tuple[str, str], tuple[int, str, str]]:
    """Aggregate → (position, decision, reason) of what holds it back."""
    query = select(_q.aggregate, _q.aggregate_id, _q.position, _q.decision, _q.reason).where(
        of(name, revision), _q.decision.in_((PARKED, RETRY))
    )
    rows = connection.execute(query.order_by(_q.position.desc()))
    return {(row[0], row[1]): (row[2], row[3], row[4]) for row in rows}


def _listed(row: Any, behind: int) -> Listed:
    whole: Any = (*row, behind)
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
        elif there.held_by is not None:
            reason = f"is behind the parked event at position {there.held_by}; decide about that one"
        else:
            reason = f"is {there.event.decision} already"
        raise UsageError(
            f"The event at position {position} of projection {name!r} {reason}. "
            f"Look at `eventjet quarantine list {name} --all`."
        )


def _decide(connection: Connection, name: str, revision: int, positions: Sequence[int], decision: str) -> None:
    values = {"decision": decision, "decided_at": Clock()}
    for start in range(0, len(positions), 500):
        some = _q.position.in_(positions[start : start + 500])
        connection.execute(update(quarantine).where(of(name, revision), some).values(**values))
