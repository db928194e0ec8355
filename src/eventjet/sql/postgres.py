"""PostgreSQL behind the `Dialect` port: through psycopg, async, sync and COPY."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
from sqlalchemy import CheckConstraint, Connection, Engine, Table, create_engine, text
from sqlalchemy import types as sa
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import NullPool

from eventjet.projections.columns import labels
from eventjet.projections.row_codec import RowCodec
from eventjet.projections.values import Convert, canonical, dumps
from eventjet.sql import postgres_statements, postgres_tables
from eventjet.sql.clock import Clock
from eventjet.sql.postgres_statements import CLOCK, PostgresStatements
from eventjet.sql.quarantine_rows import Parked
from eventjet.sql.tables import Tables

if TYPE_CHECKING:
    from eventjet.sql.database import SessionLimits

CONNECT_TIMEOUT_S = 5
_MIGRATIONS_LOCK = 0x656A_6464_6C  # "ejddl"
_ABOUT_DATA = frozenset({"21", "22", "23", "44", "54"})
"""SQLSTATE classes: cardinality, data, integrity, check options, limits of a row or an index."""
_TRANSIENT = ("08", "40", "53", "55", "57", "58", "XX", "25006", "25P03")
"""SQLSTATEs, or their classes, of faults that another try may not meet."""


class Postgres:
    """See `Dialect`. A location is a schema, with the declared names in it."""

    name = "postgresql"
    clock = CLOCK
    is_concurrent = True
    relocates_handlers = True
    byte_order = ' collate "C"'
    look_options: Mapping[str, Any] = {"isolation_level": "AUTOCOMMIT"}
    tables: Tables = postgres_tables

    def dumper(self, kind: sa.TypeEngine[Any]) -> Convert | None:
        if isinstance(kind, sa.Enum):
            return {value: label for label, value in reversed(labels(kind).items())}.__getitem__
        return dumps if isinstance(kind, sa.JSON) else None

    def loader(self, kind: sa.TypeEngine[Any]) -> Convert | None:
        if isinstance(kind, sa.Enum):
            return labels(kind).__getitem__
        if isinstance(kind, sa.JSON):
            return canonical
        return _to_utc if isinstance(kind, sa.DateTime) and kind.timezone else None

    def storage_type(self, kind: sa.TypeEngine[Any]) -> sa.TypeEngine[Any]:
        return kind

    def exactness_checks(self, table: Table) -> list[CheckConstraint]:  # noqa: ARG002 - every type is exact
        return []

    def statements(self, table: Table, codec: RowCodec) -> PostgresStatements:
        return PostgresStatements(table, codec)

    def park(self, connection: Connection, name: str, revision: int, parked: Sequence[Parked]) -> None:
        postgres_statements.park(connection, name, revision, parked)

    def own_location(self, name: str, revision: int) -> str:
        return f"ej_{name}_r{revision}"

    def name_in(self, name: str, location: str) -> str:  # noqa: ARG002 - the schema tells
        return name

    def declared_name(self, name: str) -> str:
        return name

    def relocate(self, tables: Sequence[Table], location: str) -> None:
        for table in tables:
            table.schema = location
            table.fullname = f"{location}.{table.name}"

    def lock_migrations(self, connection: Connection) -> None:
        connection.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATIONS_LOCK})

    def refusal_of(self, url: URL) -> str | None:  # noqa: ARG002 - any database will do
        return None

    def async_engine(self, url: URL, purpose: str, limits: SessionLimits, pool: Mapping[str, Any]) -> AsyncEngine:
        return create_async_engine(_with_psycopg(url), **pool, connect_args=session_arguments(url, purpose, limits))

    def engine(self, url: URL, purpose: str, limits: SessionLimits) -> Engine:
        arguments = session_arguments(url, purpose, limits)
        return create_engine(_with_psycopg(url), poolclass=NullPool, connect_args=arguments)

    def enforce_foreign_keys(self, engine: Engine) -> None:
        """Nothing: they are always enforced."""

    def lacks_table(self, cause: object) -> bool:
        return isinstance(cause, psycopg.errors.UndefinedTable)

    def remedy(self, cause: object) -> str:  # noqa: ARG002 - the reason says more
        return "Check that it runs, and that EVENTJET_DATABASE names its host, database and user."

    def is_about_data(self, error: DBAPIError) -> bool:
        return _state(error)[:2] in _ABOUT_DATA

    def is_transient(self, error: DBAPIError) -> bool:
        state = _state(error)
        if state:
            # A plan of a table that has changed since; a new session makes another.
            return state.startswith(_TRANSIENT) or (state == "0A000" and "cached plan" in str(error.orig))
        # Without a code it is the driver that speaks: of the connection, or of a value it cannot send.
        return isinstance(error.orig, psycopg.Error) and isinstance(error, OperationalError | InterfaceError)


POSTGRES = Postgres()


def connect(url: URL, purpose: str, limits: SessionLimits) -> psycopg.Connection[tuple[Any, ...]]:
    """A blocking psycopg connection, for COPY."""
    plain = url.set(drivername=Postgres.name).render_as_string(hide_password=False)
    return psycopg.connect(plain, **session_arguments(url, purpose, limits), autocommit=False)


def session_arguments(url: URL, purpose: str, limits: SessionLimits) -> dict[str, Any]:
    """What a session is connected with; time is UTC in each."""
    own = url.query.get("options", "")
    options = (
        f"-c timezone=UTC -c lock_timeout={limits.lock_ms} -c statement_timeout={limits.statement_ms} "
        f"-c idle_in_transaction_session_timeout={limits.idle_in_transaction_ms}"
    )
    joined = f"{own if isinstance(own, str) else ' '.join(own)} {options}".strip()
    arguments: dict[str, Any] = {"options": joined, "application_name": purpose}
    if "connect_timeout" not in url.query:
        arguments["connect_timeout"] = CONNECT_TIMEOUT_S
    return arguments


def _with_psycopg(url: URL) -> URL:
    return url.set(drivername=f"{Postgres.name}+psycopg")


def _state(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", None) or "")


def _to_utc(value: datetime) -> datetime:
    return value.astimezone(UTC)


@compiles(Clock, Postgres.name)
def _clock(_element: Clock, _compiler: Any, **_: Any) -> str:  # pyright: ignore[reportUnusedFunction]  registered
    return CLOCK
