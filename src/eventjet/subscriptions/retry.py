"""Helpers of sessions: the backoff between them, lease renewal, the watch over other owners, and the end of tasks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Hashable
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from eventjet.observability import logs
from eventjet.text import utc_text

_log = logging.getLogger(__name__)

T = TypeVar("T")

END_S = 5.0
"""How long cancelled tasks may take to roll back, release and end, in seconds."""
_LASTING_FAULTS = 3
"""After this many failed sessions in a row the subscription no longer delays the readiness of the process."""


class Backoff:
    """The pauses between sessions that end in faults, and the last of these faults."""

    def __init__(self, backoff_s: tuple[float, float]) -> None:
        self._first_s, self._longest_s = backoff_s
        self.pause_s = self._first_s
        """Pause after the next fault, in seconds."""
        self.faults = 0
        """Faults in a row, without progress between them."""
        self.waits: str | None = None
        """The last fault, and the time of the first in this row; None after progress."""
        self._since = ""

    def progressed(self) -> None:
        """Forget the faults, since there was progress."""
        self.pause_s, self.faults, self.waits = self._first_s, 0, None

    def failed(self, reason: str) -> bool:
        """Note that a session ended in a fault; return whether it differs from the fault of the session before."""
        self._since = self._since if self.faults else time_text()
        self.faults += 1
        previous, self.waits = self.waits, waiting_since(self._since, reason)
        return self.waits != previous

    async def wait(self, stop: asyncio.Event) -> None:
        """Pause after a fault, unless `stop` is set; each pause is twice the last, up to the longest."""
        await pause(stop, self.pause_s)
        self.pause_s = min(2 * self.pause_s, self._longest_s)

    @property
    def is_lasting(self) -> bool:
        """Whether so many sessions in a row failed that others need not wait for this subscription."""
        return self.faults >= _LASTING_FAULTS

    def hold_off(self) -> None:
        """Take the longest pause next, since the cause does not end soon."""
        self.pause_s = self._longest_s


def time_text() -> str:
    """Return the current time as reasons print it: UTC to the second."""
    return utc_text(datetime.now(UTC), "seconds")


def waiting_since(since: str, reason: str) -> str:
    """Return the reason of a subscription that continues by itself once a cause is gone."""
    return f"waiting since {since}: {reason}"


async def renewing(work: Awaitable[T], renew: Callable[[], Awaitable[object]], every_s: float) -> T:
    """Await work, and renew the lease every `every_s` seconds meanwhile; an error of a renewal cancels the work."""
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
            task.exception()  # retrieved, so that asyncio does not warn


class Closable(Protocol):
    """Something that is closed once."""

    async def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


async def opened(stack: AsyncExitStack, opening: Awaitable[C]) -> C:
    """Await something that opens, and have the stack close it, whether or not anybody still waits for this."""
    value = await opening
    stack.push_async_callback(value.close)
    return value


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait up to `END_S` for their ends; one that ignores its cancellation is logged and left."""
    for task in tasks:
        task.cancel()
        task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
    _, late = await asyncio.wait(tasks, timeout=END_S)
    for task in late:
        logs.GIVEN_UP.log(_log, name=task.get_name(), seconds=END_S)


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait for some seconds, or until `stop` is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


class OwnerWatch:
    """Detects by this process's own clock that the owner of a lease has gone silent; no clocks are compared.

    An owner renews its lease well before it ends, and each renewal changes what is stored. So an owner whose lease was
    seen unchanged for longer than it lasts is dead or cut off. If the owner is only slow, its next write is fenced.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lease: Hashable = None
        self._since = clock()

    def is_silent(self, lease: Hashable, duration_s: float) -> bool:
        """Note the lease just read, None without an owner; return whether it is unchanged for over `duration_s`."""
        now = self._clock()
        if lease != self._lease:
            self._lease, self._since = lease, now
        return lease is not None and now - self._since > duration_s


def boot_clock() -> float:
    """Return the seconds since this machine started, including suspended time where the system counts it."""
    return time.clock_gettime(_BOOT_CLOCK)


_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
