"""`Dialect` is the port to one kind of database: it has everything that differs between databases.

To add a database, write its class in a file of its own, add it to `_DIALECTS` in `database.py`, and run tests/contracts
for it (tests/integration/test_dialects.py). To support rebuilds, write its workspace beside `rebuild/workspace.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Any, ClassVar, TypeAlias

from sqlalchemy import CheckConstraint, Column, ColumnElement, Connection, Engine, Table, TextClause, text
from sqlalchemy import types as sa
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import (
    CreateIndex,
    CreateTable,
    ExecutableDDLElement,
    SetColumnComment,
    SetConstraintComment,
    SetTableComment,
)

from eventjet.findings import Finding, Level
from eventjet.projections.columns import Convert, element, labels, plain
from eventjet.projections.row_codec import ColumnValues, RowCodec
from eventjet.sql.statements import QuarantineChanges, Statements, TextOrder

READ_ONLY = "eventjet_read_only"
"""Execution option of a connection that must not lock the database: on SQLite its transactions begin deferred."""

TableName: TypeAlias = tuple[str | None, str]
"""(schema, name) of a table as it is declared."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Timeouts of a PostgreSQL session in milliseconds, so that a stopped process frees its locks. 0 means no limit."""

    lock_ms: int = 2_000
    statement_ms: int = 15_000
    idle_in_transaction_ms: int = 2_500


class Fault(Flag):
    """The kind of fault that a database error reports."""

    UNKNOWN = 0
    DATA = auto()
    """A value or a row broke a rule of the database, so that trying again cannot help."""
    TOO_LONG = auto()
    """A text is longer than its column allows."""
    TRANSIENT = auto()
    """The connection, a lock or the server failed, so that another try may succeed."""
    LOCKED_OUT = auto()
    """A lock was not granted in time."""
    NO_TABLE = auto()
    """A table is missing."""
    FORBIDDEN = auto()
    """The session lacks a right."""
    DAMAGED = auto()
    """The file is damaged, or is no database."""


class TypeMatch(Enum):
    """How an existing column takes the values of the type that is declared for it."""

    SAME = "same"
    OTHER = "other"
    """It has another type that gives every value back, or a type that cannot be compared."""
    LOSES = "loses"
    """It refuses some values, or gives back other ones."""


@dataclass(frozen=True, slots=True)
class TableRef:
    """A reference to a table that is in the database."""

    oid: int | None
    """PostgreSQL's object id, which stays the same when the table is moved; None on SQLite."""
    schema: str | None
    name: str

    def quoted(self) -> str:
        """Return the table's qualified name in SQL."""
        return qualified(self.schema, self.name)


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of a table, such as a column or an index, that another table in its place may lack."""

    key: str
    """The feature's kind, and its name or column: the same for the same feature of a table in another schema."""
    words: str = ""
    """The name of the feature in a refusal; empty where nobody would miss it."""
    definition: str = ""
    """The definition as the database writes it, without the table's location; empty where the key says everything."""
    carried: str | None = None
    """The statement that gives the feature to the heir; None where it cannot be carried over."""
    needs: str = ""
    """The key of the feature that the heir must have to be given this one; empty where it needs none."""


class Dialect(ColumnValues):
    """The port to one kind of database. Has no state, and can be pickled.

    A method that is given a connection works within the caller's transaction. A method that not every database needs
    does nothing by default.
    """

    name: ClassVar[str]
    """The name that SQLAlchemy gives the database."""
    drivers: ClassVar[tuple[str, str]]
    """The names that SQLAlchemy gives the (async, blocking) driver."""
    driver_error: ClassVar[type[Exception]]
    """The driver's own error for a connection that fails."""
    is_concurrent: ClassVar[bool]
    """Whether others read and write while a transaction writes; if not, writers of one process take turns."""
    relocates_handlers: ClassVar[bool]
    """Whether handlers of SQL find their tables in another location under the names that they use."""
    has_schemas: ClassVar[bool] = True
    """Whether a table may name a schema."""
    byte_order: ClassVar[str] = ""
    """The SQL that makes `order by` sort text by code points, as Python does."""
    look_options: ClassVar[Mapping[str, Any]]
    """Execution options of connections that only read, one statement at a time."""
    snapshot_options: ClassVar[Mapping[str, Any]]
    """Execution options with which a transaction's statements read one snapshot; set before the first statement."""
    conversions: ClassVar[Sequence[tuple[type[Any], Convert | None, Convert | None]]]
    """(type of column, its `dumper`, its `loader`); of two types that fit, the first counts."""

    # Types

    def dumper(self, kind: sa.TypeEngine[Any], /) -> Convert | None:
        if isinstance(kind, sa.Enum):
            return {value: label for label, value in reversed(labels(kind).items())}.__getitem__
        return next((dump for column_type, dump, _ in self.conversions if isinstance(plain(kind), column_type)), None)

    def loader(self, kind: sa.TypeEngine[Any], /) -> Convert | None:
        if isinstance(kind, sa.Enum):
            return labels(kind).__getitem__
        return next((load for column_type, _, load in self.conversions if isinstance(plain(kind), column_type)), None)

    def storage_type(self, column: Column[Any]) -> sa.TypeEngine[Any]:
        """Return the type with which a column stores the values of its declared type exactly."""
        return column.type

    @abstractmethod
    def type_match(self, existing: sa.TypeEngine[Any], declared: sa.TypeEngine[Any]) -> TypeMatch:
        """Return how a column of type `existing` takes `declared` values; for types that SQL writes differently."""

    def missing_labels(self, existing: sa.TypeEngine[Any], declared: sa.TypeEngine[Any]) -> list[str]:  # noqa: ARG002
        """Return the labels that an enum type of the database (or of an array) lacks; none for other types."""
        return []

    def exactness_checks(self, table: Table) -> list[CheckConstraint]:  # noqa: ARG002 - every type is exact
        """Return constraints that keep handlers from storing values that are not exact."""
        return []

    # Rows

    @abstractmethod
    def statements(self, table: Table, codec: RowCodec, states: Statements | None = None) -> Statements:
        """Return the statements of a located table and its checkpoint, which also write the table of `states`."""

    @abstractmethod
    def write_quarantine(self, connection: Connection, name: str, revision: int, changes: QuarantineChanges) -> None:
        """Change the quarantine of a projection outside of a batch; nobody else may write to these rows."""

    @abstractmethod
    def differ(self, left: ColumnElement[Any], right: ColumnElement[Any]) -> ColumnElement[bool]:
        """Return the condition that two values are stored differently, whatever the database considers equal."""

    @abstractmethod
    def load_all(self, connection: Connection) -> None:
        """Let this connection's driver load values that Python cannot represent, instead of raising an error."""

    # Connections

    def refusal_of(self, url: URL) -> str | None:  # noqa: ARG002 - any database will do
        """Return why this database cannot be used; None when it can."""
        return None

    def session_arguments(self, url: URL, purpose: str, limits: SessionLimits) -> dict[str, Any]:  # noqa: ARG002
        """Return the arguments of the driver's `connect` that configure a session."""
        return {}

    @abstractmethod
    def configure(self, engine: Engine, url: URL, limits: SessionLimits) -> None:
        """Configure the new connections and transactions of an engine."""

    def require_file(self, engine: Engine) -> None:
        """Let the engine's new connections raise where there is no file yet, instead of making one."""

    def configure_for_handlers(self, engine: Engine) -> None:
        """Configure the engine's new connections for handlers: foreign keys are enforced on them."""

    @abstractmethod
    def read_only(self, engine: Engine) -> Engine | None:
        """Return an engine that cannot write and leaves nothing behind; None where there is no database yet."""

    @abstractmethod
    def connect(self, url: URL, purpose: str, limits: SessionLimits) -> Any:
        """Open a blocking connection of the driver, for bulk loads; it begins transactions as its driver does."""

    def check_sessions(self, url: URL) -> None:
        """Raise `Unreachable` where a pooler lets connections share their sessions. Blocks."""

    @abstractmethod
    def examine(self, connection: Connection) -> tuple[str, list[Finding]]:
        """Return the database's name and version for people, and the risks of its settings; only reads."""

    def refuses_writes(self, connection: Connection) -> str:  # noqa: ARG002 - it does not say so
        """Return why the database accepts no writes from anybody, as far as it says so; else an empty string."""
        return ""

    # Errors of the driver

    @abstractmethod
    def faults(self, error: DBAPIError | BaseException) -> Fault:
        """Return the kinds of fault that an error of SQLAlchemy or of the driver reports."""

    @abstractmethod
    def remedy(self, cause: object) -> str:
        """Return what to do about an error while connecting, as a sentence for people."""

    # Locations

    @abstractmethod
    def own_location(self, name: str, revision: int) -> str:
        """Return the revision's own location, for when another revision has the declared one."""

    def declared_name(self, name: str) -> str:
        """Return the declared name of a table that has this name in some location."""
        return name

    @abstractmethod
    def relocate(self, tables: Sequence[Table], location: str) -> None:
        """Change these copies of declared tables so that they are in a location other than the declared one.

        Call it last: SQLAlchemy derives names of indexes and the schema of enum types from the declared table.
        """

    def ensure_location(self, connection: Connection, location: str) -> None:
        """Create what a location needs, such as a schema, where it is missing."""

    def drop_location(self, connection: Connection, location: str) -> None:
        """Remove what `ensure_location` created, unless something else is in it."""

    # Tables that exist

    @abstractmethod
    def find_table(self, connection: Connection, name: TableName, location: str) -> TableRef | None:
        """Return the table that is declared under this name, in a location; None where it does not exist."""

    def find_tables(
        self, connection: Connection, names: Iterable[TableName], location: str
    ) -> dict[TableName, TableRef]:
        """Return the tables that are declared under these names and exist in a location."""
        located = {name: self.find_table(connection, name, location) for name in names}
        return {name: table for name, table in located.items() if table is not None}

    def name_in_full(self, connection: Connection, name: TableName) -> TableName:
        """Return a declared name in the form in which the database distinguishes it from others."""
        return name[0] or connection.dialect.default_schema_name, name[1]

    def count_rows(self, connection: Connection, table: TableRef) -> int:
        """Return the approximate number of a table's rows."""
        return connection.scalar(verbatim(f"select count(*) from {table.quoted()}")) or 0  # noqa: S608 - of a known table

    @abstractmethod
    def text_order(self, connection: Connection, table: TableRef, column: str) -> TextOrder | None:
        """Return how an index sorts a column of text by code points; None where no index does."""

    def home(self, connection: Connection) -> str:  # noqa: ARG002 - they go wherever the tables go
        """Return the identity of the database in which identities of tables are valid; another one after a restore."""
        return ""

    @abstractmethod
    def identity(self, connection: Connection, table: TableRef, *, make: bool = False) -> str | None:
        """Return the identity of a table, which differs for every other table of its name; None where it has none.

        It stays the same when the table is renamed, moved or altered, and when its rows are deleted. `make` gives an
        identity to a table that has none.
        """

    @abstractmethod
    def features(self, connection: Connection, table: TableRef, heir: TableRef | None = None) -> list[Feature]:
        """Return what a table in its place could lack, with statements that give it to the `heir`, if there are."""

    @abstractmethod
    def dependents(
        self, connection: Connection, table: TableRef, along: Sequence[TableRef], *, for_good: bool
    ) -> list[str]:
        """Return, as text, what depends on a table and would not follow its name to another table; only reads.

        `for_good` says that no other table takes the name, so that what follows the name counts too. Foreign keys
        between the tables `along`, which go together, do not count.
        """

    def broken_by_name(self, connection: Connection) -> set[str]:  # noqa: ARG002 - whatever depends on a table is known
        """Return views and triggers that cannot be used, as they name something that does not exist; only reads."""
        return set()

    @abstractmethod
    def modelled(self, connection: Connection, tables: Sequence[Table]) -> AbstractContextManager[Connection]:
        """Create empty tables as they are declared, on another connection; they are gone after the block."""

    @abstractmethod
    def move(self, connection: Connection, table: TableRef, name: TableName, location: str, schema: str | None) -> None:
        """Move a table to a location; `schema` is the schema of the table that has just left that location, if any."""

    def inherit(self, connection: Connection, old: TableRef, heir: TableRef) -> None:
        """Give the heir the old table's owner, exactly its rights, and the features that can be carried over."""

    @abstractmethod
    def drop(self, connection: Connection, tables: Sequence[TableRef]) -> None:
        """Drop tables, whatever foreign keys are between them, but nothing that depends on them."""

    @abstractmethod
    def empty(self, connection: Connection, tables: Sequence[TableRef]) -> None:
        """Delete all rows of tables, whatever foreign keys are between them."""

    # Locks. Only a database in which one writer excludes all others needs none; the contract tests check the others.

    def lock_migrations(self, connection: Connection) -> None:
        """Let no other process create or alter tables of eventjet until this transaction ends."""

    def lock(self, connection: Connection, tables: Iterable[TableRef], *, readers: bool) -> None:
        """Lock writers out to the end of the transaction; readers too, unless `readers` lets them in."""

    def bound_waits(self, connection: Connection, *, patient: bool = False) -> None:
        """Wait, to the end of the transaction, no longer for a lock than readers may be kept waiting.

        `patient` allows longer waits, for the locks of checkpoints, for which no reader waits: workers of SQL
        projections keep their checkpoints locked while handlers run.
        """


def creation(tables: Iterable[Table]) -> list[ExecutableDDLElement]:
    """Return the statements that create tables with their constraints and indexes, and nothing else."""
    statements: list[ExecutableDDLElement] = []
    for table in tables:
        statements.append(CreateTable(table))
        statements += [CreateIndex(index) for index in sorted(table.indexes, key=lambda index: str(index.name))]
    return statements


def make_enums(connection: Connection, tables: Iterable[Table]) -> None:
    """Create the missing enum types of columns, including those that a type decorator or a variant loads."""
    dialect = connection.dialect
    for kind in (element(column.type, dialect) for table in tables for column in table.columns):
        if isinstance(kind, sa.Enum) and kind.native_enum and getattr(kind.dialect_impl(dialect), "create_type", True):
            kind.create(connection, checkfirst=True)


def comments(tables: Iterable[Table]) -> list[ExecutableDDLElement]:
    """Return the statements for declared comments; for databases that store comments."""
    statements: list[ExecutableDDLElement] = []
    for table in tables:
        statements += [SetTableComment(table)] if table.comment else []
        statements += [SetColumnComment(column) for column in table.columns if column.comment]
        statements += [SetConstraintComment(constraint) for constraint in table.constraints if constraint.comment]
    return statements


def qualified(schema: str | None, name: str) -> str:
    """Return `"schema"."name"` or `"name"`, quoted for SQL; a driver may need its percent signs doubled."""
    quoted = '"' + name.replace('"', '""') + '"'
    return quoted if schema is None else f"{qualified(None, schema)}.{quoted}"


def verbatim(statement: str) -> TextClause:
    """Return a statement without parameters, even if its names contain colons."""
    return text(statement.replace(":", r"\:"))


def finding(is_fault: bool, what: str, cost: str, fix: str) -> Finding:
    """Return the finding about a setting or a version of the database."""
    return Finding("database", "settings", Level.FAULT if is_fault else Level.WARNING, what, cost, fix)


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers with which a version begins: 18 and 1 of `18.1 (Debian …)`."""
    return tuple(int(number) for number in version.partition(" ")[0].split(".") if number.isdecimal())
