"""The database of the read models: engines and connections, configured the same wherever they are opened.

PostgreSQL through psycopg (async, sync and COPY), SQLite through aiosqlite and sqlite3. No URL is shown with its
password.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from eventjet.errors import Unreachable, UsageError
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.storage import SQLITE
from eventjet.sql.dialect import Dialect, dialect_named

CONNECT_TIMEOUT_S = 5
BUSY_TIMEOUT_S = 15.0
"""How long a writer of SQLite waits for another one; it polls, so a busy worker makes it wait for several batches."""

READ_ONLY = "eventjet_read_only"
"""Execution option of a SQLite connection that must not lock the database: its transactions begin deferred."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a session on PostgreSQL may hold up, so that a stopped process frees its locks. 0 means no limit."""

    lock_ms: int = 2_000
    statement_ms: int = 15_000
    idle_in_transaction_ms: int = 2_500

    def options(self) -> str:
        """As libpq's `options` takes them; time is UTC in every session."""
        return (
            f"-c timezone=UTC -c lock_timeout={self.lock_ms} -c statement_timeout={self.statement_ms} "
            f"-c idle_in_transaction_session_timeout={self.idle_in_transaction_ms}"
        )


WORKER = SessionLimits()
"""For sessions that hold a checkpoint's row."""
BULK = SessionLimits(lock_ms=5_000, statement_ms=0, idle_in_transaction_ms=60_000)
"""For loads, indexes and other statements that may take long."""


@dataclass(frozen=True, slots=True)
class Database:
    """Where the read models are: a value that can be pickled. Raises `UsageError` for a URL that cannot be used."""

    url: str = field(repr=False)

    def __post_init__(self) -> None:
        found = self._parsed()
        if found.get_backend_name() == SQLITE and found.database in (None, "", ":memory:"):
            raise UsageError(
                "SQLite in memory cannot be shared by a worker and its readers. Name a file: sqlite:///read.db."
            )

    @property
    def dialect(self) -> Dialect:
        """What is particular to this kind of database; raises `UsageError` for one that is not supported."""
        return dialect_named(self._parsed().get_backend_name())

    @property
    def shown(self) -> str:
        """The URL without its password."""
        found = self._parsed()
        kept = {key: value for key, value in found.query.items() if key not in ("password", "sslpassword", "passfile")}
        return found.set(query=kept).render_as_string(hide_password=True)

    def engine(self, purpose: str = "eventjet", limits: SessionLimits = WORKER, *, pool_size: int = 1) -> AsyncEngine:
        """An async engine, not connected yet; dispose of it. `purpose` is what PostgreSQL shows of the session."""
        pool: dict[str, Any] = {"pool_size": pool_size, "max_overflow": 0, "pool_timeout": 10}
        if self.dialect.name == SQLITE:
            made = create_async_engine(self._with_driver("aiosqlite"), **pool, connect_args={"timeout": BUSY_TIMEOUT_S})
            _prepare_sqlite(made.sync_engine)
            return made
        arguments = self._session(purpose, limits)
        return create_async_engine(self._with_driver("psycopg"), **pool, connect_args=arguments)

    def sync_engine(self, purpose: str = "eventjet", limits: SessionLimits = BULK) -> Engine:
        """A blocking engine without a pool, not connected yet."""
        if self.dialect.name == SQLITE:
            made = create_engine(
                self._with_driver("pysqlite"), poolclass=NullPool, connect_args={"timeout": BUSY_TIMEOUT_S}
            )
            _prepare_sqlite(made)
            return made
        arguments = self._session(purpose, limits)
        return create_engine(self._with_driver("psycopg"), poolclass=NullPool, connect_args=arguments)

    def connect_postgres(
        self, purpose: str = "eventjet", limits: SessionLimits = BULK
    ) -> psycopg.Connection[tuple[Any, ...]]:
        """A blocking psycopg connection, for COPY; close it. Raises `Unreachable`."""
        url = self._with_driver("psycopg").set(drivername=POSTGRESQL)
        try:
            return psycopg.connect(
                url.render_as_string(hide_password=False), **self._session(purpose, limits), autocommit=False
            )
        except psycopg.OperationalError as error:
            raise self.unreachable(error) from None

    def connect_sqlite(self) -> sqlite3.Connection:
        """A blocking sqlite3 connection that begins no transaction by itself; close it. Raises `Unreachable`."""
        try:
            with ExitStack() as unwanted:
                made = sqlite3.connect(str(self._parsed().database), timeout=BUSY_TIMEOUT_S, isolation_level=None)
                unwanted.callback(made.close)
                _set_pragmas(made)
                unwanted.pop_all()
        except sqlite3.OperationalError as error:
            raise self.unreachable(error) from None
        return made

    def unreachable(self, error: BaseException) -> Unreachable:
        """One paragraph for a database that cannot be used, without its password."""
        cause = getattr(error, "orig", None) or error
        if _lacks_table(cause):
            return Unreachable(f"The database {self.shown}", "eventjet's tables are not in it", "Run `eventjet init`.")
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        reason = lines[0] if lines else type(cause).__name__
        password = self._parsed().password
        if password:
            reason = reason.replace(str(password), "***")
        remedy = "Check that its folder exists and may be written to."
        if _is_busy(cause):
            remedy = f"Another program has held it for {BUSY_TIMEOUT_S:.0f} s: end that one, or try again."
        elif self.dialect.name == POSTGRESQL:
            remedy = "Check that it runs, and that EVENTJET_DATABASE names its host, database and user."
        return Unreachable(f"The database {self.shown}", reason.rstrip("."), remedy)

    @asynccontextmanager
    async def reaching(self) -> AsyncGenerator[None]:
        """Turn what connecting fails with, and the lack of eventjet's tables, into `Unreachable`."""
        with self.reaching_sync():
            yield

    @contextmanager
    def reaching_sync(self) -> Generator[None]:
        """`reaching` where there is no loop."""
        try:
            yield
        except (OperationalError, InterfaceError) as error:
            raise self.unreachable(error) from None
        except DBAPIError as error:
            # A session that PostgreSQL ends because it was idle too long is no operational error there.
            if not (error.connection_invalidated or _lacks_table(error.orig)):
                raise
            raise self.unreachable(error) from None

    def _parsed(self) -> URL:
        try:
            return make_url(self.url)
        except ArgumentError:
            raise UsageError(
                "The database's URL cannot be read. Write postgresql://user@host/name or sqlite:///path/to/file.db."
            ) from None

    def _with_driver(self, driver: str) -> URL:
        return self._parsed().set(drivername=f"{self.dialect.name}+{driver}")

    def _session(self, purpose: str, limits: SessionLimits) -> dict[str, Any]:
        query = self._parsed().query
        own = query.get("options", "")
        options = f"{own if isinstance(own, str) else ' '.join(own)} {limits.options()}".strip()
        arguments: dict[str, Any] = {"options": options, "application_name": purpose}
        if "connect_timeout" not in query:
            arguments["connect_timeout"] = CONNECT_TIMEOUT_S
        return arguments


def shown_of(connection: Connection) -> str:
    """The URL of a connection as a person would have written it, without its password."""
    url = connection.engine.url.set(drivername=connection.dialect.name)
    return Database(url.render_as_string(hide_password=False)).shown


def _lacks_table(cause: object) -> bool:
    return isinstance(cause, psycopg.errors.UndefinedTable) or "no such table" in str(cause)


def is_about_data(error: DBAPIError) -> bool:
    """Whether a value or a row broke a rule of the database, so that trying again cannot help."""
    state = str(getattr(error.orig, "sqlstate", None) or "")
    if state:
        return state[:2] in _DATA_CLASSES
    return isinstance(error.orig, sqlite3.IntegrityError | sqlite3.DataError | OverflowError)


_DATA_CLASSES = frozenset({"21", "22", "23", "44", "54"})
"""SQLSTATE classes: cardinality, data, integrity, check options, limits of a row or an index."""


def _prepare_sqlite(engine: Engine) -> None:
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


def enforce_foreign_keys(connection: Any, _record: Any = None) -> None:
    """For connections of SQLite on which an application's own statements run: elsewhere rows are whole anyway."""
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
