"""The tables of a `SqlProjection` on SQLite: made in a file of the run's own, and copied in one transaction."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any, TypeVar

from sqlalchemy import Column, Connection, Engine, Table, event, func, make_url, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from eventjet import failpoints
from eventjet.projections.sql_projection import ResolvedSql
from eventjet.projections.storage import SQLITE
from eventjet.rebuild import decided, runs
from eventjet.rebuild.catchup import begin, begun
from eventjet.rebuild.compare import Pair
from eventjet.rebuild.obstacles import check_obstacles_together
from eventjet.rebuild.shadow import NotYet, Swapped
from eventjet.rebuild.sqlite import read_checkpoint, remove, shadow_path, stop_when, swapped_in
from eventjet.rebuild.tables_postgres import copy_of
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import DECLARED, Checkpoint
from eventjet.sql.database import BULK, READ_ONLY, Database, enforce_foreign_keys
from eventjet.sql.location_assignment import create_tables
from eventjet.sql.locations import check_location
from eventjet.sql.own_tables import metadata
from eventjet.sql.sqlite_tables import quoted
from eventjet.sql.stored_tables import creation, stored_tables

T = TypeVar("T")

_MADE_BY = (
    "select type, name, sql from {}.sqlite_master where lower(tbl_name) = lower(?) and sql is not null order by 2"
)


class SqliteTables:
    """See the module. Handlers are connected to the run's file alone, so they cannot reach anything else."""

    def __init__(self, database: Database, resolved: ResolvedSql, run: str) -> None:
        self.resolved = resolved
        self.run = run
        self.path = shadow_path(database, run)
        self.stopped = threading.Event()
        self._database = database
        self._engine = database.sync_engine("eventjet rebuild")
        self._own = Database(make_url(database.url).set(database=str(self.path)).render_as_string(hide_password=False))
        self._tables = stored_tables(resolved, SQLITE)

    def create(self, *, to_swap: bool = True) -> None:
        with self._engine.begin() as connection:
            create_tables(connection, [self.resolved] if to_swap else ())
            if to_swap:
                self.check_swappable(connection)
            runs.open_run(connection, self.run, self.resolved)
        failpoints.reach("rebuild.announced")
        with self.engine().begin() as connection:
            metadata.create_all(connection)
            for statement in creation(self._tables):
                connection.execute(statement)
            begin(connection, begun(self.resolved))

    def check_swappable(self, connection: Connection) -> None:
        held = checkpoint.read(connection, self.resolved.name, self.resolved.revision)
        check_location(self.resolved, held.location if held else DECLARED, SQLITE)
        check_obstacles_together(connection, self.resolved.name, dict.fromkeys(self._tables))

    def engine(self) -> Engine:
        """Connections to the run's file."""
        return self._own.sync_engine("eventjet rebuild")

    def handlers_engine(self) -> AsyncEngine:
        made = self._own.engine("eventjet rebuild", BULK)
        event.listen(made.sync_engine, "connect", enforce_foreign_keys)
        return made

    def check_confined(self, connection: Connection) -> None:
        """There is nothing else."""

    def copy_live(self) -> Checkpoint | None:
        """Only the run's file is written to, so nobody waits."""
        with closing(self._database.connect_sqlite()) as connection:
            stop_when(connection, self.stopped)
            connection.execute("attach database ? as shadow", (str(self.path),))
            connection.execute("begin")
            found = read_checkpoint(connection, "main", self.resolved)
            if found is None or not found.log:
                return None
            check_location(self.resolved, found.location, SQLITE)
            there = "select count(*) from main.sqlite_master where type = 'table' and lower(name) = lower(?)"
            if not all(connection.execute(there, (one.name,)).fetchone()[0] for one in self._tables):
                return None
            for _, copied, made in self.pairs():
                columns = ", ".join(quoted(column.name) for column in made.columns)
                source = f"select {columns} from main.{quoted(made.name)}"
                connection.execute(f"create table shadow.{quoted(copied.name)} as {source}")
            connection.execute("commit")
            return found

    def pairs(self) -> list[Pair]:
        return [
            (declared, copy_of(made, f"eventjet_live_{number}", None), made)
            for number, (declared, made) in enumerate(zip(self.resolved.tables, self._tables, strict=True))
        ]

    def numbered(self) -> set[Column[Any]]:
        """None: here a transaction that is rolled back gives its numbers back."""
        return set()

    def compare(self, look: Callable[[Connection], T]) -> T:
        engine = self.engine()
        with engine.connect().execution_options(**{READ_ONLY: True}) as connection:
            return look(connection)

    def count(self) -> int:
        with self.engine().begin() as connection:
            return sum(connection.scalar(select(func.count()).select_from(table)) or 0 for table in self._tables)

    def finish(self) -> None:
        """Nothing to do: keys are there, and durability comes with the swap."""

    def live_checkpoint(self) -> Checkpoint | None:
        with self._engine.begin() as connection:
            return checkpoint.read(connection, self.resolved.name, self.resolved.revision)

    def swap(self, log: str, tail: Callable[[int], None] | None) -> Swapped | NotYet:
        """The live database is locked for writers, not for readers, while the rows are copied."""
        return swapped_in(self, self._database, log, self._replace_rows, tail)

    def _replace_rows(self, connection: sqlite3.Connection, location: str, *, bound_to_live: bool) -> None:  # noqa: ARG002
        """Foreign keys are not enforced on this connection, so the order of the tables does not matter."""
        check_location(self.resolved, location, SQLITE)
        decided.forget(connection.execute, f"main.{decided.TABLE}", self.resolved)
        for table in self._tables:
            name = quoted(table.name)
            made_by = connection.execute(_MADE_BY.format("shadow"), (table.name,)).fetchall()
            if made_by != connection.execute(_MADE_BY.format("main"), (table.name,)).fetchall():
                connection.execute(f"drop table if exists main.{name}")
                for statement in creation([table]):
                    connection.execute(str(statement.compile(dialect=self._engine.dialect)))
            else:
                connection.execute(f"delete from main.{name}")
            columns = ", ".join(quoted(column.name) for column in table.columns)
            connection.execute(f"insert into main.{name} ({columns}) select {columns} from shadow.{name}")
            self._keep_numbers(connection, table)

    def _keep_numbers(self, connection: sqlite3.Connection, table: Table) -> None:
        """Go on counting where the shadow does, in a table that gives no number twice."""
        if connection.execute("select 1 from shadow.sqlite_master where name = 'sqlite_sequence'").fetchone():
            connection.execute("delete from main.sqlite_sequence where name = ?", (table.name,))
            connection.execute(
                "insert into main.sqlite_sequence select * from shadow.sqlite_sequence where name = ?", (table.name,)
            )

    def interrupt(self) -> None:
        self.stopped.set()

    def drop(self) -> None:
        remove(self.path)
        with suppress(SQLAlchemyError), self._engine.begin() as connection:
            runs.close_run(connection, self.run)
