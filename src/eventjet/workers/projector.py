"""`Projector`: keeps one projection up to date, term after term.

A term is one lease: take it, take the durable over, check the log, then write batch by batch. Any fault ends the term.
After faults of connections, leases and locks another begins; faults of events and of the log stop the projection with
their reason, until somebody rebuilds it or starts a worker that takes them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from eventjet import failpoints
from eventjet.errors import (
    CheckpointFenced,
    CodecError,
    EventjetError,
    HandlerFailed,
    HistoryBroken,
    LogRolledBack,
    StillHeld,
    TableOccupied,
    TransactionEnded,
    UnknownEvent,
)
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.quarantine.fold import Offered, is_newer
from eventjet.sql.checkpoint import ACTIVE, BUILDING, DECLARED, FAILED, Checkpoint
from eventjet.sql.database import is_about_data
from eventjet.sql.locations import located
from eventjet.workers.context import WorkerContext
from eventjet.workers.lease import Lease, pause
from eventjet.workers.log_identity import check_log
from eventjet.workers.prefetch import Prefetch
from eventjet.workers.promotion import Takeover
from eventjet.workers.reader import EventReader
from eventjet.workers.retries import carry_out, load_held, tell_parked
from eventjet.workers.session import Session
from eventjet.writers.sql_writer import AnyWriter, SqlWriter
from eventjet.writers.writer import Batch, Writer

_log = logging.getLogger(__name__)

_BATCH_FIRST = 500
"""Events in the first transaction, before anything is known of the handler."""
_STOPS = (HandlerFailed, CodecError, LogRolledBack, HistoryBroken, TableOccupied, StillHeld, TransactionEnded)
_PASSES = (EventjetError, SQLAlchemyError, OSError, TimeoutError)


class Projector:
    """One projection in one process. `on_ready` is called, perhaps often, once it works or waits for the lease."""

    def __init__(self, resolved: AnyResolved, context: WorkerContext, on_ready: Callable[[], None]) -> None:
        self.resolved = resolved
        self._context = context
        self._on_ready = on_ready
        self._report = context.report(resolved)
        self._writer = self._writer_in(DECLARED)
        self._writes_in: str = DECLARED
        self._batch_max = min(_BATCH_FIRST, context.options.batch_max)
        self._pause_s = context.options.backoff_s[0]
        self._stumbled_at = -1
        self._position = 0
        self._ahead: Prefetch | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Term after term until `stop`; the batch in hand is finished and the lease let go."""
        while not stop.is_set():
            try:
                await self._term(stop)
            except CheckpointFenced as error:
                self._report.ended("fenced")
                _log.warning("%s", error)
            except Exception as error:  # noqa: BLE001 - others go on, and so does this one, at a bounded rate
                self._report.ended("fault")
                unforeseen = not isinstance(error, _PASSES)
                _log.warning("%s: %s. Trying again.", self.resolved.name, _first_line(error), exc_info=unforeseen)
                await pause(stop, self._pause_s)
                self._pause_s = min(2 * self._pause_s, self._context.options.backoff_s[1])

    async def _term(self, stop: asyncio.Event) -> None:
        """One lease, on connections of its own."""
        by_hand = isinstance(self._writer, SqlWriter)
        async with Session.open(self._context, f"worker {self.resolved.durable}", by_hand=by_hand) as session:
            lease = Lease(session, self.resolved, self._context)
            self._writer.forget()
            held = await lease.acquire(stop, self._on_ready, self._stumbled_at)
            if held is not None:
                failpoints.reach("worker.lease_taken")
                if held.location != self._writes_in:
                    self._writer, self._writes_in = self._writer_in(held.location), held.location
                if not by_hand:
                    await session.commit_by_statement()
                elif held.location != DECLARED:
                    await session.look_first_in(held.location)
                await self._hold(session, lease, held, stop)

    def _writer_in(self, where: str) -> AnyWriter:
        """SQL by hand finds its tables wherever its session looks."""
        resolved, lease_s = self.resolved, self._context.options.lease_s
        if isinstance(resolved, ResolvedSql):
            return SqlWriter(resolved, lease_s=lease_s)
        dialect = self._context.database.dialect.name
        return Writer(resolved, dialect, lease_s=lease_s, table=located(resolved.table, where, dialect))

    async def _hold(self, session: Session, lease: Lease, held: Checkpoint, stop: asyncio.Event) -> None:
        try:
            await self._project(session, lease, held, stop)
            self._report.ended("drained")
        except _STOPS as error:
            await self._stumble(lease, held, error)
        finally:
            with suppress(SQLAlchemyError, OSError):
                failpoints.reach("worker.before_release")
                await lease.release(held)

    async def _project(self, session: Session, lease: Lease, held: Checkpoint, stop: asyncio.Event) -> None:
        await carry_out(session, self._writer, self._context, self.resolved, held, stop)
        consumer = await EventReader.open(self._context, self.resolved, held.position)
        self._position = held.position
        waker = asyncio.create_task(_wake_at(stop, consumer))
        self._ahead = ahead = Prefetch(consumer)
        try:
            if not held.log:
                await lease.check_unused(held)
            # After the durable is made: whoever replaces the stream from here on deletes it too.
            log = await asyncio.to_thread(check_log, self._context.endpoint, self._context.stream, held)
            if held.log != log:
                await lease.adopt_log(held, log)
            failpoints.reach("worker.log_checked")
            await load_held(session, self._writer, self.resolved)
            consumer.start()
            self._on_ready()
            takeover = Takeover(self.resolved, self._context, held)

            async def advance(timeout_s: float) -> None:
                following = await ahead.take(timeout_s)
                if following is not None:
                    await self._write(session, held, following)

            building = held.state == BUILDING and not takeover.wanted
            while not stop.is_set():
                batch = await ahead.take(self._context.options.lease_s / 3)
                if batch is None:
                    await lease.renew(held)
                    failpoints.reach("worker.lease_renewed")
                else:
                    failpoints.reach("worker.batch_taken")
                    await self._write(session, held, batch)
                if building or takeover.wanted:
                    left = consumer.left_after(self._position)  # silence does not say that there is no more
                    if takeover.is_due(left) and await takeover.attempt(session, lease, advance):
                        return
                    if building and not left:
                        failpoints.reach("worker.before_settle")
                        await lease.settle(held, ACTIVE)
                        failpoints.reach("worker.after_settle")
                        building = False
        finally:
            waker.cancel()
            await consumer.close()

    async def _write(self, session: Session, held: Checkpoint, batch: Batch) -> None:
        """Commit a batch, in parts for as long as large ones fail; what precedes a bad event is committed first."""
        rest: Batch | None = batch
        while rest is not None:
            part, rest = rest.cut(self._batch_max)
            began = time.monotonic()
            try:
                await self._commit(session, held, part)
            except HandlerFailed as error:
                before = part.before(error.position)
                if before is not None:
                    await self._commit(session, held, before)
                raise
            self._fit(len(part.events), time.monotonic() - began)
            self._pause_s = self._context.options.backoff_s[0]

    def _fit(self, count: int, took_s: float) -> None:
        """Larger parts as long as a lease lasts for many of them: handlers may be slow."""
        options = self._context.options
        if took_s < options.lease_s / 10:
            self._batch_max = min(2 * self._batch_max, options.batch_max)
        elif took_s > options.lease_s / 4:
            self._batch_max = max(1, count // 2)

    async def _commit(self, session: Session, held: Checkpoint, part: Batch) -> None:
        """One transaction, or two halves when the database complains about data, until its event is found."""
        try:
            began = await self._transact(session, held, part)
            failpoints.reach("worker.after_commit")
            self._position = part.last
            self._report.committed(part.last, len(part.events), time.perf_counter() - began)
            self._writer.committed()
        except CheckpointFenced:
            # Perhaps the lease ran out over a slow fold: fewer events then.
            self._batch_max = max(1, len(part.events) // 2)
            raise
        except DBAPIError as error:
            self._writer.undone()
            if not is_about_data(error):
                self._batch_max = max(1, len(part.events) // 2)
                raise
            if not part.events:
                raise
            first, second = part.cut(max(1, len(part.events) // 2))
            if second is None:
                only: Any = part.events[0]
                if isinstance(only, Offered) and only.error is None:
                    await self._commit(session, held, replace(part, events=[only.failed(error)]))
                    return
                raise HandlerFailed(self.resolved.name, only.position, _id_of(only), _first_line(error)) from error
            await self._commit(session, held, first)
            await self._commit(session, held, second)

    async def _transact(self, session: Session, held: Checkpoint, part: Batch) -> float:
        """Write one transaction; return when it began, by this process's clock."""
        writer = self._writer
        if isinstance(writer, SqlWriter):
            began = time.perf_counter()
            async with session.transaction() as connection:
                await writer.write(connection, held, part)
            return began
        ahead = self._ahead
        changes = ahead.changes(part) if ahead is not None else None
        if changes is None:
            changes = await session.read(lambda connection: writer.prepare(connection, part))
        failpoints.reach("worker.batch_folded")
        began = time.perf_counter()
        writing = session.write(lambda connection: writer.commit(connection, held, part, changes))
        if ahead is None or self._context.database.dialect.name != POSTGRESQL:
            await writing
        else:
            # In this order: by its first wait it has sent its only statement.
            sent = asyncio.ensure_future(writing)
            folding = asyncio.ensure_future(ahead.fold(writer, part.last))
            try:
                await sent
            finally:
                folding.cancel()
        if changes.sorting is not None:
            tell_parked(self.resolved.name, changes.sorting)
        return began

    async def _stumble(self, lease: Lease, held: Checkpoint, error: EventjetError) -> None:
        """Stop the projection with its reason; a schema that only a newer deploy knows is left to that one."""
        if isinstance(error, UnknownEvent) and is_newer(self._context.catalog, error):
            self._pause_s = self._context.options.backoff_s[1]
            await lease.settle(held, None, str(error))
            raise error
        _log.error("%s is stopped: %s", self.resolved.name, error)
        self._stumbled_at = await lease.settle(held, FAILED, str(error))
        self._report.ended("failed")


async def _wake_at(stop: asyncio.Event, consumer: EventReader) -> None:
    await stop.wait()
    consumer.wake()


def _id_of(event: Any) -> str:
    return event.aggregate_key[1] if isinstance(event, Offered) else event.aggregate_id


def _first_line(error: BaseException) -> str:
    cause: Any = getattr(error, "orig", None) or error
    lines = str(cause).splitlines()
    if isinstance(error, EventjetError):
        return lines[0].rstrip(".")
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
