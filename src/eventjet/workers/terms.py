"""Terms: whoever follows the log works in one after the other. Any fault ends a term, and most begin another."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from eventjet.calls import called
from eventjet.codec.reasons import reason_of, traceback_of
from eventjet.errors import CheckpointFenced, CursorFenced, EventjetError, UnexpectedExit
from eventjet.observability import logs

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PASSES = (EventjetError, SQLAlchemyError, OSError, TimeoutError)
"""What is foreseen; anything else is told with its traceback."""


class Backoff:
    """Pauses between terms that end in faults."""

    def __init__(self, backoff_s: tuple[float, float]) -> None:
        self._first_s, self._most_s = backoff_s
        self.pause_s = self._first_s
        """How long to wait after the next fault."""

    def progressed(self) -> None:
        self.pause_s = self._first_s

    def hold_off(self) -> None:
        """What ended the term does not pass soon."""
        self.pause_s = self._most_s

    def paused(self) -> None:
        """Wait longer after the next fault, unless there is progress before it."""
        self.pause_s = min(2 * self.pause_s, self._most_s)


async def run_terms(
    name: str,
    term: Callable[[asyncio.Event], Awaitable[None]],
    stop: asyncio.Event,
    ends: dict[str, int],
    pace: Backoff,
    *,
    private: bool,
) -> None:
    """Term after term until `stop`; `ends` counts how they ended. `private` where something personal is at hand."""
    while not stop.is_set():
        try:
            await called(term(stop))
        except (CheckpointFenced, CursorFenced) as error:
            ends["fenced"] += 1
            logs.FENCED.tell(_log, name=name, reason=error)
        except Exception as error:  # noqa: BLE001 - others go on, and so does this one, at a bounded rate
            ends["fault"] += 1
            unforeseen = not isinstance(error, _PASSES) or isinstance(error, UnexpectedExit)
            trace = f"\n{traceback_of(error, private=private)}" if unforeseen else ""
            logs.TRYING_AGAIN.tell(_log, name=name, reason=reason_of(error, private=private), trace=trace)
            await pause(stop, pace.pause_s)
            pace.paused()


async def renewing(work: Awaitable[T], renew: Callable[[], Awaitable[object]], every_s: float) -> T:
    """Await something that may take longer than a lease, and renew the lease meanwhile; a failed renewal ends it."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=every_s)
            if not task.done():
                await renew()
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # raised above, or of no interest any more


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait, or return as soon as `stop` is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


def boot_clock() -> float:
    """Seconds since this machine was started, those in which it was suspended included, where the system tells them."""
    return time.clock_gettime(_BOOT)


_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
