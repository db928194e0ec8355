"""Where the tables of a revision are: as declared, or in a location of their own beside another revision's.

A location of its own is a schema on PostgreSQL, with the declared names in it, and a suffix of the tables' names on
SQLite. Each revision has one home, so that one that loses the declared location goes to where it would be looked for.
"""

from __future__ import annotations

import json
import re

from sqlalchemy import Table
from sqlalchemy.sql import quoted_name

from eventjet.errors import NamedByHandlers
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.row_codec import storage_table
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.sql.checkpoint import DECLARED
from eventjet.sql.stored_tables import stored_tables

_OWN_ON_SQLITE = re.compile(r"(.+)__r[0-9]+")


def recorded(resolved: AnyResolved) -> str:
    """The names of its tables as a checkpoint keeps them: JSON, with the schema where one is declared."""
    return json.dumps([table.name if table.schema is None else [table.schema, table.name] for table in resolved.tables])


def names_of(recorded: str) -> list[tuple[str | None, str]]:
    """(declared schema, name) of the tables that a checkpoint names."""
    return [(None, one) if isinstance(one, str) else (one[0], one[1]) for one in json.loads(recorded)]


def own_location(name: str, revision: int, dialect: str) -> str:
    """The location that is this revision's own."""
    return f"ej_{name}_r{revision}" if dialect == POSTGRESQL else f"__r{revision}"


def name_in(name: str, location: str, dialect: str) -> str:
    """What a table of this declared name is called in a location."""
    return name if dialect == POSTGRESQL else f"{name}{location}"


def declared_name(name: str) -> str:
    """The declared name of a table that is called so in some location of SQLite."""
    found = _OWN_ON_SQLITE.fullmatch(name)
    return found[1] if found else name


def located(table: Table, location: str, dialect: str) -> Table:
    """A declared table as it is created and read in a location.

    It is renamed last: what SQLAlchemy calls indexes, and the schema of enum types, come from the declared one.
    """
    made = storage_table(table, dialect)
    if location == DECLARED:
        return made
    if dialect == POSTGRESQL:
        made.schema = location
        made.fullname = f"{location}.{made.name}"
        return made
    made.name = made.fullname = name_in(table.name, location, dialect)
    for index in made.indexes:
        # The whole database shares the names of indexes.
        index.name = quoted_name(f"{index.name}__{made.name}", None)
    return made


def check_location(resolved: AnyResolved, location: str, dialect: str) -> None:
    """Raise `NamedByHandlers` where the tables of a projection cannot be in that location."""
    if location != DECLARED and dialect != POSTGRESQL and isinstance(resolved, ResolvedSql):
        raise NamedByHandlers(resolved)


def located_tables(resolved: AnyResolved, location: str, dialect: str) -> list[Table]:
    """The tables of a projection as they are created and read in a location, in an order in which they can be created.

    Raises `NamedByHandlers` where they cannot be in that location.
    """
    if not isinstance(resolved, ResolvedSql):
        return [located(resolved.table, location, dialect)]
    made = stored_tables(resolved, dialect)
    if location == DECLARED:
        return made
    check_location(resolved, location, dialect)
    for table in made:
        for key in table.foreign_keys:
            # Resolved by name while the names are still those of the declaration.
            _ = key.column
    for table in made:
        table.schema = location
        table.fullname = f"{location}.{table.name}"
    return made
