"""The checkpoint: the row that says how far a projection is true, who advances it and where its tables are.

This module only reads it, or adds a new one; `transitions` holds everything that changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, select, text

from eventjet.sql.own_tables import Clock, projections

NEW, BUILDING, ACTIVE, PAUSED, RETIRED, FAILED = "new", "building", "active", "paused", "retired", "failed"
STATES = (NEW, BUILDING, ACTIVE, PAUSED, FAILED, RETIRED)

DECLARED = ""
"""The location of a revision whose tables are where they are declared."""
UNASSIGNED = "[]"
"""The tables of a revision that has not been given a location yet."""

_ENSURE = text("insert into eventjet_projection (name, revision) values (:name, :revision) on conflict do nothing")


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
    """Rises whenever the owner is deposed; every write of an owner names the epoch it took the lease in."""
    owner: str | None
    lease_until: float
    """Seconds since 1970 by the database's clock."""
    state: str
    reason: str | None
    location: str = DECLARED
    """Where its tables are: empty where they are declared, else a schema, or a suffix on SQLite."""
    tables: str = UNASSIGNED
    """Their names, as JSON; empty until it has a location."""
    takes_over: bool = False
    """Whether it is to have the declared location once it has caught up with the revision that holds it."""


def ensure(connection: Connection, name: str, revision: int) -> None:
    """Add the row of a projection that has none, at position 0; it does not matter who else does so at once."""
    connection.execute(_ENSURE, {"name": name, "revision": revision})


def read(connection: Connection, name: str, revision: int) -> Checkpoint | None:
    """The checkpoint as it stands; None when there is none."""
    return checkpoint_of(connection.execute(select(projections).where(is_row(name, revision))).one_or_none())


def lock(connection: Connection, name: str, revision: int) -> Checkpoint | None:
    """The checkpoint, locked to the end of the transaction; waits for whoever holds it."""
    query = select(projections).where(is_row(name, revision)).with_for_update()
    return checkpoint_of(connection.execute(query).one_or_none())


def read_all(connection: Connection) -> list[tuple[Checkpoint, float]]:
    """Every checkpoint with the seconds its lease still has, by name and revision."""
    left = (projections.c.lease_until - Clock()).label("left")
    query = select(projections, left).order_by(projections.c.name, projections.c.revision)
    return [(Checkpoint(*row[:-1]), float(row[-1])) for row in connection.execute(query)]


def revisions(connection: Connection, name: str, *, lock: bool = False) -> list[Checkpoint]:
    """The checkpoints of all revisions of a projection, in their order; locked in that order if asked for."""
    query = select(projections).where(projections.c.name == name).order_by(projections.c.revision)
    return [Checkpoint(*row) for row in connection.execute(query.with_for_update() if lock else query)]


def is_row(name: str, revision: int) -> ColumnElement[bool]:
    """The condition for one projection's row."""
    return and_(projections.c.name == name, projections.c.revision == revision)


def checkpoint_of(row: Row[Any] | None) -> Checkpoint | None:
    """A row with all columns, as a value."""
    return None if row is None else Checkpoint(*row)
