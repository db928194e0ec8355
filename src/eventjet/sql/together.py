"""How statements without results cross to a database together: in order, in as few round trips as it takes."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, TypeAlias

import psycopg

Run: TypeAlias = tuple[str, list[Any] | None]
"""(text for the driver, its parameters, once for each execution); None for one without any."""


async def pipelined(driver: psycopg.AsyncConnection[Any], runs: Sequence[Run]) -> None:
    """PostgreSQL's pipeline: one round trip, and a statement is prepared once for all of its executions."""
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


async def in_one_hop(driver: Any, runs: Sequence[Run]) -> None:
    """To the thread of an aiosqlite connection and back once, instead of some times for each statement."""
    await driver._execute(_run, driver._conn, runs)


def _run(connection: sqlite3.Connection, runs: Sequence[Run]) -> None:
    cursor = connection.cursor()
    try:
        for text, rows in runs:
            if rows is None:
                cursor.execute(text)
            else:
                cursor.executemany(text, rows)
    finally:
        cursor.close()
