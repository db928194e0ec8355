"""`Session`: one worker's SQL connection for one term, used by one task at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from sqlalchemy import Connection, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet.sql.database import READ_ONLY
from eventjet.sql.postgres import look_first_in
from eventjet.workers.context import WorkerContext
from eventjet.writers.sql_guard import driver_of, is_over

T = TypeVar("T")


class Session:
    """Made by `Session.open`. Raises what SQLAlchemy raises; nothing is left open after that."""

    def __init__(self, connection: AsyncConnection, context: WorkerContext) -> None:
        self._connection = connection
        self._context = context
        self._is_concurrent = context.database.dialect.is_concurrent

    @classmethod
    @asynccontextmanager
    async def open(cls, context: WorkerContext, purpose: str, *, by_hand: bool = False) -> AsyncGenerator[Session]:
        """A new connection: what an older one has prepared may not fit the tables any more.

        `by_hand` is for the statements of an application, which may rely upon its foreign keys.
        """
        engine = context.database.engine(f"eventjet {purpose}")
        if by_hand:
            context.database.dialect.enforce_foreign_keys(engine.sync_engine)
        try:
            session = cls(await engine.connect(), context)
            try:
                yield session
            finally:
                await session._connection.close()
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
        async with self._context.turn(), self._connection.begin():
            return await self._connection.run_sync(change)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[AsyncConnection]:
        """A transaction for statements that are awaited one by one; rolled back on any error."""
        await self._read_only(False)
        async with self._context.turn():
            await self._connection.begin()
            try:
                yield self._connection
                await self._connection.commit()
            except BaseException:
                await self._undo()
                raise

    async def commit_by_statement(self) -> None:
        """From here on each `write` is one statement, which a concurrent database commits without being asked."""
        if self._is_concurrent:
            await self._connection.execution_options(isolation_level="AUTOCOMMIT")

    async def look_first_in(self, schema: str) -> None:
        """From here on names without a schema are looked for in this one before any other. Only for PostgreSQL."""

        def look(made: DBAPIConnection, _record: object) -> None:
            look_first_in(made, schema)

        # On whatever replaces the connection too, which SQLAlchemy may do by itself.
        event.listen(self._connection.sync_engine, "connect", look)
        await self._connection.run_sync(lambda connection: look_first_in(connection.connection, schema))

    async def _undo(self) -> None:
        """Roll back; a connection that does not come out of it clean is replaced by a new one."""
        connection = self._connection
        with suppress(SQLAlchemyError):
            await connection.rollback()
            if not connection.in_transaction() and is_over(await driver_of(connection)):
                return
        with suppress(SQLAlchemyError):
            await connection.invalidate()
        await connection.close()
        self._connection = await connection.engine.connect()

    async def _read_only(self, wanted: bool) -> None:
        if not self._is_concurrent:
            await self._connection.execution_options(**{READ_ONLY: wanted})
