"""Statements that cross to SQLite together: to the thread of an aiosqlite connection and back once."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from sqlalchemy.dialects.sqlite.aiosqlite import AsyncAdapt_aiosqlite_connection, AsyncAdapt_aiosqlite_cursor

from eventjet.sql.together import Last, Run


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
        adapted: Any = self._adapt_connection
        async with adapted._execute_mutex:
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
