"""`Dialect` is the port to one kind of database: it has everything that differs between databases.

To add a database, write its class and its `Tables` in files of their own, add it to `_dialects` in `dialects.py`, and
run tests/contracts for it (tests/integration/test_dialects.py). To support rebuilds, write its workspace in
`rebuild/workspace.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Any, ClassVar, TypeVar

from sqlalchemy import CheckConstraint, ColumnElement, Connection, Engine, Table
from sqlalchemy import types as sa
from sqlalchemy.engine import URL
from sqlalchemy.engine import Dialect as SqlalchemyDialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from eventjet.domain.quarantined import Quarantined
from eventjet.projections.columns import Convert, element, labels, plain, stored
from eventjet.projections.row_codec import ColumnValues, RowCodec
from eventjet.sql.statements import Statements
from eventjet.sql.tables import Tables
from eventjet.text import cut

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Timeouts of a PostgreSQL session in milliseconds, so that a stopped process frees its locks. 0 means no limit."""

    lock_ms: int = 2_000
    statement_ms: int = 15_000
    idle_in_transaction_ms: int = 2_500


class Fault(Flag):
    """The kind of fault that a database error reports."""

    NOTHING_KNOWN = 0
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


class Dialect(ColumnValues):
    """The port to one kind of database. Has no state, and can be pickled.

    A method that is given a connection works within the caller's transaction. A method that not every database needs
    does nothing by default.
    """

    name: ClassVar[str]
    """The name that SQLAlchemy gives the database."""
    tables: ClassVar[Tables]
    """The port to the tables that are in the database."""
    clock: ClassVar[str]
    """The SQL text of `Clock`."""
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

    def storage_type(self, kind: sa.TypeEngine[Any], /) -> sa.TypeEngine[Any]:
        """Return the type of column that stores the values of this type exactly."""
        return kind

    @abstractmethod
    def fit(self, existing: sa.TypeEngine[Any], declared: sa.TypeEngine[Any], /) -> Fit:
        """Return how a column of type `existing` takes `declared` values; for types that SQL writes differently."""

    def exactness_checks(self, table: Table, /) -> list[CheckConstraint]:  # noqa: ARG002 - every type is exact
        """Return constraints that keep handlers from storing values that are not exact."""
        return []

    # Statements

    @abstractmethod
    def statements(self, table: Table, codec: RowCodec, /) -> Statements:
        """Return the statements of one table and its checkpoint; `table` is the located table."""

    @abstractmethod
    def park(self, connection: Connection, name: str, revision: int, parked: Sequence[Quarantined], /) -> None:
        """Insert into the quarantine the events that failed in a bulk load; nobody else may write to these rows."""

    # Locations

    @abstractmethod
    def own_location(self, name: str, revision: int, /) -> str:
        """Return the revision's own location, for when another revision has the declared one."""

    def declared_name(self, name: str, /) -> str:
        """Return the declared name of a table that has this name in some location."""
        return name

    @abstractmethod
    def relocate(self, tables: Sequence[Table], location: str, /) -> None:
        """Change these copies of declared tables so that they are in a location other than the declared one.

        Call it last: SQLAlchemy derives names of indexes and the schema of enum types from the declared table.
        """

    @abstractmethod
    def differ(self, left: ColumnElement[Any], right: ColumnElement[Any], /) -> ColumnElement[bool]:
        """Return the condition that two values are stored differently, whatever the database considers equal."""

    # Connections

    def refusal_of(self, url: URL, /) -> str | None:  # noqa: ARG002 - any database will do
        """Return why this database cannot be used; None when it can."""
        return None

    @abstractmethod
    def async_engine(self, url: URL, purpose: str, limits: SessionLimits, pool: Mapping[str, Any], /) -> AsyncEngine:
        """Return an async engine, not connected yet."""

    @abstractmethod
    def engine(self, url: URL, purpose: str, limits: SessionLimits, /) -> Engine:
        """Return a blocking engine without a pool, not connected yet."""

    def check_sessions(self, url: URL, /) -> None:
        """Raise `Unreachable` where a pooler lets connections share their sessions. Blocks."""

    @abstractmethod
    def soundness(self, connection: Connection, /) -> Soundness:
        """Check the version and the settings of the database; only reads."""

    @abstractmethod
    def read_only(self, url: URL, purpose: str, limits: SessionLimits, /) -> AbstractContextManager[Connection | None]:
        """Open a connection that cannot write and leaves nothing behind; None where there is no database yet."""

    def prepare_for_handlers(self, engine: Engine, /) -> None:
        """Prepare the engine's new connections for handlers: foreign keys are enforced on them."""

    @abstractmethod
    def load_all(self, connection: Connection, /) -> None:
        """Let this connection's driver load values that Python cannot represent, instead of raising an error."""

    # Errors of the driver

    @abstractmethod
    def faults(self, error: DBAPIError | BaseException, /) -> Fault:
        """Return the kinds of fault that an error of SQLAlchemy or of the driver reports."""

    @abstractmethod
    def remedy(self, cause: object, /) -> str:
        """Return what to do about an error while connecting, as a sentence for people."""

    def refuses_writes(self, connection: Connection, /) -> str:  # noqa: ARG002 - it does not say so
        """Return why the database accepts no writes from anybody, as far as it says so; else an empty string."""
        return ""


def listed(texts: Sequence[str]) -> str:
    """Return at most ten of the texts, separated by commas, and the number of the others."""
    return ", ".join(texts[:10]) + (f" and {len(texts) - 10} more" if len(texts) > 10 else "")


class Fit(Enum):
    """How an existing column takes the values of the type that is declared for it."""

    SAME = "same"
    OTHER = "other"
    """It has another type that gives every value back, or a type that cannot be compared."""
    LOSES = "loses"
    """It refuses some values, or gives back other ones."""


def spoken(kind: sa.TypeEngine[Any], dialect: SqlalchemyDialect) -> str:
    """Return a type as SQL writes it, an enum type with its labels; name both types where it is stored as another."""
    stored_type = stored(kind, dialect)
    if isinstance(stored_type, sa.NullType):
        return "of no type that is known"
    item_type = element(stored_type, dialect)
    if isinstance(item_type, sa.Enum) and item_type.native_enum:
        return cut(
            f"{item_type.name} ENUM{'' if item_type is stored_type else '[]'} ({', '.join(map(repr, item_type.enums))})"
        )
    text = str(stored_type.compile(dialect=dialect))
    return text if plain(kind) is kind else f"{plain(kind)!s}, kept as {text}"


@dataclass(frozen=True, slots=True)
class Weakness:
    """A setting or a version of the database that is a risk."""

    what: str
    cost: str
    remedy: str
    is_fault: bool = False
    """Whether rows may be lost or wrong, or nothing can be written."""
    is_rare: bool = False
    """Whether it takes a rare coincidence to do harm."""


@dataclass(frozen=True, slots=True)
class Soundness:
    """The result of checking a database: its version and its weaknesses."""

    version: str
    """The name and the version for people: `PostgreSQL 18.1`."""
    weaknesses: tuple[Weakness, ...]


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers with which a version begins: 18 and 1 of `18.1 (Debian …)`."""
    numbers = version.partition(" ")[0].split(".")
    return tuple(int(number) for number in numbers if number.isdecimal())
