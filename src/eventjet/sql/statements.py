"""`Statements` is the port to the SQL of one projection: it reads rows by key, and writes rows and checkpoint.

Each dialect has its own `Statements`. `keys_from` reads the keys with a prefix. Names come only from declared metadata;
values are always bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Protocol, TypeAlias

from sqlalchemy import Column, ColumnElement, Connection, Select, Table, UnaryExpression, select
from sqlalchemy.sql.operators import custom_op

from eventjet.domain.quarantined import Quarantined
from eventjet.projections.row_codec import RowCodec
from eventjet.sql.own_tables import quarantine

Key: TypeAlias = tuple[Any, ...]
Advance: TypeAlias = tuple[int, str, float, str, int, int, int]
"""(position, event id, lease in seconds, name, revision, epoch, position before): see `checkpoint.ADVANCE`."""


@dataclass(frozen=True, slots=True)
class QuarantineChanges:
    """The changes of the quarantine by a batch; no position is in two of the fields."""

    upserts: Sequence[Quarantined] = ()
    """Rows to insert or replace."""
    deletions: Sequence[int] = ()
    """Positions of rows to delete: events that waited behind a quarantined one and are in the read model now."""
    resolutions: Sequence[tuple[int, str]] = ()
    """Positions with their new resolution."""


COLUMNS = tuple(field.name for field in fields(Quarantined))
INSERT = f"insert into {quarantine.name} (projection, revision, {', '.join(COLUMNS)}, quarantined_at)"
REPLACE = (
    "on conflict (projection, revision, position) do update set "
    + ", ".join(f"{name} = excluded.{name}" for name in (*COLUMNS[1:], "quarantined_at"))
    + ", resolved_at = null"
)


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of rows by a batch; no key is in two of the fields."""

    upserts: Sequence[Any] = ()
    """Rows to insert or replace."""
    inserts: Sequence[Any] = ()
    """Rows to insert; an existing row of the same key is an `IntegrityError`."""
    deletions: Sequence[Key] = ()
    """Keys of rows to delete."""
    quarantine: QuarantineChanges | None = None
    states: Sequence[Any] = ()
    """Rows to insert or replace in the table of states, where the projection has one."""


class Statements(Protocol):
    """The statements for one table and its checkpoint, and for the table of states beside it."""

    def read(self, connection: Connection, keys: Sequence[Key]) -> dict[Key, Any]:
        """Return the existing rows of these keys (at least one), by key."""
        ...

    def write(self, connection: Connection, advance: Advance, changes: Changes) -> bool:
        """Advance the checkpoint and change rows, states and quarantine, or do nothing and return False.

        It returns False when another epoch has begun or the checkpoint is at another position. This is one statement on
        PostgreSQL, and several within the caller's transaction on SQLite.
        """
        ...


class Names:
    """The quoted names of a table and its columns; on PostgreSQL with percent signs doubled, as the driver requires."""

    def __init__(self, table: Table, dialect: Any) -> None:
        prepare: Any = dialect.identifier_preparer
        self.table = str(prepare.format_table(table))
        self.key = list(table.primary_key.columns)
        self._columns = list(table.columns)
        self._quote = prepare.quote

    def quoted(self, column: Column[Any]) -> str:
        """Return the quoted name of a column."""
        return str(self._quote(column.name))

    def all(self, prefix: str = "") -> str:
        """Return the quoted names of all columns, each after `prefix`, separated by commas."""
        return ", ".join(prefix + self.quoted(column) for column in self._columns)

    def on_conflict(self) -> str:
        """Return the clause that makes an insert replace the other columns of an existing row."""
        key = ", ".join(self.quoted(column) for column in self.key)
        other_columns = [self.quoted(column) for column in self._columns if column not in self.key]
        if not other_columns:
            return f" on conflict ({key}) do nothing"
        return f" on conflict ({key}) do update set " + ", ".join(f"{name} = excluded.{name}" for name in other_columns)


def by_key(codec: RowCodec, rows: Iterable[Sequence[Any]]) -> dict[Key, Any]:
    """Load rows as the driver gives them, and return them by key."""
    load = codec.load
    key_of = codec.key
    return {key_of(row): row for row in map(load, rows)}


_LAST = "\U0010ffff"
_BEFORE_SURROGATES, _AFTER_SURROGATES = "\ud7ff", "\ue000"


class TextOrder(Enum):
    """How an index sorts a column of text by code points: (collation, operators for at least, above and below)."""

    PLAIN = ("", ">=", ">", "<")
    """By the column's own collation, which sorts by code points."""
    PATTERN = ("", "~>=~", "~>~", "~<~")
    """By the operators of PostgreSQL's `text_pattern_ops`."""
    BYTES = ("C", ">=", ">", "<")
    """By PostgreSQL's collation "C"."""


def keys_from(table: Table, key: str, order: TextOrder, prefix: str, after: str, limit: int) -> Select[Any]:
    """Return the query for the first `limit` keys that begin with `prefix`, in order, above `after` if that is set."""
    collation, at_least, above, below = order.value
    column: Column[Any] = table.c[key]
    compared: ColumnElement[Any] = column.collate(collation) if collation else column
    query = select(column).limit(limit)
    start = (above, after) if after >= prefix and after else (at_least, prefix)
    end = next_text(prefix)
    query = query.where(compared.bool_op(start[0])(start[1]))
    if end is not None:
        query = query.where(compared.bool_op(below)(end))
    if order is TextOrder.PATTERN:
        using: custom_op[Any] = custom_op("USING ~<~")
        by_pattern: UnaryExpression[Any] = UnaryExpression(column, modifier=using)
        return query.order_by(by_pattern)
    return query.order_by(compared)


def next_text(prefix: str) -> str | None:
    """Return the least text that sorts after everything with this prefix, by code points; None where there is none."""
    stripped = prefix.rstrip(_LAST)
    if not stripped:
        return None
    last = stripped[-1]
    return stripped[:-1] + (_AFTER_SURROGATES if last == _BEFORE_SURROGATES else chr(ord(last) + 1))
