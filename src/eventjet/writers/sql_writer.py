"""`SqlWriter`: one batch of events through handlers, with the checkpoint, in one transaction.

The checkpoint is advanced first, so its row is locked while handlers run: nobody else can write meanwhile, however
short the lease is. The session's limits bound how long a worker that is stopped there holds the row.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, NoReturn

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import failpoints
from eventjet.domain.recorded import Recorded
from eventjet.errors import CheckpointFenced, HandlerFailed, TransactionEnded
from eventjet.projections.sql_projection import ResolvedSql
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.dialect import is_transient
from eventjet.sql.transitions import advance, renew
from eventjet.writers.batch import Batch, reason_of
from eventjet.writers.fold_writer import fenced
from eventjet.writers.sql_guard import Guard, driver_of, is_over, is_spoilt


class SqlWriter:
    """Writes the batches of one projection to wherever the connection finds its tables."""

    def __init__(self, resolved: ResolvedSql, *, lease_s: float) -> None:
        self._resolved = resolved
        self._lease_s = lease_s
        self._guard = Guard(resolved)

    async def write(self, connection: AsyncConnection, held: Checkpoint, batch: Batch) -> None:
        """Advance and run the handlers within the caller's transaction, which must be rolled back on any error.

        Raises `CheckpointFenced`, `HandlerFailed` with the event that could not be taken, `TransactionEnded`, and what
        the database raises that is not the handler's doing.
        """
        if not batch.is_consistent:
            raise CheckpointFenced(held.name, f"a batch after position {batch.after} ends at {batch.last}")
        failpoints.reach("worker.before_commit")
        began = time.monotonic()
        await connection.run_sync(self._advance, held, batch)
        if batch.events:
            self._guard.attach(connection)
            driver = await driver_of(connection)
            handlers = self._resolved.handlers
            for event in batch.events:
                await self._take(connection, driver, handlers[type(event.data)], event)
            if time.monotonic() - began > self._lease_s / 3:
                await connection.run_sync(renew, held, self._lease_s)
        failpoints.reach("worker.rows_written")

    def _advance(self, connection: Connection, held: Checkpoint, batch: Batch) -> None:
        if not advance(connection, held, batch.after, batch.last, batch.event_id, self._lease_s):
            raise fenced(connection, held, batch)

    async def _take(self, connection: AsyncConnection, driver: Any, handler: Any, event: Recorded[Any]) -> None:
        """One event; whatever its handler raises, or leaves behind, names it."""
        name = str(getattr(handler, "__qualname__", handler))
        guard = self._guard
        try:
            with guard.handling(name):
                await handler(event, connection)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises names its event
            await self._fail(connection, event, error)
        if guard.refusal is not None or guard.fault is not None:
            await self._fail(connection, event, guard.refusal or guard.fault)
        if is_over(driver):
            raise TransactionEnded(self._resolved.name, event.position, name)
        if is_spoilt(driver):
            await self._fail(
                connection,
                event,
                "it went on after an error of the database, which undid everything; use `connection.begin_nested()` "
                "around what may fail",
            )
        if connection.in_nested_transaction():
            await self._fail(connection, event, "it left a savepoint open; use `async with connection.begin_nested()`")

    async def _fail(
        self, connection: AsyncConnection, event: Recorded[Any], error: BaseException | str | None
    ) -> NoReturn:
        guard = self._guard
        if guard.refusal is not None:
            # SQLAlchemy takes the transaction for over, and the server does not.
            with suppress(SQLAlchemyError):
                await connection.invalidate()
            error = guard.refusal
        elif guard.fault is not None:
            raise guard.fault
        elif isinstance(error, DBAPIError) and is_transient(error):
            raise error
        reason = reason_of(error) if isinstance(error, BaseException) else str(error)
        cause = error if isinstance(error, BaseException) else None
        raise HandlerFailed(self._resolved.name, event.position, event.aggregate_id, reason) from cause
