"""Ctrl-C and SIGTERM: both end a command in good order, and clean-up is not interrupted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from eventjet.cli.progress import progress
from eventjet.cli.terminal import note

if TYPE_CHECKING:
    from eventjet.rebuild.progress import Report

T = TypeVar("T")


@contextmanager
def interruptible() -> Generator[Callable[[], None]]:
    """For commands that start servers: the first of either raises `KeyboardInterrupt`; later ones change nothing.

    Yields what makes the first one change nothing, too, for clean-up that began for another reason.
    """
    seen = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if not seen:
            seen = True
            raise KeyboardInterrupt

    def calm() -> None:
        nonlocal seen
        seen = True

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield calm
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _terminable(consolation: str) -> Generator[None]:
    """SIGTERM does as Ctrl-C does within the block, and after either is said what became of things."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        note(f"Interrupted. {consolation}")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def finished(consolation: str, work: Callable[[Report], Coroutine[Any, Any, T]]) -> T:
    """Run bulk work and show its progress; Ctrl-C and SIGTERM end it in good order, and then `consolation` is said."""
    with _terminable(consolation), progress() as shown:
        return asyncio.run(_told_when_stopping(work(lambda step: shown(step.phase, step.done, step.total or None))))


async def _told_when_stopping(work: Coroutine[Any, Any, T]) -> T:
    """Run it; when it is cancelled, say at once that it is ending, which may take a while."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        note("Stopping; what was begun is cleared away.")
        task.cancel()
        return await task
