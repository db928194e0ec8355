"""`Tables`: the port to the tables that are in a database, and what SQL calls them.

It says which tables are there, what they have and what hangs on them, moves and drops them, and locks them. Everything
happens within the caller's transaction.
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


class Tables(Protocol):
    """The tables of one kind of database. Has no state. What not every database has to do is nothing here."""

    @abstractmethod
    def find(self, connection: Connection, name: TableName, location: str, /) -> TableRef | None:
        """The table declared under this name, in a location."""

    def find_all(self, connection: Connection, names: Iterable[TableName], location: str) -> dict[TableName, TableRef]:
        """Those that are there of the tables declared under these names."""
        looked = {name: self.find(connection, name, location) for name in names}
        return {name: table for name, table in looked.items() if table is not None}

    def count_rows(self, connection: Connection, table: TableRef, /) -> int:
        """About how many rows it has."""
        return connection.scalar(verbatim(f"select count(*) from {table.quoted()}")) or 0  # noqa: S608 - of a known table

    def name_in_full(self, connection: Connection, name: TableName, /) -> TableName:
        """A declared name in the form in which the database tells it from others."""
        return name[0] or connection.dialect.default_schema_name, name[1]

    # What they are

    @abstractmethod
    def features(self, connection: Connection, table: TableRef, heir: TableRef | None = None, /) -> list[Feature]:
        """Everything a table has that one made in its place could lack: columns, rules, indexes, settings.

        The statements of what can be carried are for the `heir`.
        """

    @abstractmethod
    def dependents(
        self, connection: Connection, table: TableRef, along: Sequence[TableRef], /, *, for_good: bool
    ) -> list[str]:
        """What depends on a table and would not follow its name to another one, in words; only looks.

        `for_good`: no other one comes, so what follows the name counts, too. Foreign keys between tables `along`, which
        go together, do not.
        """

    def broken_by_name(self, connection: Connection, /) -> set[str]:  # noqa: ARG002 - whatever depends on a table is known
        """Views and triggers that cannot be used, as they name what is not there; only looks."""
        return set()

    @abstractmethod
    def modelled(self, connection: Connection, tables: Sequence[Table], /) -> AbstractContextManager[Connection]:
        """Make empty tables as they are declared, on another connection; afterwards they are gone."""

    @abstractmethod
    def text_order(self, connection: Connection, table: TableRef, column: str, /) -> TextOrder | None:
        """How an index finds text of a column by its code points; None where none does."""

    def home(self, connection: Connection, /) -> str:  # noqa: ARG002 - they go wherever the tables go
        """The database whose identities of tables these are; a copy made from a dump is another one."""
        return ""

    @abstractmethod
    def identity(self, connection: Connection, table: TableRef, /, *, make: bool = False) -> str | None:
        """What tells a table from any other that came, or comes, under its name; None where nothing is noted on it.

        It stays when the table is renamed, moved or altered, and when its rows are deleted. `make` notes one on a table
        that has none.
        """

    # Changes

    @abstractmethod
    def move(
        self, connection: Connection, table: TableRef, name: TableName, location: str, schema: str | None, /
    ) -> None:
        """Move a table to a location; `schema` says where that is when a table has just left it."""

    def inherit(self, connection: Connection, old: TableRef, heir: TableRef, /) -> None:
        """Give a table the owner, exactly the rights, and what can be carried of the features of another one."""

    @abstractmethod
    def drop(self, connection: Connection, tables: Sequence[TableRef], /) -> None:
        """Drop them, whatever foreign keys are between them, and nothing that depends on them."""

    def ensure_location(self, connection: Connection, location: str, /) -> None:
        """Make what the tables of a location need."""

    def drop_location(self, connection: Connection, location: str, /) -> None:
        """Remove what `ensure_location` made, unless something else is in it."""

    # Locks: none where one writer excludes all others. The contract holds that every other database has them.

    def lock_migrations(self, connection: Connection, /) -> None:
        """Let no other process create or alter tables of eventjet until this transaction ends."""

    def lock(self, connection: Connection, tables: Iterable[TableRef], /, *, readers: bool) -> None:
        """Keep writers out to the end of the transaction, and readers too unless they are let in."""

    def bound_waits(self, connection: Connection, /, *, patient: bool = False) -> None:
        """To the end of the transaction, wait no longer for a lock than readers may be kept waiting.

        `patient`: longer, for locks of checkpoints, which no reader waits for. Workers of SQL by hand keep their rows
        locked while handlers run.
        """


def has_rows(connection: Connection, table: TableRef) -> bool:
    """Whether a table has any."""
    return connection.scalar(verbatim(f"select 1 from {table.quoted()} limit 1")) is not None  # noqa: S608 - of a known table


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
