"""`SqliteWorkspace`: a file for one run, whose rows are copied into the live database in one transaction."""

from __future__ import annotations

import glob
import reprlib
import sqlite3
import sys
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
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild import runs
from eventjet.rebuild.runs import PURPOSE, Target, columns_in_words, refusals
from eventjet.runtime import try_lock
from eventjet.sql.checkpoint import DECLARED, names_of
from eventjet.sql.database import BULK, Database
from eventjet.sql.dialect import READ_ONLY, creation, qualified
from eventjet.sql.locations import located_tables, recorded
from eventjet.sql.own_tables import metadata, rebuilds
from eventjet.sql.sqlite import SQLITE
from eventjet.sql.table_moves import Exchange, Move, NotNow

CHUNK = 5_000
"""The maximum number of rows in one transaction on SQLite; the file's only writer lock is free in between."""

_STEPS = 100_000
"""Steps of SQLite's virtual machine between two checks for an interruption: some milliseconds."""
_CLAIM_TRIES = 750
_CLAIM_S = 0.02


class SqliteWorkspace:
    """A file with the run's tables, and a lock file held while its process lives: see `PostgresWorkspace`."""

    suffixes = ("", "-wal", "-shm", "-journal", ".lock")
    """The suffixes of the file, and of the files that SQLite and `claimed` keep beside it."""
    copied_as = "table"

    def __init__(self, database: Database, run: str) -> None:
        live = _file(database)
        self.run = run
        self.path = live.with_name(f"{live.name}.ej_{run}")
        self.description = f"a file {self.path}"
        self.live = database.sync_engine(PURPOSE)
        run_url = make_url(database.url).set(database=str(self.path))
        self.database = Database(run_url.render_as_string(hide_password=False))
        self.schema = "shadow"
        self.location = DECLARED
        self._lock = self.path.with_name(f"{self.path.name}.lock")
        self._stopped = threading.Event()

    @staticmethod
    def names(connection: Connection, database: Database) -> list[str]:  # noqa: ARG004 - as PostgreSQL's
        """Return the names of the runs' files beside the database file, without the database's own name."""
        live = _file(database)
        files = live.parent.glob(f"{glob.escape(live.name)}.ej_*")
        return [path.name.removeprefix(f"{live.name}.") for path in files]

    @contextmanager
    def claimed(self) -> Generator[None]:
        """Lock a file until the end of the `with` block; raises `RebuildOvertaken` when it stays locked by another.

        A process that removes leftovers may hold the lock for a moment, or remove the file before it is locked here.
        """
        for _ in range(_CLAIM_TRIES):
            with self._lock.open("wb") as file:
                if try_lock(file) and self._lock.exists():
                    try:
                        yield
                    finally:
                        if sys.platform == "win32":
                            file.close()  # removes no open file; what takes the lock now finds no run
                        self._lock.unlink(missing_ok=True)
                    return
            time.sleep(_CLAIM_S)
        raise runs.overtaken()

    def is_claimed(self, connection: Connection) -> bool:  # noqa: ARG002 - as PostgreSQL's
        try:
            with self._lock.open("r+b") as file:
                return not try_lock(file)
        except OSError:
            return False

    def engine(self) -> Engine:
        return self.database.sync_engine(PURPOSE)

    def handlers_engine(self) -> AsyncEngine:
        """Return an engine for handlers, whose connections reach only the run's file."""
        engine = self.database.engine(PURPOSE, BULK)
        SQLITE.configure_for_handlers(engine.sync_engine)
        return engine

    def create(self, tables: Sequence[Table], *, bare: bool) -> None:
        """Create the tables, empty; a bare table gets no indexes, because the live table has them."""
        with self.engine().begin() as connection:
            metadata.create_all(connection)
            for statement in map(CreateTable, tables) if bare else creation(tables):
                connection.execute(statement)

    def finish(self, projection: str, tables: Sequence[Table], *, bare: bool) -> None:
        """Create the unique indexes, so that duplicates are found before the live database is locked."""
        with self.engine().begin() as connection:
            for index in [index for table in tables for index in table.indexes if index.unique and bare]:
                duplicates = partial(_duplicates, connection, list(index.expressions))
                with refusals(projection, duplicates), connection.begin_nested():
                    connection.execute(CreateIndex(index))

    @contextmanager
    def snapshot(self) -> Generator[Connection]:
        """Begin a transaction that reads the live database and writes only to the run's file, so nobody waits."""
        with self._interruptible().execution_options(**{READ_ONLY: True}) as connection, connection.begin():
            self.attach(connection)
            yield connection

    @contextmanager
    def swapping(self) -> Generator[Connection]:
        """Begin a transaction that locks the live database for writers, not for readers; raises `NotNow`."""
        with self._interruptible() as connection:
            try:
                transaction = connection.begin()
            except OperationalError as error:
                raise NotNow(f"another process writes to it ({error.orig})") from error
            with transaction:
                yield connection

    def attach(self, connection: Connection) -> None:
        """Attach the run's file; from its first read of the file, a transaction does not see later writes to it."""
        connection.exec_driver_sql(f"attach database ? as {self.schema}", (str(self.path),))

    def exchange(self, connection: Connection, resolved: AnyResolved, location: str) -> Exchange:
        """Return an exchange in which no tables come: `carry_out` copies rows instead."""
        return Exchange(connection, [Move(name, location, location) for name in names_of(recorded(resolved))], [])

    def carry_out(self, exchange: Exchange, resolved: AnyResolved, location: str) -> None:
        """Create the live tables again as they are declared, and copy the run's rows into them.

        References from other objects go by a table's name, so they stay valid. Foreign keys are not enforced on this
        connection, so the order of the tables does not matter.
        """
        connection = exchange.connection
        live_tables = located_tables(resolved, location, SQLITE)
        for live_table, run_table in zip(live_tables, located_tables(resolved, self.location, SQLITE), strict=True):
            target = qualified("main", live_table.name)
            source = qualified(self.schema, run_table.name)
            connection.exec_driver_sql(f"drop table if exists {target}")
            for statement in creation([live_table]):
                connection.execute(statement)
            columns = ", ".join(qualified(None, column.name) for column in run_table.columns)
            connection.exec_driver_sql(f"insert into {target} ({columns}) select {columns} from {source}")
            self._copy_last_number(connection, live_table)

    def outside_writes(self, connection: Connection) -> list[str]:  # noqa: ARG002 - as PostgreSQL's
        """Return nothing, because the connections of handlers reach only the run's file."""
        return []

    def numbered(self, tables: Sequence[Table]) -> set[Column[Any]]:  # noqa: ARG002 - as PostgreSQL's
        """Return nothing, because SQLite takes numbers back when a transaction is rolled back."""
        return set()

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
        """Connect to the live database so that `interrupt` can end a statement; copying a large table takes seconds."""
        connection = self.live.connect()
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(lambda: int(self._stopped.is_set()), _STEPS)
        return connection

    def _copy_last_number(self, connection: Connection, table: Table) -> None:
        """Copy the shadow's `sqlite_sequence` row, so that an autoincrement table goes on with the shadow's numbers."""
        counts = f"{self.schema}.sqlite_master where name = 'sqlite_sequence'"
        if connection.exec_driver_sql(f"select 1 from {counts}").fetchone():
            name = (table.name,)
            connection.exec_driver_sql("delete from main.sqlite_sequence where name = ?", name)
            source = f"{self.schema}.sqlite_sequence where name = ?"
            connection.exec_driver_sql(f"insert into main.sqlite_sequence select * from {source}", name)


def _file(database: Database) -> Path:
    return Path(str(make_url(database.url).database))


def load_part(target: Target, number: int, rows: Iterable[Sequence[Any]]) -> int:
    """Insert the rows in chunks, then the part's row in the ledger: only this process writes to the file."""
    connection = target.database.connect()
    try:
        # A shadow that is lost in a crash of the machine is made again, so nothing has to wait for the disk.
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


def _insert(connection: sqlite3.Connection, projection: str, statement: str, chunk: Sequence[Sequence[Any]]) -> None:
    """Insert all rows or none; raises `RowsRefused` with the row at fault, since the driver does not name it."""
    changes_before = connection.total_changes

    def refused_row() -> str:
        values = chunk[connection.total_changes - changes_before]
        return f"the row is ({', '.join(map(reprlib.repr, values))})"

    connection.execute("begin immediate")
    try:
        with refusals(projection, refused_row):
            connection.executemany(statement, chunk)
        connection.execute("commit")
    except BaseException:
        connection.execute("rollback")
        raise


def _duplicates(connection: Connection, columns: Sequence[str | ColumnElement[Any]]) -> str:
    """Return values that several rows have in the columns of a unique index, as text; empty if there are none."""
    plain = [column for column in columns if isinstance(column, Column)]
    if len(plain) < len(columns):
        return ""
    query = select(*plain).group_by(*plain).having(func.count() > 1).limit(1)
    values = connection.execute(query).first()
    return "" if values is None else f"several rows have {columns_in_words(plain, tuple(values))}"
