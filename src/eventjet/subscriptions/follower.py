"""`EventFollower`: one reactor or process type in one process, term after term.

A term takes the cursor, takes the durable over after its position, and has each event dealt with in the lane of its
key. The cursor is written a few times a second by compare-and-set, which is progress, lease and fence in one. What was
done after the last write is done again by the next owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from eventjet import failpoints
from eventjet.commands.repositories import Repositories
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
from eventjet.log.predecessors import PredecessorReader
from eventjet.nats.endpoint import Endpoint
from eventjet.observability import logs
from eventjet.observability.metrics import FollowerMeter
from eventjet.quarantine.fold import Reader
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.cursor import OwnerWatch
from eventjet.subscriptions.cursor_store import Cursors, HeldCursor
from eventjet.subscriptions.followed import Followed
from eventjet.subscriptions.lanes import Lanes
from eventjet.subscriptions.reader import EventReader, Source
from eventjet.subscriptions.shares import Share
from eventjet.subscriptions.term import Reading, Term
from eventjet.subscriptions.terms import Backoff, boot_clock, pause, renewing, run_terms

_log = logging.getLogger(__name__)

LANES = 32
"""Events dealt with at once by one follower."""
AHEAD_MAX = 1_000
"""Positions taken from the log and not yet below the floor."""
_BATCH_MAX = 500
_LEFT = 2
"""Leases that a free cursor is left to those who are to have it."""
_LOOK_S = 2.0
"""How often it looks whether the log is the one it began with, and whole."""
_STOPS = (CodecError, LogIncomplete, LogRolledBack, CursorDamaged, ReactionFailed)

OpenReader: TypeAlias = Callable[
    [Source, int, Callable[[PredecessorReader], Reader], int, Sequence[str]], Awaitable[Reading]
]
"""As `EventReader.open`."""


@dataclass(frozen=True, slots=True)
class FollowerContext:
    """What the followers of one process share."""

    repositories: Repositories
    cursors: Cursors
    endpoint: Endpoint
    owner: str
    options: WorkerOptions
    meters: dict[str, FollowerMeter] = field(default_factory=dict[str, FollowerMeter])
    clock: Callable[[], float] = boot_clock
    """Of leases, in seconds."""
    open_reader: OpenReader = EventReader.open

    def meter(self, followed: Followed) -> FollowerMeter:
        one = followed.declaration
        return self.meters.setdefault(one.name, FollowerMeter(one.name, one.kind))


class EventFollower:
    """`on_ready` is called, perhaps often, once it works or waits for the cursor."""

    def __init__(
        self, followed: Followed, context: FollowerContext, share: Share, on_ready: Callable[[], None]
    ) -> None:
        self.name = followed.declaration.name
        self._followed = followed
        self._context = context
        self._share = share
        self._on_ready = on_ready
        self._meter = context.meter(followed)
        self.pace = Backoff(context.options.backoff_s)
        self._failed_at = -1

    async def run(self, stop: asyncio.Event) -> None:
        """Term after term until `stop`; what is being dealt with is finished and the cursor let go."""
        private = self._context.repositories.catalog.is_private
        ends, ready = self._meter.terms, self._on_ready
        await run_terms(self.name, self._term, stop, ends, self.pace, on_ready=ready, private=private)

    async def _term(self, stop: asyncio.Event) -> None:
        """From the taking of the cursor, as soon as it is free, to its end."""
        lease_s, clock = self._context.options.lease_s, self._context.clock
        watch, left = OwnerWatch(lease_s, clock), OwnerWatch(_LEFT * lease_s, clock)
        while not stop.is_set():
            free = await self._look_at(watch)  # also where there is no room: how long nobody writes it is seen so
            if free is None or not (self._share.has_room() or left.saw(free.sequence)):
                self._on_ready()
                await pause(stop, self._context.options.poll_s)
                continue
            with self._share.holding() as let_go:
                if await self._take(free):
                    failpoints.reach("cursor.taken")
                    await self._hold(free, stop, let_go)
                    return

    async def _look_at(self, watch: OwnerWatch) -> HeldCursor | None:
        """The cursor, if it is free, or its owner silent."""
        one, context = self._followed.declaration, self._context
        held = await context.cursors.read(self.name)
        silent = watch.saw(held.sequence)
        is_free = held.cursor.is_free(one.revision, context.owner, silent=silent, failed_at=self._failed_at)
        return held if is_free else None

    async def _take(self, held: HeldCursor) -> bool:
        """Whether it is ours now: another may have been quicker."""
        context = self._context
        began = context.clock()
        try:
            await context.cursors.write(held, held.cursor.taken(context.owner, self._followed.declaration.revision))
        except CursorFenced:
            return False
        held.written_at = began
        logs.TOOK_CURSOR.tell(_log, name=self.name, position=held.cursor.position)
        return True

    async def _hold(self, held: HeldCursor, stop: asyncio.Event, let_go: asyncio.Event) -> None:
        """Work on it until one of these is set; what stops it for good is written down."""
        try:
            await self._follow(held, stop, let_go)
            self._meter.terms["drained"] += 1
        except _STOPS as error:
            logs.STOPPED.tell(_log, name=self.name, reason=error)
            await self._context.cursors.write(held, held.cursor.failed(str(error)))
            self._failed_at = held.cursor.position
            self._meter.terms["failed"] += 1
        except CursorFenced:
            raise
        except Exception:
            if self.pace.waits is not None:  # it was so in the term before as well
                with suppress(EventjetError):
                    await self._context.cursors.write(held, held.cursor.waiting(self.pace.waits))
            raise

    async def _follow(self, held: HeldCursor, stop: asyncio.Event, let_go: asyncio.Event) -> None:
        context, cursor, feed = self._context, held.cursor, self._followed.feed

        async def renew() -> None:
            began = context.clock()
            await context.cursors.write(held, held.cursor)
            held.written_at = began

        # However long these take: whoever is next would have to do them as well.
        every_s = context.options.lease_s / 3
        await renewing(feed.check(cursor), renew, every_s)
        await renewing(self._followed.check(), renew, every_s)
        parked = await renewing(context.cursors.parked(self.name), renew, every_s)
        source = Source(context.endpoint, feed.stream, self._followed.durable)
        opening = context.open_reader(source, cursor.position, feed.reader, _BATCH_MAX, feed.filters)
        reader = await renewing(opening, renew, every_s)
        lanes = Lanes(LANES, AHEAD_MAX, cursor.position, cursor.event_id, cursor.done)
        try:
            term = Term(self._followed, context, held, lanes, parked, self._meter)
            reader.start()
            self._on_ready()
            keeping = (term.keep(), self._look(held, term), term.wake(), term.look_again(), _raised(lanes))
            tasks = [asyncio.ensure_future(one) for one in (term.take(reader), *keeping)]
            try:
                await self._until_ended(term, lanes, tasks, stop, let_go)
            finally:
                if term.has_moved():
                    self.pace.progressed()
        finally:
            await lanes.close()
            await reader.close()
        self.pace.progressed()

    async def _until_ended(
        self,
        term: Term,
        lanes: Lanes,
        working: Sequence[asyncio.Future[Any]],
        stop: asyncio.Event,
        let_go: asyncio.Event,
    ) -> None:
        """Read, deal with, write; then finish what has begun, and let go. Raises whatever ends the term."""
        stopped, going = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(let_go.wait())
        taking, *keeping = working
        tasks: list[asyncio.Future[Any]] = [stopped, going, *working]
        try:
            await _first_of(tasks)
            _raise_first(working)
            taking.cancel()
            drained = asyncio.ensure_future(lanes.drained())
            tasks.append(drained)
            # Whoever is to have it next can wait for a handler; whoever stops this process cannot for long.
            await _first_of([stopped, drained, *keeping], self._followed.retry.timeout_s)
            await _first_of([drained, *keeping], self._context.options.drain_s / 2 if stop.is_set() else 0.0)
            _raise_first(keeping)
            if not drained.done():
                logs.HANDLER_CUT_OFF.tell(_log, name=self.name)
            await lanes.close()
            await term.release()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, held: HeldCursor, term: Term) -> None:
        """Raise as soon as the stream is another one, or no longer whole; note whether anything stands in the way."""
        while True:
            await asyncio.sleep(_LOOK_S)
            followed = self._followed
            term.tell_pause(await followed.feed.look(held.cursor, followed.durable))
            if term.has_moved() or term.is_idle:
                self.pace.progressed()


async def _first_of(tasks: Sequence[asyncio.Future[Any]], timeout_s: float | None = None) -> None:
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _raised(lanes: Lanes) -> None:
    await asyncio.shield(lanes.failed)


def _raise_first(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        if not task.done():
            continue
        if task.cancelled():
            raise UnexpectedExit(asyncio.CancelledError.__name__, "A task of the worker")
        if (error := task.exception()) is not None:
            raise error
