"""`Pulse`: how the read models and the log move, looked at once a second for all pages that are open."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from eventjet.errors import EventjetError
from eventjet.ui.sources import Sources
from eventjet.workers.status import StatusReader, StatusSnapshot, WorkStatus, paced

_EVERY_S = 1.0
_KEPT_S = 120.0
_IDLE_S = 60.0
"""So long after the last page was asked for it stops looking."""
_PACE_S = 10.0
_LOOK_S = 2.0


@dataclass(slots=True)
class Beat:
    """What is known now."""

    statuses: list[WorkStatus] = field(default_factory=list[WorkStatus])
    seen_s: float | None = None
    """How old that is; None while nothing was seen."""
    fault: str = ""
    """Why the last look came to nothing."""


class Pulse:
    """Of one console; it begins with the first page that asks, and rests when none does any more."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._asked = 0.0
        self._seen: deque[StatusSnapshot] = deque()
        self._fault = ""
        self._first = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def beat(self) -> Beat:
        """What is known; the first page waits for the first look, for two seconds at the most."""
        self._asked = time.monotonic()
        if self._task is None or self._task.done():
            self._first.clear()
            self._task = asyncio.create_task(self._run())
        try:
            await asyncio.wait_for(self._first.wait(), _LOOK_S)
        except TimeoutError:
            return Beat(fault="The server or the database did not answer within 2 s.")
        if not self._seen:
            return Beat(fault=self._fault)
        last = self._seen[-1]
        before = next((one for one in self._seen if one.at >= last.at - _PACE_S), last)
        return Beat(paced(before, last), time.monotonic() - last.at, self._fault)

    def positions(self, name: str, revision: int) -> list[tuple[float, int, int]]:
        """Seconds before now, position and the log's last position, oldest first, of the last two minutes."""
        now = time.monotonic()
        return [
            (now - snapshot.at, one.position, one.log_position)
            for snapshot in self._seen
            for one in snapshot.projections
            if (one.name, one.revision) == (name, revision)
        ]

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_LOOK_S)

    async def _run(self) -> None:
        async with StatusReader(self._sources.app, self._sources.settings) as reader:
            while time.monotonic() - self._asked < _IDLE_S:
                try:
                    seen = await reader.read()
                except EventjetError as error:
                    self._fault = str(error)
                else:
                    self._fault = ""
                    self._seen.append(seen)
                self._first.set()
                while self._seen and self._seen[0].at < time.monotonic() - _KEPT_S:
                    self._seen.popleft()
                await asyncio.sleep(_EVERY_S)
