"""Statements of one projection: its rows by keys or a prefix, and a change of rows, quarantine and checkpoint.

Each dialect has its own `Statements`. Names come from declared metadata alone; values are always bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Protocol, TypeAlias

from sqlalchemy import Column, ColumnElement, Connection, Select, Table, UnaryExpression, select
from sqlalchemy.sql.operators import custom_op

from eventjet.domain.parked import Parked
from eventjet.projections.row_codec import RowCodec
from eventjet.sql.own_tables import quarantine

Key: TypeAlias = tuple[Any, ...]
Advance: TypeAlias = tuple[int, str, float, str, int, int, int]
"""(position, event id, lease in seconds, and of whom: name, revision, epoch, position before): see `ADVANCE`."""


@dataclass(frozen=True, slots=True)
class QuarantineChanges:
    """What a batch does to the quarantine; no position is in two of these."""

    parked: Sequence[Parked] = ()
    """To insert, or to put in the place of what was there."""
    freed: Sequence[int] = ()
    """Positions that were blocked by a parked one and are taken: to delete."""
    resolved: Sequence[tuple[int, str]] = ()
    """Positions with their new resolution."""


COLUMNS = tuple(one.name for one in fields(Parked))
INSERT = f"insert into {quarantine.name} (projection, revision, {', '.join(COLUMNS)}, parked_at)"
REPLACE = (
    "on conflict (projection, revision, position) do update set "
    + ", ".join(f"{name} = excluded.{name}" for name in (*COLUMNS[1:], "parked_at"))
    + ", resolved_at = null"
)


Rendered: TypeAlias = tuple[Any, Any, Any]
"""(kept, made, gone) as one database's driver takes them, of values that `marshal` knows; empty where there is none."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a batch does to the rows; no key is in two of these."""

    kept: Sequence[Any] = ()
    """Rows to insert or replace."""
    made: Sequence[Any] = ()
    """Rows to insert; one of the same key is an `IntegrityError`."""
    gone: Sequence[Key] = ()
    """Keys of rows to delete."""
    quarantine: QuarantineChanges | None = None
    rendered: Sequence[Rendered] = ()
    """More of the first three, which other processes have rendered."""


class Statements(Protocol):
    """For one table and its checkpoint."""

    def read(self, connection: Connection, keys: Sequence[Key]) -> dict[Key, Any]:
        """The rows there are of these keys, of which there is at least one."""
        ...

    def render(self, changes: Changes) -> Rendered:
        """Rows and keys, ready for `write`, wherever that is called."""
        ...

    def write(self, connection: Connection, advance: Advance, changes: Changes) -> bool:
        """Advance the checkpoint and change the rows, or do neither and return False, when another epoch has begun or
        the position is another. On PostgreSQL one statement, on SQLite several within the caller's transaction."""
        ...


class Names:
    """Quoted names of one table; on PostgreSQL their percent signs are doubled, as the driver wants them."""

    def __init__(self, table: Table, dialect: Any) -> None:
        prepare: Any = dialect.identifier_preparer
        self.table = str(prepare.format_table(table))
        self.key = list(table.primary_key.columns)
        self._columns = list(table.columns)
        self._quote = prepare.quote

    def quoted(self, column: Column[Any]) -> str:
        return str(self._quote(column.name))

    def all(self, prefix: str = "") -> str:
        return ", ".join(prefix + self.quoted(column) for column in self._columns)

    def on_conflict(self) -> str:
        key = ", ".join(self.quoted(column) for column in self.key)
        rest = [self.quoted(column) for column in self._columns if column not in self.key]
        if not rest:
            return f" on conflict ({key}) do nothing"
        return f" on conflict ({key}) do update set " + ", ".join(f"{name} = excluded.{name}" for name in rest)


def by_key(codec: RowCodec, found: Iterable[Sequence[Any]]) -> dict[Key, Any]:
    """Rows as the driver gives them, by their keys."""
    load = codec.load
    key_of = codec.key
    return {key_of(row): row for row in map(load, found)}


_LAST = "\U0010ffff"
_BEFORE_SURROGATES, _AFTER_SURROGATES = "\ud7ff", "\ue000"


class TextOrder(Enum):
    """What an index of a column of text is in the order of."""

    PLAIN = ("", ">=", ">", "<")
    """The column's own, which is that of code points."""
    PATTERN = ("", "~>=~", "~>~", "~<~")
    """The operators of PostgreSQL's `text_pattern_ops`."""
    BYTES = ("C", ">=", ">", "<")
    """PostgreSQL's collation "C"."""


def keys_from(table: Table, key: str, order: TextOrder, prefix: str, after: str, most: int) -> Select[Any]:
    """The keys that begin with `prefix`, in their order, `most` of them, above `after` where that is not empty."""
    collation, at_least, above, below = order.value
    column: Column[Any] = table.c[key]
    compared: ColumnElement[Any] = column.collate(collation) if collation else column
    found = select(column).limit(most)
    start = (above, after) if after >= prefix and after else (at_least, prefix)
    end = next_text(prefix)
    found = found.where(compared.bool_op(start[0])(start[1]))
    if end is not None:
        found = found.where(compared.bool_op(below)(end))
    if order is TextOrder.PATTERN:
        using: custom_op[Any] = custom_op("USING ~<~")
        by_pattern: UnaryExpression[Any] = UnaryExpression(column, modifier=using)
        return found.order_by(by_pattern)
    return found.order_by(compared)


def next_text(prefix: str) -> str | None:
    """The least text above all that begins with a prefix, by code points; None where there is none."""
    kept = prefix.rstrip(_LAST)
    if not kept:
        return None
    last = kept[-1]
    return kept[:-1] + (_AFTER_SURROGATES if last == _BEFORE_SURROGATES else chr(ord(last) + 1))
