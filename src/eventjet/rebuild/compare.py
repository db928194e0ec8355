"""Tables of a `SqlProjection`, live and made again, compared row by row by the database itself.

Numbers that PostgreSQL gave are no function of the log: those of a batch that was rolled back are never used again. So
such columns, and foreign keys to them, are left out, and rows that have no other key are paired in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from sqlalchemy import JSON, Column, ColumnElement, Connection, MetaData, Table, Text, and_, cast, func, or_, select
from sqlalchemy.dialects.postgresql import JSONB

from eventjet.rebuild.progress import Watch

Pair: TypeAlias = tuple[Table, Table]
"""(the copy of the live one, what was made from the log) of one table."""

_PAIRED = "eventjet_row"


class TableDifference:
    """One row that is not what the log says; None stands for no row."""

    __slots__ = ("expected", "key", "live")

    def __init__(
        self, key: tuple[Any, ...], live: Mapping[str, Any] | None, expected: Mapping[str, Any] | None
    ) -> None:
        self.key = key
        """The table's name, and the primary key or the row's number in its order."""
        self.live = live
        self.expected = expected


def compare_table(
    connection: Connection, pair: Pair, numbered: Collection[Column[Any]], examples_max: int, watch: Watch
) -> tuple[int, int, list[TableDifference]]:
    """(live rows, differences, the first of them by key); `numbered` are made columns that the database filled."""
    live, made = pair
    rows = connection.scalar(select(func.count()).select_from(live)) or 0
    watch.tell("compare", rows, 0)
    compared = [column.key for column in made.columns if not _is_given(column, numbered)]
    key = [column.key for column in made.primary_key.columns]
    if not set(key) <= set(compared):
        by = key
        key = [_PAIRED]
        left, right = (
            select(
                *[side.c[name] for name in compared],
                func.row_number().over(order_by=[side.c[k] for k in by]).label(_PAIRED),
            ).subquery(f"eventjet_{name}")
            for side, name in ((live, "a"), (made, "b"))
        )
    else:
        left, right = live.alias("eventjet_a"), made.alias("eventjet_b")
    joined = left.outerjoin(right, and_(*[left.c[name] == right.c[name] for name in key]), full=True)
    missing = left.c[key[0]].is_(None), right.c[key[0]].is_(None)
    differ = or_(
        *missing, *[_comparable(left.c[name]).is_distinct_from(_comparable(right.c[name])) for name in compared]
    )
    differences = connection.scalar(select(func.count()).select_from(joined).where(differ)) or 0
    if not differences:
        return rows, 0, []
    names = [*key, *[name for name in compared if name not in key]]
    columns = [side.c[name] for side in (left, right) for name in names]
    labelled = [column.label(f"c{number}") for number, column in enumerate(columns)]
    order = [func.coalesce(left.c[name], right.c[name]) for name in key]
    found = connection.execute(select(*labelled).select_from(joined).where(differ).order_by(*order).limit(examples_max))
    return rows, differences, [_difference(made.name, tuple(row), names, len(key)) for row in found]


def copy_of(table: Table, name: str) -> Table:
    """A table beside another one, of the same columns, without any constraint."""
    columns: list[Column[object]] = [Column(column.name, column.type, key=column.key) for column in table.columns]
    return Table(name, MetaData(), *columns, schema=table.schema)


def _is_given(column: Column[Any], numbered: Collection[Column[Any]]) -> bool:
    """Whether the database numbered this column, or one that it refers to."""
    if column in numbered:
        return True
    return any(key.column is not column and _is_given(key.column, numbered) for key in column.foreign_keys)


def _difference(table: str, row: tuple[Any, ...], names: list[str], keys: int) -> TableDifference:
    live, expected = dict(zip(names, row, strict=False)), dict(zip(names, row[len(names) :], strict=True))
    sides = [side if any(side[name] is not None for name in names[:keys]) else None for side in (live, expected)]
    there = sides[0] or sides[1] or {}
    shown = [
        None if side is None else {name: value for name, value in side.items() if name != _PAIRED} for side in sides
    ]
    return TableDifference((table, *[there[name] for name in names[:keys]]), shown[0], shown[1])


def _comparable(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """PostgreSQL has no equality for JSON as it was written; equal handlers write equal text."""
    return cast(column, Text) if isinstance(column.type, JSON) and not isinstance(column.type, JSONB) else column
