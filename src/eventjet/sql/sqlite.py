"""SQLite behind the `Dialect` port: through sqlite3 and aiosqlite, one file with one writer at a time."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from sqlalchemy import CheckConstraint, Connection, Engine, Table, create_engine, event
from sqlalchemy import types as sa
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import NullPool
from sqlalchemy.sql import quoted_name

from eventjet.projections.row_codec import RowCodec
from eventjet.projections.values import Convert
from eventjet.sql import sqlite_statements, sqlite_tables, sqlite_types
from eventjet.sql.clock import Clock
from eventjet.sql.quarantine_rows import Parked, QuarantineChanges
from eventjet.sql.sqlite_statements import CLOCK, SqliteStatements
from eventjet.sql.tables import Tables

if TYPE_CHECKING:
    from eventjet.sql.database import SessionLimits

BUSY_TIMEOUT_S = 15.0
"""How long a writer waits for another one; it polls, so a busy worker makes it wait for several batches."""
READ_ONLY = "eventjet_read_only"
"""Execution option of a connection that must not lock the database: its transactions begin deferred."""

_OWN_LOCATION = re.compile(r"(.+)__r[0-9]+")
_TRANSIENT = frozenset({5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 26})
"""Primary codes of faults that another try may not meet: busy, locked, out of memory, read-only, interrupted, I/O …"""


class Sqlite:
    """See `Dialect`. A location is a suffix of the tables' names."""

    name = sqlite_types.SQLITE
    clock = CLOCK
    is_concurrent = False
    relocates_handlers = False
    byte_order = ""
    look_options: Mapping[str, Any] = {READ_ONLY: True}
    tables: Tables = sqlite_tables

    def dumper(self, kind: sa.TypeEngine[Any]) -> Convert | None:
        return sqlite_types.dumper(kind)

    def loader(self, kind: sa.TypeEngine[Any]) -> Convert | None:
        return sqlite_types.loader(kind)

    def storage_type(self, kind: sa.TypeEngine[Any]) -> sa.TypeEngine[Any]:
        return sqlite_types.storage_type(kind)

    def exactness_checks(self, table: Table) -> list[CheckConstraint]:
        return sqlite_types.exactness_checks(table)

    def statements(self, table: Table, codec: RowCodec) -> SqliteStatements:
        return SqliteStatements(table, codec)

    def park(self, connection: Connection, name: str, revision: int, parked: Sequence[Parked]) -> None:
        sqlite_statements.write_quarantine(connection, name, revision, QuarantineChanges(parked))

    def own_location(self, name: str, revision: int) -> str:  # noqa: ARG002 - each table has its name
        return f"__r{revision}"

    def name_in(self, name: str, location: str) -> str:
        return f"{name}{location}"

    def declared_name(self, name: str) -> str:
        found = _OWN_LOCATION.fullmatch(name)
        return found[1] if found else name

    def relocate(self, tables: Sequence[Table], location: str) -> None:
        for table in tables:
            table.name = table.fullname = self.name_in(table.name, location)
            for index in table.indexes:
                # The whole database shares the names of indexes.
                index.name = quoted_name(f"{index.name}__{table.name}", None)

    def lock_migrations(self, connection: Connection) -> None:
        """Nothing: the transaction itself, which began IMMEDIATE, locks."""

    def refusal_of(self, url: URL) -> str | None:
        if url.database in (None, "", ":memory:"):
            return "SQLite in memory cannot be shared by a worker and its readers. Name a file: sqlite:///read.db."
        return None

    def async_engine(self, url: URL, purpose: str, limits: SessionLimits, pool: Mapping[str, Any]) -> AsyncEngine:  # noqa: ARG002
        driver = url.set(drivername=f"{self.name}+aiosqlite")
        made = create_async_engine(driver, **pool, connect_args={"timeout": BUSY_TIMEOUT_S})
        _prepare(made.sync_engine)
        return made

    def engine(self, url: URL, purpose: str, limits: SessionLimits) -> Engine:  # noqa: ARG002 - no sessions
        driver = url.set(drivername=f"{self.name}+pysqlite")
        made = create_engine(driver, poolclass=NullPool, connect_args={"timeout": BUSY_TIMEOUT_S})
        _prepare(made)
        return made

    def enforce_foreign_keys(self, engine: Engine) -> None:
        event.listen(engine, "connect", _enforce_foreign_keys)

    def lacks_table(self, cause: object) -> bool:
        return "no such table" in str(cause)

    def remedy(self, cause: object) -> str:
        if _is_busy(cause):
            return f"Another program has held it for {BUSY_TIMEOUT_S:.0f} s: end that one, or try again."
        return "Check that its folder exists and may be written to."

    def is_about_data(self, error: DBAPIError) -> bool:
        return isinstance(error.orig, sqlite3.IntegrityError | sqlite3.DataError | OverflowError)

    def is_transient(self, error: DBAPIError) -> bool:
        code = getattr(error.orig, "sqlite_errorcode", None)
        return isinstance(code, int) and code & 0xFF in _TRANSIENT


SQLITE = Sqlite()


def connect(url: URL) -> sqlite3.Connection:
    """A blocking sqlite3 connection that begins no transaction by itself."""
    with ExitStack() as unwanted:
        made = sqlite3.connect(str(url.database), timeout=BUSY_TIMEOUT_S, isolation_level=None)
        unwanted.callback(made.close)
        _set_pragmas(made)
        unwanted.pop_all()
    return made


def _prepare(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:  # pyright: ignore[reportUnusedFunction]  a listener
        # The driver must not begin transactions by itself: it would begin them deferred, and a writer that
        # read first could then find the database locked with no way to wait.
        connection.isolation_level = None
        _set_pragmas(connection)

    @event.listens_for(engine, "begin")
    def on_begin(connection: Any) -> None:  # pyright: ignore[reportUnusedFunction]  a listener
        read_only = connection.get_execution_options().get(READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _enforce_foreign_keys(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _set_pragmas(connection: Any) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
    _switch_to_wal(cursor)
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _switch_to_wal(cursor: Any) -> None:
    """SQLite switches a new file in a transaction that reads before it writes, where its busy timeout does not apply.

    Programs that open the file for the first time at once would find it locked: each waits for the other's transaction
    instead, as a writer does, and looks again.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() > deadline:
                raise
        else:
            return
        cursor.execute("BEGIN EXCLUSIVE")
        cursor.execute("ROLLBACK")


def _is_busy(error: object) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


@compiles(Clock, Sqlite.name)
def _clock(_element: Clock, _compiler: Any, **_: Any) -> str:  # pyright: ignore[reportUnusedFunction]  registered
    return f"({CLOCK})"
