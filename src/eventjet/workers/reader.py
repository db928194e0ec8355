"""The log after a position, read and decoded in a thread of its own while the loop writes.

`EventReader` reads it, `EventBuffer` hands it over in bounded pieces, and `check_log` says whether it is the log that a
checkpoint was made from.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from eventjet.codec.catalog import Catalog
from eventjet.codec.envelope import MSG_ID, RawRecord, header
from eventjet.domain.recorded import Recorded
from eventjet.errors import (
    CodecError,
    IdentityLost,
    LogIncomplete,
    LogRolledBack,
    StoreError,
    StreamMissing,
    Unreachable,
)
from eventjet.nats.api import StreamState, message_at, stream_info
from eventjet.nats.connection import NatsConnection
from eventjet.nats.consumer import DurablePull
from eventjet.nats.endpoint import Endpoint
from eventjet.observability import logs
from eventjet.quarantine.fold import Reader
from eventjet.store.earlier import EarlierRecords
from eventjet.store.topology import identity_of, missing
from eventjet.store.voids import voids_in
from eventjet.store.wholeness import check_whole, loss
from eventjet.writers.batch import Batch

_log = logging.getLogger(__name__)

_JOIN_S = 5.0
_CHUNK_MAX = 1_000
"""Events decoded at a time, of which several make a batch."""
BYTES_MAX = 16 * 1024 * 1024
"""Bodies that may wait, in bytes; a single larger chunk still passes."""
_WAIT_S = 1.0
_GATHER_S = 0.05
"""How long a batch waits for more where the log has more: whole ones cost less an event, here and in the database."""


@dataclass(frozen=True, slots=True)
class Source:
    """Which durable of which stream is read, and where."""

    endpoint: Endpoint
    stream: str
    durable: str


class EventReader:
    """Made by `EventReader.open`; raises from `take` whatever ended the reading, after the events before it."""

    def __init__(
        self, pull: DurablePull, buffer: EventBuffer, decode: Reader, earlier: EarlierRecords, position: int, name: str
    ) -> None:
        self._pull = pull
        self._buffer = buffer
        self._decode = decode
        self._earlier = earlier
        self._position = position
        self._peeked: Batch | None = None
        self._thread = threading.Thread(target=self._read, name=f"eventjet {name}", daemon=True)

    @classmethod
    async def open(
        cls,
        source: Source,
        position: int,
        decoder: Callable[[EarlierRecords], Reader],
        batch_max: int,
        filters: Sequence[str] = (),
    ) -> EventReader:
        """Take the durable over, so that it goes on after `position`; `start` begins to read.

        What is read is what `decoder` makes, which is given the log to ask for what an event follows.
        """
        endpoint = source.endpoint.with_name(f"eventjet worker {source.durable}")
        pull = await asyncio.to_thread(
            DurablePull,
            endpoint,
            source.stream,
            source.durable,
            position=position,
            filters=filters,
            batch_max=min(batch_max, _CHUNK_MAX),
        )
        earlier = EarlierRecords(endpoint, source.stream)
        return cls(pull, EventBuffer(batch_max), decoder(earlier), earlier, position, source.durable)

    def start(self) -> None:
        self._thread.start()

    async def take(self, timeout_s: float) -> Batch | None:
        """The next events; None when none came in time or `wake` was called."""
        batch, self._peeked = self._peeked, None
        return await self._buffer.take(timeout_s) if batch is None else batch

    async def peek_whole(self) -> Batch | None:
        """What the next `take` returns, once it is as many as may be in a batch; None when reading ends before.

        Nothing is lost where it is cancelled: it waits only while the buffer still has the events.
        """
        if self._peeked is None:
            self._peeked = await self._buffer.take_whole()
        return self._peeked

    def wake(self) -> None:
        self._buffer.wake()

    def left_after(self, position: int) -> int:
        """About how many events are known to come after `position`; 0 at the end."""
        # The thread that reads changes this last: what arrives in between counts twice, never not at all.
        pending = self._pull.pending
        return max(0, self._pull.position - position) + pending

    async def close(self) -> None:
        """End the thread and the connection; the durable stays."""
        self._buffer.close()
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._pull.close()
        self._earlier.close()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                logs.THREAD_LEFT.tell(_log, thread=self._thread.name, seconds=_JOIN_S)

    def _read(self) -> None:
        """The thread: whatever ends it is handed over."""
        try:
            for records in self._pull:
                if records and not self._hand_over(records):
                    return
        except BaseException as error:  # noqa: BLE001 - raised again by the task that takes
            self._buffer.fail(error)

    def _hand_over(self, records: Sequence[RawRecord]) -> bool:
        """Decode and put; a record that cannot be decoded ends the chunk before it. False when nobody takes."""
        decode = self._decode
        decode.expect(records)
        events: list[Recorded[Any]] = []
        done = 0
        fault: CodecError | None = None
        try:
            for record in records:
                event = decode(record)
                if event is not None:
                    events.append(event)
                done += 1
        except CodecError as error:
            fault = error
        if done:
            last = records[done - 1]
            size = sum([len(record[4]) for record in records[:done]])
            event_id, left = header(last[3], MSG_ID) or "", self._pull.pending
            chunk = Chunk(self._position, last[0], event_id, events, done, size, left)
            self._position = last[0]
            if not self._buffer.put(chunk):
                return False
        if fault is not None:
            raise fault
        return True


@dataclass(frozen=True, slots=True)
class Chunk(Batch):
    """Some records of the log, decoded: several make a batch."""

    count: int
    """Records in it, those of no subscription included."""
    size: int
    """Bytes of their bodies."""
    left: int = 0
    """About how many more the log has after it."""


class EventBuffer:
    """One thread puts, one task of the loop takes. Holds at most two batches.

    What waits is merged, so that batches are small while the writer keeps up and whole while it is far behind.
    """

    def __init__(self, batch_max: int) -> None:
        """Made within the loop that takes."""
        self.batch_max = batch_max
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._changed = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._count = 0
        self._size = 0
        self._failure: BaseException | None = None
        self._closed = False

    def put(self, chunk: Chunk) -> bool:
        """Hand over, waiting while two batches are ahead; False once the buffer is closed."""
        with self._changed:
            while not self._closed and self._is_full():
                self._changed.wait(_WAIT_S)
            if self._closed:
                return False
            self._chunks.append(chunk)
            self._count += chunk.count
            self._size += chunk.size
        self._wake_from_thread()
        return True

    def fail(self, error: BaseException) -> None:
        """Have `take` raise this once everything before it is taken."""
        with self._changed:
            self._failure = error
        self._wake_from_thread()

    async def take(self, timeout_s: float) -> Batch | None:
        """What waits, up to `batch_max` records; None when nothing comes in time or `wake` is called."""
        if not self._chunks and self._failure is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        with suppress(TimeoutError):
            async with asyncio.timeout(_GATHER_S):
                while self._is_partial():
                    self._arrived.clear()
                    await self._arrived.wait()
        return self._pop()

    async def take_whole(self) -> Batch | None:
        """A whole batch, however long that takes; None when reading ends before there is one."""
        while self._failure is None and not self._is_whole():
            self._arrived.clear()
            await self._arrived.wait()
        return self._pop() if self._is_whole() else None

    def wake(self) -> None:
        """Let a waiting `take` return. From the loop."""
        self._arrived.set()

    def close(self) -> None:
        """Let a waiting `put` return False."""
        with self._changed:
            self._closed = True
            self._chunks.clear()
            self._changed.notify_all()

    def _pop(self) -> Batch | None:
        with self._changed:
            self._arrived.clear()
            if not self._chunks:
                if self._failure is not None:
                    raise self._failure
                return None
            taken = [self._chunks.popleft()]
            count = taken[0].count
            while self._chunks and count + self._chunks[0].count <= self.batch_max:
                taken.append(self._chunks.popleft())
                count += taken[-1].count
            self._count -= count
            self._size -= sum(chunk.size for chunk in taken)
            self._changed.notify_all()
        if len(taken) == 1:
            return taken[0]
        events = [event for chunk in taken for event in chunk.events]
        return Batch(taken[0].after, taken[-1].last, taken[-1].event_id, events)

    def _is_whole(self) -> bool:
        return self._count >= self.batch_max or self._is_full()

    def _is_partial(self) -> bool:
        """Whether something waits, and more is about to come: more than is left of a batch."""
        with self._changed:
            coming = self._chunks and self._failure is None and self._chunks[-1].left > self.batch_max
            return bool(coming) and not self._is_whole()

    def _is_full(self) -> bool:
        return self._count >= 2 * self.batch_max or self._size >= BYTES_MAX

    def _wake_from_thread(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            # The loop is closed, so nobody waits any more.
            self.close()


class Stand(Protocol):
    """Where something that follows a log stands, a checkpoint or a cursor: at which event of which log."""

    @property
    def name(self) -> str: ...
    @property
    def log(self) -> str: ...
    @property
    def position(self) -> int: ...
    @property
    def event_id(self) -> str: ...


def state_of_log(connection: NatsConnection, stream: str) -> tuple[str, StreamState]:
    """(identity, state) of an app's stream; raises `Unreachable` when `init` has not made it."""
    try:
        state = connection.ask(stream_info(stream))
    except StreamMissing:
        raise missing(stream) from None
    return identity_of(state), state


def learn_voids(endpoint: Endpoint, stream: str, catalog: Catalog) -> None:
    """Have the readers of a worker pass over what its log declares void. Blocks."""
    with NatsConnection.open(endpoint) as connection:
        catalog.voids.update(voids_in(connection, stream))


def check_log(endpoint: Endpoint, stream: str, held: Stand) -> str:
    """The log's identity, if the checkpoint was made from this log; raises `LogRolledBack`. Blocks."""
    with NatsConnection.open(endpoint) as connection:
        identity, state = state_of_log(connection, stream)
        fault = _another_past(connection, identity, state, held)
    if fault is not None:
        raise fault
    return identity


def check_whole_log(endpoint: Endpoint, stream: str, held: Stand) -> str:
    """As `check_log`, for who goes on from there: raises `LogIncomplete` as well. Blocks."""
    with NatsConnection.open(endpoint) as connection:
        identity, state = state_of_log(connection, stream)
        fault = log_fault(connection, identity, state, held)
    if fault is not None:
        raise fault
    return identity


def check_running(endpoint: Endpoint, stream: str, held: Stand, log: str) -> None:
    """What may change under a worker while it reads: raises as `check_whole_log`. Blocks.

    A server that is away is no fault, and another past under the same identity ends the reading by itself.
    """
    try:
        with NatsConnection.open(endpoint) as connection:
            identity, state = state_of_log(connection, stream)
    except IdentityLost:
        raise
    except (StoreError, Unreachable, OSError):
        return
    if identity != log:
        raise LogRolledBack(held.name, held.position, _other(log, stream, identity))
    check_whole(state)


def log_fault(
    connection: NatsConnection, identity: str, state: StreamState, held: Stand
) -> LogRolledBack | LogIncomplete | None:
    """Why the projection cannot go on over this log; None if it can."""
    fault = _another_past(connection, identity, state, held)
    gone = "" if fault else loss(state)
    return LogIncomplete(f"The log {state.name!r}", gone) if gone else fault


def _another_past(connection: NatsConnection, identity: str, state: StreamState, held: Stand) -> LogRolledBack | None:
    """Why the checkpoint was not made from this log, None if it was.

    A log restored from an old backup and grown again has a longer tail but another past: hence the event's id.
    """
    if held.position == 0:
        return None
    if held.log != identity:
        return LogRolledBack(held.name, held.position, _other(held.log, state.name, identity))
    if state.last < held.position:
        return LogRolledBack(held.name, held.position, f"the log ends at position {state.last}")
    record = connection.ask(message_at(state.name, held.position))
    if record is None:
        return LogRolledBack(held.name, held.position, "the log has no event there any more")
    event_id = header(record[3], MSG_ID) or ""
    if event_id != held.event_id:
        reason = f"the event there is {event_id or 'without id'}, and it was {held.event_id}"
        return LogRolledBack(held.name, held.position, reason)
    return None


def _other(log: str, stream: str, identity: str) -> str:
    return f"it was made from the log {log} and the stream {stream!r} is {identity}"
