"""`LoopWatch`: a thread that keeps the leases of handlers while one of them blocks the event loop.

Code that blocks the loop blocks what renews its lease as well. Another worker would take the cursor over, call the same
handler and be blocked by it in turn, and no result of a try would ever be written. So while the loop stands still, a
thread with a loop and a connection of its own renews the cursors whose handlers run, each as long as its try may take,
and a lease more. It also notes in the cursor which event's try blocks the loop: the try counts, whatever becomes of
this process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from eventjet.errors import CursorFenced, EventjetError
from eventjet.jetstream.client import Client
from eventjet.nats.endpoint import Endpoint
from eventjet.observability import logs
from eventjet.subscriptions.cursor_store import Cursors, StoredCursor

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RunningTry:
    """One try of an event, from the call of its handler to its end."""

    label: str
    """The subscription and its function, for the log."""
    position: int
    """The position of the event; 0 for a deadline, whose tries are not counted in the cursor."""
    stored: StoredCursor
    """The cursor of its session."""
    timeout_s: float
    """How long it may take."""
    until: float = 0.0
    """When its lease is given up, by the monotonic clock: a lease after it has taken as long as it may."""
    blocked_s: float = 0.0
    """How long it has blocked the loop without a break, in seconds."""
    is_counted: bool = False


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
            await asyncio.to_thread(thread.join)

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
        while True:
            self._beats += 1
            await asyncio.sleep(self._every_s / 2)

    # In the thread.

    async def _watch(self) -> None:
        """Look at intervals whether the loop moves; while it does not, renew leases and count the try that blocks."""
        beats, task, label, blocked_s, was_logged = -1, None, "", 0.0, False
        async with AsyncExitStack() as connections:
            cursors: Cursors | None = None
            while not await self._pause():
                has_moved = self._beats != beats
                beats, blocking = self._beats, asyncio.current_task(self._loop)
                if has_moved or blocking is not task:
                    if not was_logged:
                        self._tell(label, blocked_s)
                    running = self._tries.get(blocking)
                    task, label, blocked_s, was_logged = blocking, _label_of(blocking, running), 0.0, False
                if has_moved:
                    continue
                # Only time that this thread was awake for counts: a process that was suspended has blocked nothing.
                blocked_s += self._every_s
                running = self._tries.get(task)
                if running is not None:
                    running.blocked_s = blocked_s
                    if not was_logged and blocked_s >= self._lease_s and running.until < time.monotonic():
                        self._tell(label, blocked_s)
                        was_logged = True
                try:
                    if cursors is None:
                        client = Client(self._endpoint, self._lease_s)
                        connections.push_async_callback(client.close)
                        await client.connect()
                        cursors = Cursors(client, self._app)
                    await self._renew(cursors, running, beats)
                except (EventjetError, OSError) as error:
                    logs.TRYING_AGAIN.tell(_log, name="The leases of a blocked event loop", reason=error, trace="")
            if not was_logged:
                self._tell(label, blocked_s)

    async def _pause(self) -> bool:
        """Wait for the next look, and return whether the watch has ended."""
        until = time.monotonic() + self._every_s
        while not self._ended.is_set() and (remaining_s := until - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(remaining_s, 0.1))
        return self._ended.is_set()

    async def _renew(self, cursors: Cursors, blocking: RunningTry | None, beats: int) -> None:
        """Renew the cursors of the tries that still have time, and count the one that blocks the loop."""
        now = time.monotonic()
        positions = {id(running.stored): 0 for running in self._tries.copy().values() if running.until > now}
        cursors_by_id = {id(running.stored): running.stored for running in self._tries.copy().values()}
        if blocking is not None and not blocking.is_counted and blocking.blocked_s >= self._lease_s / 2:
            positions[id(blocking.stored)] = blocking.position
            blocking.is_counted = True
        for key, position in positions.items():
            stored = cursors_by_id.get(key)
            if stored is None:
                continue
            stored.is_lent = True  # the loop's own writes wait, should it move again meanwhile
            try:
                if self._beats == beats:
                    await self._write(cursors, stored, position)
            finally:
                stored.is_lent = False

    async def _write(self, cursors: Cursors, stored: StoredCursor, position: int) -> None:
        own = replace(stored, is_lent=False)
        try:
            await cursors.write(own, own.cursor.tried(position))
        except CursorFenced:
            # A write of the loop may have been under way when it was blocked.
            own = await cursors.read(own.cursor.name)
            if own.cursor.owner != self._owner:
                return  # the session will notice
            await cursors.write(own, own.cursor.tried(position))
        stored.cursor, stored.sequence, stored.written_at = own.cursor, own.sequence, own.written_at

    def _tell(self, label: str, blocked_s: float) -> None:
        if blocked_s >= self._lease_s:
            logs.LOOP_BLOCKED.tell(_log, name=label, seconds=round(blocked_s, 1))


def _label_of(task: asyncio.Task[Any] | None, running: RunningTry | None) -> str:
    if running is not None:
        return running.label
    return "A callback" if task is None else getattr(task.get_coro(), "__qualname__", task.get_name())
