"""`ProjectionRunner`: runs one projection in one process, session after session.

A session has one lease: it takes the lease, takes over the durable, checks the log, then writes batch by batch, each in
as few transactions as possible. While the database commits a batch of a fold, the next batch is folded. What is read,
folded or remembered ahead lives for one session only; the fence in each transaction decides whether it counts. Any
fault ends the session. After faults of connections, leases and locks another session begins. Faults of events and of
the log stop the projection with their reason, until somebody rebuilds it or starts a worker that takes the events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeAlias

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from eventjet import failpoints
from eventjet.codec.reasons import reason_of
from eventjet.errors import (
    CheckpointFenced,
    CodecError,
    EventjetError,
    HandlerFailed,
    HistoryBroken,
    LogIncomplete,
    LogRolledBack,
    RowUnreadable,
    StillHeld,
    TableLost,
    TableOccupied,
    TransactionEnded,
    UnknownEvent,
)
from eventjet.log.integrity import check_running, check_whole_log, learn_voids, pause_of
from eventjet.observability import logs, tracing
from eventjet.projections.fold import BlockedAggregates, Offered, is_newer
from eventjet.projections.fold import reader as reader_of
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.sql import locations
from eventjet.sql.checkpoint import ACTIVE, BUILDING, DECLARED, FAILED, Checkpoint
from eventjet.sql.database import is_about_data
from eventjet.subscriptions.context import Session, T, WorkerContext
from eventjet.subscriptions.lease import Lease, Promotion
from eventjet.subscriptions.quarantine_retry import carry_out_retries, load_blocked, log_parked
from eventjet.subscriptions.reader import EventReader, Source
from eventjet.subscriptions.retry import Pace, end, now_told, renewing, run_sessions, waiting_since
from eventjet.writers.batch import Batch, Parts
from eventjet.writers.fold_writer import FoldWriter, Prepared
from eventjet.writers.sql_writer import SqlWriter

_log = logging.getLogger(__name__)


class FoldCommitter:
    """Commits batches of a fold: reads the rows, folds the events, writes the rows.

    With `overlaps` the next batch is folded while this batch is written.
    """

    def __init__(
        self,
        session: Session,
        writer: FoldWriter,
        checkpoint: Checkpoint,
        reader: EventReader,
        *,
        overlaps: bool,
        private: bool,
    ) -> None:
        self._is_private = private
        self._session = session
        self._writer = writer
        self._checkpoint = checkpoint
        self._reader = reader
        self._overlaps = overlaps
        self._folded_ahead: Prepared | None = None

    async def commit(self, part: Batch) -> float:
        """Fold a part unless it was folded ahead, and write it; see `Committer`. The seconds are those of writing."""
        prepared, self._folded_ahead = self._folded_ahead, None
        if prepared is None or prepared.batch is not part:
            prepared = await self._session.read(self._writer.prepare, part)
        failpoints.reach("worker.batch_folded")
        began = time.perf_counter()
        writing = self._session.write(self._writer.commit, self._checkpoint, prepared)
        if self._overlaps:
            # The order matters: by its first wait the transaction has sent its only statement, so the server works
            # while the loop folds.
            sent = asyncio.ensure_future(writing)
            folding = asyncio.ensure_future(self._fold_ahead(part.last))
            try:
                await sent
            finally:
                # The task has either folded by now or waits for more of the log, which may take any time.
                folding.cancel()
        else:
            await writing
        took_s = time.perf_counter() - began
        log_parked(self._checkpoint.name, prepared.changes.quarantine)
        return took_s

    async def _fold_ahead(self, after: int) -> None:
        """Fold the batch after a position if it is whole: with fewer events folding ahead gains nothing."""
        batch = await self._reader.peek_whole()
        if batch is None or batch.after != after:
            return  # the rest of a cut batch comes first
        try:
            self._folded_ahead = self._writer.prepare_next(batch)
        except Exception as error:  # noqa: BLE001 - folded again in its turn, it raises this again
            reason = reason_of(error, private=self._is_private)
            logs.NOT_FOLDED_AHEAD.tell(_log, position=after, reason=reason)


class SqlCommitter:
    """Commits batches of a SQL projection: runs its handlers within the transaction."""

    def __init__(self, session: Session, writer: SqlWriter, checkpoint: Checkpoint) -> None:
        self._session = session
        self._writer = writer
        self._checkpoint = checkpoint

    async def commit(self, part: Batch) -> float:
        began = time.perf_counter()
        async with self._session.transaction() as connection:
            await self._writer.write(connection, self._checkpoint, part)
        return time.perf_counter() - began


Committer: TypeAlias = FoldCommitter | SqlCommitter
"""Writes a part of a batch to the database: `commit` is one transaction and returns how many seconds it took.

`commit` raises `CheckpointFenced`, `HandlerFailed` with the event that cannot be handled, and what the database raises;
then nothing is written.
"""


class BatchPipeline:
    """Takes batches from the reader and commits them, for one session.

    `position` is the position of the checkpoint. `on_commit` is called with the position, the number of events and the
    seconds of each transaction.
    """

    def __init__(
        self,
        resolved: AnyResolved,
        checkpoint: Checkpoint,
        reader: EventReader,
        committer: Committer,
        pace: Pace,
        on_commit: Callable[[int, int, float], None],
    ) -> None:
        self._resolved = resolved
        self._reader = reader
        self._committer = committer
        self._pace = pace
        self._on_commit = on_commit
        self.position = checkpoint.position

    async def step(self, timeout_s: float) -> bool:
        """Commit the next batch; False when none came in time or reading was woken.

        The events before one that cannot be handled are committed first. Raises `HandlerFailed`, `CodecError`,
        `CheckpointFenced`, what the database raises, and whatever ended the reading.
        """
        batch = await self._reader.take(timeout_s)
        if batch is None:
            return False
        failpoints.reach("worker.batch_taken")
        rest: Batch | None = batch
        while rest is not None:
            part, rest = rest.cut(self._pace.part_max)
            began = time.monotonic()
            await self._commit(part)
            self._pace.committed(len(part.events), time.monotonic() - began)
        return True

    async def _committed(self, part: Batch) -> float:
        resolved = self._resolved
        with tracing.batch(resolved.name, resolved.revision, len(part.events), part.last, lambda: _traces(part)):
            return await self._committer.commit(part)

    async def _commit(self, batch: Batch) -> None:
        parts = Parts(self._resolved.name, batch, private=self._resolved.is_private)
        for part in parts:
            try:
                took_s = await self._committed(part)
            except HandlerFailed as error:
                parts.failed(part, error)
            except CheckpointFenced:
                self._pace.failed(len(part.events))  # perhaps the lease ran out over a slow fold
                raise
            except DBAPIError as error:
                if not is_about_data(error):
                    self._pace.failed(len(part.events))
                parts.refused(part, error)
            else:
                failpoints.reach("worker.after_commit")
                self.position = part.last
                self._on_commit(part.last, len(part.events), took_s)


def _traces(part: Batch) -> list[str]:
    """Return the trace headers of the commands that recorded the events."""
    events: Any = part.events
    recorded = [event.event if isinstance(event, Offered) else event for event in events]
    return [
        event.metadata.traceparent for event in recorded if event is not None and event.metadata.traceparent is not None
    ]


_LOOK_S = 2.0
"""How often a worker checks that its tables exist and that the log is the same and whole, in seconds."""
_STOPS = (
    HandlerFailed,
    CodecError,
    LogIncomplete,
    LogRolledBack,
    HistoryBroken,
    RowUnreadable,
    TableLost,
    TableOccupied,
    StillHeld,
    TransactionEnded,
)


class ProjectionRunner:
    """Runs one projection in one process.

    `on_ready` is called, perhaps often, once the runner works or waits for the lease.
    """

    def __init__(self, resolved: AnyResolved, context: WorkerContext, on_ready: Callable[[], None]) -> None:
        self.resolved = resolved
        self._context = context
        self._on_ready = on_ready
        self._meter = context.meter(resolved)
        self.pace = Pace(context.options)
        self._is_waiting_noted = False
        self._pause_reason: str | None = None
        """Why the durable delivers nothing, when somebody has paused it at the server."""
        self._failed_at = -1
        self._has_warned = False

    async def run(self, stop: asyncio.Event) -> None:
        """Run session after session until `stop`, then finish the current batch and release the lease."""
        resolved, ends = self.resolved, self._meter.terms
        await run_sessions(
            resolved.name,
            self._run_session,
            stop,
            ends,
            self.pace,
            on_ready=self._on_ready,
            private=resolved.is_private,
        )

    async def _run_session(self, stop: asyncio.Event) -> None:
        is_sql = isinstance(self.resolved, ResolvedSql)
        await asyncio.to_thread(self._context.database.check_sessions)
        async with Session.open(self._context, f"worker {self.resolved.durable}", for_handlers=is_sql) as session:
            await session.read(locations.check_tables, ())
            lease = await Lease.acquire(session, self.resolved, self._context, stop, self._on_ready, self._failed_at)
            if lease is None:
                return
            self._warn_of_other_code(lease.checkpoint)
            failpoints.reach("worker.lease_taken")
            if not is_sql:
                await session.commit_by_statement()
            elif lease.checkpoint.location != DECLARED:
                await session.look_first_in(lease.checkpoint.location)
            await self._note_waiting(lease)
            try:
                await session.read(locations.check_tables, [self.resolved], self._context.log)
                await self._hold(session, lease, stop)
                self._meter.terms["drained"] += 1
            except _STOPS as error:
                await self._stop(lease, error)
            except CheckpointFenced:
                raise
            except Exception:
                await self._note_waiting(lease)
                raise
            finally:
                with suppress(SQLAlchemyError, OSError):
                    failpoints.reach("worker.before_release")
                    await lease.release()

    def _warn_of_other_code(self, checkpoint: Checkpoint) -> None:
        """Log once in a process that other code made some of the rows under the same revision."""
        if not self._has_warned and checkpoint.has_rows_of_other_code(self.resolved.code):
            self._has_warned = True
            logs.CODE_CHANGED.tell(
                _log, name=checkpoint.name, revision=checkpoint.revision, newer=checkpoint.revision + 1
            )

    async def _note_waiting(self, lease: Lease) -> None:
        """Note in the checkpoint what ended the sessions before, so that the projection does not look healthy."""
        if self.pace.waits is not None:
            with suppress(SQLAlchemyError, OSError, EventjetError):
                await lease.settle(None, self.pace.waits)
                self._is_waiting_noted = True

    async def _note_pause(self, lease: Lease, reason: str) -> None:
        logs.WAITS.tell(_log, name=self.resolved.name, reason=reason)
        await lease.settle(None, reason)
        self._is_waiting_noted = True

    async def _note_progress(self, lease: Lease) -> None:
        """Clear the backoff and the reason to wait, since a batch was written or nothing is left to write."""
        self.pace.progressed()
        if self._is_waiting_noted:
            await lease.settle(None)
            self._is_waiting_noted = False

    async def _hold(self, session: Session, lease: Lease, stop: asyncio.Event) -> None:
        """Check the tables, carry out retries, then write batches.

        Each step relies on the steps before it, and all steps rely on the lease.
        """
        context = self._context
        await lease.check_tables()
        await self._renewing(lease, learn_voids(context.client, context.stream, context.catalog))
        await carry_out_retries(session, context, self.resolved, lease, stop)
        await self._follow(session, lease, stop)

    async def _follow(self, session: Session, lease: Lease, stop: asyncio.Event) -> None:
        """Take over the durable, check the log, and write batches."""
        context, checkpoint = self._context, lease.checkpoint
        # Another worker may have changed what is blocked before this lease was taken.
        blocked = await load_blocked(session, self.resolved)
        source = Source(context.endpoint, context.stream, self.resolved.durable)
        decoder = partial(reader_of, context.catalog, self.resolved, ())
        opening = EventReader.open(source, checkpoint.position, decoder, context.options.batch_max)
        reader = await self._renewing(lease, opening)
        side_tasks: list[asyncio.Task[Any]] = [asyncio.create_task(_wake_at(stop, reader))]
        try:
            if not checkpoint.log:
                await lease.check_unused()
            # Check after the durable exists: replacing the stream from here on deletes the durable too.
            log = await self._renewing(lease, check_whole_log(context.client, context.stream, checkpoint))
            if checkpoint.log != log or checkpoint.app != self.resolved.app or not await lease.are_tables_noted():
                await lease.adopt(log)
            failpoints.reach("worker.log_checked")
            pipeline = self._pipeline(session, checkpoint, reader, blocked)
            reader.start()
            self._on_ready()
            self._pause_reason = None
            looking = asyncio.create_task(self._look(lease, log))
            side_tasks.append(looking)
            await self._project(session, lease, reader, pipeline, stop, looking)
        finally:
            await end(side_tasks)
            await reader.close()

    async def _renewing(self, lease: Lease, work: Awaitable[T]) -> T:
        """Await work that does not use the database session, and renew the lease meanwhile."""
        return await renewing(work, lease.renew, self._context.options.lease_s / 3)

    def _pipeline(
        self, session: Session, checkpoint: Checkpoint, reader: EventReader, blocked: BlockedAggregates
    ) -> BatchPipeline:
        context, resolved = self._context, self.resolved
        if isinstance(resolved, ResolvedSql):
            committer = SqlCommitter(session, SqlWriter(resolved, lease_s=context.options.lease_s), checkpoint)
        else:
            writer = context.fold_writer(resolved, checkpoint, blocked)
            overlaps = context.database.dialect.is_concurrent
            private = resolved.is_private
            committer = FoldCommitter(session, writer, checkpoint, reader, overlaps=overlaps, private=private)
        return BatchPipeline(resolved, checkpoint, reader, committer, self.pace, self._committed)

    def _committed(self, position: int, events: int, seconds: float) -> None:
        self._meter.committed(events, seconds)
        self._context.notices.tell(self.resolved.name, self.resolved.revision, position)

    async def _look(self, lease: Lease, log: str) -> NoReturn:
        """Raise as soon as the log is another one or has lost records; note whether the durable is paused."""
        client, stream = self._context.client, self._context.stream
        while True:
            await asyncio.sleep(_LOOK_S)
            await check_running(client, stream, lease.checkpoint, log)
            self._pause_reason = await pause_of(client, stream, self.resolved.durable)

    async def _project(
        self,
        session: Session,
        lease: Lease,
        reader: EventReader,
        pipeline: BatchPipeline,
        stop: asyncio.Event,
        look_task: asyncio.Task[NoReturn],
    ) -> None:
        """Write batches until `stop`, or until the revision is promoted."""
        context = self._context
        promotion = Promotion(self.resolved, context, lease, session)
        building = lease.checkpoint.state == BUILDING and not promotion.wanted
        looked_at, pause = time.monotonic(), None
        while not stop.is_set():
            if time.monotonic() - looked_at > _LOOK_S:
                await lease.check_tables()
                looked_at = time.monotonic()
            if look_task.done():
                look_task.result()
            previous_pause, pause = pause, self._pause_reason
            if pause is not None and previous_pause is None:
                await self._note_pause(lease, waiting_since(now_told(), pause))
            wrote = await pipeline.step(context.options.lease_s / 3)
            remaining = reader.left_after(pipeline.position)  # no batch in time does not mean the end of the log
            if not wrote:
                await lease.renew()
            if pause is None and (self._is_waiting_noted if wrote else not remaining):
                await self._note_progress(lease)
            if not wrote:
                failpoints.reach("worker.lease_renewed")
            if promotion.is_due(remaining) and await promotion.attempt(pipeline.step):
                return
            if building and not remaining and pause is None:
                failpoints.reach("worker.before_settle")
                await lease.settle(ACTIVE)
                failpoints.reach("worker.after_settle")
                building = False

    async def _stop(self, lease: Lease, error: EventjetError) -> None:
        """Stop the projection with its reason; an event schema of a newer deploy is left to that deploy and raised."""
        if isinstance(error, UnknownEvent) and is_newer(self._context.catalog, error):
            self.pace.hold_off()
            await lease.settle(None, str(error))
            raise error
        logs.STOPPED.tell(_log, name=self.resolved.name, reason=error)
        self._failed_at = await lease.settle(FAILED, str(error))
        self._meter.terms["failed"] += 1


async def _wake_at(stop: asyncio.Event, reader: EventReader) -> None:
    await stop.wait()
    reader.wake()
