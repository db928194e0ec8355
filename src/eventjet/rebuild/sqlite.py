"""A run on SQLite: a database file of the run's own beside the live one, copied into it in one transaction.

A file of its own keeps the load away from the live database's one writer lock.
"""

from __future__ import annotations

import glob
import reprlib
import sqlite3
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Engine, Table, func, make_url, select
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.schema import CreateIndex, CreateTable

from eventjet import failpoints
from eventjet.errors import LeaseEnded
from eventjet.file_locks import try_lock
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild import runs
from eventjet.rebuild.runs import PURPOSE, RunSpace, Target, refusals, shown
from eventjet.sql.checkpoint import DECLARED, names_of
from eventjet.sql.database import BULK, READ_ONLY, Database
from eventjet.sql.dialect import creation, qualified
from eventjet.sql.locations import located_tables, recorded
from eventjet.sql.own_tables import metadata, rebuilds
from eventjet.sql.sqlite import SQLITE
from eventjet.sql.table_moves import Exchange, Move, NotNow

CHUNK = 5_000
"""Rows loaded in one transaction: the file's one writer lock is let go of in between."""

_STEPS = 100_000
"""Steps of SQLite's machine between two looks: some milliseconds."""
_CLAIM_TRIES = 750
_CLAIM_S = 0.02


class SqliteSpace(RunSpace):
    """A file with the run's tables, and one beside it that is locked while the run's process lives."""

    suffixes = ("", "-wal", "-shm", "-journal", ".lock")
    """Of the file, and of what SQLite and `claimed` keep beside it."""

    def __init__(self, database: Database, run: str) -> None:
        live = _file(database)
        self.run = run
        self.path = live.with_name(f"{live.name}.ej_{run}")
        self.live = database.sync_engine(PURPOSE)
        own = make_url(database.url).set(database=str(self.path))
        self.database = Database(own.render_as_string(hide_password=False))
        self.attached = "shadow"
        self.location = DECLARED
        self._lock = self.path.with_name(f"{self.path.name}.lock")
        self._stopped = threading.Event()

    @staticmethod
    def names(connection: Connection, database: Database) -> list[str]:  # noqa: ARG004 - as PostgreSQL's
        """Those of the files beside the database, without its own."""
        live = _file(database)
        found = live.parent.glob(f"{glob.escape(live.name)}.ej_*")
        return [path.name.removeprefix(f"{live.name}.") for path in found]

    @staticmethod
    def described(database: Database) -> str:
        return f"a file {_file(database)}.ej_<run>"

    @staticmethod
    def load(target: Target, number: int, rows: Iterable[Sequence[Any]]) -> int:
        """Only this process writes to the shadow's file, so the ledger row may follow the last chunk."""
        connection = target.database.connect_sqlite()
        try:
            # A shadow that does not survive a crash of the machine is made again.
            connection.execute("pragma synchronous = off")
            columns = ", ".join(qualified(None, column) for column in target.columns)
            marks = ", ".join("?" * len(target.columns))
            statement = f"insert into {qualified(None, target.table)} ({columns}) values ({marks})"
            failpoints.reach("rebuild.part_begun")
            count = 0
            remaining = iter(rows)
            while chunk := list(islice(remaining, CHUNK)):
                _insert(connection, target.projection, statement, chunk)
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

    @contextmanager
    def claimed(self) -> Generator[None]:
        """A lock on a file. Whoever clears away may hold it for a moment, or remove the file before it is locked."""
        for _ in range(_CLAIM_TRIES):
            with self._lock.open("wb") as file:
                if try_lock(file) and self._lock.exists():
                    try:
                        yield
                    finally:
                        self._lock.unlink(missing_ok=True)
                    return
            time.sleep(_CLAIM_S)
        raise LeaseEnded

    def is_claimed(self, connection: Connection) -> bool:  # noqa: ARG002 - as PostgreSQL's
        try:
            with self._lock.open("r+b") as file:
                return not try_lock(file)
        except OSError:
            return False

    def engine(self) -> Engine:
        return self.database.sync_engine(PURPOSE)

    def handlers_engine(self) -> AsyncEngine:
        """Handlers are connected to the run's file alone, so they cannot reach anything else."""
        made = self.database.engine(PURPOSE, BULK)
        SQLITE.prepare_for_handlers(made.sync_engine)
        return made

    def create(self, tables: Sequence[Table], *, bare: bool) -> None:
        """The live table has the indexes; in a bare one they would only be in the way."""
        with self.engine().begin() as connection:
            metadata.create_all(connection)
            for statement in map(CreateTable, tables) if bare else creation(tables):
                connection.execute(statement)

    def finish(self, projection: str, tables: Sequence[Table], *, bare: bool) -> None:
        """Find rows that a unique index forbids before the live database is locked; durability comes with the swap."""
        with self.engine().begin() as connection:
            for index in [index for table in tables for index in table.indexes if index.unique and bare]:
                twice = partial(_double, connection, list(index.expressions))
                with refusals(projection, twice), connection.begin_nested():
                    connection.execute(CreateIndex(index))

    @contextmanager
    def snapshot(self) -> Generator[Connection]:
        """Only the run's file is written to, so nobody waits."""
        with self._interruptible().execution_options(**{READ_ONLY: True}) as connection, connection.begin():
            self.attach(connection)
            yield connection

    @contextmanager
    def swapping(self) -> Generator[Connection]:
        """The live database is locked for writers, not for readers."""
        with self._interruptible() as connection:
            try:
                transaction = connection.begin()
            except OperationalError as error:
                raise NotNow(f"another process writes to it ({error.orig})") from error
            with transaction:
                yield connection

    def attach(self, connection: Connection) -> None:
        """From its first look at the file, the transaction sees nothing that others write there."""
        connection.exec_driver_sql(f"attach database ? as {self.attached}", (str(self.path),))

    def exchange(self, connection: Connection, resolved: AnyResolved, location: str) -> Exchange:
        """No table comes: rows do."""
        return Exchange(connection, [Move(name, location, location) for name in names_of(recorded(resolved))], [])

    def carry_out(self, exchange: Exchange, resolved: AnyResolved, location: str) -> None:
        """Make the tables again as they are declared, with the run's rows; what refers to one does so by its name.

        Foreign keys are not enforced on this connection, so the order of the tables does not matter.
        """
        connection = exchange.connection
        live = located_tables(resolved, location, SQLITE)
        for old, new in zip(live, located_tables(resolved, self.location, SQLITE), strict=True):
            target = qualified("main", old.name)
            source = qualified(self.attached, new.name)
            connection.exec_driver_sql(f"drop table if exists {target}")
            for statement in creation([old]):
                connection.execute(statement)
            columns = ", ".join(qualified(None, column.name) for column in new.columns)
            connection.exec_driver_sql(f"insert into {target} ({columns}) select {columns} from {source}")
            self._keep_numbers(connection, old)

    def interrupt(self) -> None:
        self._stopped.set()

    def drop(self) -> None:
        self._remove()
        with suppress(SQLAlchemyError), self.live.begin() as connection:
            runs.close_run(connection, self.run)

    def clear(self, connection: Connection) -> None:  # noqa: ARG002 - as PostgreSQL's
        self._remove()

    def _remove(self) -> None:
        for suffix in self.suffixes:
            with suppress(OSError):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def _interruptible(self) -> Connection:
        """A connection to the live database. A statement that copies a large table takes seconds."""
        connection = self.live.connect()
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(lambda: int(self._stopped.is_set()), _STEPS)
        return connection

    def _keep_numbers(self, connection: Connection, table: Table) -> None:
        """Go on counting where the shadow does, in a table that gives no number twice."""
        counts = f"{self.attached}.sqlite_master where name = 'sqlite_sequence'"
        if connection.exec_driver_sql(f"select 1 from {counts}").fetchone():
            name = (table.name,)
            connection.exec_driver_sql("delete from main.sqlite_sequence where name = ?", name)
            source = f"{self.attached}.sqlite_sequence where name = ?"
            connection.exec_driver_sql(f"insert into main.sqlite_sequence select * from {source}", name)


def _file(database: Database) -> Path:
    return Path(str(make_url(database.url).database))


def _insert(connection: sqlite3.Connection, projection: str, statement: str, chunk: Sequence[Sequence[Any]]) -> None:
    """All rows or none; raises `RowsRefused` with the row at fault, which the driver does not name."""
    before = connection.total_changes
    connection.execute("begin immediate")
    try:
        with refusals(projection, lambda: _shown_row(chunk[connection.total_changes - before])):
            connection.executemany(statement, chunk)
        connection.execute("commit")
    except BaseException:
        connection.execute("rollback")
        raise


def _shown_row(values: Sequence[Any]) -> str:
    return f"the row is ({', '.join(map(reprlib.repr, values))})"


def _double(connection: Connection, columns: Sequence[str | ColumnElement[Any]]) -> str:
    """Values of columns that several rows have, and should not."""
    plain = [one for one in columns if isinstance(one, Column)]
    if len(plain) < len(columns):
        return ""
    query = select(*plain).group_by(*plain).having(func.count() > 1).limit(1)
    values = connection.execute(query).first()
    return "" if values is None else f"several rows have {shown(plain, tuple(values))}"
