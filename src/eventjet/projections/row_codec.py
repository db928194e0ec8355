"""Row ↔ Table: one dataclass row as the values of one table, exactly, in every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from sqlalchemy import JSON, Column, Enum, MetaData, String, Table
from sqlalchemy.sql import quoted_name
from sqlalchemy.sql.schema import SchemaConst

from eventjet.projections.columns import dumper, loader, normaliser
from eventjet.projections.row_checks import normaliser_of
from eventjet.projections.storage import storage_type
from eventjet.projections.values import Convert


class RowCodec:
    """Checks, dumps and loads the rows of one table. Values are in the table's column order throughout.

    `normalise` does not depend on the database: `load(dump(normalise(row)))` equals `normalise(row)` on each of them.
    """

    __slots__ = (
        "_dumps",
        "_loads",
        "_make",
        "_values",
        "columns",
        "dialect",
        "key",
        "normalise",
        "row_type",
        "table_name",
    )

    def __init__(self, table: Table, row_type: type, dialect: str) -> None:
        declared = list(table.columns)
        names = tuple(column.key for column in declared)
        self.table_name = table.name
        self.row_type = row_type
        self.dialect = dialect
        self.columns = tuple(column.name for column in declared)
        """The columns' names in SQL."""
        self.key: Callable[[Any], tuple[Any, ...]] = _values_of([column.key for column in table.primary_key.columns])
        """The key of a row, always a tuple."""
        self._values = _values_of(names)
        self._dumps = _conversions([dumper(column.type, dialect) for column in declared])
        self._loads = _conversions([loader(column.type, dialect) for column in declared])
        self._make = _maker(row_type, names)
        self.normalise = normaliser_of(
            row_type,
            table.name,
            [(column.key, column.name, _check(column)) for column in declared],
            self._make,
            shares=not any(isinstance(column.type, JSON) for column in declared),
        )
        """(row, row before or None) → the row as it will be read back; raises `RowRefused` for a value that would not
        come back equal. The row before is a normalised one with which it may share values."""

    def dump(self, row: Any) -> tuple[Any, ...]:
        """What the driver takes, for an insert or `COPY`; the row must be normalised."""
        values = self._values(row)
        return tuple(_converted(values, self._dumps)) if self._dumps else values

    def load(self, values: Sequence[Any]) -> Any:
        """The row of what the driver gave."""
        return self._make(_converted(values, self._loads) if self._loads else values)


def storage_table(table: Table, dialect: str, *, schema: str | None = None, name: str | None = None) -> Table:
    """The table as it is created and read in a database: with types of its own on SQLite, otherwise as declared.

    It stands alone in a `MetaData` of its own. On SQLite, where the names of indexes are shared by the whole database,
    another `name` goes into theirs too.
    """
    place = SchemaConst.RETAIN_SCHEMA if schema is None else schema
    stored = table.to_metadata(MetaData(), schema=place, name=name)
    for column in stored.columns:
        column.type = storage_type(column.type, dialect)
    if name is not None and schema is None:
        for index in stored.indexes:
            index.name = quoted_name(f"{index.name}__{name}", None)
    return stored


def key_check(column: Column[Any], parts: int) -> Convert:
    """The check of one column of a key of so many: PostgreSQL indexes no more than about 2,700 bytes."""
    check = normaliser(column.type)
    most = _KEY_BYTES // parts
    short = most // 4
    length = column.type.length if isinstance(column.type, String) and not isinstance(column.type, Enum) else 0
    plain = short if length is None else min(short, length)

    def check_key(value: Any) -> Any:
        # What nearly every key is; the checks below would pass it.
        if type(value) is str and len(value) <= plain and value.isascii() and "\0" not in value:
            return value
        if value is None:
            raise ValueError("a key cannot be None")
        fitted = check(value)
        if type(fitted) is str and len(fitted) > short and len(fitted.encode()) > most:
            raise ValueError(f"a key of this table holds {most} bytes of text in each column")
        return fitted

    return check_key


_KEY_BYTES = 2_600


def _converted(values: Sequence[Any], conversions: Sequence[tuple[int, Convert]]) -> list[Any]:
    converted = list(values)
    for index, convert in conversions:
        value = converted[index]
        if value is not None:
            converted[index] = convert(value)
    return converted


def _check(column: Column[Any]) -> Convert:
    """No check takes None."""
    check = normaliser(column.type)
    return (lambda value: None if value is None else check(value)) if column.nullable else check


def _values_of(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda row: (get(row),)


def _maker(row_type: type, names: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    own = fields(row_type)
    if tuple(field.name for field in own) == tuple(names) and not any(field.kw_only for field in own):
        return lambda values: row_type(*values)
    return lambda values: row_type(**dict(zip(names, values, strict=True)))


def _conversions(found: Sequence[Convert | None]) -> list[tuple[int, Convert]]:
    return [(index, convert) for index, convert in enumerate(found) if convert is not None]
