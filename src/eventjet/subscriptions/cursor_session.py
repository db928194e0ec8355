"""`ReactionSubscription` and its sessions: events are handled by key, tried again, or quarantined beside the cursor."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

from eventjet import failpoints
from eventjet.codec.headers import RawRecord, is_imported
from eventjet.codec.reasons import reason_of
from eventjet.commands.repository import Repositories
from eventjet.domain.quarantined import BLOCKED, DROPPED, QUARANTINED, RETRIED, AggregateKey, Quarantined
from eventjet.domain.reactor import PermanentFailure
from eventjet.errors import (
    CodecError,
    ConcurrencyConflict,
    CursorFenced,
    DefinitionError,
    EventjetError,
    HandlerBlocked,
    LogRolledBack,
    OutcomeUnknown,
    ReactionFailed,
    StoreUnavailable,
    StreamFull,
    UnexpectedExit,
    Unreachable,
    UsageError,
)
from eventjet.log.predecessors import PredecessorReader
from eventjet.observability import logs
from eventjet.observability.metrics import FollowerMeter
from eventjet.projections.fold import Offered, Reader, blocked_by, is_of, quarantined_for
from eventjet.runtime import called
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.cursor_store import CHANGES_MAX, Cursors, QuarantinedEntry, StoredCursor
from eventjet.subscriptions.handlers import EventHandler, ProcessHandler, Try
from eventjet.subscriptions.keyed_executor import KeyedExecutor
from eventjet.subscriptions.loop_watch import LoopWatch, RunningTry
from eventjet.subscriptions.partitions import PartitionAssignment
from eventjet.subscriptions.process_waking import InstanceWaker
from eventjet.subscriptions.reader import EventReader, Source
from eventjet.subscriptions.retry import Backoff, OwnerWatch, opened, renewing, time_text, waiting_since
from eventjet.subscriptions.runner import Acquire, Subscription
from eventjet.writers.batch import Batch

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
_NOTE_AFTER_TRIES = 2
"""From this many failed tries of an event on, the cursor says what it waits for."""
WRITE_S = 0.05
"""Pause between two writes of a moving cursor, in seconds."""
_PASSING = (StoreUnavailable, OutcomeUnknown, ConcurrencyConflict, StreamFull, Unreachable)
"""Errors of eventjet whose causes end by themselves: the event is tried again without limit."""
_PERMANENT = (PermanentFailure, UsageError, DefinitionError)
"""The application's word, and errors of eventjet about the code itself: another try would fail in the same way."""


class Reading(Protocol):
    """The part of `EventReader` that a session uses."""

    def start(self) -> None: ...

    async def take(self, timeout_s: float) -> Batch | None: ...

    async def close(self) -> None: ...

    def remaining_after(self, position: int) -> int: ...


OpenReader: TypeAlias = Callable[
    [Source, int, Callable[[PredecessorReader], Reader], int, Sequence[str]], Awaitable[Reading]
]
"""A function like `EventReader.open`."""


@dataclass(frozen=True, slots=True)
class ReactionContext:
    """The resources that the reaction runners of one process share."""

    repositories: Repositories
    cursors: Cursors
    owner: str
    options: WorkerOptions
    watch: LoopWatch | None = None
    """The watch over handlers that block; None where nothing blocks, as in a simulation."""
    open_reader: OpenReader = EventReader.open


class ReactionSubscription(Subscription):
    """One reactor partition, process, inbox or publication in one process."""

    def __init__(
        self,
        handler: EventHandler,
        context: ReactionContext,
        assignment: PartitionAssignment,
        on_ready: Callable[[], None],
    ) -> None:
        name, options = handler.declaration.name, context.options
        self.meter = FollowerMeter(name, handler.declaration.kind)
        private = context.repositories.catalog.is_private
        super().__init__(name, options, Backoff(options.backoff_s), self.meter, on_ready, private=private)
        self.handler = handler
        self.context = context
        self.assignment = assignment
        self._refused_at = 0
        """Sequence of the abandoned cursor that was refused to this revision last, to log that once."""

    def opened(self) -> AbstractAsyncContextManager[Acquire]:
        clock = self.context.cursors.clock
        return nullcontext(partial(self._acquire, OwnerWatch(clock), OwnerWatch(clock)))

    async def _acquire(self, watch: OwnerWatch, free_watch: OwnerWatch, failed_at: int) -> CursorSession | None:
        cursors, owner, lease_s = self.context.cursors, self.context.owner, self.options.lease_s
        revision = self.handler.declaration.revision
        stored = await cursors.read(self.name)  # also without room, to see how long the cursor is not written
        silent = watch.is_silent(stored.sequence, lease_s)
        if not stored.cursor.is_free(revision, owner, silent=silent, failed_at=failed_at):
            refusal = stored.cursor.refusal_of(revision)
            if refusal and silent and self._refused_at != stored.sequence:  # nobody else works on it either
                self._refused_at = stored.sequence
                logs.WAITS.log(_log, name=self.name, reason=refusal)
            return None
        if not (self.assignment.has_room() or free_watch.is_silent(stored.sequence, _YIELD_LEASES * lease_s)):
            return None
        with ExitStack() as undo:
            release_requested = self.assignment.add()
            undo.callback(self.assignment.remove, release_requested)
            try:
                await cursors.write(stored, stored.cursor.taken(owner, revision))
            except CursorFenced:
                return None  # another process took it first
            undo.pop_all()
        logs.TOOK_CURSOR.log(_log, name=self.name, position=stored.cursor.position)
        failpoints.reach("cursor.taken")
        return CursorSession(self, stored, release_requested)


class CursorSession:
    """One session of a cursor, from the moment that it is taken until it is released or lost; used within one loop."""

    def __init__(
        self, subscription: ReactionSubscription, stored: StoredCursor, release_requested: asyncio.Event
    ) -> None:
        self._subscription = subscription
        self._handler = subscription.handler
        self._context = subscription.context
        self._meter = subscription.meter
        self._stored = stored
        self._release_requested = release_requested
        self._initial_cursor = self._noted_cursor = stored.cursor
        self._waker: InstanceWaker | None = None
        self._previous_reason = stored.cursor.reason
        self._to_write: list[QuarantinedEntry] = []
        self._to_delete: list[QuarantinedEntry] = []
        self._write_lock = asyncio.Lock()
        self._wait_reasons: dict[AggregateKey, str] = {}
        self._retrying: dict[AggregateKey, list[QuarantinedEntry]] = {}
        """The open entries of each key that is tried again; those that are blocked behind them meanwhile are added."""
        self._seen_to_end: set[int] = set()
        """Positions whose tries the next write removes from the cursor: their ends were seen."""
        self._pause_reason: str | None = None
        self._executor: KeyedExecutor
        self._reader: Reading

    async def note(self, reason: str) -> None:
        self._previous_reason = reason
        await self._context.cursors.write(self._stored, self._stored.cursor.waiting(reason))

    async def fail(self, error: EventjetError) -> int:
        await self._context.cursors.write(self._stored, self._stored.cursor.failed(str(error)))
        return self._stored.cursor.position

    async def end(self) -> None:
        self._subscription.assignment.remove(self._release_requested)

    async def run(self, stop: asyncio.Event) -> None:
        """Take over the durable after the cursor's position, and have each event handled, one at a time for each key.

        The cursor is written several times a second by compare-and-set, which is progress, lease and fence in one.
        Delivery is at least once: the next owner repeats what was done after the last write.
        """
        context, cursor, source = self._context, self._stored.cursor, self._handler.source
        cursors, stored, every_s = context.cursors, self._stored, context.options.lease_s / 3

        async def renew() -> None:
            await cursors.write(stored, stored.cursor)

        # The lease is renewed however long these take: the next owner would have to do them as well.
        identity = await renewing(source.check(cursor), renew, every_s)
        if identity != cursor.log:  # a mirror that was promoted continues the log
            await cursors.adopt(stored, replace(stored.cursor, log=identity))
            self._initial_cursor = self._noted_cursor = cursor = stored.cursor
        await renewing(self._handler.check(), renew, every_s)
        quarantined = await renewing(cursors.quarantined(cursor.name), renew, every_s)
        consumer = Source(source.endpoint, source.stream, self._handler.durable)
        opening = context.open_reader(consumer, cursor.position, source.reader, _BATCH_MAX, source.filters)
        async with AsyncExitStack() as stack:
            reader = await renewing(opened(stack, opening), renew, every_s)
            executor = KeyedExecutor(LANES, AHEAD_MAX, cursor.position, cursor.event_id, cursor.done, stop)
            stack.push_async_callback(executor.close)
            self.start(executor, reader, quarantined)
            reader.start()
            self._subscription.on_ready()
            keeping = [self.keep(), self._look(), _raise_failure(executor)]
            if self._waker is not None:
                keeping += [self._waker.wake_due(), self._waker.set_late_again(), self._waker.look_again()]
            tasks = [asyncio.ensure_future(coroutine) for coroutine in (self.take(), *keeping)]
            try:
                await self._until_ended(tasks, stop)
            finally:
                if self._has_moved():
                    self._subscription.backoff.progressed()
        self._subscription.backoff.progressed()

    def start(self, executor: KeyedExecutor, reader: Reading, quarantined: Sequence[QuarantinedEntry]) -> None:
        """Begin to use a reader and an executor; `quarantined` is the quarantine of the cursor."""
        self._executor = executor
        self._reader = reader
        if isinstance(self._handler, ProcessHandler):
            self._waker = InstanceWaker(self._handler, executor, self._initial_cursor.waking, self._run_instance)
        self._quarantined_entries = [entry for entry in quarantined if entry.log == self._initial_cursor.log]
        self._entries_by_position = {entry.position: entry for entry in self._quarantined_entries}
        self._blocking_positions = {entry.key: entry.position for entry in reversed(self._quarantined_entries)}

    async def _until_ended(self, session_tasks: Sequence[asyncio.Future[Any]], stop: asyncio.Event) -> None:
        """Run the tasks until the end, then finish events in progress and release; raises what ends the session."""
        stopped, released = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self._release_requested.wait())
        taking, *keeping = session_tasks
        tasks: list[asyncio.Future[Any]] = [stopped, released, *session_tasks]
        try:
            await _first_of(tasks)
            raise_ended(session_tasks)
            taking.cancel()
            drained = asyncio.ensure_future(self._executor.drained())
            tasks.append(drained)
            # The next owner can wait for a running handler; a process that is stopped cannot wait long.
            await _first_of([stopped, drained, *keeping], self._handler.retry.timeout_s)
            await _first_of([drained, *keeping], self._context.options.drain_s / 2 if stop.is_set() else 0.0)
            raise_ended(keeping)
            if not drained.done():
                logs.HANDLER_CUT_OFF.log(_log, name=self._subscription.name)
            await self._executor.close()
            await self.write(owned=False)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        """Raise as soon as the stream is another one or has lost records; note whether its consumer is paused."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._note_pause(await self._handler.source.look(self._stored.cursor, self._handler.durable))
            if self._has_moved() or self._is_idle:
                self._subscription.backoff.progressed()

    async def take(self) -> None:
        """Queue every event under its key, retries of quarantined events first; raises what ends the reading."""
        self._retry_quarantined()
        while True:
            batch = await self._reader.take(self._context.options.lease_s)
            if batch is None:
                continue
            offers = cast("Sequence[Offered]", batch.events)
            for offered in offers:
                await self._executor.room()
                self._add(offered)
            last = offers[-1].position if offers else 0
            if batch.last > last:
                await self._executor.room()
                self._executor.add(batch.last, batch.event_id, [])

    async def keep(self) -> None:
        """Write the cursor when it has moved, and otherwise about every third of a lease."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._context.options.lease_s / 3):
                    await self._executor.changed.wait()
            if self._is_idle:
                self._previous_reason = None
            await self.write()
            await asyncio.sleep(WRITE_S)

    def _note_pause(self, reason: str | None) -> None:
        """Note and log why no events come when the consumer is paused at the server; None when it is not paused."""
        if (reason is None) == (self._pause_reason is None):
            return
        self._pause_reason = None if reason is None else waiting_since(time_text(), reason)
        self._executor.changed.set()
        if self._pause_reason is not None:
            logs.WAITS.log(_log, name=self._handler.declaration.name, reason=self._pause_reason)

    @property
    def _waking(self) -> tuple[int, int] | None:
        return self._initial_cursor.waking if self._waker is None else self._waker.waking

    def _has_moved(self) -> bool:
        """Return whether a cursor with more progress was written since the last call."""
        before, self._noted_cursor = self._noted_cursor, self._stored.cursor
        return _is_further(self._noted_cursor, before)

    @property
    def _is_idle(self) -> bool:
        """Whether the session is at the end of the log, has written all its progress, and waits for nothing."""
        executor = self._executor
        if self._to_write or self._to_delete or self._wait_reasons or self._pause_reason:
            return False
        if not executor.is_idle or self._waking is not None:
            return False
        return self._stored.cursor.position == executor.position and not self._reader.remaining_after(executor.position)

    async def write(self, *, owned: bool = True) -> None:
        """Write the cursor and the changes of the quarantine; without `owned`, release the cursor too.

        Raises `CursorFenced`, and `StoreUnavailable` when it is not known whether it was written.
        """
        async with self._write_lock:
            executor, stored = self._executor, self._stored
            executor.changed.clear()
            progress = executor.position, executor.event_id, executor.done_beyond(), self._waking
            failpoints.reach("cursor.before_write")
            while len(self._to_write) + len(self._to_delete) > CHANGES_MAX:
                # Events are quarantined before the cursor passes them, so that the next owner misses none.
                await self._write_with_changes(stored.cursor)
            await stored.returned()
            seen_to_end = frozenset(self._seen_to_end)
            cursor = stored.cursor.untried(seen_to_end) if stored.cursor.tries else stored.cursor
            cursor = cursor.moved(*progress, retried=self._entries_by_position)
            if _is_further(cursor, self._initial_cursor):
                self._previous_reason = None  # what ended the sessions before has not ended this one
            cursor = self._handler.source.noted(cursor.waiting(self._reason_to_wait()))
            await self._write_with_changes(cursor if owned else cursor.released())
            self._seen_to_end -= seen_to_end
            failpoints.reach("cursor.written")

    async def _write_with_changes(self, cursor: Cursor) -> None:
        """Write the cursor with the next changes of the quarantine, which stay queued until a write succeeds."""
        to_write = self._to_write[:CHANGES_MAX]
        to_delete = self._to_delete[: CHANGES_MAX - len(to_write)]
        await self._context.cursors.write(self._stored, cursor, to_write, to_delete)
        for event in (entry.event for entry in to_write if entry.event.resolution == QUARANTINED):
            logs.QUARANTINED.log(
                _log,
                name=cursor.name,
                position=event.position,
                how="is quarantined",
                more="",
                reason=event.reason,
            )
        del self._to_write[: len(to_write)], self._to_delete[: len(to_delete)]

    def _add(self, offered: Offered) -> None:
        position, event_id = offered.position, offered.event_id
        imported = not self._handler.takes_imported and is_imported(offered.record[3])
        entry = self._entries_by_position.get(position)
        if entry is not None and not is_of(entry.event.event_id, offered.record):
            raise LogRolledBack(self._handler.declaration.name, position, "the event quarantined there is another")
        if imported or self._initial_cursor.is_done(position) or entry is not None:
            self._executor.add(position, event_id, [])
            return
        work, error = self._work(offered)
        if error is not None:
            self._queue(offered, offered.aggregate_key, self._refuse, error, 1)
        elif work is not None:
            self._queue(offered, work[0], self._handle, work[1])
        else:
            self._executor.add(position, event_id, [])

    def _work(
        self, offered: Offered, *, is_late: bool = False
    ) -> tuple[tuple[AggregateKey, Try] | None, Exception | None]:
        """Return what `EventHandler.work` or `late_work` does; or None, and why the event cannot be handled."""
        if offered.event is None:
            assert offered.error is not None
            return None, offered.error
        try:
            handler = self._handler
            return (handler.late_work if is_late else handler.work)(offered.event), None
        except BaseException as raised:  # noqa: BLE001 - a correlation function of the application's
            return None, UnexpectedExit.instead_of(raised)

    def _queue(self, offered: Offered, key: AggregateKey, handle: Callable[..., Awaitable[None]], *args: Any) -> None:
        self._executor.add(offered.position, offered.event_id, [(key, lambda: handle(offered, key, *args))])

    async def _handle(self, offered: Offered, key: AggregateKey, attempt: Try) -> None:
        """Try an event until it is done or quarantined; behind an earlier event of its key it is blocked untried."""
        for blocking_key in (offered.aggregate_key, key):
            if self._is_behind(offered, blocking_key):
                self._quarantine(_under_key(blocked_by(offered), blocking_key))
                return
        tries, error = await self._try(attempt, key, offered.position)
        if error is not None:
            await self._refuse(offered, key, error, tries)
        else:
            self._meter.handled += 1

    async def _refuse(self, offered: Offered, key: AggregateKey, error: Exception, tries: int) -> None:
        """Quarantine an event that failed; raises `ReactionFailed` or the `CodecError` where none is quarantined."""
        if not self._handler.quarantines:
            if isinstance(error, CodecError):
                raise error
            name, aggregate_id = self._handler.declaration.name, offered.aggregate_key[1]
            raise ReactionFailed(name, offered.position, aggregate_id, self._reason(error)) from error
        if self._is_behind(offered, key):
            self._quarantine(_under_key(blocked_by(offered), key))
            return
        self._blocking_positions[key] = offered.position
        self._quarantine(_under_key(quarantined_for(offered, error, private=self._is_private), key), tries)

    def _is_behind(self, offered: Offered, key: AggregateKey) -> bool:
        """Return whether an earlier event of the key waits; where a cursor was set back, it may be a later one."""
        return self._blocking_positions.get(key, offered.position) < offered.position

    def _quarantine(self, event: Quarantined, tries: int = 0) -> None:
        if event.resolution == QUARANTINED:
            self._meter.tries["quarantined"] += 1
        entry = QuarantinedEntry(event, time.time(), tries, log=self._initial_cursor.log)
        self._to_write.append(entry)
        if event.resolution == BLOCKED and entry.key in self._retrying:
            self._retrying[entry.key].append(entry)
        self._executor.changed.set()

    async def _try(self, attempt: Try, key: AggregateKey, position: int) -> tuple[int, Exception | None]:
        """Return how often an event was tried, and what the last try raised: None when it is done.

        Position 0 means a deadline. From the second failed try on the cursor says why it waits. Raises `Drained` in
        place of another try of a worker that stops.
        """
        try:
            return await self._try_until(attempt, key, position)
        finally:
            if self._wait_reasons.pop(key, None) is not None:
                self._executor.changed.set()

    async def _try_until(self, attempt: Try, key: AggregateKey, position: int) -> tuple[int, Exception | None]:
        retry, label, since = self._handler.retry, self._handler.label, time_text()
        number = self._unseen_tries(position)
        if number >= retry.tries and self._handler.quarantines:
            return number, HandlerBlocked(label)
        while True:
            number += 1
            await self._renew_if_late()
            self._executor.check_open()
            limit = asyncio.timeout(retry.timeout_s)
            unseen = self._unseen_tries(position) + 1
            running = RunningTry(label, position, unseen, self._stored, retry.timeout_s)
            try:
                async with limit:
                    await called(self._watched(attempt(number), running))
            except Exception as raised:  # noqa: BLE001 - whatever it is, it is tried again, then kept with its event
                error = raised
                if limit.expired() and running.blocked_s >= self._context.options.lease_s:
                    error = HandlerBlocked(label, round(running.blocked_s, 1))
                    self._seen_to_end.discard(position)  # so it counts for other workers, too
                else:
                    self._seen_to_end.add(position)
                is_permanent = isinstance(error, (*retry.never, *_PERMANENT))
                passing = isinstance(error, (*retry.passing, *_PASSING)) and not is_permanent and not limit.expired()
                self._meter.tries["passing" if passing else "failed"] += 1
                if not passing and (number >= retry.tries or is_permanent):
                    return number, error
                self._log_failed_try(key, position, number, error)
                if number >= _NOTE_AFTER_TRIES:
                    self._note_waiting(key, position, since, error)
                await self._executor.pause(retry.pause_s(number))
            else:
                self._meter.tries["done"] += 1
                return number, None

    def _unseen_tries(self, position: int) -> int:
        """Return how many tries of an event have blocked the event loop since this session saw one end in time."""
        return 0 if position in self._seen_to_end else self._stored.cursor.tries_of(position)

    async def _watched(self, work: Awaitable[None], running: RunningTry) -> None:
        watch = self._context.watch
        with nullcontext() if watch is None else watch.trying(running):
            await work

    def _log_failed_try(self, key: AggregateKey, position: int, number: int, error: Exception) -> None:
        name, what = self._handler.declaration.name, f"position {position}" if position else "its deadline"
        whose = repr(key[1]) if key[0] == name else f"{key[0]} {key[1]!r}"
        logs.TRY_FAILED.log(_log, name=name, whose=whose, what=what, attempt=number, reason=self._reason(error))

    def _note_waiting(self, key: AggregateKey, position: int, since: str, error: Exception) -> None:
        what = f"position {position:,}" if position else f"the deadline of {key[1]!r}"
        reason = waiting_since(since, f"{what}: {self._reason(error)}")
        if self._wait_reasons.get(key) != reason:
            self._wait_reasons[key] = reason
            self._executor.changed.set()
            logs.WAITS.log(_log, name=self._handler.declaration.name, reason=reason)

    def _reason_to_wait(self) -> str | None:
        """Return why events are not handled, for the key that has waited longest; None when nothing waits."""
        first = next(iter(self._wait_reasons.values()), self._pause_reason or self._previous_reason)
        others = len(self._wait_reasons) - 1
        return f"{first} (and {others} more wait)" if others > 0 else first

    @property
    def _is_private(self) -> bool:
        return self._context.repositories.catalog.is_private

    def _reason(self, error: Exception) -> str:
        return reason_of(error, private=self._is_private)

    async def _renew_if_late(self) -> None:
        """Renew a lease that may have expired before a try begins: this process may have been suspended meanwhile."""
        while self._context.cursors.clock() - self._stored.written_at > self._context.options.lease_s:
            await self.write()

    async def _run_instance(self, key: AggregateKey, attempt: Try, position: int) -> None:
        """Wake a process instance without an event; an error quarantines the last event of the instance."""
        if key in self._blocking_positions:
            return  # the quarantined event comes first; its retry wakes the process, which is due then
        _, error = await self._try(attempt, key, position)
        if error is None:
            return
        record = await self._context.repositories.store.tail(*key)
        if record is None:
            raise error
        await self._refuse(Offered(record, None, error), key, error, self._handler.retry.tries)

    def _retry_quarantined(self) -> None:
        """Queue the retries of quarantined events under their keys, before any later event of the same key."""
        by_key: defaultdict[AggregateKey, list[QuarantinedEntry]] = defaultdict(list)
        for entry in self._quarantined_entries:
            by_key[entry.key].append(entry)
        for key, entries in by_key.items():
            if entries[0].event.resolution != QUARANTINED:
                self._retrying[key] = entries
                self._executor.add_due(key, partial(self._retry_key, key))

    async def _retry_key(self, key: AggregateKey) -> None:
        """Try the quarantined and blocked events of a key again, in order, up to one that waits or fails again."""
        try:
            await self._retry_entries(key)
        finally:
            del self._retrying[key]

    async def _retry_entries(self, key: AggregateKey) -> None:
        for entry in self._retrying[key]:
            if entry.event.resolution == QUARANTINED:
                self._blocking_positions[key] = entry.position
                return
            record = await self._handler.source.at(entry.position)
            if record is None and self._handler.source.forgets:
                self._drop(entry)
                continue
            failed = await self._try_again(entry, record)
            if failed is not None:
                assert failed.error is not None
                self._blocking_positions[key] = entry.position
                event = quarantined_for(failed, failed.error, private=self._is_private)
                self._quarantine(_under_key(event, key), self._handler.retry.tries)
                return
            if entry.event.resolution == BLOCKED:
                self._to_delete.append(entry)
            else:
                self._to_write.append(entry.resolved(RETRIED))
            self._executor.changed.set()
        del self._blocking_positions[key]

    def _drop(self, entry: QuarantinedEntry) -> None:
        name, stream = self._handler.declaration.name, self._handler.source.stream
        logs.DROPPED.log(_log, name=name, position=entry.position, stream=stream)
        self._to_write.append(entry.resolved(DROPPED))
        self._executor.changed.set()

    async def _try_again(self, entry: QuarantinedEntry, record: RawRecord | None) -> Offered | None:
        """Try a quarantined event again; return it with its error when it failed again, None when it is done."""
        if record is None or not is_of(entry.event.event_id, record):
            reason = (
                "the quarantined event is no longer there"
                if record is None
                else "the event quarantined there is another"
            )
            raise LogRolledBack(self._handler.declaration.name, entry.position, reason)
        offered = self._handler.source.decode(record)
        if offered is None:
            return None
        work, error = self._work(offered, is_late=True)
        if work is not None:
            _, error = await self._try(work[1], work[0], entry.position)
            self._seen_to_end.add(entry.position)
        return None if error is None else offered.failed(error)


def _is_further(cursor: Cursor, previous: Cursor) -> bool:
    """Return whether the progress differs from that of the earlier cursor."""
    return (cursor.position, cursor.done, cursor.waking) != (previous.position, previous.done, previous.waking)


def _under_key(event: Quarantined, key: AggregateKey) -> Quarantined:
    """Return the event under the key of its queue: for an event that a process hears, the process instance."""
    return replace(event, aggregate=key[0], aggregate_id=key[1])


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
