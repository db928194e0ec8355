"""Tables as a database has them: what both databases can be asked about them, and how they are moved.

`postgres_tables` and `sqlite_tables` answer; each is a `Tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from sqlalchemy import Connection

T = TypeVar("T")

TableName: TypeAlias = tuple[str | None, str]
"""(schema, name) of a table as it is declared."""


@dataclass(frozen=True, slots=True)
class TableRef:
    """A table that is in the database."""

    oid: int | None
    """PostgreSQL's; it stays the same when the table is moved."""
    schema: str | None
    name: str

    def quoted(self, connection: Connection) -> str:
        """Its qualified name in SQL."""
        return qualified(connection, self.schema, self.name)


class Tables(Protocol):
    """Everything happens within the caller's transaction."""

    def find(self, connection: Connection, name: TableName, location: str) -> TableRef | None:
        """The table declared under this name, in a location."""
        ...

    def bound_waits(self, connection: Connection) -> None:
        """To the end of the transaction, wait no longer for a lock than readers may be kept waiting."""
        ...

    def patiently(self, connection: Connection, lock: Callable[[], T]) -> T:
        """Lock checkpoints whose rows workers of SQL by hand keep locked while their handlers run."""
        ...

    def lock(self, connection: Connection, tables: Iterable[TableRef], *, readers: bool) -> None:
        """Keep writers out to the end of the transaction, and readers too unless they are let in."""
        ...

    def is_locked_out(self, error: Exception) -> bool:
        """Whether a driver's error says that a lock was not to be had in time."""
        ...

    def is_forbidden(self, error: Exception) -> bool:
        """Whether a driver's error says that the session lacks a right."""
        ...

    def inherit(self, connection: Connection, old: TableRef, heir: TableRef) -> None:
        """Give a table the owner, the storage parameters and the rights of another one."""
        ...

    def move(self, connection: Connection, table: TableRef, name: TableName, location: str, schema: str | None) -> None:
        """Move a table to a location; `schema` says where that is when a table has just left it."""
        ...

    def ensure_location(self, connection: Connection, location: str) -> None:
        """Make what the tables of a location need."""
        ...

    def drop_location(self, connection: Connection, location: str) -> None:
        """Remove what `ensure_location` made, unless something else is in it."""
        ...

    def obstacles(self, connection: Connection, table: TableRef, along: Sequence[TableRef]) -> list[str]:
        """What depends on a table and could not be taken over by another one, in words.

        Foreign keys between tables `along`, which move together, are no obstacle.
        """
        ...

    def indexes(self, connection: Connection, table: TableRef) -> list[str]:
        """Names of its indexes that no constraint made."""
        ...

    def count(self, connection: Connection, table: TableRef) -> int:
        """About how many rows it has."""
        ...

    def drop(self, connection: Connection, tables: Sequence[TableRef]) -> None:
        """Drop them, whatever foreign keys are between them."""
        ...


def qualified(connection: Connection, schema: str | None, name: str) -> str:
    """`"schema"."name"`, or the name alone."""
    quote = connection.dialect.identifier_preparer.quote_identifier
    return quote(name) if schema is None else f"{quote(schema)}.{quote(name)}"


def listed(found: Sequence[str]) -> str:
    """At most ten of them in words."""
    return ", ".join(found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "")
