"""`Tables` is the port to the tables that are in a database, and `TableRef` the reference to one of them.

The port finds tables, lists their features and dependents, and moves, drops and locks them. Everything happens within
the caller's transaction.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from sqlalchemy import Connection, Table, TextClause, text
from sqlalchemy import types as sa
from sqlalchemy.schema import (
    CreateIndex,
    CreateTable,
    ExecutableDDLElement,
    SetColumnComment,
    SetConstraintComment,
    SetTableComment,
)

from eventjet.projections.columns import element
from eventjet.sql.statements import TextOrder

TableName: TypeAlias = tuple[str | None, str]
"""(schema, name) of a table as it is declared."""


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


class Tables(Protocol):
    """The port to the tables of one kind of database. Has no state.

    A method that not every database needs does nothing by default.
    """

    @abstractmethod
    def find(self, connection: Connection, name: TableName, location: str, /) -> TableRef | None:
        """Return the table that is declared under this name, in a location; None where it does not exist."""

    def find_all(self, connection: Connection, names: Iterable[TableName], location: str) -> dict[TableName, TableRef]:
        """Return the tables that are declared under these names and exist in a location."""
        located = {name: self.find(connection, name, location) for name in names}
        return {name: table for name, table in located.items() if table is not None}

    def count_rows(self, connection: Connection, table: TableRef, /) -> int:
        """Return the approximate number of a table's rows."""
        return connection.scalar(verbatim(f"select count(*) from {table.quoted()}")) or 0  # noqa: S608 - of a known table

    def name_in_full(self, connection: Connection, name: TableName, /) -> TableName:
        """Return a declared name in the form in which the database distinguishes it from others."""
        return name[0] or connection.dialect.default_schema_name, name[1]

    # Features and identity

    @abstractmethod
    def features(self, connection: Connection, table: TableRef, heir: TableRef | None = None, /) -> list[Feature]:
        """Return all features that a table made in its place could lack: columns, rules, indexes, settings.

        Features that can be carried over have the statement that gives them to the `heir`.
        """

    @abstractmethod
    def dependents(
        self, connection: Connection, table: TableRef, along: Sequence[TableRef], /, *, for_good: bool
    ) -> list[str]:
        """Return, as text, what depends on a table and would not follow its name to another table; only reads.

        `for_good` says that no other table takes the name, so that what follows the name counts too. Foreign keys
        between the tables `along`, which go together, do not count.
        """

    def broken_by_name(self, connection: Connection, /) -> set[str]:  # noqa: ARG002 - whatever depends on a table is known
        """Return views and triggers that cannot be used, as they name something that does not exist; only reads."""
        return set()

    @abstractmethod
    def modelled(self, connection: Connection, tables: Sequence[Table], /) -> AbstractContextManager[Connection]:
        """Create empty tables as they are declared, on another connection; they are gone after the block."""

    @abstractmethod
    def text_order(self, connection: Connection, table: TableRef, column: str, /) -> TextOrder | None:
        """Return how an index sorts a column of text by code points; None where no index does."""

    def home(self, connection: Connection, /) -> str:  # noqa: ARG002 - they go wherever the tables go
        """Return the identity of the database in which identities of tables are valid; another one after a restore."""
        return ""

    @abstractmethod
    def identity(self, connection: Connection, table: TableRef, /, *, make: bool = False) -> str | None:
        """Return the identity of a table, which differs for every other table of its name; None where it has none.

        It stays the same when the table is renamed, moved or altered, and when its rows are deleted. `make` gives an
        identity to a table that has none.
        """

    # Changes

    @abstractmethod
    def move(
        self, connection: Connection, table: TableRef, name: TableName, location: str, schema: str | None, /
    ) -> None:
        """Move a table to a location; `schema` is the schema of the table that has just left that location, if any."""

    def inherit(self, connection: Connection, old: TableRef, heir: TableRef, /) -> None:
        """Give the heir the old table's owner, exactly its rights, and the features that can be carried over."""

    @abstractmethod
    def drop(self, connection: Connection, tables: Sequence[TableRef], /) -> None:
        """Drop tables, whatever foreign keys are between them, but nothing that depends on them."""

    def ensure_location(self, connection: Connection, location: str, /) -> None:
        """Create what a location needs, such as a schema, where it is missing."""

    def drop_location(self, connection: Connection, location: str, /) -> None:
        """Remove what `ensure_location` created, unless something else is in it."""

    # Locks. Only a database in which one writer excludes all others needs none; the contract tests check the others.

    def lock_migrations(self, connection: Connection, /) -> None:
        """Let no other process create or alter tables of eventjet until this transaction ends."""

    def lock(self, connection: Connection, tables: Iterable[TableRef], /, *, readers: bool) -> None:
        """Lock writers out to the end of the transaction; readers too, unless `readers` lets them in."""

    def bound_waits(self, connection: Connection, /, *, patient: bool = False) -> None:
        """Wait, to the end of the transaction, no longer for a lock than readers may be kept waiting.

        `patient` allows longer waits, for the locks of checkpoints, for which no reader waits: workers of SQL
        projections keep their checkpoints locked while handlers run.
        """


def has_rows(connection: Connection, table: TableRef) -> bool:
    """Whether a table has any rows."""
    return connection.scalar(verbatim(f"select 1 from {table.quoted()} limit 1")) is not None  # noqa: S608 - of a known table


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
