"""`Sqlite`: the dialect of SQLite, through sqlite3 and aiosqlite. A location is a suffix of the tables' names.

A writing transaction has the whole file to itself, so nothing else is locked; there are no owners and no rights.
"""

from __future__ import annotations

import json
import re
import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import astuple, replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote
from uuid import UUID

from sqlalchemy import (
    CheckConstraint,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Table,
    and_,
    create_engine,
    event,
    func,
    not_,
    or_,
    text,
    type_coerce,
)
from sqlalchemy import types as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import Dialect as SqlalchemyDialect
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import NullPool
from sqlalchemy.sql import quoted_name

from eventjet.findings import Finding, Level
from eventjet.projections.columns import Convert, UnfitValue, dumps, loads, normaliser, plain, stored, way_out_of
from eventjet.projections.row_codec import RowCodec
from eventjet.sql import sqlite_schema
from eventjet.sql.checkpoint import ADVANCE
from eventjet.sql.dialect import (
    Dialect,
    Fault,
    Feature,
    SessionLimits,
    TableName,
    TableRef,
    TypeMatch,
    finding,
    numbers_of,
    qualified,
    verbatim,
)
from eventjet.sql.own_tables import Clock
from eventjet.sql.sqlite_connections import (
    BUSY_TIMEOUT_S,
    READ_ONLY,
    FileMissing,
    FileReplaced,
    configure,
    connect,
    enforce_foreign_keys,
    is_busy,
    require_file,
)
from eventjet.sql.statements import (
    COLUMNS,
    INSERT,
    REPLACE,
    Advance,
    Changes,
    Key,
    Names,
    QuarantineChanges,
    Statements,
    TextOrder,
    by_key,
)

CLOCK = "(julianday('now') - 2440587.5) * 86400.0"
_OWN_LOCATION = re.compile(r"(.+)__r[0-9]+")
_TRANSIENT = frozenset({5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 26})
"""Primary codes of faults that may be gone at the next try: busy, locked, out of memory, read-only, interrupted, I/O …
"""
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


def _float(value: Any) -> float:
    """Load a float; refuse text, which `float` might parse as a number."""
    if not isinstance(value, int | float):
        raise ValueError(f"it takes floats, not {type(value).__name__}")
    return float(value)


def _truth(value: Any) -> bool:
    if value not in (0, 1):
        raise ValueError("it takes 0 or 1")
    return bool(value)


_CONVERSIONS: tuple[tuple[type[Any], Convert, Convert], ...] = (
    (sa.Float, float, _float),
    (sa.Numeric, lambda value: format(value, "f"), Decimal),
    (sa.DateTime, lambda value: value.isoformat(" ", "microseconds"), datetime.fromisoformat),
    (sa.Date, date.isoformat, date.fromisoformat),
    (sa.Uuid, lambda value: value.hex, UUID),
    (sa.Boolean, int, _truth),
    (sa.JSON, dumps, loads),
)
"""See `Dialect.conversions`."""


class Sqlite(Dialect):
    """The dialect of SQLite."""

    name = "sqlite"
    drivers = ("aiosqlite", "pysqlite")
    driver_error = sqlite3.OperationalError
    has_schemas = False
    is_concurrent = False
    relocates_handlers = False
    look_options: ClassVar[Mapping[str, Any]] = {READ_ONLY: True}
    snapshot_options: ClassVar[Mapping[str, Any]] = {READ_ONLY: True}
    conversions = _CONVERSIONS

    def storage_type(self, column: Column[Any]) -> sa.TypeEngine[Any]:
        kind = column.type
        is_decimal = isinstance(kind, sa.Numeric) and not isinstance(kind, sa.Float)
        is_instant = isinstance(kind, sa.DateTime) and kind.timezone
        # `sa.UUID` makes a column of the type UUID, in which SQLite turns digits into a number.
        is_otherwise = isinstance(kind, sa.JSON | sa.UUID)
        is_text = is_decimal or is_instant or is_otherwise
        return StoredAsText(kind, f"{column.table.name}.{column.name}") if is_text else kind

    def type_match(self, existing: sa.TypeEngine[Any], declared: sa.TypeEngine[Any]) -> TypeMatch:
        existing_kind, needed_kind = _kind(existing), _kind(stored(declared, _DIALECT))
        if needed_kind is None:
            return TypeMatch.OTHER
        if existing_kind == needed_kind:
            return TypeMatch.SAME
        # Times and days are no numbers, so a column of text stores them unchanged. An instant is stored as text, and
        # stays unchanged where a user's migration declared the column as DATETIME.
        harmless = {_ANY, "text"} if needed_kind in ("time", "day") else {_ANY}
        harmless |= {"time"} if isinstance(plain(declared), sa.DateTime) else set()
        return TypeMatch.OTHER if existing_kind in harmless else TypeMatch.LOSES

    def exactness_checks(self, table: Table) -> list[CheckConstraint]:
        """Return checks of decimals stored as text: SQLite computes with them as floats, whose text may be inexact."""
        kinds = [(column, plain(column.type)) for column in table.columns if isinstance(column.type, StoredAsText)]
        return [
            _exact(column, kind.scale or 0)
            for column, kind in kinds
            if isinstance(kind, sa.Numeric) and kind.precision is not None
        ]

    def statements(self, table: Table, codec: RowCodec, states: Statements | None = None) -> SqliteStatements:
        return SqliteStatements(table, codec, states)

    def write_quarantine(self, connection: Connection, name: str, revision: int, changes: QuarantineChanges) -> None:
        _write_quarantine(connection, name, revision, changes)

    def own_location(self, name: str, revision: int) -> str:  # noqa: ARG002 - each table has its name
        return f"__r{revision}"

    def declared_name(self, name: str) -> str:
        match = _OWN_LOCATION.fullmatch(name)
        return match[1] if match else name

    def relocate(self, tables: Sequence[Table], location: str) -> None:
        for table in tables:
            table.name = table.fullname = quoted_name(f"{table.name}{location}", None)
            for index in table.indexes:
                # Names of indexes are unique in the whole database.
                index.name = quoted_name(f"{index.name}__{table.name}", None)

    def differ(self, left: ColumnElement[Any], right: ColumnElement[Any]) -> ColumnElement[bool]:
        """Compare the types and bytes of two values, since a collation may call different texts equal."""
        kinds = func.typeof(left).is_distinct_from(func.typeof(right))
        return or_(kinds, _in_bytes(left).is_distinct_from(_in_bytes(right)))

    def refusal_of(self, url: URL) -> str | None:
        if url.database in (None, "", ":memory:"):
            return "SQLite in memory cannot be shared by a worker and its readers. Name a file: sqlite:///read.db."
        if url.query:
            return "The URL of a SQLite database takes no options. Leave out what follows its `?`."
        return None

    def configure(self, engine: Engine, url: URL, limits: SessionLimits) -> None:  # noqa: ARG002 - no sessions
        configure(engine)

    def require_file(self, engine: Engine) -> None:
        event.listen(engine, "do_connect", require_file)

    def configure_for_handlers(self, engine: Engine) -> None:
        event.listen(engine, "connect", enforce_foreign_keys)

    def read_only(self, engine: Engine) -> Engine | None:
        """Return an engine that cannot write; it does not create a file that does not exist."""
        file = Path(str(engine.url.database))
        if not file.exists() or not file.stat().st_size:
            return None
        # In `mode=ro` a reader would leave -wal and -shm files beside a file that nobody has open. Such a file does not
        # change, so it is opened as immutable.
        mode = "mode=ro" if file.with_name(f"{file.name}-wal").exists() else "immutable=1"
        read_only = create_engine(f"sqlite:///file:{quote(str(file))}?{mode}&uri=true", poolclass=NullPool)
        return read_only.execution_options(**{READ_ONLY: True})

    def connect(self, url: URL, purpose: str, limits: SessionLimits) -> sqlite3.Connection:  # noqa: ARG002
        return connect(url)

    def examine(self, connection: Connection) -> tuple[str, list[Finding]]:
        """Examine the SQLite library that this process uses, and the journal mode of the file."""
        file = next(str(path) for _, name, path in connection.execute(text("pragma database_list")) if name == "main")
        connection.execute(text("select 1 from sqlite_master limit 1"))  # raises for a file that is no database
        # From the file's header: on a connection that opened it as immutable, `pragma journal_mode` says `delete`.
        with Path(file).open("rb") as database_file:
            is_wal = database_file.read(20)[18:] == b"\x02\x02"
        version = str(connection.scalar(text("select sqlite_version()")))
        return f"SQLite {version}", findings_of(version, is_wal=is_wal)

    def load_all(self, connection: Connection) -> None:
        load_all(connection)

    def faults(self, error: DBAPIError | BaseException) -> Fault:
        cause = getattr(error, "orig", None) or error
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        no_table = isinstance(cause, FileMissing) or "no such table" in str(cause)
        faults = Fault.NO_TABLE if no_table else Fault.UNKNOWN
        if code in _DAMAGED:
            faults |= Fault.DAMAGED
        if not isinstance(error, DBAPIError):
            return faults
        is_refused = isinstance(cause, sqlite3.IntegrityError | sqlite3.DataError | OverflowError)
        if is_refused or is_of_driver(error):
            faults |= Fault.DATA
        return faults | Fault.TRANSIENT if code in _TRANSIENT else faults

    def remedy(self, cause: object) -> str:
        if isinstance(cause, FileReplaced):
            return "The next connection opens the file that is there then: try again."
        if is_busy(cause):
            return f"Another program has held it for {BUSY_TIMEOUT_S:.0f} s: end that one, or try again."
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return "Make room on its disk, and try again."
        if code == sqlite3.SQLITE_IOERR:
            return "Look at its disk, which may be full or broken, and try again."
        if code == sqlite3.SQLITE_NOTADB:
            return "Name the file that has the read models with --database or EVENTJET_DATABASE."
        if code == sqlite3.SQLITE_CORRUPT:
            return (
                "Put a backup of it in its place; or move it away, and let `eventjet init` and `eventjet rebuild` make "
                "the read models again from the log."
            )
        if isinstance(cause, FileMissing):
            return "Name the right file with --database or EVENTJET_DATABASE, or run `eventjet init`, which makes it."
        return "Check that its folder exists and may be written to."

    def find_table(self, connection: Connection, name: TableName, location: str) -> TableRef | None:
        """Find a table; SQLite ignores upper and lower case in names."""
        located_name = f"{name[1]}{location}"
        existing = connection.scalar(sqlite_schema.TABLE, {"name": located_name})
        return None if existing is None else TableRef(None, None, located_name)

    def name_in_full(self, connection: Connection, name: TableName) -> TableName:  # noqa: ARG002 - there are no schemas
        return None, name[1].lower()

    def features(self, connection: Connection, table: TableRef, heir: TableRef | None = None) -> list[Feature]:  # noqa: ARG002
        """Return everything in which tables can differ; no statement can carry any of it over."""
        return list(sqlite_schema.features_of(connection, table.name))

    def dependents(
        self, connection: Connection, table: TableRef, along: Sequence[TableRef], *, for_good: bool
    ) -> list[str]:
        """Return the table's own triggers; with `for_good` also the views, triggers and foreign keys that name it."""
        dependents = [str(trigger) for trigger in connection.scalars(sqlite_schema.TRIGGERS, {"name": table.name})]
        if for_good:
            dependents += sqlite_schema.broken_without(connection, table.name)
            ignored = {f"a foreign key of {ref.name}".lower() for ref in along}
            referring = connection.scalars(sqlite_schema.REFERRING, {"name": table.name})
            dependents += [key for key in referring if key.lower() not in ignored]
        return dependents

    def broken_by_name(self, connection: Connection) -> set[str]:
        return sqlite_schema.broken_by_name(connection)

    def modelled(self, connection: Connection, tables: Sequence[Table]) -> AbstractContextManager[Connection]:  # noqa: ARG002
        return sqlite_schema.modelled(tables)

    def text_order(self, connection: Connection, table: TableRef, column: str) -> TextOrder | None:  # noqa: ARG002
        """Return PLAIN, as every key has the collation BINARY: see `projections.resolve`."""
        return TextOrder.PLAIN

    def identity(self, connection: Connection, table: TableRef, *, make: bool = False) -> str | None:
        """Return the name of a trigger that never fires and marks the table, with which it is moved and dropped."""
        mark = connection.scalar(sqlite_schema.MARKS, {"name": table.name})
        if mark is not None or not make:
            return None if mark is None else str(mark)
        trigger = f"eventjet_identity_{secrets.token_hex(8)}"
        connection.exec_driver_sql(
            f"create trigger {trigger} after delete on {table.quoted()} when 0 begin select 1; end"
        )
        return trigger

    def move(
        self,
        connection: Connection,
        table: TableRef,
        name: TableName,
        location: str,
        schema: str | None,  # noqa: ARG002 - there are none
    ) -> None:
        """Rename a table and its indexes; what refers to its old name refers to the table that takes that over."""
        new_name = f"{name[1]}{location}"
        indexes = [
            (str(index), str(statement))
            for index, statement in connection.execute(sqlite_schema.INDEXES, {"name": table.name})
        ]
        for index, _ in indexes:
            connection.exec_driver_sql(f"drop index {qualified(None, index)}")
        connection.exec_driver_sql("pragma legacy_alter_table = on")
        try:
            quoted = table.quoted(), qualified(None, new_name)
            connection.exec_driver_sql(f"alter table {quoted[0]} rename to {quoted[1]}")
        finally:
            connection.exec_driver_sql("pragma legacy_alter_table = off")
        for index, statement in indexes:
            # The name that `Sqlite.relocate` gives the index.
            index_name = index.removesuffix(f"__{table.name}") + (f"__{new_name}" if location else "")
            match = sqlite_schema.INDEX_HEAD.match(statement)
            assert match is not None, f"SQLite stores an index as {statement!r}"
            columns = statement[match.end() :]
            kind = f"{(match[1] or '').lower()}index"
            connection.exec_driver_sql(f"create {kind} {qualified(None, index_name)} on {quoted[1]} {columns}")

    def drop(self, connection: Connection, tables: Sequence[TableRef]) -> None:
        """Drop the tables; eventjet's own connections do not enforce foreign keys."""
        for table in tables:
            connection.execute(verbatim(f"drop table {table.quoted()}"))

    def empty(self, connection: Connection, tables: Sequence[TableRef]) -> None:
        """Empty the tables; eventjet's own connections do not enforce foreign keys."""
        numbered = connection.scalar(sqlite_schema.TABLE, {"name": "sqlite_sequence"}) is not None
        for table in tables:
            connection.execute(verbatim(f"delete from {table.quoted()}"))  # noqa: S608 - of a known table
            if numbered:
                connection.exec_driver_sql("delete from sqlite_sequence where name = ?", (table.name,))


SQLITE = Sqlite()


def make_readable(table: Table) -> None:
    """Let the application's own `select(table)` read what eventjet writes on SQLite, by variants of column types."""
    for column in table.columns:
        storage_type = SQLITE.storage_type(column)
        if storage_type is not column.type:
            with suppress(ArgumentError):  # the variant was added before
                column.type = column.type.with_variant(storage_type, SQLITE.name)


@compiles(Clock, Sqlite.name)
def _clock(_element: Clock, _compiler: Any, **_: Any) -> str:  # pyright: ignore[reportUnusedFunction]  registered
    return f"({CLOCK})"


class StoredAsText(sa.TypeDecorator[Any]):
    """A declared type whose values are stored exactly, as text: SQLite's own type would round or change them.

    Decimals have their fixed scale, and instants are in UTC, in a form that sorts by time. A column declared as JSON
    would turn the text `12` into a number, and a column declared as UUID would do so with an id of digits.
    """

    impl = sa.Text
    cache_ok = True

    def __init__(self, stands_for: sa.TypeEngine[Any], column_name: str) -> None:
        super().__init__()
        self.stands_for = stands_for
        self.column_name = column_name
        self._dump, self._load = next((dump, load) for kind, dump, load in _CONVERSIONS if isinstance(stands_for, kind))

    def process_bind_param(self, value: Any, dialect: SqlalchemyDialect) -> Any:  # noqa: ARG002 - SQLAlchemy's signature
        try:
            return None if value is None else self._dump(normaliser(self.stands_for)(value))
        except ValueError as error:
            raise UnfitValue(f"{self.column_name}: {error}", way_out_of(error)) from None

    def process_result_value(self, value: Any, dialect: SqlalchemyDialect) -> Any:  # noqa: ARG002 - SQLAlchemy's signature
        return None if value is None else self._load(value)


def _in_bytes(column: ColumnElement[Any]) -> ColumnElement[Any]:
    return type_coerce(column, sa.Text).collate("BINARY")


def _exact(column: Column[Any], scale: int) -> CheckConstraint:
    as_text = type_coerce(column, sa.Text())
    digits = "." + "[0-9]" * scale if scale else ""
    return CheckConstraint(
        and_(
            as_text.bool_op("glob")(f"*[0-9]{digits}"),
            not_(as_text.bool_op("glob")("*[^-.0-9]*" if scale else "*[^-0-9]*")),
        )
    )


_DIALECT = sqlite.dialect()
_ANY = "any"
"""The kind of a column without a type, which stores each value as it is given."""
_KINDS = (
    (sa.NullType, _ANY),
    (sa.String, "text"),
    (sa.Float, "float"),
    (sa.Numeric, "number"),
    (sa.Boolean, "truth"),
    (sa.Integer, "integer"),
    (sa.DateTime, "time"),
    (sa.Date, "day"),
    (sa.Uuid, "text"),
    (sa.JSON, "json"),
    (sa.LargeBinary, "bytes"),
)
"""(type of column, its kind); of two types that fit, the first counts."""


def _kind(kind: sa.TypeEngine[Any]) -> str | None:
    return next((name for column_type, name in _KINDS if isinstance(kind, column_type)), None)


OLDEST = (3, 35)
"""The first SQLite with `returning`."""
_FIXED_IN = (3, 51, 3)
_BACKPORTED = ((3, 44, 6), (3, 50, 7))
"""The first releases, and those of older branches, without the WAL-reset fault (sqlite.org/wal.html#walresetbug)."""


def findings_of(version: str, *, is_wal: bool) -> list[Finding]:
    """Return the risks of a version, and of a file that is not in WAL mode as eventjet sets it. Pure."""
    numbers, findings = numbers_of(version), list[Finding]()
    if numbers < OLDEST:
        fix = f"Use a Python whose sqlite3 is {'.'.join(map(str, OLDEST))} or newer."
        findings.append(finding(True, f"SQLite {version} is too old", "eventjet cannot use it", fix))
    elif numbers < _FIXED_IN and not any(release[:2] == numbers[:2] and release <= numbers for release in _BACKPORTED):
        risk = finding(
            False,
            f"SQLite {version} has the WAL-reset fault",
            "in rare coincidences of two checkpoints and a commit the file loses that commit, or breaks",
            "Use a Python whose sqlite3 is 3.51.3 or newer, or PostgreSQL where several workers write.",
        )
        findings.append(replace(risk, level=Level.NOTE))
    if not is_wal:
        fix = "Start `eventjet worker`, which switches it. A file system that does not allow that will not do."
        cost = "readers and workers lock each other out"
        findings.append(finding(False, "its journal mode is not `wal`", cost, fix))
    return findings


_QUARANTINE_UPSERT = f"{INSERT} values (?, ?, {', '.join('?' for _ in COLUMNS)}, {CLOCK}) {REPLACE}"
_QUARANTINE_DELETE = "delete from eventjet_quarantine where projection = ? and revision = ? and position = ?"
_QUARANTINE_RESOLVE = (
    f"update eventjet_quarantine set resolution = ?, resolved_at = {CLOCK} "  # noqa: S608 - of constants
    "where projection = ? and revision = ? and position = ?"
)


class SqliteStatements:
    """The SQLite statements for one table and its checkpoint."""

    def __init__(self, table: Table, codec: RowCodec, states: Statements | None = None) -> None:
        assert states is None or isinstance(states, SqliteStatements)
        self._states = states
        names = Names(table, _DIALECT)
        marks = ", ".join("?" for _ in table.columns)
        self._codec = codec
        self._has_single_key = len(names.key) == 1
        key_parts = ["k.value"] if self._has_single_key else [f"k.value ->> {index}" for index in range(len(names.key))]
        match = " and ".join(
            f"t.{names.quoted(column)} = {part}" for column, part in zip(names.key, key_parts, strict=True)
        )
        equal = " and ".join(f"{names.quoted(column)} = ?" for column in names.key)
        self._advance = ADVANCE.format("?", CLOCK)
        self._insert = f"insert into {names.table} ({names.all()}) values ({marks})"  # noqa: S608 - declared names
        self._upsert = self._insert + names.on_conflict()
        # A cross join keeps the order: each key is looked up in the index.
        self._read = f"select {names.all('t.')} from json_each(?) k cross join {names.table} t on {match}"  # noqa: S608 - declared names
        self._delete = f"delete from {names.table} where {equal}"  # noqa: S608 - declared names

    def read(self, connection: Connection, keys: Sequence[Key]) -> dict[Key, Any]:
        dumped = self._codec.dump_keys(keys)
        json_keys = json.dumps([key[0] for key in dumped] if self._has_single_key else dumped)
        try:
            return by_key(self._codec, connection.exec_driver_sql(self._read, (json_keys,)))
        except DBAPIError as error:
            if not is_of_driver(error):
                raise
        # Read once more, so that the error names the row whose value the driver cannot load.
        load_all(connection)
        return by_key(self._codec, connection.exec_driver_sql(self._read, (json_keys,)))

    def write(self, connection: Connection, advance: Advance, changes: Changes) -> bool:
        if connection.exec_driver_sql(self._advance, advance).rowcount != 1:
            return False
        dump = self._codec.dump
        if changes.deletions:
            connection.exec_driver_sql(self._delete, self._codec.dump_keys(changes.deletions))
        for statement, rows in ((self._insert, changes.inserts), (self._upsert, changes.upserts)):
            if rows:
                connection.exec_driver_sql(statement, [dump(row) for row in rows])
        if changes.quarantine is not None:
            _write_quarantine(connection, advance[3], advance[4], changes.quarantine)
        if changes.states:
            assert self._states is not None
            connection.exec_driver_sql(self._states._upsert, [self._states._codec.dump(row) for row in changes.states])
        return True


def is_of_driver(error: DBAPIError) -> bool:
    """Whether sqlite3 could not load a text that is in the file."""
    return "Could not decode to UTF-8" in str(error.orig)


def load_all(connection: Connection) -> None:
    """Let this connection load text that is not UTF-8 as bytes, instead of raising an error of the driver."""
    driver: Any = connection.connection.driver_connection
    driver.text_factory = _text


def _text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _write_quarantine(connection: Connection, name: str, revision: int, changes: QuarantineChanges) -> None:
    """Write what a batch changes in the quarantine."""
    for statement, rows in (
        (_QUARANTINE_UPSERT, [(name, revision, *astuple(row)) for row in changes.upserts]),
        (_QUARANTINE_DELETE, [(name, revision, position) for position in changes.deletions]),
        (_QUARANTINE_RESOLVE, [(resolution, name, revision, position) for position, resolution in changes.resolutions]),
    ):
        if rows:
            connection.exec_driver_sql(statement, rows)
