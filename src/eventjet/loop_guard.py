"""`LoopGuard`: what belongs to one event loop, and says so at once where another one uses it.

A connection's sockets, locks and futures wake the loop that made them, and no other. Whoever awaits them elsewhere
waits for ever, and holds meanwhile what the rightful loop waits for.
"""

from __future__ import annotations

import os
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from eventjet.errors import UsageError

T = TypeVar("T")

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
