"""`VirtualLoop`: an event loop whose clock jumps to the next call, with processes in it that stop and continue.

Nothing waits in real time or runs in a thread, and the same calls come in the same order every time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")

TURNS_MAX = 400_000
"""The limit of calls in a schedule: one with more does not end."""


class Process:
    """A process whose calls wait while it is stopped; a dead process is stopped for ever."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_stopped = False
        self.waiting: deque[Turn] = deque()
        self.context = Context()
        self.context.run(PROCESS.set, self)


PROCESS: ContextVar[Process | None] = ContextVar("PROCESS", default=None)
"""The process of the present call; calls of the network and the servers have none."""
NOBODY = Context()


class Turn:
    """A call that the loop has to make."""

    __slots__ = ("arguments", "at", "call", "context", "is_cancelled")

    def __init__(self, call: Callable[..., object], arguments: tuple[Any, ...], context: Context, at: float) -> None:
        self.call = call
        self.arguments = arguments
        self.context = context
        self.at = at
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.at


class VirtualLoop(asyncio.AbstractEventLoop):
    """The event loop of a single schedule; `run` is called once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = 0
        self.faults: list[dict[str, Any]] = []
        """Uncaught errors."""
        self._ready: deque[Turn] = deque()
        self._timers: list[tuple[float, int, Turn]] = []
        self._order = 0

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine to its end, and return its result or raise its error."""
        asyncio._set_running_loop(self)
        try:
            task = self.create_task(main)
            while not task.done():
                self._turn()
            return task.result()
        finally:
            asyncio._set_running_loop(None)

    def wake(self, process: Process) -> None:
        """Resume a stopped process with the calls that waited meanwhile."""
        process.is_stopped = False
        self._ready.extend(process.waiting)
        process.waiting.clear()

    def after(self, delay: float, call: Callable[..., object], *arguments: Any) -> None:
        """Call a function after a delay, in no process."""
        self.call_at(self.now + delay, call, *arguments, context=NOBODY)

    # The methods that asyncio needs of a loop.

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        turn = Turn(callback, args, copy_context() if context is None else context, self.now)
        self._ready.append(turn)
        return turn

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        turn = Turn(callback, args, copy_context() if context is None else context, when)
        self._order += 1
        heappush(self._timers, (when, self._order, turn))
        return turn

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Call the function at once, in this thread."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is raised where the future is awaited
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.faults.append(context)

    def _turn(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready:
            assert timers, "everybody waits for ever"
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            turn = ready.popleft()
            if turn.is_cancelled:
                continue
            process = turn.context.get(PROCESS)
            if process is not None and process.is_stopped:
                process.waiting.append(turn)
                continue
            self.turns += 1
            turn.context.run(turn.call, *turn.arguments)
        assert self.turns < TURNS_MAX, "the schedule does not end"
