"""`KeyedExecutor`: one piece of work at a time for each key, many keys at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import TypeAlias

from eventjet.errors import UnexpectedExit

Work: TypeAlias = Callable[[], Awaitable[None]]

_place: ContextVar[asyncio.Semaphore] = ContextVar("place")
"""Of the work under way: one of the places of its width."""


class KeyedExecutor:
    """Made within the loop that uses it. What work raises ends the lane and is the result of `failed`."""

    def __init__(
        self,
        width: int,
        ahead_max: int,
        position: int = 0,
        event_id: str = "",
        done: Sequence[tuple[int, int]] = (),
    ) -> None:
        """So many lanes at once, and so many positions open; all is done up to `position`, and in the ranges `done`."""
        self._width = asyncio.Semaphore(width)
        self._urgent = asyncio.Semaphore(max(1, width // 4))
        self._ahead_max = ahead_max
        self._done = done
        self._added = position
        self._queues: dict[Hashable, deque[tuple[int, Work]]] = {}
        self._open: OrderedDict[int, tuple[int, str]] = OrderedDict()
        self._room = asyncio.Event()
        self._room.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = self._closing = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """What the first piece of work that failed has raised."""
        self.position = position
        """Everything up to here is done: the floor."""
        self.event_id = event_id
        """Of the event there."""
        self.changed = asyncio.Event()
        """Set when the floor or what is done beyond it has moved; for its reader to clear."""

    async def room(self) -> None:
        """Wait until another position may be opened."""
        await self._room.wait()

    def add(self, position: int, event_id: str, works: Sequence[tuple[Hashable, Work]]) -> None:
        """Work of one position, above all before it, perhaps for several keys; none passes it over."""
        self._open[position] = (len(works), event_id)
        self._added = position
        for key, work in works:
            self._queue(key, position, work)
        if not works:
            self._advance()
        if len(self._open) >= self._ahead_max:
            self._room.clear()

    def add_due(self, key: Hashable, work: Work) -> None:
        """Work of no position, in a width of its own: it does not wait behind a backlog of other keys."""
        self._queue(key, 0, work)

    async def pause(self, seconds: float) -> None:
        """For work under way, before it tries again: other keys have its place meanwhile, and its own key waits."""
        place = _place.get()
        place.release()
        await asyncio.sleep(seconds)  # only `close` cancels this, after which nothing needs a place
        await place.acquire()

    @property
    def is_idle(self) -> bool:
        """Whether all that was added is done."""
        return not self._open and not self._queues

    def done_beyond(self) -> tuple[tuple[int, int], ...]:
        """Ranges of what is done beyond the floor; neighbours among what was added are one range.

        What was done before and was not added yet is still done.
        """
        ranges: list[tuple[int, int]] = []
        joined = False
        for position, (left, _) in self._open.items():
            if left == 0 and joined:
                ranges[-1] = (ranges[-1][0], position)
            elif left == 0:
                ranges.append((position, position))
            joined = left == 0
        ranges += [(max(first, self._added + 1), last) for first, last in self._done if last > self._added]
        return tuple(ranges)

    async def drained(self) -> None:
        """Begin nothing more, and wait until what has begun is done."""
        self._draining = True
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self) -> None:
        """Cancel what is under way, and wait for its end."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()  # taken, so that nobody is warned of it
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
                place = self._width if position else self._urgent
                _place.set(place)
                async with place:
                    if self._draining:
                        return
                    await work()
            except BaseException as raised:
                if self._closing:
                    raise
                if not self.failed.done():
                    # Whoever waits for it raises it; nothing that ends a lane goes unseen.
                    self.failed.set_exception(UnexpectedExit.instead_of(raised))
                return
            queue.popleft()
            if position:
                left, event_id = self._open[position]
                self._open[position] = (left - 1, event_id)
                self._advance()
        del self._queues[key]

    def _advance(self) -> None:
        while self._open:
            position, (left, event_id) = next(iter(self._open.items()))
            if left:
                break
            del self._open[position]
            self.position, self.event_id = position, event_id
        self.changed.set()
        if len(self._open) < self._ahead_max:
            self._room.set()
