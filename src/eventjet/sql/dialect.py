"""`Dialect`: the port to one kind of database. Whatever differs between databases is asked of it.

To add a database, write its class and its `Tables` in files of their own, add it to `_dialects` here, and run
tests/contracts for it (tests/integration/test_dialects.py). To rebuild there, write its workspace in
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

from eventjet.domain.parked import Parked
from eventjet.projections.columns import Convert, element, labels, plain, stored
from eventjet.projections.row_codec import ColumnValues, RowCodec
from eventjet.sql.statements import Statements
from eventjet.sql.tables import Tables
from eventjet.text import cut

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a session on PostgreSQL may hold up, so that a stopped process frees its locks. 0 means no limit."""

    lock_ms: int = 2_000
    statement_ms: int = 15_000
    idle_in_transaction_ms: int = 2_500


class Fault(Flag):
    """What an error of a database is about."""

    NOTHING_KNOWN = 0
    DATA = auto()
    """A value or a row broke a rule of the database, so that trying again cannot help."""
    TOO_LONG = auto()
    """A text is longer than its column holds."""
    TRANSIENT = auto()
    """The connection, a lock, or the server failed, so that the same may succeed another time."""
    LOCKED_OUT = auto()
    """A lock was not to be had in time."""
    NO_TABLE = auto()
    """A table is missing."""
    FORBIDDEN = auto()
    """The session lacks a right."""


class Dialect(ColumnValues):
    """What differs between databases. Has no state, and can be pickled.

    Everything that is given a connection happens within the caller's transaction. What not every database has to do is
    nothing here.
    """

    name: ClassVar[str]
    """As SQLAlchemy calls it."""
    tables: ClassVar[Tables]
    """The tables that are in the database."""
    clock: ClassVar[str]
    """`Clock` as text."""
    is_concurrent: ClassVar[bool]
    """Whether others read and write while a transaction writes; if not, writers of one process take turns."""
    relocates_handlers: ClassVar[bool]
    """Whether SQL by hand finds its tables in another location under the names that it uses."""
    has_schemas: ClassVar[bool] = True
    """Whether a table may name a schema."""
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

    @abstractmethod
    def differ(self, one: ColumnElement[Any], other: ColumnElement[Any], /) -> ColumnElement[bool]:
        """Whether two values are not stored alike, whatever the database calls equal."""

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
    def faults(self, error: DBAPIError | BaseException, /) -> Fault:
        """What an error is about, of SQLAlchemy's or of the driver's own."""

    @abstractmethod
    def remedy(self, cause: object, /) -> str:
        """What to do about one while connecting."""

    def refuses_writes(self, connection: Connection, /) -> str:  # noqa: ARG002 - it does not say so
        """Why the database takes no writes of anybody, as far as it can be asked; empty where it may take them."""
        return ""


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
