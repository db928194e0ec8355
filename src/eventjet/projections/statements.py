"""SQL of one projection's table: rows by keys, upsert and delete, each one statement for any number of rows.

Names come from declared metadata alone; values are always bound.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from sqlalchemy import Column, Connection, Table
from sqlalchemy.dialects import postgresql, sqlite

from eventjet.projections.arrays import element_type, literal
from eventjet.projections.columns import POSTGRESQL, dumper
from eventjet.projections.tables import RowCodec


class Statements(Protocol):
    """Reads and writes rows by key, within the caller's transaction. None of its methods takes an empty sequence."""

    def read(self, connection: Connection, keys: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], Any]:
        """The rows there are, by key."""
        ...

    def upsert(self, connection: Connection, rows: Sequence[Any]) -> None:
        """Insert or replace."""
        ...

    def insert(self, connection: Connection, rows: Sequence[Any]) -> None:
        """Insert; a row of the same key is an `IntegrityError`."""
        ...

    def delete(self, connection: Connection, keys: Sequence[tuple[Any, ...]]) -> None:
        """Delete what there is of these."""
        ...


def statements(table: Table, codec: RowCodec) -> Statements:
    """The statements for the codec's database; `table` says where the rows are."""
    return PostgresStatements(table, codec) if codec.dialect == POSTGRESQL else SqliteStatements(table, codec)


class PostgresStatements:
    """Arrays in, unnested by the server."""

    def __init__(self, table: Table, codec: RowCodec) -> None:
        names = _Names(table, postgresql.dialect())
        columns = list(table.columns)
        self._codec = codec
        self._literals = [literal(column.type) for column in columns]
        self._key_literals = [literal(column.type) for column in names.key]
        arrays = ", ".join(f"%s::{element_type(column.type)}[]" for column in columns)
        keys = ", ".join(f"%s::{element_type(column.type)}[]" for column in names.key)
        aliases = ", ".join(f"k{index}" for index in range(len(names.key)))
        same = " and ".join(f"t.{names.quoted(column)} = k.k{index}" for index, column in enumerate(names.key))
        self._insert = f"insert into {names.table} ({names.all()}) select * from unnest({arrays})"  # noqa: S608
        self._upsert = self._insert + names.on_conflict()
        self._read = f"select {names.all('t.')} from unnest({keys}) as k({aliases}) join {names.table} t on {same}"  # noqa: S608
        if len(names.key) == 1:
            (only,) = names.key
            self._read = (
                f"select {names.all('t.')} from {names.table} t "  # noqa: S608
                f"where t.{names.quoted(only)} = any(%s::{element_type(only.type)}[])"
            )
        self._delete = f"delete from {names.table} t using unnest({keys}) as k({aliases}) where {same}"  # noqa: S608

    def read(self, connection: Connection, keys: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], Any]:
        found = connection.exec_driver_sql(self._read, self._arrays(keys, self._key_literals))
        return _by_key(self._codec, found)

    def upsert(self, connection: Connection, rows: Sequence[Any]) -> None:
        connection.exec_driver_sql(self._upsert, self._dumped(rows))

    def insert(self, connection: Connection, rows: Sequence[Any]) -> None:
        connection.exec_driver_sql(self._insert, self._dumped(rows))

    def delete(self, connection: Connection, keys: Sequence[tuple[Any, ...]]) -> None:
        connection.exec_driver_sql(self._delete, self._arrays(keys, self._key_literals))

    def _dumped(self, rows: Sequence[Any]) -> tuple[str, ...]:
        dump = self._codec.dump
        return self._arrays([dump(row) for row in rows], self._literals)

    @staticmethod
    def _arrays(rows: Sequence[tuple[Any, ...]], literals: Sequence[Callable[[Iterable[Any]], str]]) -> tuple[str, ...]:
        return tuple([write(column) for write, column in zip(literals, zip(*rows, strict=True), strict=True)])


class SqliteStatements:
    """Keys in as one JSON array, rows through `executemany`."""

    def __init__(self, table: Table, codec: RowCodec) -> None:
        names = _Names(table, sqlite.dialect())
        marks = ", ".join("?" for _ in table.columns)
        self._codec = codec
        self._key_dumps = [dumper(column.type, codec.dialect) for column in names.key]
        self._alone = len(names.key) == 1
        parts = ["k.value"] if self._alone else [f"k.value ->> {index}" for index in range(len(names.key))]
        same = " and ".join(f"t.{names.quoted(column)} = {part}" for column, part in zip(names.key, parts, strict=True))
        equal = " and ".join(f"{names.quoted(column)} = ?" for column in names.key)
        self._insert = f"insert into {names.table} ({names.all()}) values ({marks})"  # noqa: S608
        self._upsert = self._insert + names.on_conflict()
        # A cross join keeps the order: each key is looked up in the index.
        self._read = f"select {names.all('t.')} from json_each(?) k cross join {names.table} t on {same}"  # noqa: S608
        self._delete = f"delete from {names.table} where {equal}"  # noqa: S608

    def read(self, connection: Connection, keys: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], Any]:
        dumped = self._keys(keys)
        wanted = json.dumps([key[0] for key in dumped] if self._alone else dumped)
        return _by_key(self._codec, connection.exec_driver_sql(self._read, (wanted,)))

    def upsert(self, connection: Connection, rows: Sequence[Any]) -> None:
        dump = self._codec.dump
        connection.exec_driver_sql(self._upsert, [dump(row) for row in rows])

    def insert(self, connection: Connection, rows: Sequence[Any]) -> None:
        dump = self._codec.dump
        connection.exec_driver_sql(self._insert, [dump(row) for row in rows])

    def delete(self, connection: Connection, keys: Sequence[tuple[Any, ...]]) -> None:
        connection.exec_driver_sql(self._delete, self._keys(keys))

    def _keys(self, keys: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        if not any(self._key_dumps):
            return list(keys)
        dumps = self._key_dumps
        return [
            tuple([part if dump is None else dump(part) for dump, part in zip(dumps, key, strict=True)]) for key in keys
        ]


def _by_key(codec: RowCodec, found: Iterable[Sequence[Any]]) -> dict[tuple[Any, ...], Any]:
    load = codec.load
    key_of = codec.key
    return {key_of(row): row for row in map(load, found)}


class _Names:
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
