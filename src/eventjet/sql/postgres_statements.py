"""`PostgresStatements` writes checkpoint, rows and quarantine in one round trip, with arrays unnested by the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from typing import Any, TypeAlias

import psycopg
from psycopg.abc import Loader
from psycopg.types.datetime import DateLoader, TimestampLoader, TimestamptzLoader
from psycopg.types.json import JsonbLoader, JsonLoader
from sqlalchemy import Column, Connection, Table
from sqlalchemy import types as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError

from eventjet.projections.columns import Unread
from eventjet.projections.row_codec import RowCodec
from eventjet.sql.checkpoint import ADVANCE
from eventjet.sql.statements import (
    COLUMNS,
    INSERT,
    REPLACE,
    Advance,
    Changes,
    Key,
    Names,
    QuarantineChanges,
    Statements,
    by_key,
)

Literal: TypeAlias = Callable[[Iterable[Any]], str]
"""Writes a column of values as an array literal, ten times as fast as one call of psycopg's adapters for each value."""

CLOCK = "extract(epoch from clock_timestamp())::float8"

_TYPES = {"position": "bigint", "payload": "bytea"}
_ARRAYS = ", ".join(f"%s::{_TYPES.get(name, 'text')}[]" for name in COLUMNS)
_HAS_ADVANCED = "exists (select 1 from advanced)"
_QUARANTINE_UPSERT = (
    f", quarantined as ({INSERT} select %s, %s, q.*, {CLOCK} "  # noqa: S608 - of constants
    f"from unnest({_ARRAYS}) q where {_HAS_ADVANCED} {REPLACE})"
)
_QUARANTINE_DELETE = (
    ", freed as (delete from eventjet_quarantine where projection = %s and revision = %s "  # noqa: S608 - of constants
    f"and position = any(%s::bigint[]) and {_HAS_ADVANCED})"
)
_QUARANTINE_RESOLVE = (
    f", resolved as (update eventjet_quarantine q set resolution = d.resolution, resolved_at = {CLOCK} "  # noqa: S608 - of constants
    "from unnest(%s::bigint[], %s::text[]) d(position, resolution) where q.projection = %s and q.revision = %s "
    f"and q.position = d.position and {_HAS_ADVANCED})"
)
_DIALECT = postgresql.dialect()


class PostgresStatements:
    """The statements for a table and its checkpoint; all parts depend on `advanced`, which advances that."""

    def __init__(self, table: Table, codec: RowCodec, states: Statements | None = None) -> None:
        assert states is None or isinstance(states, PostgresStatements)
        self._states = states
        names = Names(table, _DIALECT)
        self._codec = codec
        self._dump_keys = codec.dump_keys
        of_row = [_array_of(column) for column in table.columns]
        of_key = [_array_of(column) for column in names.key]
        self._literals = [write for _, write in of_row]
        self._key_literals = [write for _, write in of_key]
        arrays = ", ".join(array for array, _ in of_row)
        keys = ", ".join(array for array, _ in of_key)
        aliases = ", ".join(f"k{index}" for index in range(len(names.key)))
        match = " and ".join(f"t.{names.quoted(column)} = k.k{index}" for index, column in enumerate(names.key))
        self._read = f"select {names.all('t.')} from unnest({keys}) as k({aliases}) join {names.table} t on {match}"  # noqa: S608 - declared names
        if len(names.key) == 1:
            (key_column,) = names.key
            self._read = (
                f"select {names.all('t.')} from {names.table} t "  # noqa: S608 - declared names
                f"where t.{names.quoted(key_column)} = any({keys})"
            )
        self._advance = f"with advanced as ({ADVANCE.format('%s', CLOCK)} returning 1)"
        self._insert = (
            f", inserted as (insert into {names.table} ({names.all()}) "  # noqa: S608 - declared names
            f"select * from unnest({arrays}) where {_HAS_ADVANCED})"
        )
        self._upsert = self._insert.replace("inserted as", "upserted as", 1)[:-1] + names.on_conflict() + ")"
        self._delete = (
            f", deleted as (delete from {names.table} t using unnest({keys}) as k({aliases}) "  # noqa: S608 - declared names
            f"where {match} and {_HAS_ADVANCED})"
        )

    def read(self, connection: Connection, keys: Sequence[Key]) -> dict[Key, Any]:
        arrays = _arrays(self._dump_keys(keys), self._key_literals)
        try:
            return by_key(self._codec, connection.exec_driver_sql(self._read, arrays))
        except (DBAPIError, ValueError, RecursionError) as error:
            if isinstance(error, DBAPIError) and not is_of_driver(error):
                raise
        # Read once more, so that the error names the row whose value the driver cannot load.
        load_all(connection)
        return by_key(self._codec, connection.exec_driver_sql(self._read, arrays))

    def write(self, connection: Connection, advance: Advance, changes: Changes) -> bool:
        parts = [self._advance]
        values: list[Any] = list(advance)
        dump = self._codec.dump
        for part, rows in ((self._insert, changes.inserts), (self._upsert, changes.upserts)):
            if rows:
                parts.append(part)
                values += _arrays([dump(row) for row in rows], self._literals)
        if changes.deletions:
            parts.append(self._delete)
            values += _arrays(self._dump_keys(changes.deletions), self._key_literals)
        if changes.quarantine is not None:
            quarantine_sql, quarantine_values = quarantine_parts(advance[3], advance[4], changes.quarantine)
            parts += quarantine_sql
            values += quarantine_values
        if changes.states:
            assert self._states is not None
            parts.append(self._states._upsert.replace("upserted as", "states as", 1))
            values += _arrays([self._states._codec.dump(row) for row in changes.states], self._states._literals)
        parts.append(" select count(*) from advanced")
        return connection.exec_driver_sql("".join(parts), tuple(values)).scalar_one() == 1


def is_of_driver(error: DBAPIError) -> bool:
    """Whether psycopg, and not the server, refused a value."""
    return isinstance(error.orig, psycopg.DataError) and not error.orig.sqlstate


def load_all(connection: Connection) -> None:
    """Let this connection load a value that Python cannot represent as `Unread`, instead of raising an error."""
    driver: Any = connection.connection.driver_connection
    for name, loader in _LOADERS.items():
        driver.adapters.register_loader(name, loader)


def _total(loader_type: Any) -> type[Loader]:
    class Total(loader_type):
        def load(self, data: Any) -> Any:
            loader: Any = super()
            try:
                return loader.load(data)
            except (psycopg.DataError, ValueError, OverflowError, RecursionError):
                return Unread(bytes(data).decode(errors="replace"))

    return Total


_LOADERS = {
    "timestamptz": _total(TimestamptzLoader),
    "timestamp": _total(TimestampLoader),
    "date": _total(DateLoader),
    "json": _total(JsonLoader),
    "jsonb": _total(JsonbLoader),
}
"""Loaders written in Python, since the compiled ones cannot return another value instead of an error."""


def quarantine_parts(name: str, revision: int, changes: QuarantineChanges) -> tuple[list[str], list[Any]]:
    """Return (the parts that change the quarantine, for a statement with a part `advanced`; their values)."""
    parts: list[str] = []
    values: list[Any] = []
    if changes.upserts:
        parts.append(_QUARANTINE_UPSERT)
        columns = zip(*[astuple(row) for row in changes.upserts], strict=True)
        values += [name, revision, *map(list, columns)]
    if changes.deletions:
        parts.append(_QUARANTINE_DELETE)
        values += [name, revision, list(changes.deletions)]
    if changes.resolutions:
        parts.append(_QUARANTINE_RESOLVE)
        values += [*map(list, zip(*changes.resolutions, strict=True)), name, revision]
    return parts, values


def _arrays(rows: Sequence[Key], literals: Sequence[Literal]) -> tuple[str, ...]:
    """Return one array literal for each column of the rows; nothing where there are no rows."""
    if not rows:
        return ()
    return tuple([write(column) for write, column in zip(literals, zip(*rows, strict=True), strict=True)])


def _array(write: Callable[[Any], str]) -> Literal:
    return lambda values: "{" + ",".join(["NULL" if value is None else write(value) for value in values]) + "}"


def _quote(value: str) -> str:
    if '"' in value or "\\" in value:
        value = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{value}"'


_BARE, _QUOTED = _array(str), _array(_quote)
_UNESCAPED = _array('"{}"'.format)
"""Writes values of types whose text has neither quotes nor backslashes."""
_ARRAYS_OF: tuple[tuple[type[Any], str, Literal], ...] = (
    (sa.Enum, "", _QUOTED),
    (sa.String, "text", _QUOTED),
    (sa.JSON, "", _QUOTED),
    (sa.SmallInteger, "int2", _BARE),
    (sa.BigInteger, "int8", _BARE),
    (sa.Integer, "int4", _BARE),
    (sa.Float, "float8", _BARE),
    (sa.Numeric, "numeric", _BARE),
    (sa.Boolean, "bool", _UNESCAPED),
    (sa.DateTime, "", _UNESCAPED),
    (sa.Date, "date", _UNESCAPED),
    (sa.Uuid, "uuid", _UNESCAPED),
    (sa.LargeBinary, "bytea", _array(lambda value: f'"\\\\x{value.hex()}"')),
)
"""(type of column, type of the array's elements, how dumped values become an array).

The second is empty where the elements have the column's own type. It never has a length or scale that could cut a
value.
"""


def _array_of(column: Column[Any]) -> tuple[str, Literal]:
    """Return the placeholder for an array of a column's values, and the function that writes the array."""
    kind = column.type
    name, write = next((name, write) for column_type, name, write in _ARRAYS_OF if isinstance(kind, column_type))
    is_text = isinstance(kind, sa.Enum) and not kind.native_enum
    return f"%s::{name or ('text' if is_text else kind.compile(_DIALECT))}[]", write
