"""Sessions of subscriptions, one after the other: any fault ends a session, and after a pause another begins.

Also the helpers of sessions: backoff, batch sizes, lease renewal, and the watch over other owners.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Hashable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from eventjet.codec.reasons import reason_of, traceback_of
from eventjet.errors import CheckpointFenced, CursorFenced, EventjetError, UnexpectedExit
from eventjet.observability import logs
from eventjet.runtime import called
from eventjet.subscriptions.context import WorkerOptions

_log = logging.getLogger(__name__)

T = TypeVar("T")

_EXPECTED = (EventjetError, SQLAlchemyError, OSError, TimeoutError)
"""Expected errors; any other error is logged with its traceback."""


END_S = 5.0
"""How long cancelled tasks may take to roll back, release and end, in seconds."""
_LASTING_FAULTS = 3
"""After this many failed sessions in a row the subscription no longer delays the readiness of the process."""

_FIRST_PART = 500
"""Events in the first transaction, before the speed of the handler is known."""


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

    def failed_term(self, reason: str) -> bool:
        """Note that a session ended in a fault; return whether it differs from the fault of the session before."""
        self._since = self._since if self.faults else now_told()
        self.faults += 1
        previous, self.waits = self.waits, waiting_since(self._since, reason)
        return self.waits != previous

    @property
    def is_lasting(self) -> bool:
        """Whether so many sessions in a row failed that others need not wait for this subscription."""
        return self.faults >= _LASTING_FAULTS

    def hold_off(self) -> None:
        """Take the longest pause next, since the cause does not end soon."""
        self.pause_s = self._longest_s

    def paused(self) -> None:
        """Double the pause after the next fault, up to the longest; progress before it resets the pause."""
        self.pause_s = min(2 * self.pause_s, self._longest_s)


class Pace(Backoff):
    """The backoff and the batch size of one projection, learnt from the speed of its commits; outlives sessions."""

    def __init__(self, options: WorkerOptions) -> None:
        super().__init__(options.backoff_s)
        self._options = options
        self.part_max = min(_FIRST_PART, options.batch_max)
        """Most events in one transaction."""

    def committed(self, count: int, took_s: float) -> None:
        """Note a commit and size the next parts: larger below a tenth of a lease, smaller above a quarter."""
        options = self._options
        if took_s < options.lease_s / 10:
            self.part_max = min(2 * self.part_max, options.batch_max)
        elif took_s > options.lease_s / 4:
            self.part_max = max(1, count // 2)
        self.progressed()

    def failed(self, count: int) -> None:
        """Halve the parts: this many events may have been too many for the lease or for the database's limits."""
        self.part_max = max(1, count // 2)


def now_told() -> str:
    """Return the current time as reasons print it: UTC to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def waiting_since(since: str, reason: str) -> str:
    """Return the reason of a subscription that continues by itself once a cause is gone."""
    return f"waiting since {since}: {reason}"


async def run_sessions(
    name: str,
    session: Callable[[asyncio.Event], Awaitable[None]],
    stop: asyncio.Event,
    end_counts: dict[str, int],
    backoff: Backoff,
    *,
    on_ready: Callable[[], None],
    private: bool,
) -> None:
    """Run session after session until `stop`, with a pause after each fault.

    `end_counts` counts how sessions ended. `private` keeps personal data out of logged reasons. A repeated fault is
    logged once. After several faults in a row `on_ready` is called, so that others do not wait for this subscription.
    """
    while not stop.is_set():
        try:
            await called(session(stop))
        except (CheckpointFenced, CursorFenced) as error:
            end_counts["fenced"] += 1
            logs.FENCED.tell(_log, name=name, reason=error)
        except Exception as error:  # noqa: BLE001 - others go on, and so does this one, at a bounded rate
            end_counts["fault"] += 1
            unforeseen = not isinstance(error, _EXPECTED) or isinstance(error, UnexpectedExit)
            trace = f"\n{traceback_of(error, private=private)}" if unforeseen else ""
            reason = reason_of(error, private=private)
            if backoff.failed_term(reason):
                logs.TRYING_AGAIN.tell(_log, name=name, reason=reason, trace=trace)
            if backoff.is_lasting:
                on_ready()
            await pause(stop, backoff.pause_s)
            backoff.paused()


async def renewing(work: Awaitable[T], renew: Callable[[], Awaitable[object]], every_s: float) -> T:
    """Await work that may take longer than a lease, and renew the lease every `every_s` seconds meanwhile.

    An error of a renewal cancels the work and is raised.
    """
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


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait up to `END_S` for their ends, whatever they raise; a task that hangs is logged and left.

    Application code may ignore a cancellation, and nothing can force it to end.
    """
    for task in tasks:
        task.cancel()
        task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
    _, late = await asyncio.wait(tasks, timeout=END_S)
    for task in late:
        logs.GIVEN_UP.tell(_log, name=task.get_name(), seconds=END_S)


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
        """Note the lease that was just read, and return whether it has been unchanged for longer than `duration_s`.

        `lease` is any value that changes with each renewal; None means that there is no owner.
        """
        now = self._clock()
        if lease != self._lease:
            self._lease, self._since = lease, now
        return lease is not None and now - self._since > duration_s


def boot_clock() -> float:
    """Return the seconds since this machine started, including suspended time where the system counts it."""
    return time.clock_gettime(_BOOT_CLOCK)


_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
