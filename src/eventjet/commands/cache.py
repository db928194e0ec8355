"""`Cache`: folded states of hot aggregates, how likely each is stale, and who else writes to them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from eventjet.commands.contention import LEARNING_RATE, STALENESS_MAX, ContentionBackoff
from eventjet.domain.history import FoldedState

S = TypeVar("S")

CACHE_MAX = 10_000
"""Folded states kept by one repository."""
MARKS_BYTES_MAX = 64_000_000
"""Bytes of the marks of their older commands; the states written longest ago go first."""
GUESS, NEWEST, OLD = "guess", "newest", "old"
"""What is known of a remembered state: nothing; that it was the newest a moment ago, for the next try; that it is not
the newest."""


class _Entry(Generic[S]):
    __slots__ = ("freshness", "is_assumed", "marks_bytes", "state")

    def __init__(self, state: FoldedState[S], freshness: str) -> None:
        self.state = state
        self.marks_bytes = 0 if state.commands.complete else state.commands.marks_bytes
        self.freshness = freshness
        self.is_assumed = False
        """A decision was made on it without a look at the log, so its outcome tells how good the guess was."""


class Cache(Generic[S]):
    """Folded states of hot aggregates; and one lock an id, so that tasks queue instead of losing races.

    A state is kept also when others write to its aggregate: only what follows it has to be read then. Whether a
    decision is made on it without a look at the log is learned from how such decisions ended before.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry[S]] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._contention: OrderedDict[str, ContentionBackoff] = OrderedDict()
        self._staleness = 0.0
        """How likely a state is stale whose aggregate has no known rivals."""
        self._marks_bytes = 0

    def get(self, aggregate_id: str) -> FoldedState[S] | None:
        """Return the remembered state, however old it may be."""
        entry = self._entries.get(aggregate_id)
        return None if entry is None else entry.state

    def assume_newest(self, aggregate_id: str, staleness_max: float = STALENESS_MAX) -> FoldedState[S] | None:
        """Return the remembered state if it is likely the newest; safe to decide on, for the log checks the position.

        None where it is stale by a chance above `staleness_max`: a look costs less than a lost race.
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
        """Return, once, a state that is known to have been the newest a moment ago."""
        entry = self._entries.get(aggregate_id)
        if entry is None or entry.freshness is not NEWEST:
            return None
        entry.freshness = GUESS
        return entry.state

    def put(self, aggregate_id: str, state: FoldedState[S], freshness: str = GUESS) -> None:
        """Remember a state unless a newer one is known; evicts the one written longest ago."""
        known = self._entries.get(aggregate_id)
        if known is not None and known.state.position > state.position:
            return
        if known is not None:
            self.drop(aggregate_id)
        self._entries[aggregate_id] = entry = _Entry(state, freshness)
        self._marks_bytes += entry.marks_bytes
        while len(self._entries) > CACHE_MAX or (self._marks_bytes > MARKS_BYTES_MAX and len(self._entries) > 1):
            self.drop(next(iter(self._entries)))

    def drop(self, aggregate_id: str) -> bool:
        """Forget a state; True if a decision was made on it without a look."""
        entry = self._entries.pop(aggregate_id, None)
        if entry is None:
            return False
        self._marks_bytes -= entry.marks_bytes
        return entry.is_assumed

    def clear(self) -> None:
        self._entries.clear()
        self._marks_bytes = 0

    def lock(self, aggregate_id: str) -> asyncio.Lock:
        """Return the lock of one id within this process; it exists as long as somebody holds it or waits for it."""
        lock = self._locks.get(aggregate_id)
        if lock is None:
            lock = self._locks[aggregate_id] = asyncio.Lock()
        return lock

    def observe_read(self, aggregate_id: str, *, is_stale: bool) -> None:
        """Learn from a read of the newest state whether the remembered one was stale."""
        entry, contention = self._entries.get(aggregate_id), self._contention.get(aggregate_id)
        if contention is not None and not is_stale:
            contention.record_quiet()
        if entry is not None and entry.freshness is not OLD:
            self.observe(aggregate_id, is_stale=is_stale)

    def observe(self, aggregate_id: str, *, is_stale: bool) -> None:
        """Learn that a remembered state was stale, or was not."""
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
        """Return the backoff of one aggregate, made where there is none; forgotten once the aggregate is calm."""
        contention = self._contention.get(aggregate_id)
        if contention is None:
            contention = self._contention[aggregate_id] = ContentionBackoff(self._staleness)
            if len(self._contention) > CACHE_MAX:
                self._contention.popitem(last=False)
        return contention

    def known_contention(self, aggregate_id: str) -> ContentionBackoff | None:
        return self._contention.get(aggregate_id)
