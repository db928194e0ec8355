"""`CursorSession`: one session of a cursor: handles events by key, retries, quarantines, and writes the cursor."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Protocol, TypeAlias, cast

from eventjet import failpoints
from eventjet.codec.headers import RawRecord, is_imported
from eventjet.codec.reasons import reason_of
from eventjet.commands.repository import Repositories
from eventjet.domain.parked import BLOCKED, DROPPED, PARKED, RETRIED, AggregateKey, Parked
from eventjet.errors import (
    CodecError,
    ConcurrencyConflict,
    DefinitionError,
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
from eventjet.log.timers import Due
from eventjet.nats.endpoint import Endpoint
from eventjet.observability import logs
from eventjet.observability.metrics import FollowerMeter
from eventjet.projections.fold import Offered, Reader, blocked_by, is_of, parked_for
from eventjet.runtime import called
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.cursor_store import CHANGES_MAX, Cursors, ParkedEntry, StoredCursor, parked_now
from eventjet.subscriptions.handlers import EventHandler, Try
from eventjet.subscriptions.keyed_executor import KeyedExecutor
from eventjet.subscriptions.reader import EventReader, Source
from eventjet.subscriptions.retry import (
    boot_clock,
    now_told,
    waiting_since,
)
from eventjet.writers.batch import Batch

_log = logging.getLogger(__name__)

_NOTE_AFTER_TRIES = 2
"""From this many failed tries of an event on, the cursor says what it waits for."""
WRITE_S = 0.05
"""Pause between two writes of a moving cursor, in seconds."""
_LOOKS_AT_ONCE = 16
"""Process instances that are looked at for the first time at once."""
_LOOKS_MAX = 1_000
"""Process instances being looked at, including those that are tried again and again."""
_DUE_S = 0.25
"""How often fired timers are looked for, in seconds: the server fires timers as often."""
_PASSING = (StoreUnavailable, OutcomeUnknown, ConcurrencyConflict, StreamFull, Unreachable)
"""Errors of eventjet whose causes end by themselves: the event is tried again without limit."""
_HOPELESS = (UsageError, DefinitionError)
"""Errors of eventjet about the code itself: another try would fail in the same way."""


class Reading(Protocol):
    """The part of `EventReader` that a session uses."""

    def start(self) -> None: ...

    async def take(self, timeout_s: float) -> Batch | None: ...

    async def close(self) -> None: ...

    def left_after(self, position: int) -> int: ...


OpenReader: TypeAlias = Callable[
    [Source, int, Callable[[PredecessorReader], Reader], int, Sequence[str]], Awaitable[Reading]
]
"""A function like `EventReader.open`."""


@dataclass(frozen=True, slots=True)
class ReactionContext:
    """The resources that the reaction runners of one process share."""

    repositories: Repositories
    cursors: Cursors
    endpoint: Endpoint
    owner: str
    options: WorkerOptions
    meters: dict[str, FollowerMeter] = field(default_factory=dict[str, FollowerMeter])
    clock: Callable[[], float] = boot_clock
    """The clock of leases, in seconds."""
    open_reader: OpenReader = EventReader.open

    def meter(self, handler: EventHandler) -> FollowerMeter:
        declaration = handler.declaration
        return self.meters.setdefault(declaration.name, FollowerMeter(declaration.name, declaration.kind))


class CursorSession:
    """One session of a cursor, from the moment that it is taken until it is released or lost; used within one loop."""

    def __init__(
        self,
        handler: EventHandler,
        context: ReactionContext,
        stored: StoredCursor,
        executor: KeyedExecutor,
        parked: Sequence[ParkedEntry],
        meter: FollowerMeter,
    ) -> None:
        self._handler = handler
        self._context = context
        self._stored = stored
        self._executor = executor
        self._meter = meter
        self._initial_cursor = stored.cursor
        self._waking = stored.cursor.waking
        entries = [entry for entry in parked if entry.log == stored.cursor.log]
        self._entries_by_position = {entry.position: entry for entry in entries}
        self._blocking_positions: dict[AggregateKey, int] = {entry.key: entry.position for entry in reversed(entries)}
        self._parked_entries = entries
        self._to_write: list[ParkedEntry] = []
        self._to_delete: list[ParkedEntry] = []
        self._write_lock = asyncio.Lock()
        self._previous_reason = stored.cursor.reason
        self._wait_reasons: dict[AggregateKey, str] = {}
        self._pause_reason: str | None = None
        self._reader: Reading | None = None
        self._noted_cursor = stored.cursor

    async def take(self, reader: Reading) -> None:
        """Queue every event under its key, retries of quarantined events first; raises what ends the reading."""
        self._reader = reader
        self._retry_parked()
        while True:
            batch = await reader.take(self._context.options.lease_s)
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
            if self.is_idle:
                self._previous_reason = None
            await self.write()
            await asyncio.sleep(WRITE_S)

    async def wake(self) -> None:
        """Queue the timers that have fired, one at a time for each process instance."""
        after, listed = 0, -1
        while True:
            newest = await self._handler.newest_fired()
            if newest > listed:
                fired = await self._handler.fired(after)
                for due in fired:
                    after = due.sequence
                    self._executor.add_due((self._handler.declaration.name, due.process_id), self._coming_due(due))
                listed = listed if fired else newest
            # All processes of this loop ask at the same moments, so that they share an answer.
            await asyncio.sleep(_DUE_S - asyncio.get_running_loop().time() % _DUE_S)

    async def look_again(self) -> None:
        """Look at all waiting process instances, once for each revision of the code; the cursor keeps the progress."""
        if self._waking is not None:
            await self._look_at_all(*self._waking)
            self._waking = None
            self._executor.changed.set()
            logs.LOOKED_AGAIN.tell(_log, name=self._handler.declaration.name, revision=self._initial_cursor.revision)
        await asyncio.Event().wait()  # a task that ends would end the session

    async def _look_at_all(self, after: int, until: int) -> None:
        """Look at the instances in a range of positions, some at once.

        An instance that fails or takes long does not delay the others; the stored progress stays below its position.
        """
        looking: dict[asyncio.Future[None], int] = {}
        places = asyncio.Semaphore(_LOOKS_AT_ONCE)

        def note(reached: int) -> None:
            for finished in [future for future in looking if future.done()]:
                del looking[finished]
            self._waking = min([reached, *(position - 1 for position in looking.values())]), until
            self._executor.changed.set()

        while after < until:
            positions, reached = await self._handler.instances(after, until)
            for process_id, position in sorted(positions.items(), key=itemgetter(1)):
                await places.acquire()
                note(position - 1)
                while len(looking) >= _LOOKS_MAX:
                    await asyncio.wait(looking, return_when=asyncio.FIRST_COMPLETED)
                    note(position - 1)
                done = asyncio.get_running_loop().create_future()
                looking[done] = position
                key = (self._handler.declaration.name, process_id)
                self._executor.add_due(key, self._looking_at(key, position, places, done))
            if reached == after:
                await asyncio.sleep(_DUE_S)  # a replica lags
            after = reached
        while looking:
            await asyncio.wait(looking, return_when=asyncio.FIRST_COMPLETED)
            note(until)

    def _looking_at(
        self, key: AggregateKey, position: int, places: asyncio.Semaphore, done: asyncio.Future[None]
    ) -> Any:
        """Return the work that looks at one instance; its place is free after the first try, whatever the result."""

        async def attempt(number: int) -> None:
            try:
                await self._handler.look_at(key[1], position)
            finally:
                if number == 1:
                    places.release()

        async def look() -> None:
            if key in self._blocking_positions:  # the quarantined event comes first; its retry wakes the process
                places.release()
            else:
                _, error = await self._try(attempt, key, position)
                if error is not None:
                    await self._refuse_last_event(key[1], error)
            done.set_result(None)

        return look

    def tell_pause(self, reason: str | None) -> None:
        """Note and log why no events come when the consumer is paused at the server; None when it is not paused."""
        if (reason is None) == (self._pause_reason is None):
            return
        self._pause_reason = None if reason is None else waiting_since(now_told(), reason)
        self._executor.changed.set()
        if self._pause_reason is not None:
            logs.WAITS.tell(_log, name=self._handler.declaration.name, reason=self._pause_reason)

    def has_moved(self) -> bool:
        """Return whether a cursor with more progress was written since the last call."""
        before, self._noted_cursor = self._noted_cursor, self._stored.cursor
        return _is_further(self._noted_cursor, before)

    @property
    def is_idle(self) -> bool:
        """Whether the session is at the end of the log, has written all its progress, and waits for nothing."""
        executor, is_written = (
            self._executor,
            not (self._to_write or self._to_delete or self._wait_reasons or self._pause_reason),
        )
        if not (is_written and executor.is_idle and self._waking is None) or self._reader is None:
            return False
        return self._stored.cursor.position == executor.position and not self._reader.left_after(executor.position)

    async def write(self) -> None:
        """Write the cursor and the changes of the quarantine.

        Raises `CursorFenced`, and `StoreUnavailable` when it is not known whether it was written.
        """
        await self._write(owned=True)

    async def release(self) -> None:
        """Write the cursor for the last time and release it; raises as `write`."""
        await self._write(owned=False)

    async def _write(self, *, owned: bool) -> None:
        async with self._write_lock:
            executor = self._executor
            executor.changed.clear()
            began = self._context.clock()
            cursor = self._stored.cursor.moved(
                executor.position, executor.event_id, executor.done_beyond(), self._waking
            )
            if _is_further(cursor, self._initial_cursor):
                self._previous_reason = None  # what ended the sessions before has not ended this one
            cursor = cursor.waiting(self._reason_to_wait())
            failpoints.reach("cursor.before_write")
            while len(self._to_write) + len(self._to_delete) > CHANGES_MAX:
                # Events are quarantined before the cursor passes them, so that the next owner misses none.
                await self._write_with_changes(self._stored.cursor)
            await self._write_with_changes(cursor if owned else cursor.released())
            failpoints.reach("cursor.written")
            self._stored.written_at = began

    async def _write_with_changes(self, cursor: Cursor) -> None:
        """Write the cursor with the next changes of the quarantine, which stay queued until a write succeeds."""
        to_write = self._to_write[:CHANGES_MAX]
        to_delete = self._to_delete[: CHANGES_MAX - len(to_write)]
        await self._context.cursors.write(self._stored, cursor, to_write, to_delete)
        for parked in (entry.parked for entry in to_write if entry.parked.resolution == PARKED):
            logs.QUARANTINED.tell(
                _log, name=cursor.name, position=parked.position, how="is parked", more="", reason=parked.reason
            )
        del self._to_write[: len(to_write)], self._to_delete[: len(to_delete)]

    def _add(self, offered: Offered) -> None:
        position, event_id = offered.position, offered.event_id
        imported = not self._handler.takes_imported and is_imported(offered.record[3])
        entry = self._entries_by_position.get(position)
        if entry is not None and not is_of(entry.parked.event_id, offered.record):
            raise LogRolledBack(self._handler.declaration.name, position, "the event parked there is another")
        if imported or self._initial_cursor.is_done(position) or entry is not None:
            self._executor.add(position, event_id, [])
            return
        if offered.event is None:
            key = offered.aggregate_key
            self._executor.add(position, event_id, [(key, lambda: self._undecodable(offered, key))])
            return
        try:
            work = self._handler.work(offered.event)
        except BaseException as raised:  # noqa: BLE001 - a correlation of the application's
            failure = UnexpectedExit.instead_of(raised)
            key = offered.aggregate_key
            self._executor.add(position, event_id, [(key, lambda: self._refuse(offered, key, failure, 1))])
            return
        works = [] if work is None else [(work[0], lambda: self._handle(offered, *work))]
        self._executor.add(position, event_id, works)

    async def _undecodable(self, offered: Offered, key: AggregateKey) -> None:
        assert offered.error is not None
        await self._refuse(offered, key, offered.error, 1)

    async def _handle(self, offered: Offered, key: AggregateKey, attempt: Try) -> None:
        """Try an event until it is done or quarantined; behind an earlier event of its key it is blocked untried."""
        blocking_key = next(
            (candidate for candidate in (offered.aggregate_key, key) if self._is_behind(offered, candidate)), None
        )
        if blocking_key is not None:
            self._park(_under_key(blocked_by(offered), blocking_key))
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
            self._park(_under_key(blocked_by(offered), key))
            return
        self._blocking_positions[key] = offered.position
        self._park(_under_key(parked_for(offered, error, private=self._is_private), key), tries)

    def _is_behind(self, offered: Offered, key: AggregateKey) -> bool:
        """Return whether an earlier event of the key waits.

        Where a cursor was set back, the waiting event may be a later one, which blocks nothing before it.
        """
        return self._blocking_positions.get(key, offered.position) < offered.position

    def _park(self, parked: Parked, tries: int = 0) -> None:
        if parked.resolution == PARKED:
            self._meter.tries["quarantined"] += 1
        self._to_write.append(parked_now(parked, tries, self._initial_cursor.log))
        self._executor.changed.set()

    async def _try(self, attempt: Try, key: AggregateKey, position: int) -> tuple[int, Exception | None]:
        """Return how often an event was tried, and what the last try raised: None when it is done.

        Position 0 means a deadline. From the second failed try on the cursor says why it waits.
        """
        try:
            return await self._try_until(attempt, key, position)
        finally:
            if self._wait_reasons.pop(key, None) is not None:
                self._executor.changed.set()

    async def _try_until(self, attempt: Try, key: AggregateKey, position: int) -> tuple[int, Exception | None]:
        retry, number, since = self._handler.retry, 0, now_told()
        while True:
            number += 1
            await self._renew_if_late()
            limit = asyncio.timeout(retry.timeout_s)
            try:
                async with limit:
                    await called(attempt(number))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again, then kept with its event
                passing = isinstance(error, (*retry.passing, *_PASSING)) and not limit.expired()
                self._meter.tries["passing" if passing else "failed"] += 1
                if not passing and (number >= retry.tries or isinstance(error, _HOPELESS)):
                    return number, error
                self._log_failed_try(key, position, number, error)
                if number >= _NOTE_AFTER_TRIES:
                    self._note_waiting(key, position, since, error)
                await self._executor.pause(retry.pause_s(number))
            else:
                self._meter.tries["done"] += 1
                return number, None

    def _log_failed_try(self, key: AggregateKey, position: int, number: int, error: Exception) -> None:
        name, what = self._handler.declaration.name, f"position {position}" if position else "its deadline"
        whose = repr(key[1]) if key[0] == name else f"{key[0]} {key[1]!r}"
        logs.TRY_FAILED.tell(_log, name=name, whose=whose, what=what, attempt=number, reason=self._reason(error))

    def _note_waiting(self, key: AggregateKey, position: int, since: str, error: Exception) -> None:
        what = f"position {position:,}" if position else f"the deadline of {key[1]!r}"
        reason = waiting_since(since, f"{what}: {self._reason(error)}")
        if self._wait_reasons.get(key) != reason:
            self._wait_reasons[key] = reason
            self._executor.changed.set()
            logs.WAITS.tell(_log, name=self._handler.declaration.name, reason=reason)

    def _reason_to_wait(self) -> str | None:
        """Return why events are not handled, for the key that has waited longest; None when nothing waits."""
        first = next(iter(self._wait_reasons.values()), self._pause_reason or self._previous_reason)
        return (
            first
            if first is None or len(self._wait_reasons) < 2
            else f"{first} (and {len(self._wait_reasons) - 1} more wait)"
        )

    @property
    def _is_private(self) -> bool:
        return self._context.repositories.catalog.is_private

    def _reason(self, error: Exception) -> str:
        return reason_of(error, private=self._is_private)

    async def _renew_if_late(self) -> None:
        """Renew a lease that may have expired before a try begins: this process may have been suspended meanwhile."""
        while self._context.clock() - self._stored.written_at > self._context.options.lease_s:
            await self.write()

    def _coming_due(self, due: Due) -> Any:
        """Return the work of one fired timer; an error of its decision quarantines the instance's last event."""
        key = (self._handler.declaration.name, due.process_id)

        async def come_due() -> None:
            if key in self._blocking_positions:
                return  # the quarantined event comes first; its retry wakes the process, which is due then
            _, error = await self._try(lambda _: self._handler.come_due(due), key, 0)
            if error is not None:
                await self._refuse_last_event(due.process_id, error)

        return come_due

    async def _refuse_last_event(self, process_id: str, error: Exception) -> None:
        """Quarantine the last event of a process instance that failed without an event having woken it."""
        name = self._handler.declaration.name
        repositories = self._context.repositories
        record = await repositories.store.tail(name, process_id)
        if record is None:
            raise error
        await self._refuse(Offered(record, None, error), (name, process_id), error, self._handler.retry.tries)

    def _retry_parked(self) -> None:
        """Queue the retries of quarantined events under their keys, before any later event of the same key."""
        by_key: defaultdict[AggregateKey, list[ParkedEntry]] = defaultdict(list)
        for entry in self._parked_entries:
            by_key[entry.key].append(entry)
        for key, entries in by_key.items():
            if entries[0].parked.resolution != PARKED:
                self._executor.add_due(key, self._retrying(key, entries))

    def _retrying(self, key: AggregateKey, entries: Sequence[ParkedEntry]) -> Any:
        async def again() -> None:
            for entry in entries:
                if entry.parked.resolution == PARKED:
                    self._blocking_positions[key] = entry.position
                    return
                record = await self._handler.source.at(entry.position)
                if record is None and self._handler.source.forgets:
                    self._forget(entry)
                    continue
                failed = await self._try_again(entry, record)
                if failed is not None:
                    assert failed.error is not None
                    self._blocking_positions[key] = entry.position
                    parked = parked_for(failed, failed.error, private=self._is_private)
                    self._park(_under_key(parked, key), self._handler.retry.tries)
                    return
                if entry.parked.resolution == BLOCKED:
                    self._to_delete.append(entry)
                else:
                    self._to_write.append(entry.resolved(RETRIED))
                self._executor.changed.set()
            del self._blocking_positions[key]

        return again

    def _forget(self, entry: ParkedEntry) -> None:
        name, stream = self._handler.declaration.name, self._handler.source.stream
        logs.DROPPED.tell(_log, name=name, position=entry.position, stream=stream)
        self._to_write.append(entry.resolved(DROPPED))
        self._executor.changed.set()

    async def _try_again(self, entry: ParkedEntry, record: RawRecord | None) -> Offered | None:
        """Try a quarantined event again; return it with its error when it failed again, None when it is done."""
        if record is None or not is_of(entry.parked.event_id, record):
            reason = "the parked event is no longer there" if record is None else "the event parked there is another"
            raise LogRolledBack(self._handler.declaration.name, entry.position, reason)
        offered = self._handler.source.decode(record)
        if offered is None:
            return None
        error = offered.error
        if offered.event is not None:
            work = self._handler.work(offered.event)
            if work is None:
                return None
            _, error = await self._try(work[1], work[0], entry.position)
        return None if error is None else offered.failed(error)


def _is_further(cursor: Cursor, previous: Cursor) -> bool:
    """Return whether the progress differs from that of the earlier cursor."""
    return (cursor.position, cursor.done, cursor.waking) != (previous.position, previous.done, previous.waking)


def _under_key(parked: Parked, key: AggregateKey) -> Parked:
    """Return the event under the key of its queue: for an event that a process hears, the process instance."""

    return replace(parked, aggregate=key[0], aggregate_id=key[1])
