"""Where the tables of a revision are: as declared, or in a place of their own beside another revision's.

A place of its own is a schema on PostgreSQL, with the declared names in it, and a suffix of the tables' names on
SQLite. Each revision has one home, so that one that loses the declared place goes to where it would be looked for.
"""

from __future__ import annotations

import json
import re

from sqlalchemy import Table
from sqlalchemy.sql import quoted_name

from eventjet.projections.bound import BoundProjection
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.tables import storage_table

DECLARED = ""
"""The place of a revision whose tables are where they are declared."""
UNPLACED = "[]"
"""The tables of a revision that has not been given a place."""
_HOME_ON_SQLITE = re.compile(r"(.+)__r[0-9]+")


def tables_of(bound: BoundProjection) -> tuple[Table, ...]:
    """The tables of a projection, as declared."""
    return (bound.table,)


def recorded(bound: BoundProjection) -> str:
    """The names of its tables as a checkpoint keeps them: JSON, with the schema where one is declared."""
    return json.dumps(
        [table.name if table.schema is None else [table.schema, table.name] for table in tables_of(bound)]
    )


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
