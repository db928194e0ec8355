"""Tables of SQLite under the names of their locations: renamed with their indexes, within the caller's transaction."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

_INDEX = re.compile(r'\s*CREATE\s+(UNIQUE\s+)?INDEX\s+("(?:[^"]|"")*"|\[[^]]*\]|`[^`]*`|\S+)\s+ON\s', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Rename:
    """One table's change of location; `declared` is its name in the declared one."""

    declared: str
    before: str
    after: str


def has_table(connection: Connection, name: str) -> bool:
    """Whether it is there."""
    query = text("select 1 from sqlite_master where type = 'table' and lower(name) = lower(:name)")
    return connection.scalar(query, {"name": name}) is not None


def rename(connection: Connection, renames: Sequence[Rename]) -> None:
    """Rename tables in the order given, and then their indexes, which are made again.

    Views and foreign keys go on naming what they name, so they find the table that takes a name over.
    """
    connection.exec_driver_sql("pragma legacy_alter_table = on")
    try:
        made: list[str] = []
        for one in renames:
            for name, statement in _indexes(connection, one.before):
                connection.exec_driver_sql(f"drop index {quoted(name)}")
                made.append(_renamed(statement, name, one))
        for one in renames:
            connection.exec_driver_sql(f"alter table {quoted(one.before)} rename to {quoted(one.after)}")
        for statement in made:
            connection.exec_driver_sql(statement)
    finally:
        connection.exec_driver_sql("pragma legacy_alter_table = off")


def quoted(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def _indexes(connection: Connection, table: str) -> list[tuple[str, str]]:
    query = text(
        "select name, sql from sqlite_master "
        "where type = 'index' and sql is not null and lower(tbl_name) = lower(:name)"
    )
    return [(str(name), str(sql)) for name, sql in connection.execute(query, {"name": table})]


def _renamed(statement: str, name: str, table: Rename) -> str:
    """The statement that makes the index under its name in the new location: see `located`."""
    own = name.removesuffix(f"__{table.before}")
    if table.after != table.declared:
        own = f"{own}__{table.after}"
    found = _INDEX.match(statement)
    assert found is not None, f"SQLite stores an index as {statement!r}"
    columns = statement[statement.index("(", found.end()) :]
    return f"create {(found[1] or '').lower()}index {quoted(own)} on {quoted(table.after)} {columns}"
