"""PURE: which saves go together. One atomic batch is on its way, and what comes meanwhile shares the next one.

A server stages each batch by itself, whatever it holds, so many saves in one batch cost what one costs. A save that
finds the lane free goes at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from eventjet.log.store import BATCH_MAX

T = TypeVar("T")

EVENTS_MAX = 100
"""A save of more events goes by itself: it shares the cost of its batch already, and nobody stands behind an import."""
BYTES_MAX = 1_000_000
"""Of one batch, and so of a save that shares one."""
WAITING_MAX = 1_000
"""Beyond so many that wait, a save goes by itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Rider(Generic[T]):
    """A save that may share a batch."""

    subjects: Collection[str]
    events: int
    size: int
    """Bytes on the wire, at the most."""
    told: T
    """Whatever its driver needs to send and to answer it."""


class Lane(Generic[T]):
    """What waits for the next batch, in the order in which it came."""

    def __init__(self) -> None:
        self._waiting: deque[Rider[T]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Rider[T]]:
        return iter(self._waiting)

    def takes(self, rider: Rider[T]) -> bool:
        """Whether it may wait here; otherwise it goes by itself."""
        return rider.events <= EVENTS_MAX and rider.size <= BYTES_MAX and len(self._waiting) < WAITING_MAX

    def put(self, rider: Rider[T]) -> None:
        """Have it wait for the next batch."""
        self._waiting.append(rider)

    def leave(self, rider: Rider[T]) -> None:
        """Take out one that goes no more; nothing where it is on its way already."""
        if rider in self._waiting:
            self._waiting.remove(rider)

    def depart(self) -> list[Rider[T]]:
        """Those that share the next batch: the one that waits longest, and all others that fit; none when none waits.

        No two of them touch one subject, and none passes one that does.
        """
        group: list[Rider[T]] = []
        left: deque[Rider[T]] = deque()
        touched: set[str] = set()
        events = size = 0
        for rider in self._waiting:
            fits = events + rider.events <= BATCH_MAX and size + rider.size <= BYTES_MAX
            if fits and touched.isdisjoint(rider.subjects):
                group.append(rider)
                events += rider.events
                size += rider.size
            else:
                left.append(rider)
            touched.update(rider.subjects)
        self._waiting = left
        return group
