"""SQL of one projection: its rows by keys, and a change of rows together with the checkpoint.

Names come from declared metadata alone; values are always bound.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from sqlalchemy import Column, Connection, Table
from sqlalchemy.dialects import postgresql, sqlite

from eventjet.projections.columns import POSTGRESQL, dumper
from eventjet.projections.row_codec import RowCodec
from eventjet.projections.storage import SQLITE
from eventjet.quarantine.fold import Sorting
from eventjet.quarantine.rows import postgres_parts, sqlite_write
from eventjet.sql.arrays import element_type, literal
from eventjet.sql.dialect import dialect_named
from eventjet.sql.transitions import ADVANCE

Key: TypeAlias = tuple[Any, ...]
Advance: TypeAlias = tuple[int, str, float, str, int, int, int]
"""(position, event id, lease in seconds, and of whom: name, revision, epoch, position before)."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a batch does to the rows; no key is in two of these."""

    kept: Sequence[Any] = ()
    """Rows to insert or replace."""
    made: Sequence[Any] = ()
    """Rows to insert; one of the same key is an `IntegrityError`."""
    gone: Sequence[Key] = ()
    """Keys of rows to delete."""
    sorting: Sorting | None = None
    """What it does to the quarantine."""


class Statements(Protocol):
    """For one table and its checkpoint."""

    def read(self, connection: Connection, keys: Sequence[Key]) -> dict[Key, Any]:
        """The rows there are of these keys, of which there is at least one."""
        ...

    def write(self, connection: Connection, advance: Advance, changes: Changes) -> bool:
        """Advance the checkpoint and change the rows, or do neither and return False, when another epoch has begun or
        the position is another. On PostgreSQL one statement, on SQLite several within the caller's transaction."""
        ...


def statements(table: Table, codec: RowCodec) -> Statements:
    """The statements for the codec's database; `table` says where the rows are."""
    return PostgresStatements(table, codec) if codec.dialect == POSTGRESQL else SqliteStatements(table, codec)


class PostgresStatements:
    """Arrays in, unnested by the server; checkpoint and rows in one statement, which is one round trip."""

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
        self._read = f"select {names.all('t.')} from unnest({keys}) as k({aliases}) join {names.table} t on {same}"  # noqa: S608 - declared names
        if len(names.key) == 1:
            (only,) = names.key
            self._read = (
                f"select {names.all('t.')} from {names.table} t "  # noqa: S608 - declared names
                f"where t.{names.quoted(only)} = any(%s::{element_type(only.type)}[])"
            )
        held = "exists (select 1 from held)"
        self._held = f"with held as ({ADVANCE.format('%s', dialect_named(POSTGRESQL).clock)} returning 1)"
        self._made = (
            f", made as (insert into {names.table} ({names.all()}) select * from unnest({arrays}) where {held})"  # noqa: S608 - declared names
        )
        self._kept = self._made.replace("made as", "kept as", 1)[:-1] + names.on_conflict() + ")"
        self._gone = (
            f", gone as (delete from {names.table} t using unnest({keys}) as k({aliases}) where {same} and {held})"  # noqa: S608 - declared names
        )

    def read(self, connection: Connection, keys: Sequence[Key]) -> dict[Key, Any]:
        return _by_key(self._codec, connection.exec_driver_sql(self._read, _arrays(keys, self._key_literals)))

    def write(self, connection: Connection, advance: Advance, changes: Changes) -> bool:
        dump = self._codec.dump
        parts = [self._held]
        values: list[Any] = list(advance)
        for part, rows in ((self._made, changes.made), (self._kept, changes.kept)):
            if rows:
                parts.append(part)
                values += _arrays([dump(row) for row in rows], self._literals)
        if changes.gone:
            parts.append(self._gone)
            values += _arrays(changes.gone, self._key_literals)
        if changes.sorting is not None:
            own, its = postgres_parts(advance[3], advance[4], changes.sorting)
            parts += own
            values += its
        parts.append(" select count(*) from held")
        return connection.exec_driver_sql("".join(parts), tuple(values)).scalar_one() == 1


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
        self._advance = ADVANCE.format("?", dialect_named(SQLITE).clock)
        self._insert = f"insert into {names.table} ({names.all()}) values ({marks})"  # noqa: S608 - declared names
        self._upsert = self._insert + names.on_conflict()
        # A cross join keeps the order: each key is looked up in the index.
        self._read = f"select {names.all('t.')} from json_each(?) k cross join {names.table} t on {same}"  # noqa: S608 - declared names
        self._delete = f"delete from {names.table} where {equal}"  # noqa: S608 - declared names

    def read(self, connection: Connection, keys: Sequence[Key]) -> dict[Key, Any]:
        dumped = self._dumped(keys)
        wanted = json.dumps([key[0] for key in dumped] if self._alone else dumped)
        return _by_key(self._codec, connection.exec_driver_sql(self._read, (wanted,)))

    def write(self, connection: Connection, advance: Advance, changes: Changes) -> bool:
        if connection.exec_driver_sql(self._advance, advance).rowcount != 1:
            return False
        dump = self._codec.dump
        if changes.gone:
            connection.exec_driver_sql(self._delete, self._dumped(changes.gone))
        for statement, rows in ((self._insert, changes.made), (self._upsert, changes.kept)):
            if rows:
                connection.exec_driver_sql(statement, [dump(row) for row in rows])
        if changes.sorting is not None:
            sqlite_write(connection, advance[3], advance[4], changes.sorting)
        return True

    def _dumped(self, keys: Sequence[Key]) -> list[Key]:
        if not any(self._key_dumps):
            return list(keys)
        dumps = self._key_dumps
        return [
            tuple([part if dump is None else dump(part) for dump, part in zip(dumps, key, strict=True)]) for key in keys
        ]


def _arrays(rows: Sequence[Key], literals: Sequence[Callable[[Iterable[Any]], str]]) -> tuple[str, ...]:
    """Rows as one array literal a column."""
    return tuple([write(column) for write, column in zip(literals, zip(*rows, strict=True), strict=True)])


def _by_key(codec: RowCodec, found: Iterable[Sequence[Any]]) -> dict[Key, Any]:
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
