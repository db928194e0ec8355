"""What workers and loads ask of the quarantine: what is blocked, what is to be tried again, how much is parked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, func, select

from eventjet.quarantine.fold import AggregateKey
from eventjet.sql.dialect import dialect_of
from eventjet.sql.own_tables import quarantine
from eventjet.sql.statements import BLOCKING, PARKED, RETRY, Parked

_PARKED_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class WaitingEvent:
    """One row that blocks its aggregate."""

    position: int
    resolution: str
    has_failed: bool
    """Whether it was ever parked itself."""
    aggregate_key: AggregateKey


def park(connection: Connection, name: str, revision: int, parked: Sequence[Parked]) -> None:
    """Insert what a bulk load could not take; nobody else writes there."""
    dialect = dialect_of(connection)
    for start in range(0, len(parked), _PARKED_AT_ONCE):
        dialect.park(connection, name, revision, parked[start : start + _PARKED_AT_ONCE])


def of(name: str, revision: int) -> ColumnElement[bool]:
    """The condition for one projection's rows."""
    return and_(quarantine.c.projection == name, quarantine.c.revision == revision)


def blocked_aggregates(connection: Connection, name: str, revision: int, last: int | None = None) -> set[AggregateKey]:
    """The aggregates that are blocked, by events up to `last` when given."""
    query = select(quarantine.c.aggregate, quarantine.c.aggregate_id).where(
        of(name, revision), quarantine.c.resolution.in_(BLOCKING)
    )
    if last is not None:
        query = query.where(quarantine.c.position <= last)
    return {(aggregate, aggregate_id) for aggregate, aggregate_id in connection.execute(query.distinct())}


def to_retry(connection: Connection, name: str, revision: int, limit: int) -> list[WaitingEvent]:
    """Rows of aggregates with an event that is to be tried again: aggregate by aggregate, in order."""
    columns = quarantine.c
    asked = (
        select(columns.aggregate, columns.aggregate_id)
        .where(of(name, revision), columns.resolution == RETRY)
        .group_by(columns.aggregate, columns.aggregate_id)
        .order_by(func.min(columns.position))
        .limit(limit)
        .subquery()
    )
    same = (columns.aggregate == asked.c.aggregate) & (columns.aggregate_id == asked.c.aggregate_id)
    query = (
        select(columns.position, columns.resolution, columns.reason != "", columns.aggregate, columns.aggregate_id)
        .join(asked, same)
        .where(of(name, revision), columns.resolution.in_(BLOCKING))
        .order_by(columns.aggregate, columns.aggregate_id, columns.position)
        .limit(limit)
    )
    rows = connection.execute(query)
    return [
        WaitingEvent(position, resolution, bool(failed), (whose, one))
        for position, resolution, failed, whose, one in rows
    ]


def parked_counts(connection: Connection) -> dict[tuple[str, int], int]:
    """How many events are parked, those to be tried again included, by name and revision."""
    columns = quarantine.c
    query = (
        select(columns.projection, columns.revision, func.count())
        .where(columns.resolution.in_((PARKED, RETRY)))
        .group_by(columns.projection, columns.revision)
    )
    return {(name, revision): count for name, revision, count in connection.execute(query)}
