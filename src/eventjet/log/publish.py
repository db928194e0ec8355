"""`Sender`: send a save to the server once, and return the server's answer.

A save of one event is a plain publish; a save of several is an atomic batch (ADR-50), with a new batch id on every try.
While a batch is under way, saves of several events wait and share the next batch (group commit): the server stages each
batch by itself, whatever its size, so many saves in one batch cost as much as one save. See ADR 0041.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from eventjet.codec.headers import SAVE, batch_blocks
from eventjet.codec.subjects import subject_of
from eventjet.errors import Forbidden, Refused, StoreUnavailable
from eventjet.jetstream.client import Client
from eventjet.log import outcome
from eventjet.log.store import BATCH_MAX, Append, event_lines, message_size

T = TypeVar("T")
_Writes: TypeAlias = Sequence[Append]

GRACE_S = 0.05
"""How long a try may take at least, however near the deadline is."""
EVENTS_MAX = 100
"""A save of more events is sent by itself: its events share the cost of a batch, and other saves do not wait for it."""
BYTES_MAX = 1_000_000
"""Bytes of one shared batch at most, and so of a save that may share it."""
WAITING_MAX = 1_000
"""When this many saves wait, the next save is sent by itself."""
GATHER_SHARE = 0.1
"""The share of a batch's time that the next batch waits for new saves of the callers just answered."""
GATHER_MAX_S = 0.005
"""How long that wait is at most."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingSave(Generic[T]):
    """A save that may share a batch."""

    subjects: Collection[str]
    events: int
    size: int
    """Bytes of the save on the wire, at most."""
    payload: T
    """Whatever the queue's owner needs to send the save and to answer its caller."""


class BatchQueue(Generic[T]):
    """The saves that wait for the next batch, in the order of their arrival. PURE."""

    def __init__(self) -> None:
        self._waiting: deque[PendingSave[T]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[PendingSave[T]]:
        return iter(self._waiting)

    def accepts(self, save: PendingSave[T]) -> bool:
        """Return whether the save may wait here; otherwise it is sent by itself."""
        return save.events <= EVENTS_MAX and save.size <= BYTES_MAX and len(self._waiting) < WAITING_MAX

    def put(self, save: PendingSave[T]) -> None:
        self._waiting.append(save)

    def discard(self, save: PendingSave[T]) -> None:
        """Remove a save whose caller has given up, if it still waits here."""
        if save in self._waiting:
            self._waiting.remove(save)

    def next_batch(self) -> list[PendingSave[T]]:
        """Remove and return the save that has waited longest and all others that fit; empty if none waits.

        No two saves of a batch share a subject, and no save overtakes an earlier one that shares a subject with it.
        """
        batch: list[PendingSave[T]] = []
        remaining: deque[PendingSave[T]] = deque()
        subjects: set[str] = set()
        events = size = 0
        for save in self._waiting:
            fits = events + save.events <= BATCH_MAX and size + save.size <= BYTES_MAX
            if fits and subjects.isdisjoint(save.subjects):
                batch.append(save)
                events += save.events
                size += save.size
            else:
                remaining.append(save)
            subjects.update(save.subjects)
        self._waiting = remaining
        return batch


@dataclass(slots=True, eq=False)
class _Try:
    """The writes of a save in the queue, and the future of their answer."""

    writes: _Writes
    answer: asyncio.Future[outcome.Answer]

    def settle(self, answer: outcome.Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class Sender:
    """Sends saves to the server; for any number of tasks of one event loop."""

    def __init__(self, app: str, client: Client) -> None:
        self._app = app
        self._client = client
        self._queue: BatchQueue[_Try] = BatchQueue()
        self._driver: asyncio.Task[None] | None = None
        self._gathering: asyncio.Future[None] | None = None
        self._expected = 0

    async def send(self, writes: _Writes, deadline: float, *, alone: bool = False) -> outcome.Answer:
        """Send a save once and return the answer, by `deadline` of the monotonic clock even if it waits for a batch."""
        left_s = max(GRACE_S, deadline - time.monotonic())
        if len(writes) == 1 and len(writes[0].events) == 1:
            (write,) = writes
            body, (headers,) = write.events[0].encoded.body, batch_blocks([event_lines(write, 0)])
            return await self._ask(self._subject(write), body, headers, min(self._client.timeout_s, left_s))
        if not alone and sum([len(write.events) for write in writes]) <= EVENTS_MAX:
            save = self._pending(writes)
            if self._queue.accepts(save):
                return await self._send_with_others(save, left_s)
        return await self._publish([writes], min(self._client.timeout_s, left_s))

    def _pending(self, writes: _Writes) -> PendingSave[_Try]:
        subjects = {self._subject(write) for write in writes}
        sizes = [message_size(event) for write in writes for event in write.events]
        attempt = _Try(writes, asyncio.get_running_loop().create_future())
        return PendingSave(subjects, len(sizes), sum(sizes), attempt)

    async def _send_with_others(self, save: PendingSave[_Try], left_s: float) -> outcome.Answer:
        attempt = save.payload
        no_reply = outcome.NoReply("its batch was not answered in time")
        timer = asyncio.get_running_loop().call_later(left_s, attempt.settle, no_reply)
        self._queue.put(save)
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive())
        elif self._gathering is not None and len(self._queue) >= self._expected:
            self._end_gathering()
        try:
            return await attempt.answer
        finally:
            timer.cancel()
            self._queue.discard(save)

    async def _drive(self) -> None:
        """Send batch after batch until no save waits."""
        try:
            while batch := self._queue.next_batch():
                started_at = time.monotonic()
                await self._send_batch([save.payload for save in batch])
                await self._gather(len(batch), time.monotonic() - started_at)
        finally:
            self._driver = None

    async def _send_batch(self, attempts: Sequence[_Try]) -> None:
        try:
            answer = await self._publish([attempt.writes for attempt in attempts], self._client.timeout_s)
        except Exception as error:  # noqa: BLE001 - it is raised where the save is made, by itself
            if len(attempts) == 1:
                if not attempts[0].answer.done():
                    attempts[0].answer.set_exception(error)
                return
            for attempt in attempts:
                attempt.settle(outcome.BatchRejected(str(error), is_conflict=True))
            return
        counts = [sum(len(write.events) for write in attempt.writes) for attempt in attempts]
        for attempt, save_answer in zip(attempts, outcome.shared(answer, counts), strict=True):
            attempt.settle(save_answer)

    async def _gather(self, answered_count: int, duration_s: float) -> None:
        """Wait a moment for the next saves of the callers that were just answered, if there are several.

        Without this wait the first of them would be sent alone, and all others would wait for its batch, in turns for
        ever.
        """
        self._expected = answered_count + len(self._queue)
        if self._expected < 2:
            return
        loop = asyncio.get_running_loop()
        self._gathering = loop.create_future()
        timer = loop.call_later(min(GATHER_MAX_S, GATHER_SHARE * duration_s), self._end_gathering)
        try:
            await self._gathering
        finally:
            timer.cancel()
            self._gathering = None

    def _end_gathering(self) -> None:
        if self._gathering is not None and not self._gathering.done():
            self._gathering.set_result(None)

    async def _publish(self, saves: Sequence[_Writes], timeout_s: float) -> outcome.Answer:
        """Send saves as one batch, whose headers show where each save ends."""
        messages: list[tuple[str, bytes]] = []
        lines: list[str] = []
        for number, writes in enumerate(saves, 1):
            remaining = sum([len(write.events) for write in writes])
            for write in writes:
                subject = self._subject(write)
                for index, event in enumerate(write.events):
                    remaining -= 1
                    messages.append((subject, event.encoded.body))
                    save_line = f"{SAVE}: {number}/{remaining}\r\n" if len(saves) > 1 else ""
                    lines.append(event_lines(write, index) + save_line)
        *before, last = [(*message, block) for message, block in zip(messages, batch_blocks(lines), strict=True)]
        return await self._ask(*last, timeout_s, before)

    async def _ask(
        self,
        subject: str,
        body: bytes,
        headers: bytes,
        timeout_s: float,
        earlier_messages: Sequence[tuple[str, bytes, bytes]] = (),
    ) -> outcome.Answer:
        """Send messages and return the server's answer to the last, which is the answer to the whole batch."""
        try:
            reply = await self._client.request(subject, body, headers, timeout_s, earlier_messages, self._app)
        except StoreUnavailable as error:
            return outcome.NoReply(error.reason)
        except Forbidden as error:
            return outcome.PermissionDenied(error.reason)
        except Refused as error:  # the message is too large for this server
            return outcome.PermissionDenied(error.reason, error)
        return outcome.answer_in(reply[4])

    def _subject(self, write: Append) -> str:
        return subject_of(self._app, write.aggregate, write.aggregate_id)
