"""Read the tables of read models: a page of rows in the order of the primary key, or one row by its key.

The database cuts long values, and personal data is masked as in `eventjet verify`. A page starts after the key of the
row before it, so that the last page costs as much as the first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import Column, ColumnElement, Connection, MetaData, Select, Table, select
from sqlalchemy.exc import DataError, ProgrammingError
from sqlalchemy.types import NullType

from eventjet.app import App
from eventjet.domain.personal import MASK, field_hint, is_private
from eventjet.errors import UsageError
from eventjet.projections.columns import labels, normaliser, plain, unsupported
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import Checkpoint, names_of
from eventjet.sql.database import dialect_of, unusable
from eventjet.sql.dialect import Dialect
from eventjet.sql.locations import check_owner, located_tables
from eventjet.text import cut

PAGE_ROWS = 50
KEY_MAX = 5_000
"""Characters that a key may have as text."""
_VALUE_MAX = 300
"""Characters that a page shows of one value."""
_LONG = (sa.String, sa.JSON, sa.LargeBinary)
_KEY_KINDS: tuple[tuple[type, Any], ...] = (
    (datetime, datetime.fromisoformat),
    (date, date.fromisoformat),
    (UUID, UUID),
    (Decimal, Decimal),
)


@dataclass(frozen=True, slots=True)
class PlacedTable:
    """A table of a read model, and where the database has it."""

    name: str
    """The declared name of the table."""
    place: str
    """The quoted name of the table in the database."""
    table: Table
    hidden: frozenset[str]
    """Columns whose values are not shown: they are personal, or may be."""

    @property
    def key(self) -> list[Column[Any]]:
        return list(self.table.primary_key.columns)


@dataclass(frozen=True, slots=True)
class TablePage:
    """A page of rows in the order of their key."""

    columns: tuple[str, ...]
    key: tuple[str, ...]
    """Names of the key's columns; empty where the table has no key, and so its rows no order."""
    rows: Sequence[tuple[str | None, Sequence[str]]]
    """(key, values) of each row: the key as JSON, or None where there is none or it has no JSON form."""
    after: str | None
    """The last key of this page as JSON, after which the next page begins; None on the last page."""


@dataclass(frozen=True, slots=True)
class RevisionTables:
    """The tables of one revision, and a page of one of them."""

    checkpoint: Checkpoint | None
    """None where the revision has no checkpoint yet."""
    tables: Sequence[PlacedTable] = ()
    missing: Sequence[str] = ()
    """Declared names of the tables that do not exist."""
    chosen: PlacedTable | None = None
    page: TablePage | None = None


def revision_tables(
    connection: Connection, app: App, name: str, revision: int, *, table: str = "", after: str = "", start: str = ""
) -> RevisionTables:
    """Return a revision's tables, and a page of the named or the first one; raises `UsageError` for another name."""
    check_owner(connection, name, app.name)
    dialect_of(connection).load_all(connection)
    stored_checkpoint = checkpoint.read(connection, name, revision)
    if stored_checkpoint is None:
        return RevisionTables(None)
    tables, missing = place_tables(connection, app, stored_checkpoint)
    chosen = next((candidate for candidate in tables if table in ("", candidate.name)), None)
    if table and chosen is None and table not in missing:
        raise UsageError(f"Revision {revision} of {name!r} has no table {table!r}.")
    page = None if chosen is None else table_page(connection, chosen, after=after, start=start)
    return RevisionTables(stored_checkpoint, tables, missing, chosen, page)


def place_tables(
    connection: Connection, app: App, stored_checkpoint: Checkpoint
) -> tuple[list[PlacedTable], list[str]]:
    """Return a revision's tables that exist, undeclared ones as the database has them, and the names of the others."""
    dialect = dialect_of(connection)
    resolved = app.projections.get(stored_checkpoint.name)
    if resolved is not None and resolved.revision == stored_checkpoint.revision:
        return _place_declared(connection, resolved, stored_checkpoint, dialect)
    placed_tables: list[PlacedTable] = []
    missing: list[str] = []
    for schema, name in names_of(stored_checkpoint.tables):
        ref = dialect.find_table(connection, (schema, name), stored_checkpoint.location)
        if ref is None:
            missing.append(name)
            continue
        table = Table(ref.name, MetaData(), schema=ref.schema, autoload_with=connection, resolve_fks=False)
        placed_tables.append(
            PlacedTable(name, ref.quoted(), table, _hidden(table, None, private=app.catalog.is_private))
        )
    return placed_tables, missing


def _place_declared(
    connection: Connection, resolved: AnyResolved, stored_checkpoint: Checkpoint, dialect: Dialect
) -> tuple[list[PlacedTable], list[str]]:
    names = [(table.schema, table.name) for table in resolved.tables]
    refs = dialect.find_tables(connection, names, stored_checkpoint.location)
    located = located_tables(resolved, stored_checkpoint.location, dialect)
    row_type = resolved.row_type if isinstance(resolved, ResolvedProjection) else None
    placed_tables: list[PlacedTable] = []
    for number, (name, table) in enumerate(zip(names, located, strict=True)):
        if name in refs:
            # A fold's second table has states.
            hidden = _hidden(table, None if number else row_type, private=resolved.is_private)
            placed_tables.append(PlacedTable(name[1], refs[name].quoted(), table, hidden))
    return placed_tables, [name for schema, name in names if (schema, name) not in refs]


def _hidden(table: Table, row_type: type | None, *, private: bool) -> frozenset[str]:
    """Return the columns to hide: the personal fields of the row type, or without one all but the key if `private`."""
    if row_type is not None:
        return frozenset(column.key for column in table.columns if is_private(field_hint(row_type, column.key)))
    key = {column.key for column in table.primary_key.columns}
    return frozenset(column.key for column in table.columns if private and column.key not in key)


def table_page(connection: Connection, placed: PlacedTable, *, after: str, start: str) -> TablePage:
    """Return the rows after a key, or with a first key column from `start` on; raises `UsageError` for no key."""
    dialect = dialect_of(connection)
    columns, key = list(placed.table.columns), placed.key
    query = page_query(placed, dialect, after=after, start=start)
    try:
        rows = connection.execute(query).all()
    except (ProgrammingError, DataError) as error:
        reason = next(iter(str(error.orig).splitlines()), "it cannot be read")
        raise unusable(connection, f"{placed.name}: {reason}", "Rebuild the read model, or alter the table.") from None
    page_rows: list[tuple[str | None, Sequence[str]]] = []
    for row in rows[:PAGE_ROWS]:
        by_column = dict(zip(columns, row, strict=True))
        values = tuple(_text(column, by_column[column], placed, dialect) for column in columns)
        page_rows.append((_key_json([(column, by_column[column]) for column in key], dialect), values))
    last_key = page_rows[-1][0] if page_rows and len(rows) > PAGE_ROWS else None
    return TablePage(
        tuple(column.name for column in columns), tuple(column.name for column in key), page_rows, last_key
    )


def page_query(placed: PlacedTable, dialect: Dialect, *, after: str, start: str) -> Select[*tuple[Any, ...]]:
    """Return the query for a page, with one row more than it shows, which says whether there is a next page."""
    key = placed.key
    query = select(*(_selected(column, placed) for column in placed.table.columns)).limit(PAGE_ROWS + 1)
    if not key:
        return query
    raw = [sa.type_coerce(column, NullType()) for column in key]
    if after:
        key_parts = key_of(placed.table, after)
        bound = [_literal(column, value, dialect) for column, value in zip(key, key_parts, strict=True)]
        query = query.where(sa.tuple_(*raw) > sa.tuple_(*bound) if len(key) > 1 else raw[0] > bound[0])
    elif start:
        query = query.where(raw[0] >= _literal(key[0], _part_of(key[0], start), dialect))
    return query.order_by(*key)


def row_query(table: Table, key: Sequence[Any], dialect: Dialect) -> Select[*tuple[Any, ...]]:
    """Return the query for the row of a key, with values as the driver gives them."""
    query = select(*(sa.type_coerce(selected, NullType()) for selected in table.columns))
    for column, value in zip(table.primary_key.columns, key, strict=True):
        query = query.where(sa.type_coerce(column, NullType()) == _literal(column, value, dialect))
    return query.limit(1)


def key_of(table: Table, text: str) -> tuple[Any, ...]:
    """Return the key that a JSON list of its parts gives. Raises `UsageError` for text that is no key of this table."""
    columns = list(table.primary_key.columns)
    try:
        if len(text) > KEY_MAX:
            raise ValueError("it is too long")
        parts = json.loads(text)
        if not isinstance(parts, list) or len(parts) != len(columns):  # pyright: ignore[reportUnknownArgumentType]
            raise ValueError(f"a key of it is a JSON list of {len(columns)}")
        return tuple(_part(column, part) for column, part in zip(columns, parts, strict=True))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise UsageError(f"This is no key of the table {table.name!r}: {cut(str(error), 200)}.") from None


def _part_of(column: Column[Any], text: str) -> Any:
    """Return a part of a key from the text that somebody typed."""
    try:
        if len(text) > KEY_MAX:
            raise ValueError("it is too long")
        kind = plain(column.type)
        if isinstance(kind, sa.Integer):
            return _checked(column, int(text))
        if isinstance(kind, sa.String) and not isinstance(kind, sa.Enum):
            # A typed prefix may be longer than any key of the column.
            return normaliser(sa.String())(text)
        return _part(column, text)
    except (ValueError, ArithmeticError) as error:
        raise UsageError(f"No key of the table begins so: {column.name}: {cut(str(error), 200)}.") from None


def _part(column: Column[Any], part: Any) -> Any:
    kind_of_column = plain(column.type)
    if isinstance(kind_of_column, sa.Enum):
        if part not in labels(kind_of_column):
            raise ValueError("there is no such label")
        return _checked(column, labels(kind_of_column)[part])
    python = _python_type(column)
    for kind, read in _KEY_KINDS:
        if python is kind and isinstance(part, str):
            return _checked(column, read(part))
    return _checked(column, part)


def _checked(column: Column[Any], value: Any) -> Any:
    """Return a part of a key in its normal form; for a column type that eventjet does not know, the JSON value."""
    if value is None or isinstance(value, list | dict):
        raise ValueError("no part of a key is null, a list or an object")
    return value if unsupported(column.type) else normaliser(column.type)(value)


def _python_type(column: Column[Any]) -> type | None:
    try:
        return plain(column.type).python_type
    except NotImplementedError:
        return None


def _literal(column: Column[Any], value: Any, dialect: Dialect) -> ColumnElement[Any]:
    """Return the value as a literal that the driver accepts."""
    dump = dialect.dumper(column.type)
    return sa.literal(value if dump is None else dump(value), NullType())


def _selected(column: Column[Any], placed: PlacedTable) -> ColumnElement[Any]:
    """Return what a page selects of a column: the beginning of a long value, and null for a hidden one."""
    if column.key in placed.hidden:
        return sa.literal_column("null")
    kind = plain(column.type)
    if column.primary_key or isinstance(kind, sa.Enum) or not isinstance(kind, _LONG):
        return sa.type_coerce(column, NullType())
    if isinstance(kind, sa.LargeBinary):
        return sa.func.length(sa.type_coerce(column, NullType()))
    return sa.func.substr(sa.cast(sa.type_coerce(column, NullType()), sa.Text), 1, _VALUE_MAX + 1)


def _text(column: Column[Any], value: Any, placed: PlacedTable, dialect: Dialect) -> str:
    if column.key in placed.hidden:
        return MASK
    if value is None:
        return "NULL"
    kind = plain(column.type)
    if isinstance(kind, sa.LargeBinary) and not column.primary_key:
        return f"{value:,} bytes"
    if not column.primary_key and isinstance(kind, _LONG) and not isinstance(kind, sa.Enum):
        text = str(value)
        return f"{text[:_VALUE_MAX]}… (cut)" if len(text) > _VALUE_MAX else text
    return cut(str(_loaded(column, value, dialect)), _VALUE_MAX)


def _loaded(column: Column[Any], value: Any, dialect: Dialect) -> Any:
    """Return a value in its normal form, or unchanged where it cannot be converted."""
    is_unconverted = unsupported(column.type) or isinstance(plain(column.type), sa.Enum)
    load = None if is_unconverted else dialect.loader(column.type)
    try:
        return value if load is None else load(value)
    except Exception:  # noqa: BLE001 - whatever a conversion raises for a value that it was not made for
        return value


def _key_json(parts: Sequence[tuple[Column[Any], Any]], dialect: Dialect) -> str | None:
    values = [_loaded(column, value, dialect) for column, value in parts]
    if not values or any(isinstance(value, bytes) or value is None for value in values):
        return None
    json_values = [value if isinstance(value, str | int | float) else _key_part_text(value) for value in values]
    text = json.dumps(json_values)
    return text if len(text) <= KEY_MAX else None


def _key_part_text(value: Any) -> str:
    return value.isoformat() if isinstance(value, date) else str(value)
