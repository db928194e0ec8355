"""`PartitionAssignment`: how many of a reactor's partitions one process works on, so that all that run share the work.

Each process tells the others that it is there, and takes at most ⌈partitions / processes⌉, and more only of what
nobody takes: others may work on some partitions alone, be of an older revision, or have failed there. That is only how
work is divided: who may move a cursor is decided by its compare-and-set, so a wrong count costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Generator
from contextlib import contextmanager, suppress

from eventjet.errors import EventjetError
from eventjet.observability import logs
from eventjet.runtime import called
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.retry import pause

_log = logging.getLogger(__name__)


class PartitionAssignment:
    """Of one reactor in one process. Where there is one partition, whoever comes first has it."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._allowed = 1 if partitions == 1 else 0
        self._processes = 0
        self._held: list[asyncio.Event] = []

    def has_room(self) -> bool:
        """Whether it may take another one."""
        return len(self._held) < self._allowed

    @contextmanager
    def holding(self) -> Generator[asyncio.Event]:
        """While one is taken and worked on; the event is set when it is to be let go."""
        let_go = asyncio.Event()
        self._held.append(let_go)
        try:
            yield let_go
        finally:
            self._held.remove(let_go)

    def divide(self, processes: int) -> None:
        """Among so many, this one included: where that is another number, what is too much is let go, newest first."""
        if processes == self._processes:
            return
        self._processes = processes
        self._allowed = math.ceil(self._partitions / max(1, processes))
        for let_go in self._held[self._allowed :]:
            let_go.set()

    async def keep(self, cursors: Cursors, name: str, owner: str, lease_s: float, stop: asyncio.Event) -> None:
        """Tell that this process is there, and look who else is, until `stop`; faults are logged and passed over."""
        try:
            while not stop.is_set():
                try:
                    self.divide(await called(cursors.beat(name, owner, self._partitions, lease_s), "A worker"))
                except Exception as error:  # noqa: BLE001 - whatever it is, the next beat is tried
                    logs.SHARES_UNKNOWN.tell(_log, name=name, reason=error)
                await pause(stop, lease_s / 3)
        finally:
            with suppress(EventjetError, OSError, TimeoutError):
                await cursors.leave(name, owner)
