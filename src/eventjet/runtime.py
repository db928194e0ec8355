"""Helpers around Python's runtime: the application's tasks, event loops, threads, the garbage collector, file locks.

The garbage collector stops the process while it visits all objects. Events, records and rows form no cycles, so a
search among them finds nothing, and among millions of objects it takes seconds. See ADR 0043.
"""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import sys
import threading
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, closing, contextmanager, suppress
from typing import IO, Any, TypeVar

from eventjet.errors import UnexpectedExit, UsageError

T = TypeVar("T")

_POLL_S = 0.2
_JOIN_TIMEOUT_S = 0.5
"""How long to wait for the end of a thread that reads from a silent server; the read itself times out later."""


async def called(work: Awaitable[T], owner: str = "The application's code") -> T:
    """Await the application's code in a task of its own, and turn what is not an `Exception` into `UnexpectedExit`.

    If the caller is cancelled, the task is cancelled and awaited. Any other cancellation is of the code itself, for
    instance of a future that it awaits, and raises `UnexpectedExit`, whose message begins with `owner`.
    """
    task = asyncio.ensure_future(_with_exceptions_only(work, owner))
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        while not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it as never retrieved
        raise
    if task.cancelled():
        raise UnexpectedExit(asyncio.CancelledError.__name__, owner)
    return task.result()


async def _with_exceptions_only(work: Awaitable[T], owner: str) -> T:
    """Convert errors within the task, because `SystemExit` and `KeyboardInterrupt` would end the event loop."""
    task = asyncio.current_task()
    try:
        return await work
    except BaseException as raised:
        if is_cancelled(raised) or _is_closed(raised, task):
            raise
        error = UnexpectedExit.instead_of(raised, owner)
        if error is raised:
            raise
        raise error from raised


def _is_closed(raised: BaseException, task: asyncio.Task[None] | None) -> bool:
    """Return whether an error is the closing of a task's coroutine, from outside the task or without a loop."""
    if not isinstance(raised, GeneratorExit):
        return False
    try:
        return asyncio.current_task() is not task
    except RuntimeError:
        return True


@contextmanager
def exceptions_only(owner: str) -> Generator[None]:
    """Turn what is not an `Exception` into `UnexpectedExit`, as `called` does, except `GeneratorExit`."""
    try:
        yield
    except (Exception, GeneratorExit):
        raise
    except BaseException as raised:
        if is_cancelled(raised):
            raise
        raise UnexpectedExit.instead_of(raised, owner) from raised


def is_cancelled(raised: BaseException) -> bool:
    """Return whether an error was raised because this task is being cancelled."""
    task = asyncio.current_task() if isinstance(raised, asyncio.CancelledError) else None
    return task is not None and task.cancelling() > 0


_process = object()
"""An object that identifies this process. A fork replaces it; comparing it costs less than asking for a process id."""


def _after_fork() -> None:
    global _process  # noqa: PLW0603
    _process = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class LoopGuard:
    """A guard that binds a connection, or a log in memory, to the event loop and process that call `check` first."""

    def __init__(self) -> None:
        self._loop: AbstractEventLoop | None = None
        self._process: object = None

    def check(self) -> None:
        """Raise `UsageError` in another loop or process, without a lock or a wait."""
        try:
            loop = get_running_loop()
        except RuntimeError:  # no loop runs in this thread, or this process was forked out of a running one
            loop = None
        if loop is not None and loop is self._loop and self._process is _process:
            return
        if self._loop is None and loop is not None:
            self._loop, self._process = loop, _process
            return
        whose, where = "the event loop", "was used from another one"
        if self._loop is not None and self._process is not _process:
            whose, where = "the process", "was used in a fork of that process"
        elif self._loop is not None and self._loop.is_closed():
            where = "that loop is closed: each `asyncio.run` makes a loop of its own"
        raise UsageError(
            f"This connection belongs to {whose} that opened it, and {where}. Open one in each loop and process "
            "that uses one, or share one among threads with `App.connect_blocking`."
        )


class GuardedBlock(AbstractAsyncContextManager[T]):
    """A context manager that raises `UsageError`, and stays open, if it is left in another loop.

    Any other use raises an error that says how it is used: `AttributeError` for an attribute, which `hasattr` and
    `inspect` expect, else `UsageError`.
    """

    def __init__(
        self, manager: AbstractAsyncContextManager[T], guard: LoopGuard, form: str, blocking: str | None = None
    ) -> None:
        """`form` is how it is used, such as `bank.connect() as jet`, and `blocking` the call for code without await."""
        self._manager = manager
        self._guard = guard
        self._usage = f"write `async with {form}:`"
        self._blocking = "" if blocking is None else f", or `with {blocking}:` in code without `await`"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"There is no {name!r} before the block is entered: {self._usage}.", name=name, obj=self)

    def __await__(self) -> Generator[Any, None, T]:
        raise UsageError(f"This is a block, and not a coroutine: {self._usage}.")

    def __enter__(self) -> T:
        raise UsageError(f"This block is asynchronous: {self._usage}{self._blocking}.")

    __exit__ = None  # so that `with` reaches `__enter__`, and nobody takes this for a context manager of `with`

    async def __aenter__(self) -> T:
        self._guard.check()
        return await self._manager.__aenter__()

    async def __aexit__(self, *raised: Any) -> bool | None:
        self._guard.check()
        return await self._manager.__aexit__(*raised)


class GuardedIterator(AsyncIterator[T]):
    """An async generator's iterator that raises `UsageError`, and leaves it open, in a loop other than its guard's."""

    def __init__(self, generator: AsyncGenerator[T], guard: LoopGuard) -> None:
        self._generator = generator
        self._guard = guard

    def __anext__(self) -> Awaitable[T]:
        self._guard.check()
        return self._generator.__anext__()

    async def aclose(self) -> None:
        """Close the generator."""
        self._guard.check()
        await self._generator.aclose()


_lock = threading.Lock()
_frozen_blocks = 0
"""Number of active `gc_frozen` blocks in this process."""


def tune_gc() -> None:
    """Make the garbage collector run seldom and ignore all present objects.

    This is for eventjet's own processes, once they have imported what they need. Batches of thousands of events live
    only for a moment; collected at the usual rate, they cost an eighth of a worker's time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@contextmanager
def gc_frozen() -> Generator[None]:
    """Make the garbage collector ignore, within the block, the objects that existed before it.

    For the application's process, whose thresholds stay as they are. If it has frozen objects itself, nothing changes.
    Older objects that become garbage within the block are collected after it.
    """
    global _frozen_blocks  # noqa: PLW0603  it is the process that is frozen, or not
    with _lock:
        if _frozen_blocks == 0 and gc.get_freeze_count():
            is_ours = False
        else:
            is_ours = True
            _frozen_blocks += 1
            if _frozen_blocks == 1:
                gc.freeze()
    try:
        yield
    finally:
        with _lock:
            if is_ours:
                _frozen_blocks -= 1
                if _frozen_blocks == 0:
                    gc.unfreeze()


@contextmanager
def uncollected() -> Generator[None]:
    """Disable the garbage collector within the block.

    A fold makes no cycles, and the collector would visit its rows again and again. With 50,000 rows that is a quarter
    of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def try_lock(file: IO[bytes]) -> bool:
    """Lock an open file for this process; return False if it is locked already, or the system has no such locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(_LOCKED_BYTE)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


_LOCKED_BYTE = 1 << 30
"""Where a file is locked on Windows, whose locks are of bytes and keep others from reading them."""
_TICK_S = 0.25


def loop_runner() -> asyncio.Runner:
    """Return a runner of coroutines whose loop psycopg can use, on Windows too."""
    if sys.platform != "win32":
        return asyncio.Runner()

    def new_loop() -> AbstractEventLoop:
        loop = asyncio.SelectorEventLoop()

        def tick() -> None:
            loop.call_later(_TICK_S, tick)

        tick()  # because Ctrl-C does not end a `select` on Windows
        return loop

    return asyncio.Runner(loop_factory=new_loop)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, in a loop of `loop_runner`."""
    with loop_runner() as runner:
        return runner.run(work)


def check_loop_for_psycopg() -> None:
    """Raise `UsageError` in the loop that Windows chooses by itself, in which psycopg cannot read PostgreSQL."""
    proactor: type | None = getattr(asyncio, "ProactorEventLoop", None)
    try:
        loop = get_running_loop()
    except RuntimeError:
        return
    if proactor is not None and isinstance(loop, proactor):
        raise UsageError(
            "On Windows, PostgreSQL cannot be read in the event loop that `asyncio.run` starts (ProactorEventLoop). "
            "Start the program by `asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)`, and uvicorn with "
            "`--loop asyncio:SelectorEventLoop`."
        )


def read_ahead(items: Generator[T], check: Callable[[], object], most: int = 8) -> Generator[T]:
    """Yield the items, of which a thread reads up to `most` ahead, so that what gives and what takes them both work.

    `check` is called before each, and several times a second while none comes: what it raises ends the reading.
    """
    ready: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(most)
    stopped = threading.Event()

    def put(item: tuple[T] | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=_POLL_S)
                return
            except queue.Full:
                continue

    def read() -> None:
        end: BaseException | None = None
        try:
            with closing(items):
                for item in items:
                    put((item,))
                    if stopped.is_set():
                        break
        except BaseException as error:  # noqa: BLE001 - it is raised again where the items are awaited
            end = error
        put(end)

    reader = threading.Thread(target=read, name="eventjet-read-ahead", daemon=True)
    reader.start()
    try:
        while True:
            check()
            try:
                item = ready.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        stopped.set()
        reader.join(_JOIN_TIMEOUT_S)
