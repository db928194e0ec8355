"""What hangs on a live table and would not follow a swap: a rebuild refuses it, by name, before it reads an event."""

from __future__ import annotations

from sqlalchemy import Connection, ForeignKeyConstraint, Table

from eventjet.errors import RebuildRefused
from eventjet.projections.bound import BoundProjection
from eventjet.projections.obstacles import listed, obstacles, undeclared_indexes


def check_obstacles(connection: Connection, bound: BoundProjection, live: Table, oid: int | None) -> None:
    """Raise `RebuildRefused` with everything that a swap of `live` could not carry; `oid` is PostgreSQL's."""
    found = [
        f"the foreign key to {key.referred_table.name}, which it declares"
        for key in bound.table.constraints
        if isinstance(key, ForeignKeyConstraint)
    ]
    declared = [str(index.name) for index in live.indexes]
    found += obstacles(connection, live.name, oid)
    found += [
        f"the index {name}, which the table does not declare"
        for name in undeclared_indexes(connection, live.name, oid, declared)
    ]
    if found:
        raise RebuildRefused(
            bound.name,
            f"the table {live.name} has {listed(found)}, which a swap cannot carry over",
            "Drop it and create it again after the rebuild, or declare it on the table if it is an index.",
        )
