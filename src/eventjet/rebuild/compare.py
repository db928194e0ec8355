"""Live tables compared with the same ones made again: a fold's row by row in the normal form, others by the database.

Numbers that PostgreSQL gave are no function of the log: those of a batch that was rolled back are never used again. So
such columns, and foreign keys to them, are left out, and rows that have no other key are paired in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from itertools import compress
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    String,
    Table,
    Text,
    and_,
    cast,
    func,
    or_,
    select,
)

from eventjet.errors import RowUnreadable
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.projections.sql_projection import ResolvedSql
from eventjet.rebuild.progress import Watch
from eventjet.rebuild.shadow import Pair, Shadow
from eventjet.sql.database import READ_ONLY
from eventjet.sql.dialect import dialect_of

EXAMPLES_MAX = 20
"""Differences that are looked into; all are counted."""
UNKNOWN_SINCE = "since when is not known of SQL by hand"

_FETCH = 2_000
_TOLD_EVERY = 10_000
_PAIRED = "eventjet_row"


@dataclass(frozen=True, slots=True)
class Difference:
    """One key whose live row is not what the log says."""

    key: tuple[Any, ...]
    """For SQL by hand the table's name comes first."""
    live: Any
    """The live row; None when there is none."""
    expected: Any
    """The row folded from the log; None when there should be none."""
    columns: tuple[str, ...]
    """The fields of a row, or the columns of SQL by hand, that differ; none where a side has no row."""
    since: str
    """`missed since N`: equal before the event at position N; or `never equal`. Not known for SQL by hand."""
    position: int | None = None
    """That N; None where there is none."""


def compare_rows(shadow: Shadow[ResolvedProjection], watch: Watch) -> tuple[int, int, list[tuple[Any, Any]]]:
    """(live rows, differences, the first pairs of live and expected row) of a fold.

    A live row that no fold can have written is a `RowUnreadable`.
    """
    codec = RowCodec(shadow.resolved.table, shadow.resolved.row_type, shadow.target.database.dialect)
    ((copied, made),) = shadow.pairs()
    rows = differences = 0
    first: list[tuple[Any, Any]] = []
    with _in_key_order(shadow, copied, codec) as live, _in_key_order(shadow, made, codec) as expected:
        for one, other in _paired(live, expected, codec):
            rows += one is not None
            if rows % _TOLD_EVERY == 0:
                watch.tell("compare", rows, 0)
            if not are_equal(one, other, codec):
                differences += 1
                if len(first) < EXAMPLES_MAX:
                    first.append((one, other))
    return rows, differences, first


def compare_tables(shadow: Shadow[ResolvedSql], watch: Watch) -> tuple[int, int, list[Difference]]:
    """(live rows, differences, the first of them table by table) of SQL by hand."""
    rows = differences = 0
    examples: list[Difference] = []
    numbered = shadow.space.numbered(shadow.tables)
    with shadow.space.engine().connect().execution_options(**{READ_ONLY: True}) as connection:
        for pair in shadow.pairs():
            some, different, first = _compare_table(connection, pair, numbered, watch)
            rows, differences = rows + some, differences + different
            examples += first
    return rows, differences, examples[:EXAMPLES_MAX]


@contextmanager
def _in_key_order(shadow: Shadow[ResolvedProjection], table: Table, codec: RowCodec) -> Generator[Iterator[Any]]:
    """The rows of one table, a few at a time, by key as Python sorts it."""
    engine = shadow.space.engine()
    quote = engine.dialect.identifier_preparer.quote_identifier
    in_bytes = shadow.target.database.dialect.byte_order
    order = ", ".join(
        quote(column.name) + (in_bytes if isinstance(column.type, String) else "")
        for column in shadow.resolved.table.primary_key.columns
    )
    columns = ", ".join(map(quote, codec.columns))
    with engine.connect() as connection:
        shadow.target.database.dialect.load_all(connection)
        options = {"stream_results": True, "yield_per": _FETCH, READ_ONLY: True}
        found = connection.execution_options(**options).exec_driver_sql(
            f"select {columns} from {engine.dialect.identifier_preparer.format_table(table)} order by {order}"
        )
        yield (_loaded(codec, values) for values in found)


def _loaded(codec: RowCodec, values: Sequence[Any]) -> Any:
    try:
        return codec.load(values)
    except RowUnreadable as error:
        return error


def key_of(row: Any, codec: RowCodec) -> tuple[Any, ...]:
    """The key of a row, or of one that cannot be read."""
    return row.key if isinstance(row, RowUnreadable) else codec.key(row)


def _paired(live: Iterator[Any], expected: Iterator[Any], codec: RowCodec) -> Iterator[tuple[Any, Any]]:
    """Rows of the same key together; None where a side has none. Both sides come in the order of their keys.

    Neither need have a unique key: a second row of one is paired with None.
    """
    one, other = next(live, None), next(expected, None)
    while one is not None or other is not None:
        if (
            other is None
            or (isinstance(one, RowUnreadable) and not one.has_key)
            or (one is not None and key_of(one, codec) < codec.key(other))
        ):
            yield one, None
            one = next(live, None)
        elif one is None or codec.key(other) < key_of(one, codec):
            yield None, other
            other = next(expected, None)
        else:
            yield one, other
            one, other = next(live, None), next(expected, None)


def are_equal(one: Any, other: Any, codec: RowCodec) -> bool:
    """Whether two rows are the same values, or there is none on either side."""
    return one is other if one is None or other is None else not differing(one, other, codec)


def differing(one: Any, other: Any, codec: RowCodec) -> tuple[str, ...]:
    """The fields of two rows whose values are stored otherwise, whatever their class calls equal."""
    if one is None or other is None:
        return ()
    for row in (one, other):
        if isinstance(row, RowUnreadable):
            return (codec.fields[codec.columns.index(row.column)],) if row.column else codec.fields
    triples = zip(codec.fields, codec.dump(one), codec.dump(other), strict=True)
    return tuple(name for name, a, b in triples if not _is_same(a, b))


def _is_same(a: Any, b: Any) -> bool:
    """Whether two values print alike, too: 1.0 is not 1.00 then, nor 0.0 what -0.0 is."""
    if isinstance(a, float | Decimal):
        return type(a) is type(b) and str(a) == str(b)
    return a == b


def _compare_table(
    connection: Connection, pair: Pair, numbered: Collection[Column[Any]], watch: Watch
) -> tuple[int, int, list[Difference]]:
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
    distinct = [dialect_of(connection).differ(left.c[name], right.c[name]) for name in compared]
    differ = or_(*missing, *distinct)
    differences = connection.scalar(select(func.count()).select_from(joined).where(differ)) or 0
    if not differences:
        return rows, 0, []
    names = [*key, *[name for name in compared if name not in key]]
    columns = [side.c[name] for side in (left, right) for name in names]
    order = [func.coalesce(left.c[name], right.c[name]) for name in key]

    def first(shown: Sequence[ColumnElement[Any]]) -> Sequence[Any]:
        labelled = [column.label(f"c{number}") for number, column in enumerate([*shown, *distinct])]
        query = select(*labelled).select_from(joined).where(differ)
        return connection.execute(query.order_by(*order).limit(EXAMPLES_MAX)).all()

    try:
        found = first(columns)
    except Exception:  # noqa: BLE001 - whatever a driver or a type raises for a value that Python does not have
        dialect_of(connection).load_all(connection)
        found = first([cast(column, Text) for column in columns])
    sides = len(columns)
    return (
        rows,
        differences,
        [_difference(made.name, row[:sides], names, len(key), list(compress(compared, row[sides:]))) for row in found],
    )


def _is_given(column: Column[Any], numbered: Collection[Column[Any]]) -> bool:
    """Whether the database numbered this column, or one that it refers to."""
    if column in numbered:
        return True
    return any(key.column is not column and _is_given(key.column, numbered) for key in column.foreign_keys)


def _difference(table: str, row: Sequence[Any], names: list[str], keys: int, differ: Sequence[str]) -> Difference:
    live, expected = dict(zip(names, row, strict=False)), dict(zip(names, row[len(names) :], strict=True))
    sides = [side if any(side[name] is not None for name in names[:keys]) else None for side in (live, expected)]
    there = sides[0] or sides[1] or {}
    shown = [
        None if side is None else {name: value for name, value in side.items() if name != _PAIRED} for side in sides
    ]
    columns = tuple(differ) if all(sides) else ()
    return Difference((table, *[there[name] for name in names[:keys]]), shown[0], shown[1], columns, UNKNOWN_SINCE)
