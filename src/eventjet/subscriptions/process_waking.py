"""`InstanceWaker`: wakes the instances of a process that no event wakes: when a timer fires, and for new code."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from operator import itemgetter
from typing import TypeAlias

from eventjet.domain.quarantined import AggregateKey
from eventjet.observability import logs
from eventjet.subscriptions.handlers import ProcessHandler, Try
from eventjet.subscriptions.keyed_executor import KeyedExecutor

_log = logging.getLogger(__name__)

_LOOKS_AT_ONCE = 16
"""Process instances that are looked at for the first time at once."""
_LOOKS_MAX = 1_000
"""Process instances being looked at, including those that are tried again and again."""
_DUE_S = 0.25
"""How often fired timers are looked for, in seconds: the server fires timers as often."""
_LATE_LOOK_S = 30.0
"""How often timers that the server did not fire are looked for, in seconds."""
_LATE_SHARE = 0.01
"""The share of time that looking for them may take: all timers are read."""

RunInstance: TypeAlias = Callable[[AggregateKey, Try, int], Awaitable[None]]
"""Try to wake an instance, again and again if need be; the position is that of its last event, or 0 for a timer."""


class InstanceWaker:
    """Wakes the instances of one process type within one session."""

    def __init__(
        self, handler: ProcessHandler, executor: KeyedExecutor, waking: tuple[int, int] | None, run: RunInstance
    ) -> None:
        """Prepare; `waking` is the range of positions in which instances still have to be looked at."""
        self.waking = waking
        """As `Cursor.waking`: the progress of `look_again`."""
        self._handler = handler
        self._name = handler.declaration.name
        self._executor = executor
        self._run = run

    async def wake_due(self) -> None:
        """Queue the timers that have fired, one at a time for each process instance, without end."""
        after, listed = 0, -1
        while True:
            newest = await self._handler.newest_fired()
            if newest > listed:
                fired = await self._handler.fired(after)
                for due in fired:
                    after, key = due.sequence, (self._name, due.process_id)
                    self._executor.add_due(
                        key, lambda key=key, due=due: self._run(key, lambda _: self._handler.come_due(due), 0)
                    )
                listed = listed if fired else newest
            # All processes of this loop ask at the same moments, so that they share an answer.
            await asyncio.sleep(_DUE_S - asyncio.get_running_loop().time() % _DUE_S)

    async def set_late_again(self) -> None:
        """Set timers again that the server did not fire at their time, without end."""
        loop, pause_s = asyncio.get_running_loop(), _LATE_LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            began = loop.time()
            if count := await self._handler.set_late_again():
                logs.TIMERS_LATE.log(_log, name=self._name, count=count)
            pause_s = max(_LATE_LOOK_S, (loop.time() - began) / _LATE_SHARE)

    async def look_again(self) -> None:
        """Look at all waiting instances, once for each revision of the code; then wait without end.

        An instance that fails or takes long does not delay the others; `waking` stays below its position.
        """
        if self.waking is not None:
            await self._look_at_all(*self.waking)
            self.waking = None
            self._executor.changed.set()
            logs.LOOKED_AGAIN.log(_log, name=self._name, revision=self._handler.declaration.revision)
        await asyncio.Event().wait()  # a task that ends would end the session

    async def _look_at_all(self, after: int, until: int) -> None:
        looking: dict[asyncio.Future[None], int] = {}
        places = asyncio.Semaphore(_LOOKS_AT_ONCE)

        def note(reached: int) -> None:
            for finished in [future for future in looking if future.done()]:
                del looking[finished]
            self.waking = min([reached, *(position - 1 for position in looking.values())]), until
            self._executor.changed.set()

        while after < until:
            positions, reached = await self._handler.instances(after, until)
            for process_id, position in sorted(positions.items(), key=itemgetter(1)):
                await places.acquire()
                note(position - 1)
                while len(looking) >= _LOOKS_MAX:
                    await asyncio.wait(looking, return_when=asyncio.FIRST_COMPLETED)
                    note(position - 1)
                done = asyncio.get_running_loop().create_future()
                looking[done] = position
                self._queue_look(process_id, position, places, done)
            if reached == after:
                await asyncio.sleep(_DUE_S)  # a replica lags
            after = reached
        while looking:
            await asyncio.wait(looking, return_when=asyncio.FIRST_COMPLETED)
            note(until)

    def _queue_look(
        self, process_id: str, position: int, places: asyncio.Semaphore, done: asyncio.Future[None]
    ) -> None:
        """Queue the look at one instance; its place is free after the first try, whatever the result."""
        key, was_tried = (self._name, process_id), False

        async def attempt(number: int) -> None:
            nonlocal was_tried
            try:
                await self._handler.look_at(process_id, position)
            finally:
                if number == 1:
                    was_tried = True
                    places.release()

        async def look() -> None:
            await self._run(key, attempt, position)
            if not was_tried:
                places.release()
            done.set_result(None)

        self._executor.add_due(key, look)
