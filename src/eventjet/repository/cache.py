"""Folded states of hot aggregates, bounded; and one lock an id, so that tasks queue instead of losing races."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from eventjet.domain.history import Held

S = TypeVar("S")

CACHE_MAX = 10_000
"""Folded states kept by one repository."""


class Cache(Generic[S]):
    """Least recently used goes first; a newer state is never replaced by an older one."""

    def __init__(self, size_max: int = CACHE_MAX) -> None:
        self._size_max = size_max
        self._held: OrderedDict[str, Held[S]] = OrderedDict()
        self._locks: dict[str, _Lock] = {}

    def get(self, aggregate_id: str) -> Held[S] | None:
        """What is known; safe to decide on, since the log checks the expected position."""
        return self._held.get(aggregate_id)

    def put(self, aggregate_id: str, held: Held[S]) -> None:
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

    @asynccontextmanager
    async def alone(self, aggregate_id: str) -> AsyncGenerator[None]:
        """One command at a time on one id, within this process."""
        lock = self._locks.setdefault(aggregate_id, _Lock())
        lock.users += 1
        try:
            async with lock.lock:
                yield
        finally:
            lock.users -= 1
            if not lock.users:
                self._locks.pop(aggregate_id, None)


class _Lock:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
