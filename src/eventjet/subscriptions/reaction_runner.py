"""`ReactionRunner`: runs one reactor, process, inbox or publication in one process, session after session.

A session takes the cursor, takes over the durable after the cursor's position, and has each event handled, one at a
time for each key. The cursor is written several times a second by compare-and-set, which is progress, lease and fence
in one. Delivery is at least once: the next owner repeats what was done after the last write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from eventjet import failpoints
from eventjet.errors import (
    CodecError,
    CursorDamaged,
    CursorFenced,
    EventjetError,
    LogIncomplete,
    LogRolledBack,
    ReactionFailed,
    UnexpectedExit,
)
from eventjet.observability import logs
from eventjet.subscriptions.cursor_session import CursorSession, ReactionContext
from eventjet.subscriptions.cursor_store import StoredCursor
from eventjet.subscriptions.handlers import EventHandler
from eventjet.subscriptions.keyed_executor import KeyedExecutor
from eventjet.subscriptions.partitions import PartitionAssignment
from eventjet.subscriptions.reader import Source
from eventjet.subscriptions.retry import (
    Backoff,
    OwnerWatch,
    pause,
    renewing,
    run_sessions,
)

_log = logging.getLogger(__name__)

LANES = 32
"""Events that one subscription handles at once."""
AHEAD_MAX = 1_000
"""Positions read from the log beyond the position up to which all is done."""
_BATCH_MAX = 500
_YIELD_LEASES = 2
"""How many leases long a process without room for it leaves a free cursor to other processes."""
_LOOK_S = 2.0
"""How often the stream's identity and integrity are checked, in seconds."""
_STOPS = (CodecError, LogIncomplete, LogRolledBack, CursorDamaged, ReactionFailed)


class ReactionRunner:
    """Runs one reactor partition, process, inbox or publication in one process.

    `on_ready` is called, perhaps often, once the runner works or waits for the cursor.
    """

    def __init__(
        self,
        handler: EventHandler,
        context: ReactionContext,
        assignment: PartitionAssignment,
        on_ready: Callable[[], None],
    ) -> None:
        self.name = handler.declaration.name
        self._handler = handler
        self._context = context
        self._assignment = assignment
        self._on_ready = on_ready
        self._meter = context.meter(handler)
        self.pace = Backoff(context.options.backoff_s)
        self._failed_at = -1

    async def run(self, stop: asyncio.Event) -> None:
        """Run session after session until `stop`, then finish the events in progress and release the cursor."""
        private = self._context.repositories.catalog.is_private
        ends, ready = self._meter.terms, self._on_ready
        await run_sessions(self.name, self._run_session, stop, ends, self.pace, on_ready=ready, private=private)

    async def _run_session(self, stop: asyncio.Event) -> None:
        """Wait until the cursor is free, take it, and run one session."""
        lease_s, clock = self._context.options.lease_s, self._context.clock
        watch, free_watch = OwnerWatch(clock), OwnerWatch(clock)
        while not stop.is_set():
            stored = await self._look_at(watch)  # also without room, to see how long the cursor is not written
            if stored is None or not (
                self._assignment.has_room() or free_watch.is_silent(stored.sequence, _YIELD_LEASES * lease_s)
            ):
                self._on_ready()
                await pause(stop, self._context.options.poll_s)
                continue
            with self._assignment.holding() as release_requested:
                if await self._take(stored):
                    failpoints.reach("cursor.taken")
                    await self._hold(stored, stop, release_requested)
                    return

    async def _look_at(self, watch: OwnerWatch) -> StoredCursor | None:
        """Return the cursor if it is free or its owner is silent, else None."""
        declaration, context = self._handler.declaration, self._context
        stored = await context.cursors.read(self.name)
        silent = watch.is_silent(stored.sequence, context.options.lease_s)
        is_free = stored.cursor.is_free(declaration.revision, context.owner, silent=silent, failed_at=self._failed_at)
        return stored if is_free else None

    async def _take(self, stored: StoredCursor) -> bool:
        """Take the cursor; False when another process took it first."""
        context = self._context
        began = context.clock()
        try:
            await context.cursors.write(stored, stored.cursor.taken(context.owner, self._handler.declaration.revision))
        except CursorFenced:
            return False
        stored.written_at = began
        logs.TOOK_CURSOR.tell(_log, name=self.name, position=stored.cursor.position)
        return True

    async def _hold(self, stored: StoredCursor, stop: asyncio.Event, release_requested: asyncio.Event) -> None:
        """Run the session until one of the events is set; write an error that stops the subscription to the cursor."""
        try:
            await self._follow(stored, stop, release_requested)
            self._meter.terms["drained"] += 1
        except _STOPS as error:
            logs.STOPPED.tell(_log, name=self.name, reason=error)
            await self._context.cursors.write(stored, stored.cursor.failed(str(error)))
            self._failed_at = stored.cursor.position
            self._meter.terms["failed"] += 1
        except CursorFenced:
            raise
        except Exception:
            if self.pace.waits is not None:  # the session before ended in a fault as well
                with suppress(EventjetError):
                    await self._context.cursors.write(stored, stored.cursor.waiting(self.pace.waits))
            raise

    async def _follow(self, stored: StoredCursor, stop: asyncio.Event, release_requested: asyncio.Event) -> None:
        context, cursor, events = self._context, stored.cursor, self._handler.source

        async def renew() -> None:
            began = context.clock()
            await context.cursors.write(stored, stored.cursor)
            stored.written_at = began

        # The lease is renewed however long these take: the next owner would have to do them as well.
        every_s = context.options.lease_s / 3
        await renewing(events.check(cursor), renew, every_s)
        await renewing(self._handler.check(), renew, every_s)
        parked = await renewing(context.cursors.parked(self.name), renew, every_s)
        consumer = Source(context.endpoint, events.stream, self._handler.durable)
        opening = context.open_reader(consumer, cursor.position, events.reader, _BATCH_MAX, events.filters)
        reader = await renewing(opening, renew, every_s)
        executor = KeyedExecutor(LANES, AHEAD_MAX, cursor.position, cursor.event_id, cursor.done)
        try:
            session = CursorSession(self._handler, context, stored, executor, parked, self._meter)
            reader.start()
            self._on_ready()
            keeping = (
                session.keep(),
                self._look(stored, session),
                session.wake(),
                session.look_again(),
                _raise_failure(executor),
            )
            tasks = [asyncio.ensure_future(coroutine) for coroutine in (session.take(reader), *keeping)]
            try:
                await self._until_ended(session, executor, tasks, stop, release_requested)
            finally:
                if session.has_moved():
                    self.pace.progressed()
        finally:
            await executor.close()
            await reader.close()
        self.pace.progressed()

    async def _until_ended(
        self,
        session: CursorSession,
        executor: KeyedExecutor,
        session_tasks: Sequence[asyncio.Future[Any]],
        stop: asyncio.Event,
        release_requested: asyncio.Event,
    ) -> None:
        """Run the tasks until the end, then finish events in progress and release; raises what ends the session."""
        stopped, released = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(release_requested.wait())
        taking, *keeping = session_tasks
        tasks: list[asyncio.Future[Any]] = [stopped, released, *session_tasks]
        try:
            await _first_of(tasks)
            raise_ended(session_tasks)
            taking.cancel()
            drained = asyncio.ensure_future(executor.drained())
            tasks.append(drained)
            # The next owner can wait for a running handler; a process that is stopped cannot wait long.
            await _first_of([stopped, drained, *keeping], self._handler.retry.timeout_s)
            await _first_of([drained, *keeping], self._context.options.drain_s / 2 if stop.is_set() else 0.0)
            raise_ended(keeping)
            if not drained.done():
                logs.HANDLER_CUT_OFF.tell(_log, name=self.name)
            await executor.close()
            await session.release()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, stored: StoredCursor, session: CursorSession) -> None:
        """Raise as soon as the stream is another one or has lost records; note whether its consumer is paused."""
        while True:
            await asyncio.sleep(_LOOK_S)
            handler = self._handler
            session.tell_pause(await handler.source.look(stored.cursor, handler.durable))
            if session.has_moved() or session.is_idle:
                self.pace.progressed()


async def _first_of(tasks: Sequence[asyncio.Future[Any]], timeout_s: float | None = None) -> None:
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _raise_failure(executor: KeyedExecutor) -> None:
    await asyncio.shield(executor.failed)


def raise_ended(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Raise the error of the first task that has ended; `UnexpectedExit` when it was cancelled or raised nothing."""
    for task in tasks:
        if not task.done():
            continue
        if task.cancelled():
            raise UnexpectedExit(asyncio.CancelledError.__name__, "A task of the worker")
        raise task.exception() or UnexpectedExit("nothing, but ended", "A task of the worker")
