"""SQL of the quarantine: what a batch does to it, as part of the batch's transaction, and what is held back.

Its text is made of constants of eventjet's own; values are always bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, select

from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.storage import SQLITE
from eventjet.quarantine.fold import HOLDING, PARKED, RETRY, AggregateKey, Parked, Sorting
from eventjet.sql.dialect import dialect_named
from eventjet.sql.own_tables import quarantine

_COLUMNS = (
    "position", "aggregate", "aggregate_id", "event_id", "event_type", "decision", "reason", "traceback", "payload"
)  # fmt: skip
_TYPES = ("bigint", "text", "text", "text", "text", "text", "text", "text", "bytea")
_ANEW = ", ".join(f"{name} = excluded.{name}" for name in (*_COLUMNS[1:], "parked_at"))
_CONFLICT = f"on conflict (projection, revision, position) do update set {_ANEW}, decided_at = null"
_INTO = f"insert into eventjet_quarantine (projection, revision, {', '.join(_COLUMNS)}, parked_at)"

_POSTGRES_PARKED = (
    f", parked as ({_INTO} select %s, %s, q.*, {dialect_named(POSTGRESQL).clock} "  # noqa: S608 - of constants
    f"from unnest({', '.join(f'%s::{kind}[]' for kind in _TYPES)}) q where exists (select 1 from held) {_CONFLICT})"
)
_POSTGRES_FREED = (
    ", freed as (delete from eventjet_quarantine where projection = %s and revision = %s "
    "and position = any(%s::bigint[]) and exists (select 1 from held))"
)
_POSTGRES_DECIDED = (
    f", decided as (update eventjet_quarantine q set decision = d.decision, decided_at = {dialect_named(POSTGRESQL).clock} "  # noqa: S608 - of constants
    "from unnest(%s::bigint[], %s::text[]) d(position, decision) where q.projection = %s and q.revision = %s "
    "and q.position = d.position and exists (select 1 from held))"
)
_SQLITE_PARKED = f"{_INTO} values (?, ?, {', '.join('?' for _ in _COLUMNS)}, {dialect_named(SQLITE).clock}) {_CONFLICT}"
_SQLITE_FREED = "delete from eventjet_quarantine where projection = ? and revision = ? and position = ?"
_SQLITE_DECIDED = (
    f"update eventjet_quarantine set decision = ?, decided_at = {dialect_named(SQLITE).clock} "  # noqa: S608 - of constants
    "where projection = ? and revision = ? and position = ?"
)


@dataclass(frozen=True, slots=True)
class Waiting:
    """One row that holds its aggregate back."""

    position: int
    decision: str
    has_failed: bool
    """Whether it was ever parked itself."""
    aggregate_key: AggregateKey


def postgres_parts(name: str, revision: int, sorting: Sorting) -> tuple[list[str], list[Any]]:
    """(parts of the batch's one statement, which has a part `held`; their values)."""
    parts: list[str] = []
    values: list[Any] = []
    if sorting.parked:
        parts.append(_POSTGRES_PARKED)
        values += [name, revision, *map(list, zip(*map(astuple, sorting.parked), strict=True))]
    if sorting.freed:
        parts.append(_POSTGRES_FREED)
        values += [name, revision, list(sorting.freed)]
    if sorting.decided:
        parts.append(_POSTGRES_DECIDED)
        values += [*map(list, zip(*sorting.decided, strict=True)), name, revision]
    return parts, values


def sqlite_write(connection: Connection, name: str, revision: int, sorting: Sorting) -> None:
    """The same within the caller's transaction."""
    for statement, rows in (
        (_SQLITE_PARKED, [(name, revision, *astuple(one)) for one in sorting.parked]),
        (_SQLITE_FREED, [(name, revision, position) for position in sorting.freed]),
        (_SQLITE_DECIDED, [(decision, name, revision, position) for position, decision in sorting.decided]),
    ):
        if rows:
            connection.exec_driver_sql(statement, rows)


def park(connection: Connection, name: str, revision: int, parked: Sequence[Parked]) -> None:
    """Insert what a bulk load could not take; nobody else writes there."""
    for start in range(0, len(parked), 1_000):
        sorting = Sorting(parked[start : start + 1_000])
        if connection.dialect.name != POSTGRESQL:
            sqlite_write(connection, name, revision, sorting)
            continue
        parts, values = postgres_parts(name, revision, sorting)
        connection.exec_driver_sql(f"with held as (select 1){parts[0]} select 1", tuple(values))


def of(name: str, revision: int) -> ColumnElement[bool]:
    """The condition for one projection's rows."""
    return and_(quarantine.c.projection == name, quarantine.c.revision == revision)


def aggregates(connection: Connection, name: str, revision: int, last: int | None = None) -> set[AggregateKey]:
    """The aggregates held back, by events up to `last` when given."""
    query = select(quarantine.c.aggregate, quarantine.c.aggregate_id).where(
        of(name, revision), quarantine.c.decision.in_(HOLDING)
    )
    if last is not None:
        query = query.where(quarantine.c.position <= last)
    return {(aggregate, aggregate_id) for aggregate, aggregate_id in connection.execute(query.distinct())}


def to_retry(connection: Connection, name: str, revision: int, limit: int) -> list[Waiting]:
    """Rows of aggregates with an event that is to be tried again: aggregate by aggregate, in order."""
    columns = quarantine.c
    asked = (
        select(columns.aggregate, columns.aggregate_id)
        .where(of(name, revision), columns.decision == RETRY)
        .group_by(columns.aggregate, columns.aggregate_id)
        .order_by(func.min(columns.position))
        .limit(limit)
        .subquery()
    )
    same = (columns.aggregate == asked.c.aggregate) & (columns.aggregate_id == asked.c.aggregate_id)
    query = (
        select(columns.position, columns.decision, columns.reason != "", columns.aggregate, columns.aggregate_id)
        .join(asked, same)
        .where(of(name, revision), columns.decision.in_(HOLDING))
        .order_by(columns.aggregate, columns.aggregate_id, columns.position)
        .limit(limit)
    )
    rows = connection.execute(query)
    return [Waiting(position, decision, bool(failed), (whose, one)) for position, decision, failed, whose, one in rows]


def parked_counts(connection: Connection) -> dict[tuple[str, int], int]:
    """How many events are parked, those to be tried again included, by name and revision."""
    columns = quarantine.c
    query = (
        select(columns.projection, columns.revision, func.count())
        .where(columns.decision.in_((PARKED, RETRY)))
        .group_by(columns.projection, columns.revision)
    )
    return {(name, revision): count for name, revision, count in connection.execute(query)}
