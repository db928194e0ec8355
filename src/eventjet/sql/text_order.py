"""How an index finds text in the order of code points, so that what begins with some text is a range and no scan."""

from __future__ import annotations

from enum import Enum
from typing import Any

from sqlalchemy import Column, ColumnElement, Select, Table, UnaryExpression, select
from sqlalchemy.sql.operators import custom_op

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
