"""Rows into a shadow on SQLite, by the thousand."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from eventjet import failpoints
from eventjet.rebuild.refused import refusals, row_of
from eventjet.sql.own_tables import rebuilds

if TYPE_CHECKING:
    from eventjet.rebuild.load import Target

CHUNK = 5_000
"""Rows in one transaction: the file's one writer lock is let go of in between."""


def load(target: Target, number: int, rows: Iterable[Sequence[Any]]) -> int:
    """Only this process writes to the shadow's file, so the ledger row may follow the last chunk."""
    connection = target.database.connect_sqlite()
    try:
        # A shadow that does not survive a crash of the machine is made again.
        connection.execute("pragma synchronous = off")
        statement = (
            f"insert into {_quoted(target.table)} ({', '.join(map(_quoted, target.columns))}) "
            f"values ({', '.join('?' * len(target.columns))})"
        )
        failpoints.reach("rebuild.part_begun")
        count = 0
        remaining = iter(rows)
        while chunk := list(islice(remaining, CHUNK)):
            with refusals(target.projection, partial(_refused, connection, statement, chunk)):
                _insert_chunk(connection, statement, chunk)
            count += len(chunk)
        failpoints.reach("rebuild.rows_copied")
        connection.execute(
            f"insert into {rebuilds.name} (run, part, projection, revision, rows) values (?, ?, ?, ?, ?)",
            (target.run, number, target.projection, target.revision, count),
        )
        failpoints.reach("rebuild.part_loaded")
        return count
    finally:
        connection.close()


def _insert_chunk(connection: sqlite3.Connection, statement: str, chunk: Sequence[Sequence[Any]]) -> None:
    connection.execute("begin immediate")
    try:
        connection.executemany(statement, chunk)
        connection.execute("commit")
    except BaseException:
        connection.execute("rollback")
        raise


def _refused(connection: sqlite3.Connection, statement: str, chunk: Sequence[Sequence[Any]]) -> str:
    """Which row of a chunk it was: the driver names the rule alone."""
    connection.execute("begin immediate")
    try:
        for row in chunk:
            try:
                connection.execute(statement, row)
            except sqlite3.Error:
                return row_of(row)
    finally:
        connection.execute("rollback")
    return ""


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
