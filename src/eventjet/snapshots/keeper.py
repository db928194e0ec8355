"""Writes snapshots after the ack, off the caller's path, from a bounded queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from eventjet.snapshots.snapshot import SnapshotStore

QUEUE_MAX = 1_000
CLOSE_S = 2.0


class SnapshotKeeper:
    """One task a connection. A full queue drops: the next save of the aggregate brings another."""

    def __init__(self, store: SnapshotStore) -> None:
        self.store = store
        self.written = 0
        self.dropped = 0
        self._queue: asyncio.Queue[tuple[str, str, Callable[[], bytes | None]]] = asyncio.Queue(QUEUE_MAX)
        self._task: asyncio.Task[None] | None = None

    def keep(self, aggregate: str, aggregate_id: str, encode: Callable[[], bytes | None]) -> None:
        """Queue one; encoded when its turn comes."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        try:
            self._queue.put_nowait((aggregate, aggregate_id, encode))
        except asyncio.QueueFull:
            self.dropped += 1

    async def close(self) -> None:
        """Write what is queued, for two seconds at most."""
        if self._task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._queue.join()
        self.dropped += self._queue.qsize()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None

    async def _run(self) -> None:
        while True:
            aggregate, aggregate_id, encode = await self._queue.get()
            try:
                value = encode()
                if value is None:
                    self.dropped += 1
                else:
                    await self.store.put(aggregate, aggregate_id, value)
                    self.written += 1
            except Exception:  # noqa: BLE001  one state that cannot be kept must not keep the others from it
                self.dropped += 1
            finally:
                self._queue.task_done()
