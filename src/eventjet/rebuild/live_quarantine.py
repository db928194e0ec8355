"""The live quarantine as a rebuild obeys it: taken over when the shadow is made, given back by the swap.

Connections are to the live database; `schema` is what they call that of the shadow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, MetaData, Table, delete, insert, select

from eventjet.errors import QuarantineChanged
from eventjet.projections.sql_projection import AnyResolved
from eventjet.quarantine.rows import of
from eventjet.sql.own_tables import quarantine
from eventjet.sql.statements import RETRIED, VERDICTS


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A quarantine at one moment."""

    known: Mapping[int, str]
    """Positions that are not in the rows, with why."""
    decided: frozenset[tuple[int, str]]
    """What people decided, and what came of it."""


def read(connection: Connection, resolved: AnyResolved) -> Snapshot:
    """What the live quarantine holds now."""
    own = of(resolved.name, resolved.revision)
    rows = connection.execute(select(quarantine.c.position, quarantine.c.resolution).where(own)).all()
    return Snapshot(
        known={position: resolution for position, resolution in rows if resolution != RETRIED},
        decided=frozenset((position, resolution) for position, resolution in rows if resolution in VERDICTS),
    )


def take_over(connection: Connection, schema: str, resolved: AnyResolved) -> Snapshot:
    """Copy it to the shadow's, which is empty."""
    _copy(connection, quarantine, _within(schema), resolved)
    return read(connection, resolved)


def give_back(connection: Connection, schema: str, resolved: AnyResolved, before: Snapshot | None) -> None:
    """Put the shadow's rows in the place of the live ones, whose checkpoint is locked.

    Raises `QuarantineChanged` when people decided something after `before` was taken over.
    """
    if before is not None and read(connection, resolved).decided != before.decided:
        raise QuarantineChanged(resolved)
    connection.execute(delete(quarantine).where(of(resolved.name, resolved.revision)))
    _copy(connection, _within(schema), quarantine, resolved)


def _copy(connection: Connection, source: Table, target: Table, resolved: AnyResolved) -> None:
    own = (source.c.projection == resolved.name) & (source.c.revision == resolved.revision)
    connection.execute(insert(target).from_select([column.name for column in source.c], select(source).where(own)))


def _within(schema: str) -> Table:
    return quarantine.to_metadata(MetaData(), schema=schema)
