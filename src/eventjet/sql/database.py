"""`Database`: the database of the read models, with engines and connections that are configured alike everywhere.

PostgreSQL is used through psycopg (async, sync and COPY), SQLite through aiosqlite and sqlite3. No URL is shown with
its password.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from eventjet.errors import Unreachable, UsageError
from eventjet.sql import postgres_connections, sqlite_connections
from eventjet.sql.dialect import Dialect, Fault, SessionLimits
from eventjet.sql.dialects import dialect_named
from eventjet.urls import database_url, shown_database

READ_ONLY = sqlite_connections.READ_ONLY
"""Execution option of a connection that must not lock the database: on SQLite its transactions begin deferred."""

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
    """The URL of the read models' database; a value that can be pickled.

    Raises `UsageError` for a URL that cannot be used.
    """

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

    def engine(self, purpose: str = "eventjet", limits: SessionLimits = WORKER, *, pool_size: int = 1) -> AsyncEngine:
        """Return an async engine, not connected yet; dispose of it.

        PostgreSQL shows `purpose` as the application name of the sessions.
        """
        pool = {"pool_size": pool_size, "max_overflow": 0, "pool_timeout": 10}
        return self.dialect.async_engine(self._parsed(), purpose, limits, pool)

    def sync_engine(self, purpose: str = "eventjet", limits: SessionLimits = BULK) -> Engine:
        """Return a blocking engine without a pool, not connected yet."""
        return self.dialect.engine(self._parsed(), purpose, limits)

    @contextmanager
    def read_only(self, purpose: str, limits: SessionLimits = COMMAND) -> Generator[Connection | None]:
        """Open a connection that cannot write and leaves nothing behind; None where there is no database yet."""
        with self.dialect.read_only(self._parsed(), purpose, limits) as connection:
            yield connection

    def connect_postgres(
        self, purpose: str = "eventjet", limits: SessionLimits = BULK
    ) -> psycopg.Connection[tuple[Any, ...]]:
        """Open a blocking psycopg connection, for COPY; close it. Raises `Unreachable`."""
        try:
            return postgres_connections.connect(self._parsed(), purpose, limits)
        except psycopg.OperationalError as error:
            raise self.unreachable(error) from None

    def check_sessions(self) -> None:
        """Raise `Unreachable` where a pooler lets connections share their sessions. Blocks."""
        with self.reaching_sync():
            try:
                self.dialect.check_sessions(self._parsed())
            except psycopg.OperationalError as error:
                raise self.unreachable(error) from None

    def connect_sqlite(self) -> sqlite3.Connection:
        """Open a blocking sqlite3 connection that begins no transaction by itself; close it. Raises `Unreachable`."""
        try:
            return sqlite_connections.connect(self._parsed())
        except sqlite3.OperationalError as error:
            raise self.unreachable(error) from None

    def unreachable(self, error: BaseException) -> Unreachable:
        """Return the error for a database that cannot be used, in one paragraph and without the password."""
        cause = getattr(error, "orig", None) or error
        if Fault.NO_TABLE in self.dialect.faults(error):
            return Unreachable(f"The database {self.shown}", "eventjet's tables are not in it", "Run `eventjet init`.")
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        reason = lines[0] if lines else type(cause).__name__
        remedy = self.dialect.remedy(cause)
        return Unreachable(f"The database {self.shown}", reason.rstrip("."), remedy)

    @asynccontextmanager
    async def reaching(self) -> AsyncGenerator[None]:
        """Turn errors of connecting, missing tables of eventjet and missing rights into `Unreachable`."""
        with self.reaching_sync():
            yield

    @contextmanager
    def reaching_sync(self) -> Generator[None]:
        """Do what `reaching` does, without an event loop."""
        try:
            yield
        except (OperationalError, InterfaceError) as error:
            raise self.unreachable(error) from None
        except DBAPIError as error:
            # To SQLAlchemy it is no operational error when PostgreSQL ends a session that was idle too long.
            of_database = self.dialect.faults(error) & (Fault.NO_TABLE | Fault.FORBIDDEN)
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
    return Unreachable(f"The database {shown_database(url.render_as_string(hide_password=False))}", reason, remedy)


OWNER = "eventjet_owner"
READER = "eventjet_reader"


def grants(tables: Iterable[tuple[str | None, str]]) -> str:
    """Return SQL that creates roles and grants for these tables, given as (schema, name).

    The database's owner runs it once `eventjet init` has run.
    """
    schemas = sorted({schema or "public" for schema, _ in tables} | {"public"})
    lines = [
        f"create role {OWNER} login;",
        f"create role {READER} login;",
        "-- Rebuilds and revisions have schemas of their own.",
        f"do $$ begin execute format('grant connect, create on database %I to {OWNER}', current_database()); end $$;",
        f"do $$ begin execute format('grant connect on database %I to {READER}', current_database()); end $$;",
    ]
    for schema in map(_quoted, schemas):
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


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
