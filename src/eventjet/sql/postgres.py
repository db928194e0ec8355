"""`Postgres`: the dialect of PostgreSQL, through psycopg (async, sync and COPY). A location is a schema.

`pg_depend` lists whatever names a table, its columns or its row type. What it does not list is read from the catalogues
of publications, subscriptions, security labels and inheritance: see `postgres_catalog`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence, Sized
from contextlib import contextmanager
from datetime import UTC
from math import inf
from operator import ge
from typing import Any, ClassVar, TypeAlias, cast

import psycopg
from sqlalchemy import ColumnElement, Connection, Engine, Table, event, text
from sqlalchemy import cast as sql_cast
from sqlalchemy import types as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateSchema

from eventjet.findings import Finding
from eventjet.projections.columns import canonical, dumps, element, stored
from eventjet.projections.row_codec import RowCodec
from eventjet.sql import postgres_catalog as catalog
from eventjet.sql import postgres_connections as connections
from eventjet.sql import postgres_statements
from eventjet.sql.dialect import (
    Dialect,
    Fault,
    Feature,
    SessionLimits,
    TableName,
    TableRef,
    TypeMatch,
    creation,
    finding,
    make_enums,
    numbers_of,
    qualified,
    verbatim,
)
from eventjet.sql.own_tables import Clock
from eventjet.sql.postgres_statements import CLOCK, PostgresStatements
from eventjet.sql.statements import QuarantineChanges, Statements, TextOrder

LOCK_TIMEOUT_MS = 500
"""How long an exchange of tables waits for a lock, since readers queue behind it meanwhile."""
CHECKPOINT_LOCK_MS = 10_000
"""How long an exchange waits for the batch of running handlers: only their next batch queues behind it."""
_MIGRATIONS_LOCK = 0x656A_6464_6C  # "ejddl"

_ABOUT_DATA = frozenset({"21", "22", "23", "44", "54"})
"""SQLSTATE classes: cardinality, data, integrity, check options, limits of a row or an index."""
_TRANSIENT = ("08", "40", "53", "55", "57", "58", "XX", "25006", "25P03")
"""SQLSTATEs, or their classes, of faults that may be gone at the next try."""
_SINGLE_FORM = (sa.Integer, sa.Boolean, sa.Date, sa.DateTime, sa.LargeBinary, sa.Uuid)
_OPTIONS = frozenset(option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults())
_STATES = {
    "22001": Fault.TOO_LONG,
    "42501": Fault.FORBIDDEN,
    "42P01": Fault.NO_TABLE,
    **dict.fromkeys(("55P03", "40P01", "57014", "2BP01"), Fault.LOCKED_OUT),
}
"""Faults of single SQLSTATEs.

A lock that was not granted is a timeout, a deadlock, a cancelled statement, or a dependent that was created meanwhile,
which the next try sees.
"""
_NOT_EMPTY = "2BP01"
_PARAMETERS_MAX = 65_535
"""The most parameters of one statement: the protocol counts them in 16 bits."""


class Postgres(Dialect):
    """The dialect of PostgreSQL."""

    name = "postgresql"
    drivers = ("psycopg", "psycopg")
    driver_error = psycopg.OperationalError
    is_concurrent = True
    relocates_handlers = True
    byte_order = ' collate "C"'
    look_options: ClassVar[Mapping[str, Any]] = {"isolation_level": "AUTOCOMMIT"}
    snapshot_options: ClassVar[Mapping[str, Any]] = {"isolation_level": "REPEATABLE READ"}
    conversions = (
        (sa.JSON, dumps, canonical),
        (sa.DateTime, None, lambda value: value.astimezone(UTC) if value.tzinfo else value),
    )

    def type_match(self, existing: sa.TypeEngine[Any], declared: sa.TypeEngine[Any]) -> TypeMatch:
        accepted, needed = _values_of(existing), _values_of(stored(declared, _DIALECT))
        if needed is None:
            return TypeMatch.OTHER
        if accepted is None or accepted[0] != needed[0]:
            return TypeMatch.LOSES
        if accepted == needed:
            return TypeMatch.SAME
        return TypeMatch.OTHER if all(map(ge, accepted[1], needed[1])) and accepted[2] >= needed[2] else TypeMatch.LOSES

    def missing_labels(self, existing: sa.TypeEngine[Any], declared: sa.TypeEngine[Any]) -> list[str]:
        existing_type, declared_type = element(existing, _DIALECT), element(declared, _DIALECT)
        if not (
            isinstance(existing_type, sa.Enum) and isinstance(declared_type, sa.Enum) and declared_type.native_enum
        ):
            return []
        is_same = existing_type.name == declared_type.name
        return [label for label in declared_type.enums if is_same and label not in existing_type.enums]

    def statements(self, table: Table, codec: RowCodec, states: Statements | None = None) -> PostgresStatements:
        return PostgresStatements(table, codec, states)

    def write_quarantine(self, connection: Connection, name: str, revision: int, changes: QuarantineChanges) -> None:
        parts, values = postgres_statements.quarantine_parts(name, revision, changes)
        connection.exec_driver_sql(f"with advanced as (select 1){''.join(parts)} select 1", tuple(values))

    def differ(self, left: ColumnElement[Any], right: ColumnElement[Any]) -> ColumnElement[bool]:
        """Compare two values as text, except for types in which each value has only one form.

        To PostgreSQL a month equals thirty days, 1.0 equals 1.00 and 0.0 equals -0.0, and `json` has no equality.
        """
        if isinstance(left.type, _SINGLE_FORM):
            return left.is_distinct_from(right)
        return sql_cast(left, sa.Text).collate("C").is_distinct_from(sql_cast(right, sa.Text).collate("C"))

    def load_all(self, connection: Connection) -> None:
        postgres_statements.load_all(connection)

    def refusal_of(self, url: URL) -> str | None:
        if not _OPTIONS.issuperset(url.query) or not str(url.query.get("connect_timeout", "0")).isdecimal():
            return (
                "The database's URL has an option after its `?` that PostgreSQL's client library does not take. "
                "Write those of libpq, such as sslmode=verify-full. It is not shown here, for it may hold a secret."
            )
        return None

    def session_arguments(self, url: URL, purpose: str, limits: SessionLimits) -> dict[str, Any]:
        return connections.session_arguments(url, purpose, limits)

    def configure(self, engine: Engine, url: URL, limits: SessionLimits) -> None:
        """Check and set the settings of each new session."""
        settings = connections.settings_of(url, limits)

        @event.listens_for(engine, "connect")
        def on_connect(connection: Any, _record: Any) -> None:  # pyright: ignore[reportUnusedFunction]  a listener
            connections.prove(connection, url, settings)

    def read_only(self, engine: Engine) -> Engine:
        return engine.execution_options(postgresql_readonly=True)

    def connect(self, url: URL, purpose: str, limits: SessionLimits) -> psycopg.Connection[tuple[Any, ...]]:
        return connections.connect(url, purpose, limits)

    def check_sessions(self, url: URL) -> None:
        connections.check_sessions(url)

    def examine(self, connection: Connection) -> tuple[str, list[Finding]]:
        """Examine the settings of this session, which every role may read."""
        names = ["server_version", *_SETTINGS]
        query = text("select name, setting from pg_settings where name = any(:names)")
        settings = {str(name): str(setting) for name, setting in connection.execute(query, {"names": names})}
        # This session may be read-only by its own choice, so its default counts.
        settings["transaction_read_only"] = str(connection.scalar(text("show default_transaction_read_only")))
        if connection.scalar(text("select pg_is_in_recovery()")):
            settings["transaction_read_only"] = "on"
        return f"PostgreSQL {settings['server_version']}", findings_of(settings)

    def refuses_writes(self, connection: Connection) -> str:
        if connection.scalar(text("select pg_is_in_recovery()")):
            return "the database is a standby, or is being recovered: it takes no writes"
        setting = connection.execute(_READ_ONLY_FOR_ALL).scalar_one_or_none()
        return "" if setting is None else f"the database takes no writes: {setting} is on for everybody"

    def faults(self, error: DBAPIError | BaseException) -> Fault:
        state = str(getattr(getattr(error, "orig", None) or error, "sqlstate", None) or "")
        fault = _STATES.get(state, Fault.UNKNOWN)
        if not isinstance(error, DBAPIError):
            return fault & Fault.NO_TABLE
        if state[:2] in _ABOUT_DATA or postgres_statements.is_of_driver(error):
            fault |= Fault.DATA
        return fault | Fault.TRANSIENT if _is_transient(error, state) else fault

    def remedy(self, cause: object) -> str:
        if "statement pooling" in str(cause):
            return connections.REMEDY
        if "unsupported startup parameter" in str(cause):
            return "A pooler refuses what sessions need: give PgBouncer `ignore_startup_parameters = options`."
        return "Check that it runs, and that --database or EVENTJET_DATABASE names its host, database and user."

    def own_location(self, name: str, revision: int) -> str:
        return f"ej_{name}_r{revision}"

    def relocate(self, tables: Sequence[Table], location: str) -> None:
        for table in tables:
            table.schema = location
            table.fullname = f"{location}.{table.name}"

    def ensure_location(self, connection: Connection, location: str) -> None:
        # Not IF NOT EXISTS, which requires the right to create a schema even when it exists.
        query = text("select 1 from pg_namespace where nspname = :name")
        if location and connection.scalar(query, {"name": location}) is None:
            connection.execute(CreateSchema(location))

    def drop_location(self, connection: Connection, location: str) -> None:
        try:
            with connection.begin_nested():
                connection.execute(verbatim(f"drop schema if exists {qualified(None, location)} restrict"))
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != _NOT_EMPTY:
                raise

    def find_table(self, connection: Connection, name: TableName, location: str) -> TableRef | None:
        """Find a table; the search path says where declared tables without a schema are."""
        schema, table = name
        row = connection.execute(catalog.FIND, {"name": qualified(location or schema, table)}).one_or_none()
        return None if row is None else TableRef(int(row[0]), str(row[1]), str(row[2]))

    def count_rows(self, connection: Connection, table: TableRef) -> int:
        """Return the number of rows at the last ANALYZE, or the exact number where there was none."""
        estimate = connection.scalar(
            text("select reltuples::bigint from pg_class where oid = :oid"), {"oid": table.oid}
        )
        return int(estimate) if estimate and estimate > 0 else super().count_rows(connection, table)

    def features(self, connection: Connection, table: TableRef, heir: TableRef | None = None) -> list[Feature]:
        """Return all in which tables can differ but owner, dependents, and the rights that their owner gave."""
        target = heir or table
        names = {"oid": table.oid, "heir": target.quoted(), "schema": qualified(None, str(target.schema))}
        # PostgreSQL omits the schemas of the search path from definitions: with the table's schema in the path, its
        # definitions are the same in any schema.
        path = connection.scalar(catalog.PATH)
        connection.execute(
            catalog.SET_PATH, {"path": ", ".join(filter(None, (qualified(None, str(table.schema)), path)))}
        )
        rows = connection.execute(catalog.FEATURES, names).all()
        connection.execute(catalog.SET_PATH, {"path": path})
        return [
            Feature(str(key), str(words), str(definition), carried, str(needs))
            for key, words, definition, carried, needs in rows
        ]

    def dependents(
        self,
        connection: Connection,
        table: TableRef,
        along: Sequence[TableRef],
        *,
        for_good: bool,  # noqa: ARG002 - nothing follows a name
    ) -> list[str]:
        """Return what would be dropped with the table, keep it from being dropped, or stay with it when it moves."""
        query = catalog.DEPENDENTS.bindparams(along=[ref.oid for ref in along])
        return [str(dependent) for dependent in connection.scalars(query, {"oid": table.oid})]

    @contextmanager
    def modelled(self, connection: Connection, tables: Sequence[Table]) -> Generator[Connection]:
        """Create empty tables in the schemas that they name, of which none may exist, and roll back at the end."""
        with (
            connection.engine.connect().execution_options(postgresql_readonly=False) as model_connection,
            model_connection.begin() as transaction,
        ):
            for schema in {table.schema for table in tables}:
                model_connection.execute(verbatim(f"create schema {qualified(None, str(schema))}"))
            make(model_connection, tables)
            yield model_connection
            transaction.rollback()

    def text_order(self, connection: Connection, table: TableRef, column: str) -> TextOrder | None:
        """Return in which order an index sorts the column; None where no index sorts it by code points.

        To the end of the transaction the planner must use an index: for a table that was never analysed it assumes that
        few rows match, and would read and sort all of them.
        """
        connection.execute(catalog.KEEP_TO_INDEXES)
        order_name = connection.execute(catalog.ORDER, {"oid": table.oid, "column": column}).scalar()
        return None if order_name is None else TextOrder[order_name]

    def home(self, connection: Connection) -> str:
        """Return the database and the oid of eventjet's own table, which changes when a dump is restored."""
        return str(connection.scalar(catalog.HOME))

    def identity(self, connection: Connection, table: TableRef, *, make: bool = False) -> str:  # noqa: ARG002 - known since it was found
        return str(table.oid)

    def move(self, connection: Connection, table: TableRef, name: TableName, location: str, schema: str | None) -> None:
        """Move a table to another schema; its indexes, constraints and sequences go with it and keep their names."""
        target = schema or location or name[0] or str(connection.scalar(text("select current_schema()")))
        quoted = qualified(None, target)
        connection.execute(verbatim(f"alter table {table.quoted()} set schema {quoted}"))

    def inherit(self, connection: Connection, old: TableRef, heir: TableRef) -> None:
        """Give the heir the old table's owner, its rights, and the missing features that can be carried over."""
        ids = {"old": old.oid, "heir": heir.oid}
        for statements in (catalog.OWNER, catalog.RIGHTS):
            for statement in connection.scalars(statements, ids).all():
                connection.execute(verbatim(str(statement)))
        heir_keys = {feature.key for feature in self.features(connection, heir)}
        for feature in self.features(connection, old, heir):
            if (
                feature.carried is not None
                and feature.key not in heir_keys
                and (not feature.needs or feature.needs in heir_keys)
            ):
                connection.execute(verbatim(feature.carried))

    def drop(self, connection: Connection, tables: Sequence[TableRef]) -> None:
        """Drop all in one statement, as foreign keys may be between them; fails if anything else depends on one."""
        if tables:
            connection.execute(verbatim(f"drop table {', '.join(table.quoted() for table in tables)} restrict"))

    def empty(self, connection: Connection, tables: Sequence[TableRef]) -> None:
        """Empty all in one statement, as foreign keys may be between them; fails if another table refers to one."""
        if tables:
            names = ", ".join(table.quoted() for table in tables)
            connection.execute(verbatim(f"truncate table {names} restart identity restrict"))

    def lock_migrations(self, connection: Connection) -> None:
        connection.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATIONS_LOCK})

    def lock(self, connection: Connection, tables: Iterable[TableRef], *, readers: bool) -> None:
        """Lock the tables one after the other, in the given order."""
        mode = "exclusive" if readers else "access exclusive"
        for table in tables:
            connection.execute(verbatim(f"lock table {table.quoted()} in {mode} mode"))

    def bound_waits(self, connection: Connection, *, patient: bool = False) -> None:
        """Limit how long this transaction waits for locks: even readers queue behind a waiting lock."""
        connection.execute(text(f"set local lock_timeout = {CHECKPOINT_LOCK_MS if patient else LOCK_TIMEOUT_MS}"))


def make(connection: Connection, tables: Sequence[Table]) -> None:
    """Create tables in an existing schema, with the enum types of their columns where those are missing."""
    make_enums(connection, tables)
    for statement in creation(tables):
        connection.execute(statement)


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
    """Whether a statement was never sent, having more parameters than the protocol has room for."""
    parameters: object = error.params
    return not error.ismulti and isinstance(parameters, Sized) and len(parameters) > _PARAMETERS_MAX


@compiles(Clock, Postgres.name)
def _clock(_element: Clock, _compiler: Any, **_: Any) -> str:  # pyright: ignore[reportUnusedFunction]  registered
    return CLOCK


_DIALECT = postgresql.dialect()
_SINGLE_BITS, _DOUBLE_BITS = 24, 53
_MICROSECONDS = 6
_SIMPLE: tuple[tuple[type[Any], str, tuple[float, ...]], ...] = (
    (sa.SmallInteger, "integer", (16,)),
    (sa.BigInteger, "integer", (64,)),
    (sa.Integer, "integer", (32,)),
    (sa.Boolean, "truth", ()),
    (sa.Date, "day", ()),
    (sa.Uuid, "uuid", ()),
    (sa.LargeBinary, "bytes", ()),
    (sa.JSON, "json", ()),
    (postgresql.CITEXT, "text without case", ()),
)
_Values: TypeAlias = tuple[str, tuple[float, ...], frozenset[str]]
"""The values that a type takes: (kind, limits of which a larger one includes a smaller one, labels)."""


def _values_of(kind: sa.TypeEngine[Any]) -> _Values | None:
    """Return what a type takes; None for a type that eventjet does not know, as a SQL projection may declare it."""
    if isinstance(kind, sa.ARRAY):
        values = _values_of(element(cast("sa.TypeEngine[Any]", kind), _DIALECT))
        return values and (f"array of {values[0]}", values[1], values[2])
    if isinstance(kind, sa.Enum) and kind.native_enum:
        return f"enum {kind.name}", (), frozenset(kind.enums)
    name: str | None = None
    limits: tuple[float, ...] = ()
    if simple := next((entry for entry in _SIMPLE if isinstance(kind, entry[0])), None):
        _, name, limits = simple
    elif isinstance(kind, sa.String):
        name, limits = "padded text" if isinstance(kind, sa.CHAR) else "text", (kind.length or inf,)
    elif isinstance(kind, sa.Float):
        single = isinstance(kind, sa.REAL) or (kind.precision is not None and kind.precision <= _SINGLE_BITS)
        name, limits = "float", (_SINGLE_BITS if single else _DOUBLE_BITS,)
    elif isinstance(kind, sa.Numeric):
        scale = kind.scale or 0
        name, limits = "decimal", (inf, inf) if kind.precision is None else (kind.precision - scale, scale)
    elif isinstance(kind, sa.DateTime):
        digits = getattr(kind, "precision", None)
        name, limits = "instant" if kind.timezone else "wall time", (_MICROSECONDS if digits is None else digits,)
    return None if name is None else (name, limits, frozenset())


OLDEST, MAINTAINED = (10,), (15,)
"""The oldest PostgreSQL that psycopg 3 supports, and the oldest maintained; 14 ended in November 2026."""

_TORN_COST = "a power cut may lose or break rows, checkpoints among them: every read model would have to be rebuilt"
_SETTINGS: dict[str, tuple[tuple[str, ...], bool, str, str]] = {
    "fsync": (("on",), True, _TORN_COST, "Set `fsync = on` in postgresql.conf and reload."),
    "full_page_writes": (("on",), True, _TORN_COST, "Set `full_page_writes = on` in postgresql.conf and reload."),
    "transaction_read_only": (
        ("off",),
        True,
        "workers can write nothing, so read models stand still",
        "Name the primary in --database or EVENTJET_DATABASE, or set `default_transaction_read_only = off`.",
    ),
    "synchronous_commit": (
        ("on", "local", "remote_write", "remote_apply"),
        False,
        "a crash takes back the last commits, rows and checkpoint together; whoever was told of them sees them gone",
        "Set `synchronous_commit = on` for the role of the workers.",
    ),
    "server_encoding": (
        ("UTF8",),
        False,
        "text that this encoding lacks stops the projection that writes it",
        "Make the database again with `encoding 'UTF8'`, and rebuild into it.",
    ),
}
"""(values that are no risk, whether another one is a fault, its cost, its fix) by setting."""


def findings_of(settings: Mapping[str, str]) -> list[Finding]:
    """Return the risks of settings, given by name with `server_version` among them. Pure."""
    findings = [
        finding(is_fault, f"{name} is {settings[name]}", cost, fix)
        for name, (safe, is_fault, cost, fix) in _SETTINGS.items()
        if settings.get(name, safe[0]) not in safe
    ]
    version, fix = settings["server_version"], f"Upgrade to PostgreSQL {MAINTAINED[0]} or newer."
    if numbers_of(version) < MAINTAINED:
        is_fault = numbers_of(version) < OLDEST
        cost = "eventjet cannot use it" if is_fault else "faults of its own that lose data stay unmended"
        findings.append(finding(is_fault, f"PostgreSQL {version} is no longer maintained", cost, fix))
    return findings
