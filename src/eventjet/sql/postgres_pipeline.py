"""Statements that cross to PostgreSQL together: in psycopg's pipeline, in one round trip."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.pq import ExecStatus
from sqlalchemy.dialects.postgresql.psycopg import AsyncAdapt_psycopg_cursor

from eventjet.sql.together import Last, Run


async def pipelined(driver: psycopg.AsyncConnection[Any], runs: Sequence[Run], last: Last | None) -> None:
    """A statement is prepared once for all of its executions."""
    cursors: dict[str, Any] = {}
    async with driver.pipeline():
        for text, rows in runs:
            cursor: Any = cursors.get(text)
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
