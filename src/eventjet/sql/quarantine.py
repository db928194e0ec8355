"""The rows of the quarantine: queries of workers, loads and people, and what people decide about an event.

A decision, to try a quarantined event again or to drop it, is written with the checkpoint locked and deposes its owner:
the worker that has the lease is fenced, and the next lease session begins with carrying the decision out.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, func, select, update

from eventjet.domain.quarantined import BLOCKED, BLOCKING, DROPPED, QUARANTINED, RETRY, AggregateKey, Quarantined
from eventjet.errors import UsageError
from eventjet.sql import checkpoint
from eventjet.sql.database import dialect_of
from eventjet.sql.own_tables import Clock, quarantine
from eventjet.sql.statements import QuarantineChanges

_q = quarantine.c
_IS_HEAD = _q.resolution.in_((QUARANTINED, RETRY))
"""The condition for events that failed, or are to be tried again: those that do not wait behind another one."""
_ROWS_AT_ONCE = 1_000
_POSITIONS_AT_ONCE = 500
"""Positions in one statement: databases limit its parameters."""


@dataclass(frozen=True, slots=True)
class WaitingEvent:
    """A row of the quarantine that blocks its aggregate."""

    position: int
    has_failed: bool
    """Whether the event itself failed, rather than only waiting behind another one."""
    aggregate_key: AggregateKey


def insert_events(connection: Connection, name: str, revision: int, events: Sequence[Quarantined]) -> None:
    """Insert the events that failed in a bulk load; nobody else may write to these rows."""
    dialect = dialect_of(connection)
    for start in range(0, len(events), _ROWS_AT_ONCE):
        dialect.write_quarantine(connection, name, revision, QuarantineChanges(events[start : start + _ROWS_AT_ONCE]))


def of(name: str, revision: int) -> ColumnElement[bool]:
    """Return the condition that matches the rows of one revision of a projection."""
    return and_(_q.projection == name, _q.revision == revision)


def blocked_aggregates(connection: Connection, name: str, revision: int, last: int | None = None) -> set[AggregateKey]:
    """Return the aggregates that are blocked; if `last` is given, only those blocked by events up to that position."""
    query = select(_q.aggregate, _q.aggregate_id).where(of(name, revision), _q.resolution.in_(BLOCKING))
    if last is not None:
        query = query.where(_q.position <= last)
    return {(aggregate, aggregate_id) for aggregate, aggregate_id in connection.execute(query.distinct())}


def to_retry(connection: Connection, name: str, revision: int, limit: int) -> list[WaitingEvent]:
    """Return the blocking rows of aggregates with an event to be tried again, by aggregate and position."""
    aggregates = (
        select(_q.aggregate, _q.aggregate_id)
        .where(of(name, revision), _q.resolution == RETRY)
        .group_by(_q.aggregate, _q.aggregate_id)
        .order_by(func.min(_q.position))
        .limit(limit)
        .subquery()
    )
    condition = (_q.aggregate == aggregates.c.aggregate) & (_q.aggregate_id == aggregates.c.aggregate_id)
    query = (
        select(_q.position, _q.reason != "", _q.aggregate, _q.aggregate_id)
        .join(aggregates, condition)
        .where(of(name, revision), _q.resolution.in_(BLOCKING))
        .order_by(_q.aggregate, _q.aggregate_id, _q.position)
        .limit(limit)
    )
    rows = connection.execute(query)
    return [WaitingEvent(position, bool(has_failed), (*key,)) for position, has_failed, *key in rows]


def quarantined_counts(connection: Connection) -> dict[tuple[str, int], int]:
    """Count quarantined events by (name, revision), also those to be tried again; not those that only wait."""
    query = select(_q.projection, _q.revision, func.count()).where(_IS_HEAD).group_by(_q.projection, _q.revision)
    return {(name, revision): count for name, revision, count in connection.execute(query)}


@dataclass(frozen=True, slots=True)
class Listed:
    """An event of the quarantine, without its traceback and payload."""

    projection: str
    revision: int
    position: int
    aggregate: str
    aggregate_id: str
    event_id: str
    event_type: str
    resolution: str
    reason: str
    quarantined_at: float
    """Seconds since 1970."""
    resolved_at: float | None
    blocked: int
    """The number of events of its aggregate that wait behind it."""

    def contains(self, text: str) -> bool:
        """Whether its reason, type, aggregate or id contains a text, in upper or lower case."""
        searched = (self.reason, self.event_type, self.aggregate, self.aggregate_id)
        return any(text.casefold() in value.casefold() for value in searched)


@dataclass(frozen=True, slots=True)
class Shown:
    """An event of the quarantine, with its traceback and payload."""

    event: Listed
    traceback: str
    payload: bytes | None
    blocked_by: int | None
    """The position of the event behind which it waits; None where it does not wait."""


@dataclass(frozen=True, slots=True)
class DecisionOutcome:
    """The outcome so far of a decision about an event."""

    position: int
    resolution: str
    reason: str
    next: int | None
    """The position of the event that blocks its aggregate now; None when there is none."""
    next_resolution: str | None
    next_reason: str

    @property
    def is_open(self) -> bool:
        """Whether a worker still has to carry the decision out."""
        return RETRY in (self.resolution, self.next_resolution)


_blocked_rows = quarantine.alias()
_blocked_count = select(func.count()).where(
    *(_blocked_rows.c[name] == _q[name] for name in ("projection", "revision", "aggregate", "aggregate_id")),
    _blocked_rows.c.resolution == BLOCKED,
)
_LISTED: list[ColumnElement[Any]] = [
    *(_q[field.name] for field in fields(Listed)[:-1]),
    case((_IS_HEAD, _blocked_count.scalar_subquery()), else_=0),
]
"""The columns of `Listed`."""


def listed(
    connection: Connection,
    names: Collection[str],
    *,
    resolved: bool = False,
    after: int = 0,
    limit: int | None = None,
    text: str = "",
) -> list[Listed]:
    """Return the quarantined events of some projections by position, including those to be tried again.

    With `resolved`, resolved events are included. Only events `after` a position, and at most `limit`, are returned.
    With `text`, only those are returned whose reason, type, aggregate or id contains it, in upper or lower case.
    """
    resolution = _q.resolution != BLOCKED if resolved else _IS_HEAD
    conditions = [_q.projection.in_(names), _q.position > after, resolution]
    if not text:
        return list(_select(connection, *conditions, limit=limit))
    # In Python: the lower() of SQLite, and of PostgreSQL in the locale C, knows no letters beyond ASCII.
    matching = (event for event in _select(connection, *conditions) if event.contains(text))
    return list(islice(matching, limit))


def waiting(connection: Connection, head: Listed, limit: int) -> list[Listed]:
    """Return the first `limit` events that wait behind a quarantined event, in order."""
    of_aggregate = (_q.aggregate == head.aggregate) & (_q.aggregate_id == head.aggregate_id)
    is_behind = (_q.resolution == BLOCKED) & (_q.position > head.position)
    return list(_select(connection, of(head.projection, head.revision), of_aggregate, is_behind, limit=limit))


def _select(connection: Connection, *conditions: ColumnElement[bool], limit: int | None = None) -> Generator[Listed]:
    query = select(*_LISTED).where(*conditions).order_by(_q.position, _q.projection, _q.revision).limit(limit)
    with connection.execute(query, execution_options={"yield_per": _ROWS_AT_ONCE}) as rows:
        yield from (Listed(*row) for row in rows)


def shown(connection: Connection, name: str, revision: int, position: int) -> Shown | None:
    """Return one event with its traceback and payload; None when it is not in the quarantine."""
    query = select(*_LISTED, _q.traceback, _q.payload).where(of(name, revision), _q.position == position)
    row: Any = connection.execute(query).one_or_none()
    if row is None:
        return None
    event = Listed(*row[:-2])
    head = _heads(connection, name, revision).get((event.aggregate, event.aggregate_id))
    blocked_by = head[0] if event.resolution == BLOCKED and head is not None else None
    return Shown(event, row.traceback, row.payload, blocked_by)


def retry(connection: Connection, name: str, revision: int, positions: Sequence[int] | None) -> list[int]:
    """Mark quarantined events to be tried again (None: all of them); return their positions. Raises `UsageError`."""
    blocking = _locked(connection, name, revision)
    chosen = sorted(blocking) if positions is None else list(dict.fromkeys(positions))
    _check_blocking(connection, name, revision, chosen, blocking)
    if chosen and positions is None:
        _resolve(connection, name, revision, _IS_HEAD, RETRY)
    else:
        _resolve_positions(connection, name, revision, chosen, RETRY)
    if chosen:
        checkpoint.depose(connection, name, revision)
    return chosen


def drop(connection: Connection, name: str, revision: int, positions: Sequence[int]) -> list[int]:
    """Drop quarantined events, let the next of each be tried, and return their positions. Raises `UsageError`."""
    blocking = _locked(connection, name, revision)
    chosen = list(dict.fromkeys(positions))
    _check_blocking(connection, name, revision, chosen, blocking)
    _resolve_positions(connection, name, revision, chosen, DROPPED)
    dropped = {blocking[position] for position in chosen}
    first_blocked = (
        select(_q.aggregate, _q.aggregate_id, func.min(_q.position))
        .where(of(name, revision), _q.resolution == BLOCKED)
        .group_by(_q.aggregate, _q.aggregate_id)
    )
    following = [position for *key, position in connection.execute(first_blocked) if tuple(key) in dropped]
    _resolve_positions(connection, name, revision, following, RETRY)
    checkpoint.depose(connection, name, revision)
    return chosen


def outcomes(connection: Connection, name: str, revision: int, positions: Sequence[int]) -> list[DecisionOutcome]:
    """Return the outcome so far of the decisions about these positions; unknown positions are left out."""
    heads = _heads(connection, name, revision)
    query = select(_q.position, _q.resolution, _q.reason, _q.aggregate, _q.aggregate_id).where(
        of(name, revision), _q.resolution != BLOCKED
    )
    if len(positions) <= _POSITIONS_AT_ONCE:
        query = query.where(_q.position.in_(positions))
    decided = {
        position: DecisionOutcome(position, resolution, reason, *heads.get((*key,), (None, None, "")))
        for position, resolution, reason, *key in connection.execute(query)
    }
    return [decided[position] for position in positions if position in decided]


def _heads(connection: Connection, name: str, revision: int) -> dict[tuple[str, str], tuple[int, str, str]]:
    """Return (position, resolution, reason) of the first event that blocks each aggregate."""
    query = select(_q.aggregate, _q.aggregate_id, _q.position, _q.resolution, _q.reason).where(
        of(name, revision), _IS_HEAD
    )
    rows = connection.execute(query.order_by(_q.position.desc()))
    return {(aggregate, aggregate_id): (*head,) for aggregate, aggregate_id, *head in rows}


def _locked(connection: Connection, name: str, revision: int) -> dict[int, tuple[str, str]]:
    """Lock the checkpoint, so that nothing changes, and return the aggregates of blocking events by position."""
    checkpoint.lock(connection, name, revision)
    return {head[0]: key for key, head in _heads(connection, name, revision).items()}


def _check_blocking(
    connection: Connection, name: str, revision: int, chosen: Sequence[int], blocking: Collection[int]
) -> None:
    for position in chosen:
        if position in blocking:
            continue
        details = shown(connection, name, revision, position)
        if details is None:
            reason = "is not in its quarantine"
        elif details.blocked_by is not None:
            reason = f"waits behind the quarantined event at position {details.blocked_by}; decide about that one"
        else:
            reason = f"was {details.event.resolution} already, and is not quarantined any more"
        raise UsageError(
            f"The event at position {position} of projection {name!r} {reason}. "
            f"Look at `eventjet quarantine list {name} --all`."
        )


def _resolve_positions(
    connection: Connection, name: str, revision: int, positions: Sequence[int], resolution: str
) -> None:
    for start in range(0, len(positions), _POSITIONS_AT_ONCE):
        are_chosen = _q.position.in_(positions[start : start + _POSITIONS_AT_ONCE])
        _resolve(connection, name, revision, are_chosen, resolution)


def _resolve(connection: Connection, name: str, revision: int, condition: ColumnElement[bool], resolution: str) -> None:
    values = {"resolution": resolution, "resolved_at": Clock()}
    connection.execute(update(quarantine).where(of(name, revision), condition).values(**values))
