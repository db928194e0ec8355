"""`EventReader`: the log after a position, read and decoded in a thread of its own while the loop writes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from eventjet.codec.envelope import MSG_ID, RawRecord, header
from eventjet.domain.recorded import Recorded
from eventjet.errors import CodecError
from eventjet.nats.consumer import DurablePull
from eventjet.projections.sql_projection import AnyResolved
from eventjet.quarantine.fold import reader
from eventjet.workers.buffer import Chunk, EventBuffer
from eventjet.workers.context import WorkerContext
from eventjet.writers.batch import Batch

_log = logging.getLogger(__name__)

_JOIN_S = 5.0
_CHUNK_MAX = 1_000
"""Events decoded at a time, of which several make a batch."""


class EventReader:
    """Made by `EventReader.open`; raises from `take` whatever ended the reading, after the events before it."""

    def __init__(
        self, pull: DurablePull, buffer: EventBuffer, decode: Callable[[RawRecord], Any], position: int, name: str
    ) -> None:
        self._pull = pull
        self._buffer = buffer
        self._decode = decode
        self._position = position
        self._peeked: Batch | None = None
        self._thread = threading.Thread(target=self._read, name=f"eventjet {name}", daemon=True)

    @classmethod
    async def open(cls, context: WorkerContext, resolved: AnyResolved, position: int) -> EventReader:
        """Take the projection's durable over, so that it goes on after `position`; `start` begins to read."""
        pull = await asyncio.to_thread(
            DurablePull,
            context.endpoint.with_name(f"eventjet worker {resolved.durable}"),
            context.stream,
            resolved.durable,
            position=position,
            batch_max=min(context.options.batch_max, _CHUNK_MAX),
        )
        buffer = EventBuffer(context.options.batch_max)
        return cls(pull, buffer, reader(context.catalog, resolved), position, resolved.durable)

    def start(self) -> None:
        """Begin to read."""
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
        """Let a waiting `take` return."""
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
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                _log.warning("the thread %r did not end within %g s", self._thread.name, _JOIN_S)

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
