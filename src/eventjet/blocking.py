"""`BlockingJet`: a `Jet` for code without `await`, over an event loop in a thread of its own.

Nothing is written twice: each method here is made from the async one, with its parameters, its types and its docstring.
See ADR 0066.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from eventjet.commands import Blobs, Command, Repository
from eventjet.domain.aggregate import AggregateType
from eventjet.domain.recorded import NO_METADATA, Metadata
from eventjet.errors import ConnectionClosed, UsageError
from eventjet.jet import Jet
from eventjet.runtime import run_async
from eventjet.settings import Settings

S = TypeVar("S")
E = TypeVar("E")
T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


def _blocking(method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], R]:
    """Make a blocking method of an async one; the class has the portal in `_portal`, and `_target` finds the object."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        portal: _Portal = self._portal
        return portal.call(lambda jet: method(self._target(jet), *args, **kwargs))

    return call


def _planning(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Make a method that runs in the loop of one that awaits nothing, such as `decide`."""

    @wraps(method)
    async def in_loop(target: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(target, *args, **kwargs)

    return _blocking(in_loop)


def _iterating(method: Callable[Concatenate[T, P], AsyncIterator[R]]) -> Callable[Concatenate[Any, P], Iterator[R]]:
    """Make a method that returns a blocking iterator of one that returns an async iterator."""

    @wraps(method)
    def iterate(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        portal: _Portal = self._portal
        events: list[Any] = []

        async def following(jet: Jet) -> tuple[R] | None:
            if not events:
                events.append(method(self._target(jet), *args, **kwargs))
            try:
                return (await anext(events[0]),)
            except StopAsyncIteration:
                return None

        try:
            while (item := portal.call(following)) is not None:
                yield item[0]
        finally:
            if events:  # else nothing was begun
                # Not awaited, since the garbage collector may end this iterator in the thread of the loop.
                with suppress(UsageError):
                    portal.start(lambda _: events[0].aclose())

    return iterate


class BlockingJet(AbstractContextManager["BlockingJet"]):
    """A `Jet` whose methods block instead of being awaited; made by `App.connect_blocking`.

    Its methods take, return and raise what those of `Jet` do. Safe for any number of threads. It connects at its first
    use or at the start of its `with` block, so a module may make it: each forked process connects by itself, as long as
    nobody used it before the fork. After a use, a call in a fork raises `UsageError` at once. So does a call after
    `close`, and a call in a thread in which an event loop runs.

    ```python
    with bank.in_memory_blocking() as jet:
        done = jet.repository(Account).execute("a-1", Account.open, "ada")
        jet.caught_up("balances", position=done.position)
        assert [recorded.data for recorded in jet.tail()] == [Opened(owner="ada")]
    ```
    """

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Jet]]) -> None:
        self._portal = _Portal(connect)

    def __enter__(self) -> BlockingJet:
        self._portal.open()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the saves in flight and close the connection; later calls raise `UsageError`.

        So do calls that other threads still wait for. At the end of the process it happens by itself.
        """
        self._portal.close()

    @property
    def settings(self) -> Settings:
        """The settings of the connection, `settings.database` among them; connects if nothing has yet."""
        return self._portal.open().jet.settings

    def repository(self, aggregate: AggregateType[S, E], /) -> BlockingRepository[S, E]:
        """Return the repository of one aggregate type. It connects when it is first used.

        Its methods raise `UsageError` for a type that the app does not list.
        """
        return BlockingRepository(self._portal, aggregate)

    @property
    def blobs(self) -> BlockingBlobs:
        """The content of blobs; connects when it is first used."""
        return BlockingBlobs(self._portal)

    def _target(self, jet: Jet) -> Jet:
        return jet

    transact = _blocking(Jet.transact)
    resolve = _blocking(Jet.resolve)
    init = _blocking(Jet.init)
    append_many = _blocking(Jet.append_many)
    caught_up = _blocking(Jet.caught_up)
    settled = _blocking(Jet.settled)
    tail = _iterating(Jet.tail)
    skipped = _blocking(Jet.skipped)
    log = _blocking(Jet.log)


class BlockingBlobs:
    """A `Blobs` whose methods block instead of being awaited; `BlockingJet.blobs` returns it.

    ```python
    with bank.in_memory_blocking() as jet:
        blob = jet.blobs.put(b"%PDF-1.7")
        assert b"".join(jet.blobs.chunks(blob)) == b"%PDF-1.7"
    ```
    """

    def __init__(self, portal: _Portal) -> None:
        self._portal = portal

    def _target(self, jet: Jet) -> Blobs:
        return jet.blobs

    put = _blocking(Blobs.put)
    read = _blocking(Blobs.read)
    chunks = _iterating(Blobs.chunks)
    save = _blocking(Blobs.save)


class BlockingRepository(Generic[S, E]):
    """A `Repository` whose methods block instead of being awaited; made by `BlockingJet.repository`.

    Safe for any number of threads.

    ```python
    with bank.in_memory_blocking() as jet:
        accounts = jet.repository(Account)
        done = accounts.execute("a-1", Account.deposit, Decimal(100))
        assert (done.state.balance, done.version) == (100, 1)
        assert accounts.load("a-1").balance == 100
    ```
    """

    def __init__(self, portal: _Portal, aggregate: AggregateType[S, E]) -> None:
        self._portal = portal
        self._aggregate = aggregate

    def _target(self, jet: Jet) -> Repository[S, E]:
        return jet.repository(self._aggregate)

    def command(
        self,
        command_id: str | None = None,
        /,
        *,
        ignoring: Collection[str] = (),
        metadata: Metadata = NO_METADATA,
    ) -> BlockingCommand[S, E]:
        """Return an idempotent command, as `Repository.command` does; an invalid id is refused when it is executed."""

        def command(jet: Jet) -> Command[S, E]:
            return self._target(jet).command(command_id, ignoring=ignoring, metadata=metadata)

        return BlockingCommand(self._portal, command)

    load = _blocking(Repository[S, E].load)
    history = _blocking(Repository[S, E].history)
    execute = _blocking(Repository[S, E].execute)
    decide = _planning(Repository[S, E].decide)


class BlockingCommand(Generic[S, E]):
    """A `Command` whose `execute` blocks instead of being awaited; made by `BlockingRepository.command`."""

    def __init__(self, portal: _Portal, target: Callable[[Jet], Command[S, E]]) -> None:
        self._portal = portal
        self._target = target

    execute = _blocking(Command[S, E].execute)
    decide = _planning(Command[S, E].decide)


class _Portal:
    """A connection and its event loop, in a daemon thread that starts with the first call."""

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Jet]]) -> None:
        self._connect = connect
        self._lock = threading.RLock()
        """Reentrant, because the garbage collector may end an iterator in a thread that has it."""
        self._pid: int | None = None
        """The process of the first call, set before the lock is taken: a fork of it must not wait for the lock."""
        self._opened: _Opened | None = None
        self._failures = 0
        """How many tries to connect have failed."""
        self._failure: Exception | None = None
        """Why the last of them failed."""
        self._is_closed = False

    def call(self, method: Callable[[Jet], Awaitable[R]]) -> R:
        """Run a method of the connection in its loop and return its result; an interrupt of the wait cancels it."""
        _refuse_in_loop(self._opened)
        future = self.start(method)
        try:
            return future.result()
        except (CancelledError, ConnectionClosed):
            if not self._is_closed:
                raise
            raise UsageError(
                "This connection was closed while the call waited: by `close`, or by the end of its `with` block, in "
                "another thread. Events that the call was to record may be recorded or not. Close a connection once "
                "all threads are done; to find out, execute the command again with the same id, over another one."
            ) from None
        finally:
            future.cancel()

    def start(self, method: Callable[[Jet], Awaitable[R]]) -> Future[R]:
        """Start a method of the connection in its loop."""

        async def run(jet: Jet) -> R:
            return await method(jet)

        failed_before = self._failures
        with self._lock_of_this_process():  # so that `close` ends the loop after it has begun this
            if self._opened is None and self._failure is not None and self._failures > failed_before:
                raise self._failure  # the try that this call waited for; each thread's own would take turns
            opened = self.open()
            return asyncio.run_coroutine_threadsafe(run(opened.jet), opened.loop)

    def open(self) -> _Opened:
        """Connect unless that is done; raises what `App.connect` raises."""
        with self._lock_of_this_process():
            if self._is_closed:
                raise UsageError("This connection is closed. Make another one with `connect_blocking`.")
            if self._opened is None:
                _refuse_in_loop(None)
                try:
                    self._opened = _Opened(self._connect)
                except Exception as error:
                    self._failures, self._failure = self._failures + 1, error
                    raise
                atexit.register(self.close)
            return self._opened

    def close(self) -> None:
        """Close the connection and end its loop; in a fork of its process it does nothing."""
        _refuse_in_loop(self._opened)
        if self._pid not in (None, os.getpid()):
            return
        with self._lock:
            self._is_closed = True
            opened, self._opened = self._opened, None
        if opened is not None:
            atexit.unregister(self.close)
            opened.close()

    def _lock_of_this_process(self) -> threading.RLock:
        if self._pid is None:
            self._pid = os.getpid()
        elif self._pid != os.getpid():
            raise UsageError(
                "This connection was used in the process that forked this one, and does not work here. Make another "
                "one with `connect_blocking()` after the fork. A connection that nobody used before the fork works in "
                "each process, which connects by itself."
            )
        return self._lock


class _Opened:
    """A thread in which a loop runs, and the connection of that loop."""

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Jet]]) -> None:
        self._connected: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._connect = connect
        self.loop: asyncio.AbstractEventLoop
        self.jet: Jet
        self._thread = threading.Thread(target=self._run, name="eventjet", daemon=True)
        self._thread.start()
        try:
            wait((self._connected, self._ended), return_when=FIRST_COMPLETED)
        finally:
            self._connected.cancel()  # if the wait was interrupted, nobody needs the connection
        if self._ended.done():
            self._ended.result()

    def close(self) -> None:
        """Close the connection; raises what that raises."""
        self.loop.call_soon_threadsafe(self._stop.set)
        self._ended.result()
        self._thread.join()

    def _run(self) -> None:
        try:
            run_async(self._serve())
        except BaseException as error:  # noqa: BLE001  it is raised where somebody waits for it
            # Python 3.12 starts no thread while it exits, and a loop needs one to shut its executor down.
            if not self._ended.done():
                self._ended.set_exception(error)

    async def _serve(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self._connect() as self.jet:
            if self._connected.set_running_or_notify_cancel():
                self._connected.set_result(None)
                await self._stop.wait()
        self._ended.set_result(None)


def _refuse_in_loop(opened: _Opened | None) -> None:
    """Raise `UsageError` if an event loop runs in this thread, which the call would stop.

    The loop of a notebook stands still for every cell anyway.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None and (opened is None or loop is not opened.loop):
        return
    if opened is not None and loop is opened.loop:
        raise UsageError(
            "A decision, or other code that this connection runs, calls the connection and would wait for itself. Make "
            "the call before, and give the decision what it returned: `execute(id, Account.decide, value)`."
        )
    raise UsageError(
        "An event loop runs in this thread, and a blocking call would stop it. Use `connect` and `await` here, or hand "
        "the call to a thread with `asyncio.to_thread`."
    )
