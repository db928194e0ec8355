"""`Cache`: folded states of hot aggregates, how far each is to be believed, and who else writes to them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from eventjet.commands.rivals import CONFIRMED_ABOVE, LEARNS, Rivals
from eventjet.domain.history import FoldedState

S = TypeVar("S")

CACHE_MAX = 10_000
"""Folded states kept by one repository."""
MARKS_BYTES_MAX = 64_000_000
"""What the marks of their older commands may take; the states go that were written longest ago."""
GUESS, NEWEST, OLD = "guess", "newest", "old"
"""What is known of a remembered state: nothing; that it was the newest a moment ago, for the next try; that it is not
the newest."""


class _Entry(Generic[S]):
    __slots__ = ("is_relied_upon", "marks_bytes", "state", "word")

    def __init__(self, state: FoldedState[S], word: str) -> None:
        self.state = state
        self.marks_bytes = 0 if state.commands.complete else state.commands.marks_bytes
        self.word = word
        self.is_relied_upon = False
        """A decision was made on it without a look at the log, so what comes of it says how good the guess was."""


class Cache(Generic[S]):
    """Folded states of hot aggregates; and one lock an id, so that tasks queue instead of losing races.

    A state is remembered for as long as it may be useful, also when others write to its aggregate: what follows it is
    all there is to read. Whether a decision is made on it without looking is learned from what came of that before.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry[S]] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._rivals: OrderedDict[str, Rivals] = OrderedDict()
        self._old = 0.0
        """How likely a state is old of whose aggregate no rivals are known."""
        self._marks_bytes = 0

    def get(self, aggregate_id: str) -> FoldedState[S] | None:
        """What is known, however old it may be."""
        entry = self._entries.get(aggregate_id)
        return None if entry is None else entry.state

    def relied_upon(self, aggregate_id: str, at_most: float = CONFIRMED_ABOVE) -> FoldedState[S] | None:
        """What is known, where it is likely the newest; safe to decide on, since the log checks the expected position.

        None where it is old by a chance higher than `at_most`: a look costs less than a race that is lost.
        """
        entry = self._entries.get(aggregate_id)
        if entry is None or entry.word is OLD:
            return None
        if entry.word is NEWEST:
            entry.word = GUESS
            return entry.state
        rivals = self._rivals.get(aggregate_id)
        if (self._old if rivals is None else rivals.old) > at_most:
            return None
        entry.is_relied_upon = True
        return entry.state

    def newest(self, aggregate_id: str) -> FoldedState[S] | None:
        """What was the newest state a moment ago, where that is known; once."""
        entry = self._entries.get(aggregate_id)
        if entry is None or entry.word is not NEWEST:
            return None
        entry.word = GUESS
        return entry.state

    def put(self, aggregate_id: str, state: FoldedState[S], word: str = GUESS) -> None:
        """Remember a state, unless a newer one is known; the one written longest ago goes first."""
        known = self._entries.get(aggregate_id)
        if known is not None and known.state.position > state.position:
            return
        if known is not None:
            self._forget(aggregate_id)
        self._entries[aggregate_id] = entry = _Entry(state, word)
        self._marks_bytes += entry.marks_bytes
        while len(self._entries) > CACHE_MAX or (self._marks_bytes > MARKS_BYTES_MAX and len(self._entries) > 1):
            self._forget(next(iter(self._entries)))

    def take(self, aggregate_id: str) -> bool:
        """Forget a state that is about to be followed by another; whether it was relied upon without a look."""
        entry = self._forget(aggregate_id)
        return entry is not None and entry.is_relied_upon

    def drop(self, aggregate_id: str) -> None:
        self._forget(aggregate_id)

    def clear(self) -> None:
        self._entries.clear()
        self._marks_bytes = 0

    def _forget(self, aggregate_id: str) -> _Entry[S] | None:
        entry = self._entries.pop(aggregate_id, None)
        if entry is not None:
            self._marks_bytes -= entry.marks_bytes
        return entry

    def lock(self, aggregate_id: str) -> asyncio.Lock:
        """One command at a time on one id, within this process; there as long as somebody holds it or waits for it."""
        lock = self._locks.get(aggregate_id)
        if lock is None:
            lock = self._locks[aggregate_id] = asyncio.Lock()
        return lock

    def looked(self, aggregate_id: str, *, is_old: bool) -> None:
        """The newest state was read: whether it is another one than that remembered."""
        entry, rivals = self._entries.get(aggregate_id), self._rivals.get(aggregate_id)
        if rivals is not None and not is_old:
            rivals.nobody_wrote()
        if entry is not None and entry.word is not OLD:
            self.learn(aggregate_id, is_old=is_old)

    def learn(self, aggregate_id: str, *, is_old: bool) -> None:
        """A remembered state was the newest, or not."""
        rivals = self._rivals.get(aggregate_id)
        if rivals is not None:
            rivals.learn(is_old)
            if rivals.is_calm:
                del self._rivals[aggregate_id]
            return
        self._old += (is_old - self._old) * LEARNS
        if is_old:
            self.rivals(aggregate_id).learn(True)

    def rivals(self, aggregate_id: str) -> Rivals:
        """The rivals of one aggregate, from now on known; forgotten where they are long gone."""
        rivals = self._rivals.get(aggregate_id)
        if rivals is None:
            rivals = self._rivals[aggregate_id] = Rivals(self._old)
            if len(self._rivals) > CACHE_MAX:
                self._rivals.popitem(last=False)
        return rivals

    def known_rivals(self, aggregate_id: str) -> Rivals | None:
        return self._rivals.get(aggregate_id)
