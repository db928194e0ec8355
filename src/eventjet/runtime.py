"""What eventjet asks of Python's runtime: tasks of the application, event loops, the garbage collector, file locks.

The collector stops the process while it looks at every object there is. Events, records and rows make no cycles:
looking for some among them finds nothing, and among millions of objects it takes seconds. See ADR 0043.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import IO, Any, TypeVar

from eventjet.errors import UnexpectedExit, UsageError

T = TypeVar("T")


async def called(work: Awaitable[T], whose: str = "The application's code") -> T:
    """Await something in a task of its own; raises `UnexpectedExit` for what it raises that is not an `Exception`.

    A cancellation of the caller is handed on, and its end waited for. Any other one is the code's own: of a future that
    somebody cancelled, or of its own task. `whose` begins the sentence that says so.
    """
    task = asyncio.ensure_future(_with_exceptions_only(work, whose))
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        while not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # taken, so that nobody is warned of it
        raise
    if task.cancelled():
        raise UnexpectedExit(asyncio.CancelledError.__name__, whose)
    return task.result()


async def _with_exceptions_only(work: Awaitable[T], whose: str) -> T:
    """Within the task: `SystemExit` and `KeyboardInterrupt` would end the loop itself."""
    task = asyncio.current_task()
    try:
        return await work
    except BaseException as raised:
        if is_cancelled(raised) or _is_closed(raised, task):
            raise
        error = UnexpectedExit.instead_of(raised, whose)
        if error is raised:
            raise
        raise error from raised


def _is_closed(raised: BaseException, task: asyncio.Task[None] | None) -> bool:
    """Whether it was raised in the coroutine of a task because that is closed: from outside it, or without a loop."""
    if not isinstance(raised, GeneratorExit):
        return False
    try:
        return asyncio.current_task() is not task
    except RuntimeError:
        return True


@contextmanager
def exceptions_only(whose: str) -> Generator[None]:
    """As `called`, within this task, around a generator or what opens something; its being closed is no fault."""
    try:
        yield
    except (Exception, GeneratorExit):
        raise
    except BaseException as raised:
        if is_cancelled(raised):
            raise
        raise UnexpectedExit.instead_of(raised, whose) from raised


def is_cancelled(raised: BaseException) -> bool:
    """Whether it was raised because this task is being cancelled."""
    task = asyncio.current_task() if isinstance(raised, asyncio.CancelledError) else None
    return task is not None and task.cancelling() > 0


_process = object()
"""Stands for this process. A fork of it makes another one, which costs less than to ask for the process's id."""


def _forked() -> None:
    global _process  # noqa: PLW0603
    _process = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class LoopGuard:
    """Of a connection, or of a log in memory. It belongs to the loop, and the process, that checks it first."""

    def __init__(self) -> None:
        self._loop: AbstractEventLoop | None = None
        self._process: object = None

    def check(self) -> None:
        """Raise `UsageError` in another loop or process. It takes no lock and waits for nothing."""
        try:
            loop = get_running_loop()
        except RuntimeError:  # no loop runs in this thread, or this process was forked out of a running one
            loop = None
        if loop is not None and loop is self._loop and self._process is _process:
            return
        if self._loop is None and loop is not None:
            self._loop, self._process = loop, _process
        elif self._loop is not None and self._process is not _process:
            raise UsageError(
                "This connection belongs to the process that opened it, and was used in a fork of that process. Open "
                "one in each process after the fork, in an event loop that was made there."
            )
        elif self._loop is not None and self._loop.is_closed():
            raise UsageError(
                "This connection belongs to the event loop that opened it, and that loop is closed: each `asyncio.run` "
                "makes a loop of its own. Open a connection in the loop that uses it, or keep one loop running and "
                "hand every call to it with `asyncio.run_coroutine_threadsafe`."
            )
        else:
            raise UsageError(
                "This connection belongs to the event loop that opened it, and was used from another one. Open a "
                "connection in this loop. Or, while its own loop runs in another thread, hand the call to that with "
                "`asyncio.run_coroutine_threadsafe`."
            )


class GuardedBlock(AbstractAsyncContextManager[T]):
    """A block that ends in the loop where it began. To leave it elsewhere raises `UsageError`, and it stays open."""

    def __init__(self, opened: AbstractAsyncContextManager[T], guard: LoopGuard) -> None:
        self._opened = opened
        self._guard = guard

    async def __aenter__(self) -> T:
        self._guard.check()
        return await self._opened.__aenter__()

    async def __aexit__(self, *raised: Any) -> bool | None:
        self._guard.check()
        return await self._opened.__aexit__(*raised)


class GuardedIterator(AsyncIterator[T]):
    """Hands on what a generator yields, in its own loop. Elsewhere it raises `UsageError`, and the generator stays."""

    def __init__(self, generator: AsyncGenerator[T], guard: LoopGuard) -> None:
        self._generator = generator
        self._guard = guard

    def __anext__(self) -> Awaitable[T]:
        self._guard.check()
        return self._generator.__anext__()

    async def aclose(self) -> None:
        """Ask for nothing more."""
        self._guard.check()
        await self._generator.aclose()


_lock = threading.Lock()
_settled = 0
"""How many blocks of `settled` are under way in this process."""


def settle_process() -> None:
    """In a process of eventjet's own, once it has imported what it needs: look seldom, and only at what is new.

    Batches of thousands of events live for a moment: looked for at the usual rate, they cost an eighth of a worker's
    time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@contextmanager
def settled() -> Generator[None]:
    """In the application's process: within the block, look only at what is made within it.

    Its thresholds stay as they are, and so does what it froze itself. What was there before and came to be a cycle of
    garbage is found after the block.
    """
    global _settled  # noqa: PLW0603  it is the process that is frozen, or not
    with _lock:
        if _settled == 0 and gc.get_freeze_count():
            is_ours = False
        else:
            is_ours = True
            _settled += 1
            if _settled == 1:
                gc.freeze()
    try:
        yield
    finally:
        with _lock:
            if is_ours:
                _settled -= 1
                if _settled == 0:
                    gc.unfreeze()


@contextmanager
def uncollected() -> Generator[None]:
    """Within the block, look at nothing: a fold makes no cycles, and the rows it holds would be walked over again and
    again. At 50,000 rows that is a quarter of all time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def try_lock(file: IO[bytes]) -> bool:
    """Lock the open file for this process if nobody has; False where there are no such locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True
