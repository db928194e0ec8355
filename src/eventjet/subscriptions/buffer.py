"""`EventBuffer`: decoded pieces of the log, from the thread that reads to the task that writes, merged into batches."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from eventjet.writers.batch import Batch

BYTES_MAX = 16 * 1024 * 1024
"""Bodies that may wait, in bytes; a single larger chunk still passes."""
_WAIT_S = 1.0
_GATHER_S = 0.05
"""How long a batch waits for more where the log has more: whole ones cost less an event, here and in the database."""


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
        self._closed = self._finished = False

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

    def finish(self) -> None:
        """Nothing more will be put."""
        with self._changed:
            self._finished = True
        self._wake_from_thread()

    @property
    def has_more(self) -> bool:
        """Whether something waits."""
        return bool(self._chunks)

    async def take(self, timeout_s: float) -> Batch | None:
        """What waits, up to `batch_max` records; None when nothing comes in time or `wake` is called."""
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
        """A whole batch, however long that takes; None when reading ends before there is one."""
        while not self._has_ended and not self._is_whole():
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
            # The loop is closed, so nobody waits any more.
            self.close()
