"""Folded states of hot aggregates, bounded; and one lock an id, so that tasks queue instead of losing races."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Generic, TypeVar

from eventjet.domain.history import FoldedState

S = TypeVar("S")

CACHE_MAX = 10_000
"""Folded states kept by one repository."""


class Cache(Generic[S]):
    """Least recently used goes first; a newer state is never replaced by an older one."""

    def __init__(self, size_max: int = CACHE_MAX) -> None:
        self._size_max = size_max
        self._held: OrderedDict[str, FoldedState[S]] = OrderedDict()
        self._locks: dict[str, _Lock] = {}

    def get(self, aggregate_id: str) -> FoldedState[S] | None:
        """What is known; safe to decide on, since the log checks the expected position."""
        return self._held.get(aggregate_id)

    def put(self, aggregate_id: str, held: FoldedState[S]) -> None:
        """Remember a state, unless a newer one is known."""
        known = self._held.get(aggregate_id)
        if known is not None and known.position > held.position:
            return
        self._held[aggregate_id] = held
        self._held.move_to_end(aggregate_id)
        if len(self._held) > self._size_max:
            self._held.popitem(last=False)

    def drop(self, aggregate_id: str) -> None:
        """Forget what turned out stale."""
        self._held.pop(aggregate_id, None)

    def clear(self) -> None:
        """Forget every state."""
        self._held.clear()

    def alone(self, aggregate_id: str) -> KeyedLocks:
        """One command at a time on one id, within this process: to be entered by `async with`."""
        return KeyedLocks(self._locks, aggregate_id)


class KeyedLocks:
    """Holds the lock of one id, which is there as long as somebody holds it or waits for it."""

    __slots__ = ("_aggregate_id", "_lock", "_locks")

    def __init__(self, locks: dict[str, _Lock], aggregate_id: str) -> None:
        self._locks = locks
        self._aggregate_id = aggregate_id

    async def __aenter__(self) -> None:
        self._lock = self._locks.get(self._aggregate_id) or self._locks.setdefault(self._aggregate_id, _Lock())
        self._lock.users += 1
        try:
            await self._lock.lock.acquire()
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._lock.lock.release()
        self._leave()

    def _leave(self) -> None:
        self._lock.users -= 1
        if not self._lock.users:
            self._locks.pop(self._aggregate_id, None)


class _Lock:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
