"""Terms: whoever follows the log works in one after the other. Any fault ends a term, and most begin another."""

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

_PASSES = (EventjetError, SQLAlchemyError, OSError, TimeoutError)
"""What is foreseen; anything else is told with its traceback."""


END_S = 5.0
"""How long what was cancelled may take to end, to roll back and to let go."""
_LASTING = 3
"""Terms in a row that ended in faults, from which on whoever waits for this one to begin waits no longer."""

_PART_FIRST = 500
"""Events in the first transaction, before anything is known of the handler."""


class Backoff:
    """Pauses between terms that end in faults, and what those were."""

    def __init__(self, backoff_s: tuple[float, float]) -> None:
        self._first_s, self._most_s = backoff_s
        self.pause_s = self._first_s
        """How long to wait after the next fault."""
        self.faults = 0
        """In a row, without progress between them."""
        self.waits: str | None = None
        """What the last of them was, and since when there have been any; None after progress."""
        self._since = ""

    def progressed(self) -> None:
        self.pause_s, self.faults, self.waits = self._first_s, 0, None

    def failed_term(self, reason: str) -> bool:
        """A term ended in a fault; whether it is another one than that of the term before."""
        self._since = self._since if self.faults else now_told()
        self.faults += 1
        before, self.waits = self.waits, waiting_since(self._since, reason)
        return self.waits != before

    @property
    def is_lasting(self) -> bool:
        return self.faults >= _LASTING

    def hold_off(self) -> None:
        """What ended the term does not pass soon."""
        self.pause_s = self._most_s

    def paused(self) -> None:
        """Wait longer after the next fault, unless there is progress before it."""
        self.pause_s = min(2 * self.pause_s, self._most_s)


class Pace(Backoff):
    """What a projector has learnt of its handlers and its database; outlives terms."""

    def __init__(self, options: WorkerOptions) -> None:
        super().__init__(options.backoff_s)
        self._options = options
        self.part_max = min(_PART_FIRST, options.batch_max)
        """Events in one transaction, at most."""

    def committed(self, count: int, took_s: float) -> None:
        """Larger parts as long as a lease lasts for many of them: handlers may be slow."""
        options = self._options
        if took_s < options.lease_s / 10:
            self.part_max = min(2 * self.part_max, options.batch_max)
        elif took_s > options.lease_s / 4:
            self.part_max = max(1, count // 2)
        self.progressed()

    def failed(self, count: int) -> None:
        """Perhaps so many events were too many for the lease, or for the database's limits: fewer then."""
        self.part_max = max(1, count // 2)


def now_told() -> str:
    """This moment, as reasons tell it."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def waiting_since(since: str, reason: str) -> str:
    """The reason of what goes on by itself once something else is as it has to be."""
    return f"waiting since {since}: {reason}"


async def run_sessions(
    name: str,
    term: Callable[[asyncio.Event], Awaitable[None]],
    stop: asyncio.Event,
    ends: dict[str, int],
    pace: Backoff,
    *,
    on_ready: Callable[[], None],
    private: bool,
) -> None:
    """Term after term until `stop`; `ends` counts how they ended. `private` where something personal is at hand.

    The same fault again is not logged again. `on_ready` is called where faults last: nobody has to wait for this one.
    """
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
            reason = reason_of(error, private=private)
            if pace.failed_term(reason):
                logs.TRYING_AGAIN.tell(_log, name=name, reason=reason, trace=trace)
            if pace.is_lasting:
                on_ready()
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


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their ends, whatever they raise, for `END_S`; what hangs is named, and given up.

    Code of the application may take no notice of a cancellation, and nothing can force it to.
    """
    for task in tasks:
        task.cancel()
        task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
    _, late = await asyncio.wait(tasks, timeout=END_S)
    for task in late:
        logs.GIVEN_UP.tell(_log, name=task.get_name(), seconds=END_S)


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait, or return as soon as `stop` is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


class OwnerWatch:
    """Tells that the owner of a lease has gone silent, by this process's own clock; no clocks are compared.

    An owner renews its lease well before it ends, and each renewal changes what is stored. So the owner of one that was
    seen unchanged for longer than it lasts is dead or cut off. Should it be only slow, its next write is fenced.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lease: Hashable = None
        self._since = clock()

    def is_silent(self, lease: Hashable, lasts_s: float) -> bool:
        """Note what names the lease at this look (None for no owner); whether that has not changed for so long."""
        now = self._clock()
        if lease != self._lease:
            self._lease, self._since = lease, now
        return lease is not None and now - self._since > lasts_s


def boot_clock() -> float:
    """Seconds since this machine was started, those in which it was suspended included, where the system tells them."""
    return time.clock_gettime(_BOOT)


_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
