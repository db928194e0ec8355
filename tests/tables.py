"""Reads and writes of a database beside eventjet."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, text

from eventjet.sql.database import Database
from eventjet.sql.dialect import READ_ONLY


@contextmanager
def reading(database: str) -> Generator[Connection]:
    """Open a connection that only reads, as an application's own."""
    with Database(database).sync_engine().connect().execution_options(**{READ_ONLY: True}) as connection:
        yield connection


def execute(database: str, *statements: str) -> list[Any]:
    """Run statements in one transaction; return the rows of the last one."""
    with Database(database).sync_engine().begin() as connection:
        results = [connection.execute(text(statement)) for statement in statements]
        return list(results[-1]) if results[-1].returns_rows else []
