"""Where the tables of a revision are: as declared, or in a place of their own beside another revision's.

A place of its own is a schema on PostgreSQL, with the declared names in it, and a suffix of the tables' names on
SQLite. Each revision has one home, so that one that loses the declared place goes to where it would be looked for.
"""

from __future__ import annotations

import json
import re

from sqlalchemy import Table
from sqlalchemy.sql import quoted_name

from eventjet.errors import ProjectionError
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.sql import AnyBound, BoundSql
from eventjet.projections.sql_tables import stored_tables
from eventjet.projections.tables import storage_table

DECLARED = ""
"""The place of a revision whose tables are where they are declared."""
UNPLACED = "[]"
"""The tables of a revision that has not been given a place."""
_HOME_ON_SQLITE = re.compile(r"(.+)__r[0-9]+")


class NamedByHandlers(ProjectionError):
    """Tables of SQL by hand would have to be called otherwise than its handlers call them."""

    def __init__(self, bound: AnyBound) -> None:
        self.projection = bound.name
        self.revision = bound.revision
        names = ", ".join(table.name for table in bound.tables)
        super().__init__(
            f"Revision {bound.revision} of projection {bound.name!r} is SQL by hand, whose handlers name {names}, and "
            "another revision has these names; on SQLite there is no second place for them. Declare tables of other "
            f"names for it, or leave the revision as it was and run `eventjet rebuild {bound.name}`."
        )


def recorded(bound: AnyBound) -> str:
    """The names of its tables as a checkpoint keeps them: JSON, with the schema where one is declared."""
    return json.dumps([table.name if table.schema is None else [table.schema, table.name] for table in bound.tables])


def names_of(recorded: str) -> list[tuple[str | None, str]]:
    """(declared schema, name) of the tables that a checkpoint names."""
    return [(None, one) if isinstance(one, str) else (one[0], one[1]) for one in json.loads(recorded)]


def home(name: str, revision: int, dialect: str) -> str:
    """The place that is this revision's own."""
    return f"ej_{name}_r{revision}" if dialect == POSTGRESQL else f"__r{revision}"


def name_in(name: str, place: str, dialect: str) -> str:
    """What a table of this declared name is called in a place."""
    return name if dialect == POSTGRESQL else f"{name}{place}"


def declared_name(name: str) -> str:
    """The declared name of a table that is called so in some place of SQLite."""
    found = _HOME_ON_SQLITE.fullmatch(name)
    return found[1] if found else name


def placed(table: Table, place: str, dialect: str) -> Table:
    """A declared table as it is created and read in a place.

    It is renamed last: what SQLAlchemy calls indexes, and the schema of enum types, come from the declared one.
    """
    made = storage_table(table, dialect)
    if place == DECLARED:
        return made
    if dialect == POSTGRESQL:
        made.schema = place
        made.fullname = f"{place}.{made.name}"
        return made
    made.name = made.fullname = name_in(table.name, place, dialect)
    for index in made.indexes:
        # The whole database shares the names of indexes.
        index.name = quoted_name(f"{index.name}__{made.name}", None)
    return made


def check_place(bound: AnyBound, place: str, dialect: str) -> None:
    """Raise `NamedByHandlers` where the tables of a projection cannot be in that place."""
    if place != DECLARED and dialect != POSTGRESQL and isinstance(bound, BoundSql):
        raise NamedByHandlers(bound)


def placed_tables(bound: AnyBound, place: str, dialect: str) -> list[Table]:
    """The tables of a projection as they are created and read in a place, in an order in which they can be created.

    Raises `NamedByHandlers` where they cannot be in that place.
    """
    if not isinstance(bound, BoundSql):
        return [placed(bound.table, place, dialect)]
    made = stored_tables(bound, dialect)
    if place == DECLARED:
        return made
    check_place(bound, place, dialect)
    for table in made:
        for key in table.foreign_keys:
            # Resolved by name while the names are still those of the declaration.
            _ = key.column
    for table in made:
        table.schema = place
        table.fullname = f"{place}.{table.name}"
    return made
