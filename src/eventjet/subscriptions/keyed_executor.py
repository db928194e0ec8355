"""`KeyedExecutor`: runs one piece of work at a time for each key, and many keys at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import TypeAlias

from eventjet.errors import UnexpectedExit

Work: TypeAlias = Callable[[], Awaitable[None]]


class Drained(Exception):
    """The executor begins nothing more: work that raises this is left undone, and its position stays open."""


_place: ContextVar[asyncio.Semaphore] = ContextVar("place")
"""The semaphore that the running work holds a place of."""


class KeyedExecutor:
    """An executor with one queue for each key, and the position up to which all work is done.

    It is created within the loop that uses it. An error of work stops the queue of its key and is the result of
    `failed`.
    """

    def __init__(
        self,
        width: int,
        ahead_max: int,
        position: int = 0,
        event_id: str = "",
        done: Sequence[tuple[int, int]] = (),
        stop: asyncio.Event | None = None,
    ) -> None:
        """Create an executor that runs `width` keys at once and has at most `ahead_max` positions open.

        All work up to `position` and in the ranges `done` was done before. Nothing more begins once `stop` is set.
        """
        self._places = asyncio.Semaphore(width)
        self._due_places = asyncio.Semaphore(max(1, width // 4))
        self._ahead_max = ahead_max
        self._done_ranges = done
        self._last_added = position
        self._queues: dict[Hashable, deque[tuple[int, Work]]] = {}
        self._open_positions: OrderedDict[int, tuple[int, str]] = OrderedDict()
        self._room = asyncio.Event()
        self._room.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event() if stop is None else stop
        self._draining = asyncio.Event()
        self._closing = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the error of the first piece of work that failed."""
        self.position = position
        """All work up to and including this position is done: the floor."""
        self.event_id = event_id
        """Id of the event at `position`."""
        self.changed = asyncio.Event()
        """Set when the floor or the work done beyond it has moved; whoever waits for it clears it."""

    async def room(self) -> None:
        """Wait until another position may be opened."""
        await self._room.wait()

    def add(self, position: int, event_id: str, works: Sequence[tuple[Hashable, Work]]) -> None:
        """Queue the work of one position, higher than all before, perhaps for several keys.

        The floor does not pass the position before all its work is done; a position without work is done at once.
        """
        self._open_positions[position] = (len(works), event_id)
        self._last_added = position
        for key, work in works:
            self._queue(key, position, work)
        if not works:
            self._advance()
        if len(self._open_positions) >= self._ahead_max:
            self._room.clear()

    def add_due(self, key: Hashable, work: Work) -> None:
        """Queue work without a position; it has places of its own and does not wait behind a backlog of other keys."""
        self._queue(key, 0, work)

    async def pause(self, seconds: float) -> None:
        """Pause the running work before its next try, or until drained; other keys use its place, its own key waits."""
        place = _place.get()
        place.release()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # only `close` cancels this, after which nothing needs a place
                await self._draining.wait()
        await place.acquire()

    def check_open(self) -> None:
        """Raise `Drained` if nothing more is to begin, not even another try of running work."""
        if self._stop.is_set() or self._draining.is_set():
            raise Drained

    @property
    def is_idle(self) -> bool:
        """Whether all work that was added is done."""
        return not self._open_positions and not self._queues

    def done_beyond(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges that are done beyond the floor, those of before that were not added yet included."""
        ranges: list[tuple[int, int]] = []
        joined = False
        for position, (remaining, _) in self._open_positions.items():
            if remaining == 0 and joined:
                ranges[-1] = (ranges[-1][0], position)
            elif remaining == 0:
                ranges.append((position, position))
            joined = remaining == 0
        ranges += [
            (max(first, self._last_added + 1), last) for first, last in self._done_ranges if last > self._last_added
        ]
        return tuple(ranges)

    async def drained(self) -> None:
        """Start no further work, and wait until the running work is done."""
        self._draining.set()
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self) -> None:
        """Cancel the running work and wait for its end."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()  # retrieved, so that asyncio does not warn
        self.failed.cancel()

    def _queue(self, key: Hashable, position: int, work: Work) -> None:
        queue = self._queues.get(key)
        if queue is not None:
            queue.append((position, work))
            return
        self._queues[key] = deque([(position, work)])
        task = asyncio.ensure_future(self._run(key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, key: Hashable) -> None:
        queue = self._queues[key]
        while queue:
            position, work = queue[0]
            try:
                place = self._places if position else self._due_places
                _place.set(place)
                async with place:
                    self.check_open()
                    await work()
            except Drained:
                return
            except BaseException as raised:
                if self._closing:
                    raise
                if not self.failed.done():
                    # The session awaits `failed` and raises it, so an error that stops a queue is never lost.
                    self.failed.set_exception(UnexpectedExit.instead_of(raised))
                return
            queue.popleft()
            if position:
                remaining, event_id = self._open_positions[position]
                self._open_positions[position] = (remaining - 1, event_id)
                self._advance()
        del self._queues[key]

    def _advance(self) -> None:
        while self._open_positions:
            position, (remaining, event_id) = next(iter(self._open_positions.items()))
            if remaining:
                break
            del self._open_positions[position]
            self.position, self.event_id = position, event_id
        self.changed.set()
        if len(self._open_positions) < self._ahead_max:
            self._room.set()
