"""PURE: a range of positions cut into parts that are read one by one, the same on every try."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

EVENTS_PER_RANGE = 100_000
"""Small enough that progress shows and a retry is cheap, large enough that opening a consumer does not."""


class Range(NamedTuple):
    """Positions `start` <= position < `end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.start)


def split(first: int, last: int, count: int) -> tuple[Range, ...]:
    """`count` ranges at most, of nearly the same size, that hold every position from `first` to `last`."""
    total = last - first + 1
    if total <= 0:
        return ()
    parts = max(1, min(count, total))
    edges = [first + total * number // parts for number in range(parts + 1)]
    return tuple(Range(start, end) for start, end in pairwise(edges))


def range_count(events: int, at_least: int = 1) -> int:
    """How many ranges so many events are worth."""
    return max(at_least, -(-events // EVENTS_PER_RANGE))
