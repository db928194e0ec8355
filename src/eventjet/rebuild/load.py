"""Rows into a shadow, whole or not at all, and once only: a task that is tried again finds its part in the ledger."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from psycopg import sql

from eventjet import failpoints
from eventjet.rebuild.refused import refusals, row_of
from eventjet.sql.database import Database
from eventjet.sql.postgres import POSTGRES
from eventjet.sql.quarantine_rows import Parked

SQLITE_CHUNK = 5_000
"""Rows a transaction of SQLite: a larger one would keep a live writer waiting."""

LEDGER = "eventjet_rebuild"


@dataclass(frozen=True, slots=True)
class Target:
    """Where one projection's rows go; a value that can be pickled."""

    run: str
    purpose: str
    """What the database shows of the sessions that load."""
    projection: str
    revision: int
    database: Database
    """Where the shadow is: the live one on PostgreSQL, a file of the run's own on SQLite."""
    schema: str | None
    """The run's schema; None on SQLite."""
    table: str
    columns: tuple[str, ...]
    known: Mapping[int, str] = field(default_factory=dict[int, str], repr=False, hash=False)
    """Positions that are in the live quarantine, with what was decided; empty where nothing is quarantined."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one task folded and loaded of one projection."""

    projection: str
    number: int
    events: int
    rows: int
    parked: Sequence[Parked] = ()
    """What it could not take."""


def load_part(target: Target, number: int, rows: Iterable[Sequence[Any]]) -> int:
    """Load one part in one transaction with its row in the ledger; return how many rows the ledger says it has.

    Raises `RowsRefused`.
    """
    if target.database.dialect.name == POSTGRES.name:
        with refusals(target.projection):
            return _copy(target, number, rows)
    return _insert(target, number, rows)


def _copy(target: Target, number: int, rows: Iterable[Sequence[Any]]) -> int:
    assert target.schema is not None
    ledger = sql.Identifier(target.schema, LEDGER)
    connection = target.database.connect_postgres(target.purpose)
    with connection, connection.cursor() as cursor:
        cursor.execute(
            sql.SQL(
                "insert into {} (run, part, projection, revision) values (%s, %s, %s, %s) on conflict do nothing"
            ).format(ledger),
            (target.run, number, target.projection, target.revision),
        )
        this_part = (target.run, number)
        if not cursor.rowcount:
            cursor.execute(sql.SQL("select rows from {} where run = %s and part = %s").format(ledger), this_part)
            found = cursor.fetchone()
            assert found is not None
            return int(found[0])
        failpoints.reach("rebuild.part_begun")
        statement = sql.SQL("copy {} ({}) from stdin").format(
            sql.Identifier(target.schema, target.table), sql.SQL(", ").join(map(sql.Identifier, target.columns))
        )
        count = 0
        with cursor.copy(statement) as copy:
            write_row = copy.write_row
            for row in rows:
                write_row(row)
                count += 1
        failpoints.reach("rebuild.rows_copied")
        cursor.execute(
            sql.SQL("update {} set rows = %s where run = %s and part = %s").format(ledger), (count, *this_part)
        )
    failpoints.reach("rebuild.part_loaded")
    return count


def _insert(target: Target, number: int, rows: Iterable[Sequence[Any]]) -> int:
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
        while chunk := list(islice(remaining, SQLITE_CHUNK)):
            with refusals(target.projection, partial(_refused, connection, statement, chunk)):
                _insert_chunk(connection, statement, chunk)
            count += len(chunk)
        failpoints.reach("rebuild.rows_copied")
        connection.execute(
            f"insert into {LEDGER} (run, part, projection, revision, rows) values (?, ?, ?, ?, ?)",
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
