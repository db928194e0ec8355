"""`Postgres`: the dialect of PostgreSQL, through psycopg (async, sync and COPY). A location is a schema."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC
from math import inf
from typing import Any, ClassVar, TypeVar, cast

import psycopg
from sqlalchemy import ColumnElement, Connection, Engine, Table, create_engine, event, text
from sqlalchemy import cast as sql_cast
from sqlalchemy import types as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import NullPool

from eventjet.domain.quarantined import Quarantined
from eventjet.projections.columns import canonical, dumps, element, stored
from eventjet.projections.row_codec import RowCodec
from eventjet.sql import (
    postgres_connections,
    postgres_statements,
)
from eventjet.sql.dialect import (
    Dialect,
    Fault,
    Fit,
    SessionLimits,
    Soundness,
    Weakness,
    numbers_of,
)
from eventjet.sql.own_tables import Clock
from eventjet.sql.postgres_statements import CLOCK, PostgresStatements
from eventjet.sql.postgres_tables import PostgresTables

T = TypeVar("T")

_ABOUT_DATA = frozenset({"21", "22", "23", "44", "54"})
"""SQLSTATE classes: cardinality, data, integrity, check options, limits of a row or an index."""
_TRANSIENT = ("08", "40", "53", "55", "57", "58", "XX", "25006", "25P03")
"""SQLSTATEs, or their classes, of faults that may be gone at the next try."""
_LOCKED_OUT = ("55P03", "40P01", "57014", "2BP01")
"""SQLSTATEs of a lock that was not granted (timeout, deadlock, cancelled statement), and of a dependent that was
created meanwhile, which the next try sees."""
_ONE_FORM = (sa.Integer, sa.Boolean, sa.Date, sa.DateTime, sa.LargeBinary, sa.Uuid)
_OPTIONS = frozenset(option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults())
_TOO_LONG = "22001"
_FORBIDDEN = "42501"
_PARAMETERS_MAX = 65_535
"""The most parameters of one statement: the protocol counts them in 16 bits."""


class Postgres(Dialect):
    """The dialect of PostgreSQL."""

    name = "postgresql"
    tables = PostgresTables()
    clock = CLOCK
    is_concurrent = True
    relocates_handlers = True
    byte_order = ' collate "C"'
    look_options: ClassVar[Mapping[str, Any]] = {"isolation_level": "AUTOCOMMIT"}
    snapshot_options: ClassVar[Mapping[str, Any]] = {"isolation_level": "REPEATABLE READ"}
    conversions = (
        (sa.JSON, dumps, canonical),
        (sa.DateTime, None, lambda value: value.astimezone(UTC) if value.tzinfo else value),
    )

    def fit(self, existing: sa.TypeEngine[Any], declared: sa.TypeEngine[Any]) -> Fit:
        return fit_of(existing, declared)

    def statements(self, table: Table, codec: RowCodec) -> PostgresStatements:
        return PostgresStatements(table, codec)

    def park(self, connection: Connection, name: str, revision: int, parked: Sequence[Quarantined]) -> None:
        postgres_statements.park(connection, name, revision, parked)

    def own_location(self, name: str, revision: int) -> str:
        return f"ej_{name}_r{revision}"

    def relocate(self, tables: Sequence[Table], location: str) -> None:
        for table in tables:
            table.schema = location
            table.fullname = f"{location}.{table.name}"

    def differ(self, left: ColumnElement[Any], right: ColumnElement[Any]) -> ColumnElement[bool]:
        """Compare two values as text, except for types in which each value has only one form.

        To PostgreSQL a month equals thirty days, 1.0 equals 1.00 and 0.0 equals -0.0, and `json` has no equality.
        """
        if isinstance(left.type, _ONE_FORM):
            return left.is_distinct_from(right)
        return sql_cast(left, sa.Text).collate("C").is_distinct_from(sql_cast(right, sa.Text).collate("C"))

    def refusal_of(self, url: URL) -> str | None:
        if not _OPTIONS.issuperset(url.query) or not str(url.query.get("connect_timeout", "0")).isdecimal():
            return (
                "The database's URL has an option after its `?` that PostgreSQL's client library does not take. "
                "Write those of libpq, such as sslmode=verify-full. It is not shown here, for it may hold a secret."
            )
        return None

    def async_engine(self, url: URL, purpose: str, limits: SessionLimits, pool: Mapping[str, Any]) -> AsyncEngine:
        arguments = postgres_connections.session_arguments(url, purpose, limits)
        engine = create_async_engine(postgres_connections.with_psycopg(url), **pool, connect_args=arguments)
        event.listen(engine.sync_engine, "connect", postgres_connections.proving(url, limits))
        return engine

    def engine(self, url: URL, purpose: str, limits: SessionLimits) -> Engine:
        arguments = postgres_connections.session_arguments(url, purpose, limits)
        engine = create_engine(postgres_connections.with_psycopg(url), poolclass=NullPool, connect_args=arguments)
        event.listen(engine, "connect", postgres_connections.proving(url, limits))
        return engine

    def check_sessions(self, url: URL) -> None:
        postgres_connections.check_sessions(url)

    def soundness(self, connection: Connection) -> Soundness:
        return soundness_of(connection)

    @contextmanager
    def read_only(self, url: URL, purpose: str, limits: SessionLimits) -> Generator[Connection]:
        engine = self.engine(url, purpose, limits).execution_options(postgresql_readonly=True)
        with engine.connect() as connection:
            yield connection

    def load_all(self, connection: Connection) -> None:
        postgres_statements.load_all(connection)

    def remedy(self, cause: object) -> str:
        if "statement pooling" in str(cause):
            return postgres_connections.REMEDY
        if "unsupported startup parameter" in str(cause):
            return "A pooler refuses what sessions need: give PgBouncer `ignore_startup_parameters = options`."
        return "Check that it runs, and that EVENTJET_DATABASE names its host, database and user."

    def faults(self, error: DBAPIError | BaseException) -> Fault:
        cause = getattr(error, "orig", None) or error
        if isinstance(cause, psycopg.errors.UndefinedTable):
            return Fault.NO_TABLE
        if not isinstance(error, DBAPIError):
            return Fault.NOTHING_KNOWN
        state, faults = _state(error), Fault.NOTHING_KNOWN
        if state[:2] in _ABOUT_DATA or postgres_statements.is_of_driver(error):
            faults |= Fault.DATA
        if state == _TOO_LONG:
            faults |= Fault.TOO_LONG
        if state == _FORBIDDEN:
            faults |= Fault.FORBIDDEN
        if state in _LOCKED_OUT:
            faults |= Fault.LOCKED_OUT
        return faults | Fault.TRANSIENT if _is_transient(error, state) else faults

    def refuses_writes(self, connection: Connection) -> str:
        if connection.scalar(text("select pg_is_in_recovery()")):
            return "the database is a standby, or is being recovered: it takes no writes"
        setting = connection.execute(_READ_ONLY_FOR_ALL).scalar_one_or_none()
        return "" if setting is None else f"the database takes no writes: {setting} is on for everybody"


_READ_ONLY_FOR_ALL = text(
    "select name from pg_settings where name = 'default_transaction_read_only' and setting = 'on' "
    "and source not in ('client', 'user', 'database user', 'session')"
)

POSTGRES = Postgres()


def _is_transient(error: DBAPIError, state: str) -> bool:
    if state:
        # A cached plan of a table that has changed since; a new session makes a new plan.
        return state.startswith(_TRANSIENT) or (state == "0A000" and "cached plan" in str(error.orig))
    # An error without a code is the driver's: about the connection, or about a value that it cannot send.
    is_drivers = isinstance(error.orig, psycopg.Error) and isinstance(error, OperationalError | InterfaceError)
    return is_drivers and not _has_too_many_parameters(error)


def _has_too_many_parameters(error: DBAPIError) -> bool:
    """Whether a statement was never sent, since the protocol has no room for so many parameters.

    The driver raises an operational error, as it does where the server is at fault.
    """
    parameters: object = error.params
    return not error.ismulti and isinstance(parameters, Sized) and len(parameters) > _PARAMETERS_MAX


def _state(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", None) or "")


@compiles(Clock, Postgres.name)
def _clock(_element: Clock, _compiler: Any, **_: Any) -> str:  # pyright: ignore[reportUnusedFunction]  registered
    return CLOCK


_DIALECT = postgresql.dialect()
_SINGLE_BITS, _DOUBLE_BITS = 24, 53
_MICROSECONDS = 6
_INTEGERS = ((sa.SmallInteger, 16), (sa.BigInteger, 64), (sa.Integer, 32))
_SIMPLE = (
    (sa.Boolean, "truth"),
    (sa.Date, "day"),
    (sa.Uuid, "uuid"),
    (sa.LargeBinary, "bytes"),
    (postgresql.JSONB, "json"),
    (sa.JSON, "json"),
)


@dataclass(frozen=True, slots=True)
class _ValueRange:
    """The values that a type takes: their kind, and limits of which a larger one includes a smaller one."""

    kind: str
    limits: tuple[float, ...] = ()
    labels: frozenset[str] = frozenset()
    form: type[Any] | None = field(default=None, kw_only=True)
    """Distinguishes types that take the same values."""

    def takes(self, declared: _ValueRange) -> bool:
        enough = all(limit >= needed for limit, needed in zip(self.limits, declared.limits, strict=True))
        return enough and self.labels >= declared.labels


def fit_of(existing: sa.TypeEngine[Any], declared: sa.TypeEngine[Any]) -> Fit:
    """Return how a column of type `existing` takes `declared` values; for types that SQL writes differently."""
    accepted, needed = _value_range(existing), _value_range(stored(declared, _DIALECT))
    if needed is None:
        return Fit.OTHER
    if accepted == needed:
        return Fit.SAME
    return Fit.OTHER if accepted is not None and accepted.kind == needed.kind and accepted.takes(needed) else Fit.LOSES


def missing_labels(existing: sa.TypeEngine[Any], declared: sa.TypeEngine[Any]) -> list[str]:
    """Return the labels that an enum type of the database (or of an array's elements) lacks; none for other types."""
    existing_type, declared_type = element(existing, _DIALECT), element(declared, _DIALECT)
    if not (
        isinstance(existing_type, sa.Enum)
        and isinstance(declared_type, sa.Enum)
        and declared_type.native_enum
        and existing_type.name == declared_type.name
    ):
        return []
    return [label for label in declared_type.enums if label not in existing_type.enums]


def _value_range(kind: sa.TypeEngine[Any]) -> _ValueRange | None:
    """Return what a type takes; None for a type that eventjet does not know, as a SQL projection may declare it."""
    if isinstance(kind, sa.ARRAY):
        item_range = _value_range(element(cast("sa.TypeEngine[Any]", kind), _DIALECT))
        return item_range and replace(item_range, kind=f"array of {item_range.kind}")
    if isinstance(kind, sa.String):
        return _text(kind)
    if isinstance(kind, sa.Float):
        single = isinstance(kind, sa.REAL) or (kind.precision is not None and kind.precision <= _SINGLE_BITS)
        return _ValueRange("float", (_SINGLE_BITS if single else _DOUBLE_BITS,))
    if isinstance(kind, sa.Numeric):
        scale = kind.scale or 0
        return _ValueRange("decimal", (inf, inf) if kind.precision is None else (kind.precision - scale, scale))
    if isinstance(kind, sa.DateTime):
        digits = getattr(kind, "precision", None)
        kind_name = "instant" if kind.timezone else "wall time"
        return _ValueRange(kind_name, (_MICROSECONDS if digits is None else digits,))
    for column_type, bits in _INTEGERS:
        if isinstance(kind, column_type):
            return _ValueRange("integer", (bits,))
    return next(
        (_ValueRange(name, form=column_type) for column_type, name in _SIMPLE if isinstance(kind, column_type)), None
    )


def _text(kind: sa.String) -> _ValueRange | None:
    if isinstance(kind, sa.Enum) and kind.native_enum:
        return _ValueRange(f"enum {kind.name}", (), frozenset(kind.enums))
    if isinstance(kind, postgresql.CITEXT):
        return _ValueRange("text without case")
    return _ValueRange(
        "padded text" if isinstance(kind, sa.CHAR) else "text", (inf if kind.length is None else kind.length,)
    )


OLDEST, MAINTAINED = (10,), (15,)
"""The oldest PostgreSQL that psycopg 3 supports, and the oldest that is maintained; 14 ended in November 2026.

Tests run on 18.
"""

_TORN_COST = "a power cut may lose or break rows, checkpoints among them: every read model would have to be rebuilt"
_FAULTS = {
    "fsync": ("on", _TORN_COST, "Set `fsync = on` in postgresql.conf and reload."),
    "full_page_writes": ("on", _TORN_COST, "Set `full_page_writes = on` in postgresql.conf and reload."),
    "transaction_read_only": (
        "off",
        "workers can write nothing, so read models stand still",
        "Point EVENTJET_DATABASE at the primary, or set `default_transaction_read_only = off`.",
    ),
}
_WARNINGS = {
    "synchronous_commit": (
        ("on", "local", "remote_write", "remote_apply"),
        "a crash takes back the last commits, rows and checkpoint together; whoever was told of them sees them gone",
        "Set `synchronous_commit = on` for the role of the workers.",
    ),
    "server_encoding": (
        ("UTF8",),
        "text that this encoding lacks stops the projection that writes it",
        "Make the database again with `encoding 'UTF8'`, and rebuild into it.",
    ),
}
_SETTINGS = text("select name, setting from pg_settings where name = any(:names)")


def soundness_of(connection: Connection) -> Soundness:
    """Check the settings of this session, which every role may read."""
    names = ["server_version", *_FAULTS, *_WARNINGS]
    settings = {str(name): str(setting) for name, setting in connection.execute(_SETTINGS, {"names": names})}
    # This session may be read-only by its own choice, so its default counts.
    settings["transaction_read_only"] = str(connection.scalar(text("show default_transaction_read_only")))
    if connection.scalar(text("select pg_is_in_recovery()")):
        settings["transaction_read_only"] = "on"
    return judged(settings)


def judged(settings: Mapping[str, str]) -> Soundness:
    """Return the weaknesses of settings, given by name with `server_version` among them. Pure."""
    version = settings["server_version"]
    weaknesses = [
        Weakness(f"{name} is {settings[name]}", cost, remedy, is_fault=True)
        for name, (expected, cost, remedy) in _FAULTS.items()
        if settings.get(name, expected) != expected
    ]
    weaknesses += [
        Weakness(f"{name} is {settings[name]}", cost, remedy)
        for name, (accepted, cost, remedy) in _WARNINGS.items()
        if settings.get(name, accepted[0]) not in accepted
    ]
    numbers = numbers_of(version)
    if numbers < MAINTAINED:
        weaknesses.append(
            Weakness(
                f"PostgreSQL {version} is no longer maintained",
                "eventjet cannot use it" if numbers < OLDEST else "faults of its own that lose data stay unmended",
                f"Upgrade to PostgreSQL {MAINTAINED[0]} or newer.",
                is_fault=numbers < OLDEST,
            )
        )
    return Soundness(f"PostgreSQL {version}", tuple(weaknesses))
