"""`ProjectionSubscription` and its sessions: a projection's events are written batch by batch, with the checkpoint.

A session takes the lease of the checkpoint, takes over the durable, checks the log, then writes each batch in as few
transactions as possible. While the database commits a batch of a fold, the next batch is folded. What is read, folded
or remembered ahead lives for one session only; the fence in each transaction decides whether it counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from eventjet import failpoints
from eventjet.codec.reasons import reason_of
from eventjet.domain.position import ACTIVE, BUILDING, FAILED
from eventjet.errors import CheckpointFenced, EventjetError, HandlerFailed, UnknownEvent
from eventjet.log.skip_markers import reading_skip_markers
from eventjet.observability import logs, tracing
from eventjet.observability.metrics import Meter
from eventjet.projections.fold import Offered, is_newer
from eventjet.projections.fold import reader as reader_of
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.sql import locations
from eventjet.sql.checkpoint import DECLARED, Checkpoint
from eventjet.sql.database import is_about_data
from eventjet.subscriptions.context import Session, WorkerContext, WorkerOptions
from eventjet.subscriptions.lease import Lease, Promotion
from eventjet.subscriptions.quarantine_retry import carry_out_retries, load_blocked, log_quarantined
from eventjet.subscriptions.reader import EventReader, Source
from eventjet.subscriptions.retry import Backoff, OwnerWatch, end, opened, renewing, time_text, waiting_since
from eventjet.subscriptions.runner import Acquire, Subscription
from eventjet.writers.batch import Batch, Parts
from eventjet.writers.fold_writer import FoldWriter, Prepared
from eventjet.writers.sql_writer import SqlWriter

_log = logging.getLogger(__name__)

_LOOK_S = 2.0
"""How often a worker checks that its tables exist and that the log is the same and whole, in seconds."""
_FIRST_PART = 500
"""Events in the first transaction, before the speed of the handler is known."""


class Pace(Backoff):
    """The backoff and the batch size of one projection, learnt from the speed of its commits; outlives sessions."""

    def __init__(self, options: WorkerOptions) -> None:
        super().__init__(options.backoff_s)
        self._options = options
        self.part_max = min(_FIRST_PART, options.batch_max)
        """Most events in one transaction."""

    def committed(self, count: int, took_s: float) -> None:
        """Note a commit and size the next parts: larger below a tenth of a lease, smaller above a quarter."""
        options = self._options
        if took_s < options.lease_s / 10:
            self.part_max = min(2 * self.part_max, options.batch_max)
        elif took_s > options.lease_s / 4:
            self.shrink(count)
        self.progressed()

    def shrink(self, count: int) -> None:
        """Halve the parts: this many events may have been too many for the lease or for the database's limits."""
        self.part_max = max(1, count // 2)


class ProjectionSubscription(Subscription):
    """One projection in one process."""

    def __init__(self, resolved: AnyResolved, context: WorkerContext, on_ready: Callable[[], None]) -> None:
        self.pace = Pace(context.options)
        self.meter = Meter(resolved.name, resolved.revision)
        super().__init__(resolved.name, context.options, self.pace, self.meter, on_ready, private=resolved.is_private)
        self.resolved = resolved
        self.context = context
        self._has_warned = False
        self._is_location_logged = False

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Acquire]:
        context, resolved = self.context, self.resolved
        await asyncio.to_thread(context.database.check_sessions)
        for_handlers = isinstance(resolved, ResolvedSql)
        async with Session.open(context, f"worker {resolved.durable}", for_handlers=for_handlers) as session:
            await session.read(locations.check_tables, ())
            yield partial(self._acquire, session, OwnerWatch())

    async def _acquire(self, session: Session, watch: OwnerWatch, failed_at: int) -> ProjectionSession | None:
        lease = await Lease.acquire(session, self.resolved, self.context, watch, failed_at)
        if lease is None:
            return None
        checkpoint = lease.checkpoint
        if not self._has_warned and checkpoint.has_rows_of_other_code(self.resolved.code):
            self._has_warned = True
            logs.CODE_CHANGED.log(
                _log, name=checkpoint.name, revision=checkpoint.revision, newer=checkpoint.revision + 1
            )
        if checkpoint.location and not self._is_location_logged:
            self._is_location_logged = True
            log_event = logs.BESIDE if checkpoint.takes_over else logs.BESIDE_FOR_GOOD
            log_event.log(_log, name=f"{checkpoint.name} revision {checkpoint.revision}", projection=checkpoint.name)
        failpoints.reach("worker.lease_taken")
        return ProjectionSession(self, session, lease)


class ProjectionSession:
    """One session of a projection, from the moment that it has the lease until that is released or lost."""

    def __init__(self, subscription: ProjectionSubscription, session: Session, lease: Lease) -> None:
        self._subscription = subscription
        self._resolved = subscription.resolved
        self._context = subscription.context
        self._pace = subscription.pace
        self._session = session
        self._lease = lease
        self._has_noted = False
        """Whether the checkpoint has a reason to wait."""
        self._pause_reason: str | None = None
        """Why no events arrive: the durable is paused at the server, or the mirror is cut off."""
        self._position = lease.checkpoint.position
        self._reader: EventReader
        self._writer: _FoldCommitter | _SqlCommitter

    async def note(self, reason: str) -> None:
        await self._lease.note_state(None, reason)
        self._has_noted = True

    async def fail(self, error: EventjetError) -> int:
        """Stop the projection; an event schema of a newer deploy is left to that deploy and raised."""
        if isinstance(error, UnknownEvent) and is_newer(self._context.catalog, error):
            self._pace.hold_off()
            await self._lease.note_state(None, str(error))
            raise error
        return await self._lease.note_state(FAILED, str(error))

    async def end(self) -> None:
        with suppress(SQLAlchemyError, OSError):
            failpoints.reach("worker.before_release")
            await self._lease.release()

    async def run(self, stop: asyncio.Event) -> None:
        """Check the tables, carry out retries, check the log, then write batches: each relies on those before it."""
        context, resolved, session, lease = self._context, self._resolved, self._session, self._lease
        checkpoint = lease.checkpoint
        if not isinstance(resolved, ResolvedSql):
            await session.commit_by_statement()
        elif checkpoint.location != DECLARED:
            await session.look_first_in(checkpoint.location)
        await session.read(locations.check_tables, [resolved], context.log)
        await lease.check_tables()
        every_s = context.options.lease_s / 3
        reading = context.client.run(reading_skip_markers(context.stream))
        context.catalog.skipped.update(await renewing(reading, lease.renew, every_s))
        await carry_out_retries(session, context, resolved, lease, stop)
        # Another worker may have changed what is blocked before this lease was taken.
        blocked = await load_blocked(session, resolved)
        source = Source(context.reader.endpoint, context.stream, resolved.durable)
        decoder = partial(reader_of, context.catalog, resolved, ())
        opening = EventReader.open(source, checkpoint.position, decoder, context.options.batch_max)
        async with AsyncExitStack() as stack:
            self._reader = reader = await renewing(opened(stack, opening), lease.renew, every_s)
            side_tasks: list[asyncio.Task[Any]] = [asyncio.create_task(_wake_at(stop, reader))]
            stack.push_async_callback(end, side_tasks)
            if not checkpoint.log:
                await lease.check_unused()
            # Check after the durable exists: replacing the stream from here on deletes the durable too.
            log = await renewing(context.reader.check(checkpoint), lease.renew, every_s)
            if checkpoint.log != log or checkpoint.app != resolved.app or not await lease.are_tables_noted():
                await lease.adopt(log)
            failpoints.reach("worker.log_checked")
            if isinstance(resolved, ResolvedSql):
                self._writer = _SqlCommitter(session, SqlWriter(resolved, lease_s=context.options.lease_s), checkpoint)
            else:
                writer = context.fold_writer(resolved, checkpoint, blocked)
                overlaps = context.database.dialect.is_concurrent
                private = resolved.is_private
                self._writer = _FoldCommitter(session, writer, checkpoint, reader, overlaps=overlaps, private=private)
            reader.start()
            self._subscription.on_ready()
            looking = asyncio.create_task(self._look(log))
            side_tasks.append(looking)
            await self._write_batches(stop, looking)

    async def _look(self, log: str) -> NoReturn:
        """Raise as soon as the log is another one or has lost records; note why its events do not arrive."""
        while True:
            await asyncio.sleep(_LOOK_S)
            checkpoint = replace(self._lease.checkpoint, position=self._position)
            self._pause_reason = await self._context.reader.look(checkpoint, log, self._resolved.durable)

    async def _write_batches(self, stop: asyncio.Event, looking: asyncio.Task[NoReturn]) -> None:
        """Write batches until `stop`, or until the revision is promoted."""
        lease = self._lease
        promotion = Promotion(self._resolved, self._context, lease, self._session)
        building = lease.checkpoint.state == BUILDING and not promotion.is_pending
        looked_at, pause = time.monotonic(), None
        while not stop.is_set():
            if time.monotonic() - looked_at > _LOOK_S:
                await lease.check_tables()
                looked_at = time.monotonic()
            if looking.done():
                looking.result()
            previous_pause, pause = pause, self._pause_reason
            if pause is not None and previous_pause is None:
                reason = waiting_since(time_text(), pause)
                logs.WAITS.log(_log, name=self._resolved.name, reason=reason)
                await self.note(reason)
            wrote = await self._step(self._context.options.lease_s / 3, stop)
            # That no batch came in time does not mean the end of the log.
            remaining = self._reader.remaining_after(self._position)
            if not wrote:
                await lease.renew()
            if pause is None and (self._has_noted if wrote else not remaining):
                self._pace.progressed()
                if self._has_noted:
                    await lease.note_state(None)
                    self._has_noted = False
            if not wrote:
                failpoints.reach("worker.lease_renewed")
            if stop.is_set():
                return  # the rest of a batch may have been left
            if promotion.is_due(remaining) and await promotion.attempt(self._step):
                return
            if building and not remaining and pause is None:
                failpoints.reach("worker.before_settle")
                await lease.note_state(ACTIVE)
                failpoints.reach("worker.after_settle")
                building = False

    async def _step(self, timeout_s: float, stop: asyncio.Event | None = None) -> bool:
        """Commit the next batch; False when none came in time or reading was woken.

        The events before one that cannot be handled are committed first. Once `stop` is set no transaction is begun:
        the rest of a batch is left to the next session. Raises `HandlerFailed`, `CodecError`, `CheckpointFenced`, what
        the database raises, and whatever ended the reading.
        """
        batch = await self._reader.take(timeout_s)
        if batch is None:
            return False
        failpoints.reach("worker.batch_taken")
        rest: Batch | None = batch
        while rest is not None and not (stop is not None and stop.is_set()):
            part, rest = rest.cut(self._pace.part_max)
            began = time.monotonic()
            await self._commit(part)
            self._pace.committed(len(part.events), time.monotonic() - began)
        return True

    async def _commit(self, batch: Batch) -> None:
        resolved, context = self._resolved, self._context
        parts = Parts(resolved.name, batch, private=resolved.is_private)
        for part in parts:
            count = len(part.events)
            try:
                with tracing.batch(resolved.name, resolved.revision, count, part.last, partial(_traces, part)):
                    took_s = await self._writer.commit(part)
            except HandlerFailed as error:
                parts.failed(part, error)
            except CheckpointFenced:
                self._pace.shrink(count)  # perhaps the lease ran out over a slow fold
                raise
            except DBAPIError as error:
                if not is_about_data(error):
                    self._pace.shrink(count)
                parts.refused(part, error)
            else:
                failpoints.reach("worker.after_commit")
                self._position = part.last
                self._subscription.meter.committed(count, took_s)
                context.notices.publish(resolved.name, resolved.revision, part.last)


# Both committers write a part of a batch in one transaction and return the seconds that took. They raise
# `CheckpointFenced`, `HandlerFailed` with the event that cannot be handled, and what the database raises; then nothing
# is written.


class _FoldCommitter:
    """Commits batches of a fold; with `overlaps` the next batch is folded while the database writes this one."""

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
        """Fold a part unless it was folded ahead, and write it. The seconds are those of writing."""
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
        log_quarantined(self._checkpoint.name, prepared.changes.quarantine)
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
            logs.NOT_FOLDED_AHEAD.log(_log, position=after, reason=reason)


class _SqlCommitter:
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


def _traces(part: Batch) -> list[str]:
    """Return the trace headers of the commands that recorded the events."""
    events: Any = part.events
    recorded = [event.event if isinstance(event, Offered) else event for event in events]
    return [
        event.metadata.traceparent for event in recorded if event is not None and event.metadata.traceparent is not None
    ]


async def _wake_at(stop: asyncio.Event, reader: EventReader) -> None:
    await stop.wait()
    reader.wake()
