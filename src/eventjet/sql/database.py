"""`Database`: the database of the read models, with engines and connections that are configured alike everywhere.

PostgreSQL is used through psycopg (async, sync and COPY), SQLite through aiosqlite and sqlite3. No URL is shown with
its password.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sqlalchemy import Connection, Engine, create_engine, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from eventjet.errors import Unreachable, UsageError
from eventjet.runtime import check_loop_for_psycopg
from eventjet.settings import dev_hint
from eventjet.sql.dialect import Dialect, Fault, SessionLimits, qualified
from eventjet.sql.postgres import POSTGRES
from eventjet.sql.sqlite import SQLITE
from eventjet.sql.sqlite_connections import FileMissing
from eventjet.urls import database_url, shown_database

_DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (POSTGRES, SQLITE)}

WORKER = SessionLimits()
"""Limits of sessions that lock a checkpoint."""
COMMAND = SessionLimits(idle_in_transaction_ms=15_000)
"""Limits of a person's command, which is not retried: a busy machine may delay it between statements."""
PAGE = SessionLimits(lock_ms=1_000, statement_ms=1_800)
"""Limits of queries for a page of the console: its reader does not wait longer."""
BULK = SessionLimits(lock_ms=5_000, statement_ms=0, idle_in_transaction_ms=60_000)
"""Limits of loads, indexes and other statements that may take long."""


@dataclass(frozen=True, slots=True)
class Database:
    """The URL of the read models' database, which can be pickled; raises `UsageError` for one that cannot be used."""

    url: str = field(repr=False)

    def __post_init__(self) -> None:
        refusal = self.dialect.refusal_of(self._parsed())
        if refusal is not None:
            raise UsageError(refusal)

    @property
    def dialect(self) -> Dialect:
        """The dialect of this kind of database; raises `UsageError` for a database that is not supported."""
        return dialect_named(self._parsed().get_backend_name())

    @property
    def shown(self) -> str:
        """The URL without user, password and options."""
        return shown_database(self.url)

    def engine(
        self, purpose: str = "eventjet", limits: SessionLimits = WORKER, *, existing: bool = False
    ) -> AsyncEngine:
        """Return an async engine of one connection, to be disposed of; `existing` makes no SQLite file as it connects.

        Raises `UsageError` in a loop in which psycopg cannot work.
        """
        if self.dialect is POSTGRES:
            check_loop_for_psycopg()
        url, arguments = self._arguments(0, purpose, limits)
        engine = create_async_engine(url, pool_size=1, max_overflow=0, pool_timeout=10, connect_args=arguments)
        self.dialect.configure(engine.sync_engine, self._parsed(), limits)
        if existing:
            self.dialect.require_file(engine.sync_engine)
        return engine

    def sync_engine(self, purpose: str = "eventjet", limits: SessionLimits = BULK, *, existing: bool = False) -> Engine:
        """Return a blocking engine without a pool, not connected yet; `existing` is as for `engine`."""
        url, arguments = self._arguments(1, purpose, limits)
        engine = create_engine(url, poolclass=NullPool, connect_args=arguments)
        self.dialect.configure(engine, self._parsed(), limits)
        if existing:
            self.dialect.require_file(engine)
        return engine

    def _arguments(self, driver: int, purpose: str, limits: SessionLimits) -> tuple[URL, dict[str, Any]]:
        """Return the URL with the async (0) or the blocking (1) driver, and the arguments of its connections."""
        dialect, url = self.dialect, self._parsed()
        url_of_driver = url.set(drivername=f"{dialect.name}+{dialect.drivers[driver]}")
        return url_of_driver, dialect.session_arguments(url, purpose, limits)

    @contextmanager
    def read_only(self, purpose: str, limits: SessionLimits = COMMAND) -> Generator[Connection | None]:
        """Open a connection that cannot write and leaves nothing behind; None where there is no database yet."""
        engine = self.dialect.read_only(self.sync_engine(purpose, limits))
        if engine is None:
            yield None
        else:
            with engine.connect() as connection:
                yield connection

    def connect(self, purpose: str = "eventjet", limits: SessionLimits = BULK) -> Any:
        """Open a blocking connection of psycopg or sqlite3, for bulk loads; close it. Raises `Unreachable`."""
        with self.reaching_sync():
            return self.dialect.connect(self._parsed(), purpose, limits)

    def check_sessions(self) -> None:
        """Raise `Unreachable` where a pooler lets connections share their sessions. Blocks."""
        with self.reaching_sync():
            self.dialect.check_sessions(self._parsed())

    def unreachable(self, error: BaseException) -> Unreachable:
        """Return the error for a database that cannot be used, in one paragraph and without the password."""
        cause = getattr(error, "orig", None) or error
        if Fault.NO_TABLE in self.dialect.faults(error) and not isinstance(cause, FileMissing):
            return _unreachable(self.url, "eventjet's tables are not in it", "Run `eventjet init`.")
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        reason = lines[0] if lines else type(cause).__name__
        return _unreachable(self.url, reason.rstrip("."), self.dialect.remedy(cause))

    @asynccontextmanager
    async def reaching(self) -> AsyncGenerator[None]:
        """Turn errors of connecting, missing tables of eventjet, missing rights and damage into `Unreachable`."""
        with self.reaching_sync():
            yield

    @contextmanager
    def reaching_sync(self) -> Generator[None]:
        """Do what `reaching` does, without an event loop."""
        try:
            yield
        except (OperationalError, InterfaceError, self.dialect.driver_error) as error:
            raise self.unreachable(error) from None
        except DBAPIError as error:
            # To SQLAlchemy it is no operational error when PostgreSQL ends a session that was idle too long.
            of_database = self.dialect.faults(error) & (Fault.NO_TABLE | Fault.FORBIDDEN | Fault.DAMAGED)
            if not (error.connection_invalidated or of_database):
                raise
            raise self.unreachable(error) from None

    def _parsed(self) -> URL:
        database_url(self.url)
        return make_url(self.url)


def unusable(connection: Connection | Engine, reason: str, remedy: str) -> Unreachable:
    """Return the error for a database that exists and cannot be used as it is."""
    # The URL as a person would write it: without the driver.
    url = connection.engine.url.set(drivername=connection.dialect.name)
    text = url.render_as_string(hide_password=False)
    if url.drivername == "sqlite":
        text = f"sqlite:///{url.database}"  # whose characters would be escaped
    return _unreachable(text, reason, remedy)


def _unreachable(url: str, reason: str, remedy: str) -> Unreachable:
    """Return the error for a database; a SQLite file is named by its whole path, since another may be meant."""
    shown = shown_database(url)
    if shown.startswith("sqlite"):
        path = shown.partition(":///")[2]
        # `Dialect.read_only` writes it as a URI.
        file = unquote(path.removeprefix("file:")) if path.startswith("file:") else path
        shown = f"sqlite:///{Path(file).absolute()}"
        remedy = dev_hint("database", f"sqlite:///{file}") or remedy
    return Unreachable(f"The database {shown}", reason, remedy)


def dialect_named(name: str) -> Dialect:
    """Return the dialect of a database by SQLAlchemy's name for it; raises `UsageError` for an unsupported database."""
    dialect = _DIALECTS.get(name)
    if dialect is None:
        raise UsageError(f"eventjet does not support the database {name!r}. Use one of {', '.join(_DIALECTS)}.")
    return dialect


def dialect_of(connection: Connection | Engine) -> Dialect:
    """Return the dialect of the database to which a connection or an engine connects."""
    return dialect_named(connection.dialect.name)


def declared_names(name: str) -> set[str]:
    """Return the declared names that a table of this name may have, in any kind of database."""
    return {dialect.declared_name(name) for dialect in _DIALECTS.values()}


def is_about_data(error: DBAPIError) -> bool:
    """Whether a value or a row broke a rule of the database, so that trying again cannot help."""
    return any(Fault.DATA in dialect.faults(error) for dialect in _DIALECTS.values())


def is_transient(error: DBAPIError) -> bool:
    """Whether the connection, a lock or the server failed, so that another try may succeed."""
    is_of_connection = error.connection_invalidated
    return is_of_connection or any(Fault.TRANSIENT in dialect.faults(error) for dialect in _DIALECTS.values())


OWNER = "eventjet_owner"
READER = "eventjet_reader"


def grants(tables: Iterable[tuple[str | None, str]]) -> str:
    """Return SQL that makes roles and grants for tables (schema, name); the owner runs it after `eventjet init`."""
    schemas = sorted({schema or "public" for schema, _ in tables} | {"public"})
    lines = [
        f"create role {OWNER} login;",
        f"create role {READER} login;",
        "-- Rebuilds and revisions have schemas of their own.",
        f"do $$ begin execute format('grant connect, create on database %I to {OWNER}', current_database()); end $$;",
        f"do $$ begin execute format('grant connect on database %I to {READER}', current_database()); end $$;",
    ]
    for schema in (qualified(None, schema) for schema in schemas):
        lines += [
            f"revoke create on schema {schema} from public;",
            f"grant usage, create on schema {schema} to {OWNER};",
            f"grant usage on schema {schema} to {READER};",
        ]
    lines += [
        f"-- What {OWNER} makes, swaps in or promotes can be read without another grant.",
        f"alter default privileges for role {OWNER} grant select on tables to {READER};",
    ]
    return "\n".join([*lines, ""])
