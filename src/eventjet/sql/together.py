"""How statements cross to a database together: in order, in one round trip, with a cursor of SQLAlchemy's at the end."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import psycopg
from psycopg.pq import ExecStatus
from sqlalchemy.dialects.postgresql.psycopg import AsyncAdapt_psycopg_cursor
from sqlalchemy.dialects.sqlite.aiosqlite import AsyncAdapt_aiosqlite_connection, AsyncAdapt_aiosqlite_cursor

Run: TypeAlias = tuple[str, list[Any] | None]
"""(text for the driver, its parameters, once for each execution); None for one without any."""


@dataclass(frozen=True, slots=True)
class Last:
    """The statement whose result is wanted, and the cursor that is to have it."""

    cursor: Any
    text: str
    parameters: Any


async def pipelined(driver: psycopg.AsyncConnection[Any], runs: Sequence[Run], last: Last | None) -> None:
    """PostgreSQL's pipeline; a statement is prepared once for all of its executions."""
    cursors: dict[str, psycopg.AsyncCursor[Any]] = {}
    async with driver.pipeline():
        for text, rows in runs:
            cursor = cursors.get(text)
            if cursor is None:
                cursor = cursors[text] = driver.cursor()
            if rows is None:
                await cursor.execute(text)
            else:
                await cursor.executemany(text, rows)
        if last is not None:
            await last.cursor._cursor.execute(last.text, last.parameters)
    if last is not None:
        answer = last.cursor._cursor
        if answer.pgresult is not None and answer.pgresult.status == ExecStatus.TUPLES_OK:
            last.cursor._rows = deque(await answer.fetchall())


def is_plain_psycopg(cursor: object) -> bool:
    """Whether it has its rows at once: not one on the server."""
    return type(cursor) is AsyncAdapt_psycopg_cursor


class OneHopCursor(AsyncAdapt_aiosqlite_cursor):
    """Goes to the thread of its connection once for each statement; SQLAlchemy's own goes four times."""

    __slots__ = ("_about",)

    def __init__(self, adapt_connection: Any) -> None:
        self._adapt_connection = adapt_connection
        self._connection = adapt_connection._connection
        self._cursor = None  # type: ignore[assignment]
        self._rows = deque()
        self._about: tuple[Any, int, Any] = None, -1, None

    @property
    def description(self) -> Any:
        return self._about[0]

    @property
    def rowcount(self) -> int:
        return self._about[1]

    @property
    def lastrowid(self) -> Any:
        return self._about[2]

    @property
    def arraysize(self) -> int:
        return 1

    @arraysize.setter
    def arraysize(self, value: int) -> None:
        """Rows are all here."""

    def close(self) -> None:
        self._rows.clear()

    async def _async_soft_close(self) -> None:
        """The driver's cursor is closed since it was read."""

    async def _execute_async(self, operation: Any, parameters: Any) -> None:
        await self.run((), operation, [parameters or ()], many=False)

    async def _executemany_async(self, operation: Any, seq_of_parameters: Any) -> None:
        await self.run((), operation, seq_of_parameters, many=True)

    async def run(self, runs: Sequence[Run], text: str, rows: Sequence[Any], *, many: bool) -> None:
        """Execute statements without results, and then this one."""
        driver: Any = self._connection
        async with self._adapt_connection._execute_mutex:
            found, self._about = await driver._execute(_run, driver._conn, runs, text, rows, many)
        self._rows = deque(found)


class OneHopConnection(AsyncAdapt_aiosqlite_connection):
    """Has cursors that go to its thread once."""

    __slots__ = ()

    _cursor_cls: ClassVar[Any] = OneHopCursor


async def in_one_hop(driver: Any, runs: Sequence[Run], last: Last | None) -> None:
    """To the thread of an aiosqlite connection and back."""
    if last is not None:
        await last.cursor.run(runs, last.text, [last.parameters], many=False)
    else:
        await driver._execute(_run, driver._conn, runs, None, (), False)


def _run(
    connection: sqlite3.Connection, runs: Sequence[Run], text: str | None, rows: Sequence[Any], many: bool
) -> tuple[list[Any], tuple[Any, int, Any]]:
    """In the connection's thread: (rows; description, rows affected and last id)."""
    cursor = connection.cursor()
    try:
        for one, each in runs:
            if each is None:
                cursor.execute(one)
            else:
                cursor.executemany(one, each)
        if text is None:
            return [], (None, -1, None)
        if many:
            cursor.executemany(text, rows)
        else:
            cursor.execute(text, rows[0])
        found = cursor.fetchall() if cursor.description else []
        return found, (cursor.description, cursor.rowcount, cursor.lastrowid)
    finally:
        cursor.close()
