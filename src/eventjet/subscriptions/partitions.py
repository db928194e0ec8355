"""`PartitionAssignment`: how many of a reactor's partitions one process works on, so that all processes share the work.

Each process announces itself to the others and takes at most ⌈partitions / processes⌉ partitions. It takes more only
where nobody else takes a partition: other processes may work on some partitions alone, run an older revision, or have
failed there. The assignment only divides the work. The compare-and-set of the cursor decides who may move it, so a
wrong count costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress

from eventjet.errors import EventjetError
from eventjet.observability import logs
from eventjet.runtime import called
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.retry import pause

_log = logging.getLogger(__name__)


class PartitionAssignment:
    """The partitions of one reactor that one process works on; a single one belongs to the first that takes it."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._limit = 1 if partitions == 1 else 0
        self._processes = 0
        self._releases: list[asyncio.Event] = []

    def has_room(self) -> bool:
        """Return whether this process may take another partition."""
        return len(self._releases) < self._limit

    def add(self) -> asyncio.Event:
        """Count one more partition as taken; the event is set when it must be released."""
        release_requested = asyncio.Event()
        self._releases.append(release_requested)
        return release_requested

    def remove(self, release_requested: asyncio.Event) -> None:
        """Count the partition of this event as released."""
        self._releases.remove(release_requested)

    def divide(self, processes: int) -> None:
        """Divide the partitions among all processes; where that lowers the limit, those taken last are released."""
        if processes == self._processes:
            return
        self._processes = processes
        self._limit = math.ceil(self._partitions / max(1, processes))
        for release_requested in self._releases[self._limit :]:
            release_requested.set()

    async def keep(self, cursors: Cursors, name: str, owner: str, lease_s: float, stop: asyncio.Event) -> None:
        """Announce this process and count the others every third of a lease until `stop`; faults are only logged."""
        try:
            while not stop.is_set():
                try:
                    self.divide(await called(cursors.beat(name, owner, self._partitions, lease_s), "A worker"))
                except Exception as error:  # noqa: BLE001 - whatever it is, the next beat is tried
                    logs.SHARES_UNKNOWN.log(_log, name=name, reason=error)
                await pause(stop, lease_s / 3)
        finally:
            with suppress(EventjetError, OSError, TimeoutError):
                await cursors.leave(name, owner)
