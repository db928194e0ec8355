"""Cache the folded states of recently used aggregates, and how likely each is stale or contended."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from eventjet.commands.contention import LEARNING_RATE, STALENESS_MAX, ContentionBackoff
from eventjet.domain.history import FoldedState

S = TypeVar("S")

CACHE_MAX = 10_000
"""Folded states that one repository keeps."""
MARKS_BYTES_MAX = 64_000_000
"""Bytes of the marks of older commands that the cached states keep; the states written longest ago go first."""
GUESS, NEWEST, OLD = "guess", "newest", "old"
"""Freshness of a cached state: not known; the newest a moment ago, which holds for the next attempt only; known not to
be the newest."""


class _Entry(Generic[S]):
    __slots__ = ("freshness", "is_assumed", "marks_bytes", "state")

    def __init__(self, state: FoldedState[S], freshness: str) -> None:
        self.state = state
        self.marks_bytes = 0 if state.commands.complete else state.commands.marks_bytes
        self.freshness = freshness
        self.is_assumed = False
        """True if a decision was made on the state without a read of the log; its outcome shows if that was right."""


class Cache(Generic[S]):
    """Folded states of recently used aggregates, and one lock for each id so that tasks queue instead of losing races.

    A state is kept even when others write to its aggregate, because then only the events after it have to be read.
    Whether a decision may be made on it without a read of the log depends on how such decisions ended before.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry[S]] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._contention: OrderedDict[str, ContentionBackoff] = OrderedDict()
        self._staleness = 0.0
        """Probability that a state is stale if its aggregate has no known contention."""
        self._marks_bytes = 0

    def get(self, aggregate_id: str) -> FoldedState[S] | None:
        """Return the cached state, however old it is."""
        entry = self._entries.get(aggregate_id)
        return None if entry is None else entry.state

    def assume_newest(self, aggregate_id: str, staleness_max: float = STALENESS_MAX) -> FoldedState[S] | None:
        """Return the cached state if it is likely the newest.

        None if it is stale with a probability above `staleness_max`: then a read costs less than a lost race. A stale
        state is safe to decide on, because the log checks the expected position.
        """
        entry = self._entries.get(aggregate_id)
        if entry is None or entry.freshness is OLD:
            return None
        if entry.freshness is NEWEST:
            entry.freshness = GUESS
            return entry.state
        contention = self._contention.get(aggregate_id)
        if (self._staleness if contention is None else contention.staleness) > staleness_max:
            return None
        entry.is_assumed = True
        return entry.state

    def newest(self, aggregate_id: str) -> FoldedState[S] | None:
        """Return a state that is known to have been the newest a moment ago, and return it only once."""
        entry = self._entries.get(aggregate_id)
        if entry is None or entry.freshness is not NEWEST:
            return None
        entry.freshness = GUESS
        return entry.state

    def put(self, aggregate_id: str, state: FoldedState[S], freshness: str = GUESS) -> None:
        """Cache a state unless a newer one is cached; evict the states written longest ago if there are too many."""
        previous = self._entries.get(aggregate_id)
        if previous is not None and previous.state.position > state.position:
            return
        if previous is not None:
            self.drop(aggregate_id)
        self._entries[aggregate_id] = entry = _Entry(state, freshness)
        self._marks_bytes += entry.marks_bytes
        while len(self._entries) > CACHE_MAX or (self._marks_bytes > MARKS_BYTES_MAX and len(self._entries) > 1):
            self.drop(next(iter(self._entries)))

    def drop(self, aggregate_id: str) -> bool:
        """Drop a state; return whether a decision was made on it without a read of the log."""
        entry = self._entries.pop(aggregate_id, None)
        if entry is None:
            return False
        self._marks_bytes -= entry.marks_bytes
        return entry.is_assumed

    def clear(self) -> None:
        self._entries.clear()
        self._marks_bytes = 0

    def lock(self, aggregate_id: str) -> tuple[asyncio.Lock, bool]:
        """Return the lock of one id, which lives as long as tasks hold it or wait for it, and whether others do."""
        lock = self._locks.get(aggregate_id)
        if lock is not None:
            return lock, True
        lock = self._locks[aggregate_id] = asyncio.Lock()
        return lock, False

    def observe_read(self, aggregate_id: str, *, is_stale: bool) -> None:
        """Record whether the cached state was stale, after a read of the newest state."""
        entry, contention = self._entries.get(aggregate_id), self._contention.get(aggregate_id)
        if contention is not None and not is_stale:
            contention.record_quiet()
        if entry is not None and entry.freshness is not OLD:
            self.observe(aggregate_id, is_stale=is_stale)

    def observe(self, aggregate_id: str, *, is_stale: bool) -> None:
        """Record whether a cached state was stale."""
        contention = self._contention.get(aggregate_id)
        if contention is not None:
            contention.observe(is_stale)
            if contention.is_calm:
                del self._contention[aggregate_id]
            return
        self._staleness += (is_stale - self._staleness) * LEARNING_RATE
        if is_stale:
            self.contention(aggregate_id).observe(True)

    def contention(self, aggregate_id: str) -> ContentionBackoff:
        """Return the backoff of one aggregate; create it if there is none. It is dropped once the aggregate is calm."""
        contention = self._contention.get(aggregate_id)
        if contention is None:
            contention = self._contention[aggregate_id] = ContentionBackoff(self._staleness)
            if len(self._contention) > CACHE_MAX:
                self._contention.popitem(last=False)
        return contention

    def known_contention(self, aggregate_id: str) -> ContentionBackoff | None:
        return self._contention.get(aggregate_id)
