"""Statements for SQLite: several in the caller's transaction; checkpoint first, since it is the fence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects.sqlite import dialect as sqlite_dialect
from sqlalchemy.exc import DBAPIError

from eventjet.projections.columns import Convert
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
    Rendered,
    by_key,
)

CLOCK = "(julianday('now') - 2440587.5) * 86400.0"

_PARKED = f"{INSERT} values (?, ?, {', '.join('?' for _ in COLUMNS)}, {CLOCK}) {REPLACE}"
_FREED = "delete from eventjet_quarantine where projection = ? and revision = ? and position = ?"
_RESOLVED = (
    f"update eventjet_quarantine set resolution = ?, resolved_at = {CLOCK} "  # noqa: S608 - of constants
    "where projection = ? and revision = ? and position = ?"
)


class SqliteStatements:
    """For one table and its checkpoint."""

    def __init__(self, table: Table, codec: RowCodec, key_dumps: Sequence[Convert | None]) -> None:
        names = Names(table, sqlite_dialect())
        marks = ", ".join("?" for _ in table.columns)
        self._codec = codec
        self._key_dumps = key_dumps
        self._alone = len(names.key) == 1
        parts = ["k.value"] if self._alone else [f"k.value ->> {index}" for index in range(len(names.key))]
        same = " and ".join(f"t.{names.quoted(column)} = {part}" for column, part in zip(names.key, parts, strict=True))
        equal = " and ".join(f"{names.quoted(column)} = ?" for column in names.key)
        self._advance = ADVANCE.format("?", CLOCK)
        self._insert = f"insert into {names.table} ({names.all()}) values ({marks})"  # noqa: S608 - declared names
        self._upsert = self._insert + names.on_conflict()
        # A cross join keeps the order: each key is looked up in the index.
        self._read = f"select {names.all('t.')} from json_each(?) k cross join {names.table} t on {same}"  # noqa: S608 - declared names
        self._delete = f"delete from {names.table} where {equal}"  # noqa: S608 - declared names

    def read(self, connection: Connection, keys: Sequence[Key]) -> dict[Key, Any]:
        dumped = self._dumped(keys)
        wanted = json.dumps([key[0] for key in dumped] if self._alone else dumped)
        try:
            return by_key(self._codec, connection.exec_driver_sql(self._read, (wanted,)))
        except DBAPIError as error:
            if not is_of_driver(error):
                raise
        # Once more, so that the row is named whose value the driver has nothing for.
        load_all(connection)
        return by_key(self._codec, connection.exec_driver_sql(self._read, (wanted,)))

    def render(self, changes: Changes) -> Rendered:
        dump = self._codec.dump
        return [dump(row) for row in changes.kept], [dump(row) for row in changes.made], self._dumped(changes.gone)

    def write(self, connection: Connection, advance: Advance, changes: Changes) -> bool:
        if connection.exec_driver_sql(self._advance, advance).rowcount != 1:
            return False
        rendered = [self.render(changes), *changes.rendered]
        for statement, which in ((self._delete, 2), (self._insert, 1), (self._upsert, 0)):
            rows: list[Key] = [row for one in rendered for row in one[which]]
            if rows:
                connection.exec_driver_sql(statement, rows)
        if changes.quarantine is not None:
            write_quarantine(connection, advance[3], advance[4], changes.quarantine)
        return True

    def _dumped(self, keys: Sequence[Key]) -> list[Key]:
        if not any(self._key_dumps):
            return list(keys)
        dumps = self._key_dumps
        return [
            tuple([part if dump is None else dump(part) for dump, part in zip(dumps, key, strict=True)]) for key in keys
        ]


def is_of_driver(error: DBAPIError) -> bool:
    """Whether sqlite3 refused a text that the file has."""
    return "Could not decode to UTF-8" in str(error.orig)


def load_all(connection: Connection) -> None:
    """From here on a text that is none comes as its bytes, and is no error of the driver's."""
    driver: Any = connection.connection.driver_connection
    driver.text_factory = _text


def _text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def write_quarantine(connection: Connection, name: str, revision: int, changes: QuarantineChanges) -> None:
    """What a batch does to the quarantine."""
    for statement, rows in (
        (_PARKED, [(name, revision, *astuple(one)) for one in changes.parked]),
        (_FREED, [(name, revision, position) for position in changes.freed]),
        (_RESOLVED, [(resolution, name, revision, position) for position, resolution in changes.resolved]),
    ):
        if rows:
            connection.exec_driver_sql(statement, rows)
