"""Async code of the application, called so that what ends it is told from what ends its caller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from contextlib import contextmanager, suppress
from typing import TypeVar

from eventjet.errors import UnexpectedExit

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
