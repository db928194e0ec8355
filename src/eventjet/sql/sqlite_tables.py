"""Tables of a file of SQLite, for `eventjet.sql.tables`: a location is a suffix of their names.

A transaction that writes has the whole file to itself, so locks are nothing here; nor are there owners and rights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from sqlalchemy import Connection, text

from eventjet.sql.tables import TableName, TableRef, qualified

T = TypeVar("T")

_INDEX = re.compile(r'\s*CREATE\s+(UNIQUE\s+)?INDEX\s+("(?:[^"]|"")*"|\[[^]]*\]|`[^`]*`|\S+)\s+ON\s', re.IGNORECASE)
_TABLE = text("select name from sqlite_master where type = 'table' and lower(name) = lower(:name)")
_TRIGGERS = text(
    "select 'the trigger ' || name from sqlite_master "
    "where type = 'trigger' and lower(tbl_name) = lower(:name) order by 1"
)
_INDEXES = text(
    "select name, sql from sqlite_master "
    "where type = 'index' and sql is not null and lower(tbl_name) = lower(:name) order by 1"
)


def find(connection: Connection, name: TableName, location: str) -> TableRef | None:
    """SQLite does not tell capitals from small letters in names."""
    wanted = f"{name[1]}{location}"
    found = connection.scalar(_TABLE, {"name": wanted})
    return None if found is None else TableRef(None, None, wanted)


def bound_waits(connection: Connection) -> None:
    """Nothing waits once the transaction has begun."""


def patiently(connection: Connection, lock: Callable[[], T]) -> T:  # noqa: ARG001 - as PostgreSQL's
    """Nothing to wait for."""
    return lock()


def lock(connection: Connection, tables: Iterable[TableRef], *, readers: bool) -> None:
    """Writers are kept out already, and readers see what was there before the transaction."""


def is_locked_out(error: Exception) -> bool:  # noqa: ARG001 - as PostgreSQL's
    """No lock is waited for within a transaction."""
    return False


def is_forbidden(error: Exception) -> bool:  # noqa: ARG001 - as PostgreSQL's
    """There are no rights."""
    return False


def inherit(connection: Connection, old: TableRef, heir: TableRef) -> None:
    """Nothing to inherit."""


def move(connection: Connection, table: TableRef, name: TableName, location: str, schema: str | None) -> None:  # noqa: ARG001
    """Rename the table and its indexes, which are made again: the whole file shares the names of indexes.

    Views and foreign keys go on naming what they name, so they find the table that takes a name over.
    """
    after = f"{name[1]}{location}"
    made = [(str(index), str(statement)) for index, statement in connection.execute(_INDEXES, {"name": table.name})]
    for index, _ in made:
        connection.exec_driver_sql(f"drop index {qualified(connection, None, index)}")
    connection.exec_driver_sql("pragma legacy_alter_table = on")
    try:
        quoted = table.quoted(connection), qualified(connection, None, after)
        connection.exec_driver_sql(f"alter table {quoted[0]} rename to {quoted[1]}")
    finally:
        connection.exec_driver_sql("pragma legacy_alter_table = off")
    for index, statement in made:
        # As `located` names it.
        own = index.removesuffix(f"__{table.name}") + (f"__{after}" if location else "")
        found = _INDEX.match(statement)
        assert found is not None, f"SQLite stores an index as {statement!r}"
        columns = statement[statement.index("(", found.end()) :]
        kind = f"{(found[1] or '').lower()}index"
        connection.exec_driver_sql(f"create {kind} {qualified(connection, None, own)} on {quoted[1]} {columns}")


def ensure_location(connection: Connection, location: str) -> None:
    """A suffix needs nothing."""


def drop_location(connection: Connection, location: str) -> None:
    """Nothing was made."""


def obstacles(connection: Connection, table: TableRef, along: Sequence[TableRef]) -> list[str]:  # noqa: ARG001
    """Triggers alone: everything else refers to a table by its name."""
    return [str(one) for one in connection.scalars(_TRIGGERS, {"name": table.name})]


def indexes(connection: Connection, table: TableRef) -> list[str]:
    return [str(one) for one in connection.scalars(_INDEXES, {"name": table.name})]


def count(connection: Connection, table: TableRef) -> int:
    """Exactly."""
    return connection.scalar(text(f"select count(*) from {table.quoted(connection)}")) or 0  # noqa: S608 - of a known table


def drop(connection: Connection, tables: Sequence[TableRef]) -> None:
    """Foreign keys are not enforced on connections of eventjet's own."""
    for table in tables:
        connection.execute(text(f"drop table {table.quoted(connection)}"))
