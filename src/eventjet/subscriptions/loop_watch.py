"""`LoopWatch`: a thread that keeps the leases of running handlers while code blocks the event loop.

Code that blocks the loop also blocks the renewal of its lease. Another worker would take the cursor over, call the same
handler, be blocked in turn, and so on: no worker would ever write the result of a try. So a thread with a loop and a
connection of its own looks at the loop several times a lease. While the loop stands still, it renews the cursors whose
handlers run, each until its try has had its time and a lease more. It also counts the blocking try in its cursor.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from eventjet.errors import CursorFenced
from eventjet.jetstream.client import Client
from eventjet.nats.endpoint import Endpoint
from eventjet.observability import logs
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.cursor_store import Cursors, StoredCursor

_log = logging.getLogger(__name__)
_STEP_S = 0.05  # between two looks of a wait for its end


@dataclass(slots=True, eq=False)
class RunningTry:
    """One try of an event, from the call of its handler to its end."""

    label: str
    """The subscription and its function, for the log."""
    position: int
    """The position of the event; 0 for a deadline, whose tries are not counted in the cursor."""
    number: int
    """The count of the position in the cursor unless a worker sees this try end in time."""
    stored: StoredCursor
    """The cursor of its session."""
    timeout_s: float
    """How long it may take."""
    until: float = 0.0
    """When its lease is given up, by the monotonic clock."""
    blocked_s: float = 0.0
    """The longest time in which it kept the loop from moving, in seconds."""


@dataclass(slots=True)
class _Standstill:
    """A time in which the loop does not move; two are equal if it has not moved since, and the same code blocks it."""

    beats: int
    """The beats of the loop when it began."""
    task: asyncio.Task[Any] | None
    """The task that blocks the loop; None for a callback."""
    running: RunningTry | None
    """The try that the task runs; None if it runs no handler."""
    seconds: float = field(default=0.0, compare=False)
    is_logged: bool = field(default=False, compare=False)


class LoopWatch:
    """The watch over the event loop that creates it, in which handlers run under the leases of one worker."""

    def __init__(self, endpoint: Endpoint, app: str, owner: str, lease_s: float) -> None:
        self._endpoint = endpoint.with_name("eventjet blocked loop")
        self._app = app
        self._owner = owner
        self._lease_s = lease_s
        self._every_s = lease_s / 6
        self._loop = asyncio.get_running_loop()
        self._tries: dict[asyncio.Task[Any] | None, RunningTry] = {}
        self._beats = 0
        self._ended = threading.Event()

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[LoopWatch]:
        """Watch the loop during the block."""
        thread = threading.Thread(target=lambda: asyncio.run(self._watch()), name="eventjet loop watch", daemon=True)
        beating = asyncio.create_task(self._beat())
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            beating.cancel()
            until = time.monotonic() + 3 * self._lease_s  # a renewal that is under way takes one at most
            # `to_thread` would wait for a free thread: handlers that were cut off may keep them all.
            while thread.is_alive() and time.monotonic() < until:  # noqa: ASYNC110  a thread's end is no awaitable
                await asyncio.sleep(_STEP_S)

    @contextmanager
    def trying(self, running: RunningTry) -> Generator[None]:
        """Note during the block that the current task runs a try."""
        task = asyncio.current_task()
        running.until = time.monotonic() + running.timeout_s + self._lease_s
        self._tries[task] = running
        try:
            yield
        finally:
            del self._tries[task]

    async def _beat(self) -> None:
        """Show that the loop moves, twice between two looks of the thread."""
        while True:
            self._beats += 1
            await asyncio.sleep(self._every_s / 2)

    # All below runs in the thread.

    async def _watch(self) -> None:
        """Look at intervals whether the loop stands still; while it does, keep leases."""
        client = Client(self._endpoint, self._lease_s)  # connects at its first use
        cursors, has_failed = Cursors(client, self._app), False
        standstill = self._look()
        try:
            while not await self._pause():
                if self._look() != standstill:
                    self._log_blocked(standstill)
                    standstill = self._look()
                    continue
                self._prolong(standstill)
                try:
                    await self._keep_leases(cursors, standstill)
                    has_failed = False
                except Exception as error:  # noqa: BLE001 - whatever it is, the next look may succeed
                    if not has_failed:
                        logs.TRYING_AGAIN.log(_log, name="The leases of a blocked event loop", reason=error, trace="")
                    has_failed = True
        finally:
            self._log_blocked(standstill)
            await client.close()

    async def _pause(self) -> bool:
        """Wait for the next look, and return whether the watch has ended."""
        until = time.monotonic() + self._every_s
        while not self._ended.is_set() and time.monotonic() < until:  # noqa: ASYNC110  the loop of another thread sets it
            await asyncio.sleep(_STEP_S)
        return self._ended.is_set()

    def _look(self) -> _Standstill:
        """Return a standstill that begins now: it is one if the next look returns an equal one."""
        task = asyncio.current_task(self._loop)
        return _Standstill(self._beats, task, self._tries.get(task))

    def _prolong(self, standstill: _Standstill) -> None:
        """Add the time since the last look, and log the standstill once the lease of its try is given up."""
        # Looks are counted, not clocks read: a process that was suspended has blocked nothing.
        standstill.seconds += self._every_s
        running = standstill.running
        if running is not None:
            running.blocked_s = max(running.blocked_s, standstill.seconds)
        if running is None or running.until < time.monotonic():
            self._log_blocked(standstill)

    def _log_blocked(self, standstill: _Standstill) -> None:
        """Log a standstill of a lease or more, once."""
        if standstill.seconds < self._lease_s or standstill.is_logged:
            return
        standstill.is_logged = True
        task, running = standstill.task, standstill.running
        label = "A callback" if task is None else getattr(task.get_coro(), "__qualname__", task.get_name())
        name = label if running is None else running.label
        logs.LOOP_BLOCKED.log(_log, name=name, seconds=round(standstill.seconds, 1))

    async def _keep_leases(self, cursors: Cursors, standstill: _Standstill) -> None:
        """Renew the cursors of the tries whose leases are not given up yet."""
        now = time.monotonic()
        for stored in {running.stored for running in self._tries.copy().values() if running.until > now}:
            stored.lent_until = time.monotonic() + 2 * self._lease_s
            try:
                if self._look() == standstill:  # if it ends after this, the loop's own write waits
                    async with asyncio.timeout(self._lease_s):
                        await self._renew(cursors, stored, standstill)
            finally:
                stored.lent_until = 0.0

    async def _renew(self, cursors: Cursors, stored: StoredCursor, standstill: _Standstill) -> None:
        own = StoredCursor(*stored.value)
        try:
            await cursors.write(own, self._counted(own.cursor, stored, standstill))
        except CursorFenced:
            # A write of the loop may have been under way when the loop was blocked.
            own = await cursors.read(own.cursor.name)
            if own.cursor.owner != self._owner:
                return  # another worker has the cursor, as the session will notice
            await cursors.write(own, self._counted(own.cursor, stored, standstill))
        stored.value = own.value

    def _counted(self, cursor: Cursor, stored: StoredCursor, standstill: _Standstill) -> Cursor:
        """Return the cursor with the try that has blocked the loop for half a lease, if it is of this session."""
        running = standstill.running
        if running is None or running.stored is not stored or standstill.seconds < self._lease_s / 2:
            return cursor
        return cursor.tried(running.position, running.number)
