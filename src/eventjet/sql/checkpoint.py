"""Checkpoints: how far each projection is true, who advances it, and the tables that say so.

Time is the database's, in seconds since 1970, so that the workers' clocks do not matter. A checkpoint moves
`new → building → active ⇄ paused → retired`, and to `failed` with a reason from any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Engine,
    Row,
    and_,
    case,
    func,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql import migrations
from eventjet.sql.own_tables import projections

NEW, BUILDING, ACTIVE, PAUSED, RETIRED, FAILED = "new", "building", "active", "paused", "retired", "failed"
HALF_WRITTEN = "may hold half of a batch"
"""In the reason of one that failed: its position counts for nothing, so only a rebuild lets it go on."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One row of `eventjet_projection`."""

    name: str
    revision: int
    generation: int
    position: int
    event_id: str
    """Id of the event at that position; empty at position 0."""
    log: str
    """Identity of the log it was made from; empty before the first event."""
    epoch: int
    owner: str | None
    lease_until: float
    """Seconds since 1970 by the database's clock."""
    state: str
    reason: str | None
    location: str = ""
    """Where its tables are: empty where they are declared, else a schema, or a suffix on SQLite."""
    tables: str = "[]"
    """Their names, as JSON; empty until it has a location."""
    takes_over: bool = False
    """Whether it is to have the declared location once it has caught up with the revision that holds it."""


def create_tables(engine: Engine | Connection, resolved: Iterable[AnyResolved] = ()) -> list[str]:
    """Create what is missing of eventjet's tables and the read models'; return the names made.

    A revision that finds its table held by another one gets one of its own. Nothing else changes.
    """
    if isinstance(engine, Engine):
        with engine.begin() as connection:
            return create_tables(connection, resolved)
    from eventjet.sql import location_assignment

    made = list(migrations.upgrade(engine).tables)
    for one in resolved:
        made += location_assignment.prepare(engine, one)
    return made


def check_tables(connection: Connection, resolved: Iterable[AnyResolved]) -> None:
    """Raise `Unreachable` when a table, or a column of a read model, is not in the database, or eventjet's are old."""
    from eventjet.sql import location_assignment

    migrations.check(connection)
    for one in resolved:
        location_assignment.check(connection, one)


def clock(dialect: str) -> ColumnElement[float]:
    """The database's time in seconds since 1970, as it is when the statement runs."""
    if dialect == POSTGRESQL:
        return literal_column("extract(epoch from clock_timestamp())::float8", Double())
    return literal_column("(julianday('now') - 2440587.5) * 86400.0", Double())


def read(connection: Connection, name: str, revision: int) -> Checkpoint | None:
    """The checkpoint as it stands; None when there is none."""
    found = connection.execute(select(projections).where(is_row(name, revision))).one_or_none()
    return None if found is None else _checkpoint(found)


def read_all(connection: Connection) -> list[tuple[Checkpoint, float]]:
    """Every checkpoint with the seconds its lease still has, by name and revision."""
    left = (projections.c.lease_until - clock(connection.dialect.name)).label("left")
    query = select(projections, left).order_by(projections.c.name, projections.c.revision)
    return [(_checkpoint(row[:-1]), float(row[-1])) for row in connection.execute(query)]


def lock(connection: Connection, name: str, revision: int) -> Checkpoint | None:
    """The checkpoint, locked to the end of the transaction; waits for whoever holds it."""
    query = select(projections).where(is_row(name, revision)).with_for_update()
    found = connection.execute(query).one_or_none()
    return None if found is None else _checkpoint(found)


def ensure(connection: Connection, name: str, revision: int) -> None:
    """Make the row of a projection that has none, at position 0."""
    insert = postgres_insert if connection.dialect.name == POSTGRESQL else sqlite_insert
    connection.execute(insert(projections).values(name=name, revision=revision).on_conflict_do_nothing())


def take(
    connection: Connection, name: str, revision: int, owner: str, ttl_s: float, *, stumbled_at: int = -1
) -> Checkpoint | None:
    """Become the owner if the lease is free; the epoch rises by one. None while another worker holds it.

    A row that is locked counts as held. A new one starts building; one that failed is tried again, unless the process
    that asks `stumbled_at` the very position or its tables are half written; paused and retired ones stay.
    """
    now = clock(connection.dialect.name)
    candidate = select(projections.c.name).where(_free(name, revision, owner, now, stumbled_at))
    found = connection.execute(candidate.with_for_update(skip_locked=True)).one_or_none()
    if found is None:
        return None
    state = case(
        (projections.c.state == NEW, BUILDING), (projections.c.state == FAILED, ACTIVE), else_=projections.c.state
    )
    row = connection.execute(
        update(projections)
        .where(is_row(name, revision))
        .values(epoch=projections.c.epoch + 1, owner=owner, lease_until=now + ttl_s, state=state, reason=None)
        .returning(projections)
    ).one()
    return _checkpoint(row)


def is_free(connection: Connection, name: str, revision: int, owner: str, *, stumbled_at: int = -1) -> bool:
    """Whether `take` would succeed now, or there is no row yet; found out without locking anything."""
    free = _free(name, revision, owner, clock(connection.dialect.name), stumbled_at)
    row = connection.execute(select(free.label("free")).where(is_row(name, revision))).one_or_none()
    return row is None or bool(row.free)


def renew(connection: Connection, held: Checkpoint, ttl_s: float) -> bool:
    """Extend the lease; False when another epoch has begun."""
    until = clock(connection.dialect.name) + ttl_s
    return connection.execute(_of_epoch(held).values(lease_until=until)).rowcount == 1


def release(connection: Connection, held: Checkpoint) -> bool:
    """Let go of the lease at once; False when another epoch has begun."""
    return connection.execute(_of_epoch(held).values(owner=None, lease_until=0)).rowcount == 1


def settle(connection: Connection, held: Checkpoint, state: str | None, reason: str | None = None) -> int | None:
    """Note a state (None keeps it) and a reason, and keep the lease.

    Returns the position it stands at, or None when another epoch has begun.
    """
    values = {"reason": reason} if state is None else {"state": state, "reason": reason}
    return connection.scalar(_of_epoch(held).values(**values).returning(projections.c.position))


def adopt_log(connection: Connection, held: Checkpoint, log: str) -> bool:
    """Remember the log that an empty read model is about to be made from; False when another epoch has begun."""
    return connection.execute(_of_epoch(held).values(log=log)).rowcount == 1


def is_row(name: str, revision: int) -> ColumnElement[bool]:
    """The condition for one projection's row."""
    return and_(projections.c.name == name, projections.c.revision == revision)


def _free(name: str, revision: int, owner: str, now: ColumnElement[float], stumbled_at: int) -> ColumnElement[bool]:
    unowned = (projections.c.lease_until < now) | projections.c.owner.is_(None) | (projections.c.owner == owner)
    whole = ~func.coalesce(projections.c.reason, "").contains(HALF_WRITTEN)
    failed_elsewhere = and_(projections.c.state == FAILED, projections.c.position != stumbled_at, whole)
    return and_(is_row(name, revision), unowned, projections.c.state.in_((NEW, BUILDING, ACTIVE)) | failed_elsewhere)


def _of_epoch(held: Checkpoint) -> Any:
    return update(projections).where(is_row(held.name, held.revision), projections.c.epoch == held.epoch)


def _checkpoint(row: Row[Any] | tuple[Any, ...]) -> Checkpoint:
    return Checkpoint(*row)
