"""`Loads`: what one process folds, loaded part by part, and what it keeps account of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from eventjet.codec.headers import RawRecord
from eventjet.rebuild.folding import Folding, Foldings
from eventjet.rebuild.progress import Watch
from eventjet.rebuild.runs import Part, Target
from eventjet.rebuild.spaces import space_kind

_TOLD_EVERY = 2_000


class Loads:
    """The foldings of one plan with the parts they were loaded in."""

    def __init__(self, foldings: Foldings, targets: Sequence[Target], watch: Watch, first: int = 0) -> None:
        """Parts are numbered from `first`."""
        self._watch = watch
        self._first = first
        self._foldings = foldings
        self._pairs = list(zip(targets, foldings.each, strict=True))
        self._parts: list[Part] = []

    def take(self, records: list[RawRecord]) -> None:
        self._foldings.take(records)
        for target, folding in self._pairs:
            if folding.is_due():
                self._load(target, folding)

    def finish(self, events: int) -> list[Part]:
        """Load what is held; the last part of each projection accounts for the events that were taken."""
        total = sum(len(folding) for _, folding in self._pairs)
        done = 0
        for target, folding in self._pairs:
            held = len(folding)
            self._load(target, folding, events, done, total)
            done += held
        return self._parts

    def _load(self, target: Target, folding: Folding, events: int = 0, done: int = 0, total: int = 0) -> None:
        number = self._first + len(self._parts)
        parked, folding.parked = folding.parked, []
        rows = self._told(iter(folding.rows() if folding.resolved.reads else folding.drain()), done, total)
        loaded = space_kind(target.database).load(target, number, rows)
        self._parts.append(Part(target.projection, events, loaded, parked))

    def _told(self, rows: Iterator[Sequence[Any]], done: int, total: int) -> Iterator[Sequence[Any]]:
        """The same rows; while they are loaded, `total` of them at the end, it is told how many are."""
        for number, row in enumerate(rows, start=done):
            if number % _TOLD_EVERY == 0:
                self._watch.tell("load", number, total) if total else self._watch.check()
            yield row
