"""Where the tables of a revision are: as declared, or in a location of their own beside another revision's.

A location of its own is a schema on PostgreSQL, with the declared names in it, and a suffix of the tables' names on
SQLite. Each revision has one, so that one that loses the declared location goes to where it would be looked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from sqlalchemy import MetaData, Table
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement

from eventjet.errors import NamedByHandlers
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.sql.checkpoint import DECLARED
from eventjet.sql.dialect import Dialect


def recorded(resolved: AnyResolved) -> str:
    """The names of its tables as a checkpoint keeps them: JSON, with the schema where one is declared."""
    return json.dumps([table.name if table.schema is None else [table.schema, table.name] for table in resolved.tables])


def names_of(recorded: str) -> list[tuple[str | None, str]]:
    """(declared schema, name) of the tables that a checkpoint names."""
    return [(None, one) if isinstance(one, str) else (one[0], one[1]) for one in json.loads(recorded)]


def located(table: Table, location: str, dialect: Dialect) -> Table:
    """The table of a fold as it is created and read in a location."""
    return _located(_stored([table], dialect), location, dialect)[0]


def located_tables(resolved: AnyResolved, location: str, dialect: Dialect) -> list[Table]:
    """The tables of a projection as they are created and read in a location, in an order in which they can be created.

    Raises `NamedByHandlers` where they cannot be in that location.
    """
    check_location(resolved, location, dialect)
    made = _stored(resolved.tables, dialect)
    if isinstance(resolved, ResolvedSql):
        for table in made:
            for check in dialect.exactness_checks(table):
                table.append_constraint(check)
            for key in table.foreign_keys:
                # Resolved by name while the names are still those of the declaration.
                _ = key.column
    return _located(made, location, dialect)


def check_location(resolved: AnyResolved, location: str, dialect: Dialect) -> None:
    """Raise `NamedByHandlers` where the tables of a projection cannot be in that location."""
    if location != DECLARED and isinstance(resolved, ResolvedSql) and not dialect.relocates_handlers:
        raise NamedByHandlers(resolved)


def creation(tables: Iterable[Table]) -> list[ExecutableDDLElement]:
    """Statements that make the tables with all their constraints and indexes, and nothing else."""
    found: list[ExecutableDDLElement] = []
    for table in tables:
        found.append(CreateTable(table))
        found += [CreateIndex(index) for index in sorted(table.indexes, key=lambda one: str(one.name))]
    return found


def _stored(tables: Sequence[Table], dialect: Dialect) -> list[Table]:
    """Copies of declared tables with the types that a database holds exactly, in a `MetaData` of their own."""
    together = MetaData()
    made = [table.to_metadata(together) for table in tables]
    for table in made:
        for column in table.columns:
            column.type = dialect.storage_type(column.type)
    return made


def _located(made: list[Table], location: str, dialect: Dialect) -> list[Table]:
    if location != DECLARED:
        dialect.relocate(made, location)
    return made
