"""`EventReader`: reads and decodes a stream after a position in a thread of its own while the loop writes.

`EventBuffer` passes the decoded chunks from the thread to the loop, merged into batches.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from eventjet.codec.headers import RawRecord, event_id_of
from eventjet.domain.recorded import Recorded
from eventjet.errors import CodecError
from eventjet.jetstream.reader import DurablePull
from eventjet.log.predecessors import PredecessorReader
from eventjet.nats.endpoint import Endpoint
from eventjet.observability import logs
from eventjet.projections.fold import Reader
from eventjet.writers.batch import Batch

BYTES_MAX = 16 * 1024 * 1024
"""Bytes of bodies that may wait in a buffer; a single larger chunk still passes."""
_WAIT_S = 1.0
_GATHER_S = 0.05
"""How long a batch waits for more events where the log has more: a whole batch costs less per event."""


@dataclass(frozen=True, slots=True)
class Chunk(Batch):
    """A decoded piece of the log; several chunks make a batch."""

    count: int
    """Number of records read, including records that gave no event."""
    size: int
    """Bytes of their bodies."""
    left: int = 0
    """About how many more records the consumer has after this chunk."""


class EventBuffer:
    """A buffer of about two batches, filled by one thread and emptied by one task of the loop.

    Waiting chunks are merged, so that batches are small while the writer keeps up and whole while it is far behind.
    """

    def __init__(self, batch_max: int) -> None:
        """Create the buffer within the loop that takes from it."""
        self.batch_max = batch_max
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._changed = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._count = 0
        self._size = 0
        self._failure: BaseException | None = None
        self._closed = self._finished = False

    def put(self, chunk: Chunk) -> bool:
        """Add a chunk, waiting while two batches are buffered; False once the buffer is closed. Blocks."""
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
        """Have `take` raise this error once all chunks before it are taken."""
        with self._changed:
            self._failure = error
        self._wake_from_thread()

    def finish(self) -> None:
        """Declare that no more chunks will be put."""
        with self._changed:
            self._finished = True
        self._wake_from_thread()

    async def take(self, timeout_s: float) -> Batch | None:
        """Return the waiting events, of up to `batch_max` records; None when none come in time or `wake` is called."""
        if not self._chunks and not self._has_ended:
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
        """Return a whole batch, however long that takes; None when reading ends before there is one."""
        while not self._has_ended and not self._is_whole():
            self._arrived.clear()
            await self._arrived.wait()
        return self._pop() if self._is_whole() else None

    def wake(self) -> None:
        """Let a waiting `take` return; to be called in the loop."""
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
            chunks = [self._chunks.popleft()]
            count = chunks[0].count
            while self._chunks and count + self._chunks[0].count <= self.batch_max:
                chunks.append(self._chunks.popleft())
                count += chunks[-1].count
            self._count -= count
            self._size -= sum(chunk.size for chunk in chunks)
            self._changed.notify_all()
        if len(chunks) == 1:
            return chunks[0]
        events = [event for chunk in chunks for event in chunk.events]
        return Batch(chunks[0].after, chunks[-1].last, chunks[-1].event_id, events)

    def _is_whole(self) -> bool:
        return self._count >= self.batch_max or self._is_full()

    def _is_partial(self) -> bool:
        """Return whether less than a batch waits and more than a whole batch is still to come."""
        with self._changed:
            coming = self._chunks and not self._has_ended and self._chunks[-1].left > self.batch_max
            return bool(coming) and not self._is_whole()

    @property
    def _has_ended(self) -> bool:
        return self._finished or self._failure is not None

    def _is_full(self) -> bool:
        return self._count >= 2 * self.batch_max or self._size >= BYTES_MAX

    def _wake_from_thread(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            # The loop is closed, so no task waits any more.
            self.close()


_log = logging.getLogger(__name__)

_JOIN_S = 5.0
CHUNK_MAX = 1_000
"""Records that are pulled and decoded at a time, at most; several chunks make a batch."""


@dataclass(frozen=True, slots=True)
class Source:
    """The stream and durable to read, and the endpoint to connect to."""

    endpoint: Endpoint
    stream: str
    durable: str


class EventReader:
    """Reads one durable, opened by `open`, in a thread; `take` raises what ended it, after the events before."""

    def __init__(
        self,
        pull: DurablePull,
        buffer: EventBuffer,
        decode: Reader,
        predecessors: PredecessorReader,
        position: int,
        name: str,
    ) -> None:
        self._pull = pull
        self._buffer = buffer
        self._decode = decode
        self._predecessors = predecessors
        self._position = position
        self._peeked: Batch | None = None
        self._thread = threading.Thread(target=self._read, name=f"eventjet {name}", daemon=True)

    @classmethod
    async def open(
        cls,
        source: Source,
        position: int,
        decoder: Callable[[PredecessorReader], Reader],
        batch_max: int,
        filters: Sequence[str] = (),
    ) -> EventReader:
        """Take over the durable after `position`; `decoder` is given a reader of predecessors, and decodes records."""
        endpoint = source.endpoint.with_name(f"eventjet worker {source.durable}")
        open_pull = partial(
            DurablePull,
            endpoint,
            source.stream,
            source.durable,
            position=position,
            filters=filters,
            batch_max=min(batch_max, CHUNK_MAX),
        )
        # No task, which the end of the loop would cancel: then nobody would close what the thread opens.
        opening = asyncio.get_running_loop().run_in_executor(None, open_pull)
        try:
            pull = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unused)  # cancelling does not stop the thread
            raise
        predecessors = PredecessorReader(pull.link, source.stream)
        return cls(pull, EventBuffer(batch_max), decoder(predecessors), predecessors, position, source.durable)

    def start(self) -> None:
        self._thread.start()

    async def take(self, timeout_s: float) -> Batch | None:
        """Return the next events; None when none came in time or `wake` was called."""
        batch, self._peeked = self._peeked, None
        return await self._buffer.take(timeout_s) if batch is None else batch

    async def peek_whole(self) -> Batch | None:
        """Return the batch of the next `take` once it is whole, None at the end; cancelling this loses no events."""
        if self._peeked is None:
            self._peeked = await self._buffer.take_whole()
        return self._peeked

    def wake(self) -> None:
        self._buffer.wake()

    def remaining_after(self, position: int) -> int:
        """Return about how many events are known to come after `position`; 0 at the end."""
        # The reading thread changes `pending` last: an event that arrives in between counts twice, and is never missed.
        pending = self._pull.pending
        return max(0, self._pull.position - position) + pending

    async def close(self) -> None:
        """Stop the thread and close the connection; the durable stays on the server."""
        self._buffer.close()
        self._predecessors.close()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        """Close the pull and wait for the thread, if it was started; a thread that does not end is logged. Blocks."""
        self._pull.close()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                logs.THREAD_LEFT.log(_log, thread=self._thread.name, seconds=_JOIN_S)

    def _read(self) -> None:
        """Run the thread; whatever ends it is passed to the task that takes."""
        try:
            for records in self._pull:
                if records and not self._hand_over(records):
                    break
            self._buffer.finish()
        except BaseException as error:  # noqa: BLE001 - raised again by the task that takes
            self._buffer.fail(error)

    def _hand_over(self, records: Sequence[RawRecord]) -> bool:
        """Put decoded records as a chunk, those before an undecodable one first; False when the buffer is closed."""
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
            event_id, pending = event_id_of(last), self._pull.pending
            chunk = Chunk(self._position, last[0], event_id, events, done, size, pending)
            self._position = last[0]
            if not self._buffer.put(chunk):
                return False
        if fault is not None:
            raise fault
        return True


def _close_unused(opening: asyncio.Future[DurablePull]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
