"""`Dialect`: the port to one kind of database. Whatever differs between databases is asked of it.

To add a database, write its class in a file of its own, add it to `_dialects` here, and run tests/contracts for it
(tests/integration/test_dialects.py). To rebuild there, write its workspace in `rebuild/workspace.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, ClassVar, TypeAlias, TypeVar

from sqlalchemy import CheckConstraint, ColumnElement, Connection, Engine, Table, TextClause, text
from sqlalchemy import types as sa
from sqlalchemy.engine import URL
from sqlalchemy.engine import Dialect as SqlalchemyDialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.schema import (
    CreateIndex,
    CreateTable,
    ExecutableDDLElement,
    SetColumnComment,
    SetConstraintComment,
    SetTableComment,
)

from eventjet.domain.parked import Parked
from eventjet.errors import UsageError
from eventjet.projections.columns import Convert, element, labels, plain, stored
from eventjet.projections.row_codec import ColumnValues, RowCodec
from eventjet.sql.statements import Statements, TextOrder
from eventjet.text import cut

T = TypeVar("T")

TableName: TypeAlias = tuple[str | None, str]
"""(schema, name) of a table as it is declared."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a session on PostgreSQL may hold up, so that a stopped process frees its locks. 0 means no limit."""

    lock_ms: int = 2_000
    statement_ms: int = 15_000
    idle_in_transaction_ms: int = 2_500


@dataclass(frozen=True, slots=True)
class TableRef:
    """A table that is in the database."""

    oid: int | None
    """PostgreSQL's; it stays the same when the table is moved."""
    schema: str | None
    name: str

    def quoted(self) -> str:
        """Its qualified name in SQL."""
        return qualified(self.schema, self.name)


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a table has, and that another table in its place may lack."""

    key: str
    """Its kind, and its name or its column: the same for another table's, whatever schema that is in."""
    words: str = ""
    """As a refusal names it; empty where nobody would miss it."""
    definition: str = ""
    """As the database writes it, wherever the table is; empty where the key says all."""
    carried: str | None = None
    """The statement that gives it to the heir."""
    needs: str = ""
    """The key of what the heir must have to take it."""


class Dialect(ColumnValues):
    """What differs between databases. Has no state, and can be pickled.

    Everything that is given a connection happens within the caller's transaction. What not every database has to do is
    nothing here.
    """

    name: ClassVar[str]
    """As SQLAlchemy calls it."""
    clock: ClassVar[str]
    """`Clock` as text."""
    is_concurrent: ClassVar[bool]
    """Whether others read and write while a transaction writes; if not, writers of one process take turns."""
    relocates_handlers: ClassVar[bool]
    """Whether SQL by hand finds its tables in another location under the names that it uses."""
    byte_order: ClassVar[str] = ""
    """What makes `order by` sort text by code points, as Python does."""
    look_options: ClassVar[Mapping[str, Any]]
    """Execution options of connections that only look, one statement at a time."""
    snapshot_options: ClassVar[Mapping[str, Any]]
    """Execution options with which all statements of a transaction see the same; before its first one."""
    conversions: ClassVar[Sequence[tuple[type[Any], Convert | None, Convert | None]]]
    """(type of column, its `dumper`, its `loader`); of two types that fit, the first counts."""

    # Types

    def dumper(self, kind: sa.TypeEngine[Any], /) -> Convert | None:
        if isinstance(kind, sa.Enum):
            return {value: label for label, value in reversed(labels(kind).items())}.__getitem__
        return next((dump for known, dump, _ in self.conversions if isinstance(plain(kind), known)), None)

    def loader(self, kind: sa.TypeEngine[Any], /) -> Convert | None:
        if isinstance(kind, sa.Enum):
            return labels(kind).__getitem__
        return next((load for known, _, load in self.conversions if isinstance(plain(kind), known)), None)

    def storage_type(self, kind: sa.TypeEngine[Any], /) -> sa.TypeEngine[Any]:
        """The type that holds this one exactly."""
        return kind

    @abstractmethod
    def fit(self, found: sa.TypeEngine[Any], declared: sa.TypeEngine[Any], /) -> Fit:
        """How a column of the one type takes values of the other; of types that SQL writes differently."""

    def exactness_checks(self, table: Table, /) -> list[CheckConstraint]:  # noqa: ARG002 - every type is exact
        """What keeps handlers from storing values that are not exact."""
        return []

    # Statements

    @abstractmethod
    def statements(self, table: Table, codec: RowCodec, /) -> Statements:
        """For one table and its checkpoint; `table` says where the rows are."""

    @abstractmethod
    def park(self, connection: Connection, name: str, revision: int, parked: Sequence[Parked], /) -> None:
        """Insert into the quarantine what a bulk load could not take; nobody else writes there."""

    # Locations

    @abstractmethod
    def own_location(self, name: str, revision: int, /) -> str:
        """The location that is this revision's own."""

    def declared_name(self, name: str, /) -> str:
        """The declared name of a table that is called so in some location."""
        return name

    @abstractmethod
    def relocate(self, tables: Sequence[Table], location: str, /) -> None:
        """Let these tables, which are copies of declared ones, stand in a location other than the declared one.

        They are renamed last: what SQLAlchemy calls indexes, and the schema of enum types, come from the declared one.
        """

    def ensure_location(self, connection: Connection, location: str, /) -> None:
        """Make what the tables of a location need."""

    def drop_location(self, connection: Connection, location: str, /) -> None:
        """Remove what `ensure_location` made, unless something else is in it."""

    def name_in_full(self, connection: Connection, name: TableName, /) -> TableName:
        """A declared name in the form in which the database tells it from others."""
        return name[0] or connection.dialect.default_schema_name, name[1]

    def schema_statement(self, schema: str, /) -> str:
        """What makes a schema that a table names; empty where there are none."""
        return f"create schema {qualified(None, schema)}"

    @abstractmethod
    def differ(self, one: ColumnElement[Any], other: ColumnElement[Any], /) -> ColumnElement[bool]:
        """Whether two values are not stored alike, whatever the database calls equal."""

    # Tables that are there

    @abstractmethod
    def find_table(self, connection: Connection, name: TableName, location: str, /) -> TableRef | None:
        """The table declared under this name, in a location."""

    def find_tables(
        self, connection: Connection, names: Iterable[TableName], location: str
    ) -> dict[TableName, TableRef]:
        """Those that are there of the tables declared under these names."""
        looked = {name: self.find_table(connection, name, location) for name in names}
        return {name: table for name, table in looked.items() if table is not None}

    @abstractmethod
    def move_table(
        self, connection: Connection, table: TableRef, name: TableName, location: str, schema: str | None, /
    ) -> None:
        """Move a table to a location; `schema` says where that is when a table has just left it."""

    def inherit(self, connection: Connection, old: TableRef, heir: TableRef, /) -> None:
        """Give a table the owner, exactly the rights, and what can be carried of the features of another one."""

    @abstractmethod
    def dependents(
        self, connection: Connection, table: TableRef, along: Sequence[TableRef], /, *, for_good: bool
    ) -> list[str]:
        """What depends on a table and would not follow its name to another one, in words; only looks.

        `for_good`: no other one comes, so what follows the name counts, too. Foreign keys between tables `along`, which
        go together, do not.
        """

    @abstractmethod
    def features(self, connection: Connection, table: TableRef, heir: TableRef | None = None, /) -> list[Feature]:
        """Everything a table has that one made in its place could lack: columns, rules, indexes, settings.

        The statements of what can be carried are for the `heir`.
        """

    @abstractmethod
    def modelled(self, connection: Connection, tables: Sequence[Table], /) -> AbstractContextManager[Connection]:
        """Make empty tables as they are declared, on another connection; afterwards they are gone."""

    def broken_by_name(self, connection: Connection, /) -> set[str]:  # noqa: ARG002 - whatever depends on a table is known
        """Views and triggers that cannot be used, as they name what is not there; only looks."""
        return set()

    @abstractmethod
    def text_order(self, connection: Connection, table: TableRef, column: str, /) -> TextOrder | None:
        """How an index finds text of a column by its code points; None where none does."""

    def count_rows(self, connection: Connection, table: TableRef, /) -> int:
        """About how many rows it has."""
        return connection.scalar(verbatim(f"select count(*) from {table.quoted()}")) or 0  # noqa: S608 - of a known table

    def has_rows(self, connection: Connection, table: TableRef, /) -> bool:
        """Whether it has any."""
        return connection.scalar(verbatim(f"select 1 from {table.quoted()} limit 1")) is not None  # noqa: S608 - as above

    def home(self, connection: Connection, /) -> str:  # noqa: ARG002 - they go wherever the tables go
        """The database whose identities of tables these are; a copy made from a dump is another one."""
        return ""

    @abstractmethod
    def identity(self, connection: Connection, table: TableRef, /) -> str | None:
        """What tells a table from any other that came, or comes, under its name; None where nothing is noted on it.

        It stays when the table is renamed, moved or altered, and when its rows are deleted.
        """

    @abstractmethod
    def identify(self, connection: Connection, table: TableRef, /) -> str:
        """`identity`, noted on the table if it has none."""

    @abstractmethod
    def drop_tables(self, connection: Connection, tables: Sequence[TableRef], /) -> None:
        """Drop them, whatever foreign keys are between them, and nothing that depends on them."""

    # Locks: none where one writer excludes all others. The contract holds that every other database has them.

    def lock_migrations(self, connection: Connection, /) -> None:
        """Let no other process create or alter tables of eventjet until this transaction ends."""

    def lock_tables(self, connection: Connection, tables: Iterable[TableRef], /, *, readers: bool) -> None:
        """Keep writers out to the end of the transaction, and readers too unless they are let in."""

    def bound_waits(self, connection: Connection, /) -> None:
        """To the end of the transaction, wait no longer for a lock than readers may be kept waiting."""

    def patiently(self, connection: Connection, lock: Callable[[], T], /) -> T:  # noqa: ARG002 - nothing to wait for
        """Lock checkpoints whose rows workers of SQL by hand keep locked while their handlers run."""
        return lock()

    # Connections

    def refusal_of(self, url: URL, /) -> str | None:  # noqa: ARG002 - any database will do
        """Why this database cannot be used; None when it can."""
        return None

    @abstractmethod
    def async_engine(self, url: URL, purpose: str, limits: SessionLimits, pool: Mapping[str, Any], /) -> AsyncEngine:
        """An async engine, not connected yet."""

    @abstractmethod
    def engine(self, url: URL, purpose: str, limits: SessionLimits, /) -> Engine:
        """A blocking engine without a pool, not connected yet."""

    def check_sessions(self, url: URL, /) -> None:
        """Raise `Unreachable` where connections share their sessions. Blocks."""

    @abstractmethod
    def soundness(self, connection: Connection, /) -> Soundness:
        """What it says of its version and its settings; only looks."""

    @abstractmethod
    def read_only(self, url: URL, purpose: str, limits: SessionLimits, /) -> AbstractContextManager[Connection | None]:
        """A connection that cannot write and leaves nothing behind; None where there is no database yet."""

    def prepare_for_handlers(self, engine: Engine, /) -> None:
        """For connections on which an application's own statements run: it may rely upon its foreign keys."""

    @abstractmethod
    def load_all(self, connection: Connection, /) -> None:
        """From here on values that Python has none for are no errors of this connection's driver."""

    # Errors of the driver

    @abstractmethod
    def lacks_table(self, cause: object, /) -> bool:
        """Whether it says that a table is missing."""

    @abstractmethod
    def remedy(self, cause: object, /) -> str:
        """What to do about one while connecting."""

    @abstractmethod
    def is_about_data(self, error: DBAPIError, /) -> bool:
        """Whether a value or a row broke a rule of the database, so that trying again cannot help."""

    def is_too_long(self, error: DBAPIError, /) -> bool:  # noqa: ARG002 - texts of any length are kept
        """Whether a text is longer than its column holds."""
        return False

    @abstractmethod
    def is_transient(self, error: DBAPIError, /) -> bool:
        """Whether the connection, a lock, or the server failed, so that the same may succeed another time."""

    def is_locked_out(self, error: DBAPIError, /) -> bool:  # noqa: ARG002 - no lock is waited for
        """Whether a lock was not to be had in time."""
        return False

    def refuses_writes(self, connection: Connection, /) -> str:  # noqa: ARG002 - it does not say so
        """Why the database takes no writes of anybody, as far as it can be asked; empty where it may take them."""
        return ""

    def is_forbidden(self, error: DBAPIError, /) -> bool:  # noqa: ARG002 - there are no rights
        """Whether the session lacks a right."""
        return False


@cache
def _dialects() -> dict[str, Dialect]:
    # Imported here because they are built on this module.
    from eventjet.sql.postgres import POSTGRES
    from eventjet.sql.sqlite import SQLITE

    return {dialect.name: dialect for dialect in (POSTGRES, SQLITE)}


def dialect_named(name: str) -> Dialect:
    """The dialect that SQLAlchemy calls so; raises `UsageError` for one that is not supported."""
    dialect = _dialects().get(name)
    if dialect is None:
        raise UsageError(f"eventjet does not support the database {name!r}. Use one of {', '.join(_dialects())}.")
    return dialect


def dialect_of(connection: Connection | Engine) -> Dialect:
    """The dialect of the database at the other end."""
    return dialect_named(connection.dialect.name)


def declared_names(name: str) -> set[str]:
    """The declared names that a table may have, whatever the database."""
    return {dialect.declared_name(name) for dialect in _dialects().values()}


def is_about_data(error: DBAPIError) -> bool:
    """Whether a value or a row broke a rule of the database, so that trying again cannot help."""
    return any(dialect.is_about_data(error) for dialect in _dialects().values())


def is_transient(error: DBAPIError) -> bool:
    """Whether the connection, a lock, or the server failed, so that the same may succeed another time."""
    return error.connection_invalidated or any(dialect.is_transient(error) for dialect in _dialects().values())


def creation(tables: Iterable[Table]) -> list[ExecutableDDLElement]:
    """Statements that make the tables with all their constraints and indexes, and nothing else."""
    found: list[ExecutableDDLElement] = []
    for table in tables:
        found.append(CreateTable(table))
        found += [CreateIndex(index) for index in sorted(table.indexes, key=lambda one: str(one.name))]
    return found


def make_enums(connection: Connection, tables: Iterable[Table]) -> None:
    """Create the enum types of columns where those are missing, also what a decorator or a variant loads."""
    own = connection.dialect
    for kind in (element(column.type, own) for table in tables for column in table.columns):
        if isinstance(kind, sa.Enum) and kind.native_enum and getattr(kind.dialect_impl(own), "create_type", True):
            kind.create(connection, checkfirst=True)


def comments(tables: Iterable[Table]) -> list[ExecutableDDLElement]:
    """Statements for the comments that are declared; for databases that keep any."""
    found: list[ExecutableDDLElement] = []
    for table in tables:
        found += [SetTableComment(table)] if table.comment else []
        found += [SetColumnComment(column) for column in table.columns if column.comment]
        found += [SetConstraintComment(one) for one in table.constraints if one.comment]
    return found


def qualified(schema: str | None, name: str) -> str:
    """`"schema"."name"`, or the name alone, as the database reads it; a driver may want its percent signs doubled."""
    quoted = '"' + name.replace('"', '""') + '"'
    return quoted if schema is None else f"{qualified(None, schema)}.{quoted}"


def verbatim(statement: str) -> TextClause:
    """A statement without parameters, whatever is in the names that it holds."""
    return text(statement.replace(":", r"\:"))


def listed(found: Sequence[str]) -> str:
    """At most ten of them in words."""
    return ", ".join(found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "")


class Fit(Enum):
    """How a column that is there takes the values of the type that is declared for it."""

    SAME = "same"
    OTHER = "other"
    """It is of another type, which gives every value back; or nobody can say."""
    LOSES = "loses"
    """It refuses some, or gives them back as others."""


def spoken(kind: sa.TypeEngine[Any], dialect: SqlalchemyDialect) -> str:
    """A type as SQL writes it; an enum of the database with its labels, and one that is kept as another with both."""
    own = stored(kind, dialect)
    if isinstance(own, sa.NullType):
        return "of no type that is known"
    each = element(own, dialect)
    if isinstance(each, sa.Enum) and each.native_enum:
        return cut(f"{each.name} ENUM{'' if each is own else '[]'} ({', '.join(map(repr, each.enums))})")
    told = str(own.compile(dialect=dialect))
    return told if plain(kind) is kind else f"{plain(kind)!s}, kept as {told}"


@dataclass(frozen=True, slots=True)
class Weakness:
    """One setting, or its version."""

    what: str
    cost: str
    remedy: str
    is_fault: bool = False
    """Whether rows may be lost or wrong, or nothing can be written."""
    is_rare: bool = False
    """Whether it takes a coincidence that few ever meet."""


@dataclass(frozen=True, slots=True)
class Soundness:
    """A database, as it answers."""

    version: str
    """As a person calls it: `PostgreSQL 18.1`."""
    weaknesses: tuple[Weakness, ...]


def numbers_of(version: str) -> tuple[int, ...]:
    """Of `18.1 (Debian …)` the numbers that it begins with."""
    numbers = version.partition(" ")[0].split(".")
    return tuple(int(one) for one in numbers if one.isdecimal())
