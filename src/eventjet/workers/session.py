"""`Session`: one worker's SQL connection for one term, used by one task at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.database import READ_ONLY
from eventjet.workers.workplace import Workplace

T = TypeVar("T")


class Session:
    """Made by `Session.open`. Raises what SQLAlchemy raises; nothing is left open after that."""

    def __init__(self, connection: AsyncConnection, place: Workplace) -> None:
        self._connection = connection
        self._place = place
        self._is_postgres = place.database.dialect == POSTGRESQL

    @classmethod
    @asynccontextmanager
    async def open(cls, place: Workplace, purpose: str) -> AsyncGenerator[Session]:
        """A new connection: what an older one has prepared may not fit the tables any more."""
        engine = place.database.engine(f"eventjet {purpose}")
        try:
            async with engine.connect() as connection:
                yield cls(connection, place)
        finally:
            await engine.dispose()

    async def read(self, look: Callable[[Connection], T]) -> T:
        """Run something that only reads; a transaction begins with its first statement, if there is any."""
        await self._read_only(True)
        try:
            return await self._connection.run_sync(look)
        finally:
            if self._connection.in_transaction():
                await self._connection.rollback()

    async def write(self, change: Callable[[Connection], T]) -> T:
        """Run something in a transaction of its own."""
        await self._read_only(False)
        async with self._place.turn(), self._connection.begin():
            return await self._connection.run_sync(change)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[AsyncConnection]:
        """Several steps in one transaction, with other work between them."""
        await self._read_only(False)
        async with self._place.turn(), self._connection.begin():
            yield self._connection

    async def commit_by_statement(self) -> None:
        """From here on each `write` is one statement, which PostgreSQL commits without being asked."""
        if self._is_postgres:
            await self._connection.execution_options(isolation_level="AUTOCOMMIT")

    async def _read_only(self, wanted: bool) -> None:
        if not self._is_postgres:
            await self._connection.execution_options(**{READ_ONLY: wanted})
