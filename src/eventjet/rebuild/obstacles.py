"""What hangs on a live table and would not follow a swap: a rebuild refuses it, by name, before it reads an event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, ForeignKeyConstraint, Table

from eventjet.errors import RebuildRefused
from eventjet.projections.resolve import ResolvedProjection
from eventjet.sql.obstacles import listed, obstacles, undeclared_indexes


def check_obstacles(connection: Connection, resolved: ResolvedProjection, live: Table, oid: int | None) -> None:
    """Raise `RebuildRefused` with everything that a swap of `live` could not carry; `oid` is PostgreSQL's."""
    found = [
        f"the foreign key to {key.referred_table.name}, which it declares"
        for key in resolved.table.constraints
        if isinstance(key, ForeignKeyConstraint)
    ]
    _refuse(resolved.name, live, [*found, *_in_database(connection, live, oid, ())])


def check_obstacles_together(connection: Connection, name: str, live: Mapping[Table, int | None]) -> None:
    """The same for tables that are swapped together, with their oids: foreign keys between them are no obstacle."""
    along = [oid for oid in live.values() if oid is not None]
    for table, oid in live.items():
        _refuse(name, table, _in_database(connection, table, oid, along))


def _refuse(name: str, live: Table, found: Sequence[str]) -> None:
    if found:
        raise RebuildRefused(
            name,
            f"the table {live.name} has {listed(found)}, which a swap cannot carry over",
            "Drop it and create it again after the rebuild, or declare it on the table if it is an index.",
        )


def _in_database(connection: Connection, live: Table, oid: int | None, along: Sequence[int]) -> list[str]:
    declared = [str(index.name) for index in live.indexes]
    lost = undeclared_indexes(connection, live.name, oid, declared)
    return [
        *obstacles(connection, live.name, oid, along),
        *(f"the index {name}, which the table does not declare" for name in lost),
    ]
