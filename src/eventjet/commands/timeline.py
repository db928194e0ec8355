"""The history of one aggregate in pages, however long: a version is found by bisection, and not by reading up to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eventjet.codec.headers import VERSION, RawRecord, number_of
from eventjet.log.store import EventStore

PAGE_MAX = 50
"""Events of one page."""
_STRANGERS_MAX = 50
"""Records without a version, one after the other, that are passed over; others wrote them."""
_LOOKS_MAX = 160
"""Twice the bits of a position, and then some: a bound, not a cost. A dense history takes two."""


@dataclass(frozen=True, slots=True)
class Head:
    """Both ends of one history."""

    first: RawRecord
    last: RawRecord
    """The last record that tells a version; the last of all where none does."""
    version: int
    """Of the last one; 0 where no record tells one."""
    end: int
    """Position of the last record of all."""


def version_in(record: RawRecord) -> int | None:
    """The version that a record tells; None where it tells none, or one that cannot be at its position."""
    version = number_of(record[3], VERSION)
    return version if version is not None and 0 < version <= record[0] else None


async def head_of(store: EventStore, aggregate: str, aggregate_id: str) -> Head | None:
    """Both ends of a history, None for an empty one. Raises what `EventStore` does, and `Refused` for what is no id."""
    newest = await store.newest(aggregate, aggregate_id)
    first = await store.history(aggregate, aggregate_id, most=1)
    if newest is None or not first:
        return None
    last, back = newest, 1
    while version_in(last) is None:
        # Others wrote behind it: in steps that double, back to what has a version.
        after = max(first[0][0] - 1, newest[0] - 1 - back)
        near = await store.history(aggregate, aggregate_id, after=after, most=_STRANGERS_MAX)
        last = next((one for one in reversed(near) if version_in(one) is not None), newest)
        if after < first[0][0]:
            break
        back *= 2
    return Head(first[0], last, version_in(last) or 0, newest[0])


async def record_of(store: EventStore, aggregate: str, aggregate_id: str, version: int, head: Head) -> RawRecord | None:
    """The record of a version, or the first one above it where it is missing; None beyond the end.

    Some log2(positions) requests at the most, and two where its events are evenly spread.
    """
    if version > head.version:
        return None
    if version == head.version:
        return head.last
    low, high = head.first[0], head.last[0]
    low_version, high_version, found = 1, head.version, head.last
    for look in range(_LOOKS_MAX):
        if low >= high:
            break
        share = (version - low_version) / max(high_version - low_version, 1) if look % 2 == 0 else 0.5
        middle = min(max(low + int((high - low) * min(max(share, 0.0), 1.0)), low), high - 1)
        record = await _next_told(store, aggregate, aggregate_id, middle)
        told = None if record is None else version_in(record)
        if record is None or told is None:
            high = middle
        elif told == version:
            return record
        elif told > version:
            high, high_version, found = middle, told, record
        else:
            low, low_version = record[0] + 1, told
    return found


async def _next_told(store: EventStore, aggregate: str, aggregate_id: str, start: int) -> RawRecord | None:
    """The first record at or after a position that tells a version."""
    found = await store.history(aggregate, aggregate_id, after=start - 1, most=1)
    if found and version_in(found[0]) is None:
        found = await store.history(aggregate, aggregate_id, after=start - 1, most=_STRANGERS_MAX)
    return next((one for one in found if version_in(one) is not None), None)


async def page_of(store: EventStore, aggregate: str, aggregate_id: str, upto: int, head: Head) -> Sequence[RawRecord]:
    """The last `PAGE_MAX` versions up to one, newest first, with what others wrote between and behind them."""
    lowest = max(upto - PAGE_MAX + 1, 1)
    begin = head.first if lowest == 1 else await record_of(store, aggregate, aggregate_id, lowest, head)
    if begin is None:
        return ()
    kept: list[RawRecord] = []
    after, told = begin[0] - 1, 0
    for most in (PAGE_MAX, _STRANGERS_MAX):  # the second where some of the first tell no version of their own
        found = await store.history(aggregate, aggregate_id, after=after, most=most)
        for record in found:
            told = max(version_in(record) or 0, told)
            if told > upto:
                break
            kept.append(record)
        if told >= upto or len(found) < most:
            break
        after = found[-1][0]
    return kept[::-1]


async def part_of(
    store: EventStore, aggregate: str, aggregate_id: str, *, after: int, newest_first: bool, limit: int | None
) -> Sequence[RawRecord]:
    """The records behind a version, whatever they hold, `limit` of them at the most, from either end."""
    head = await head_of(store, aggregate, aggregate_id)
    lowest = after + 1
    if head is not None and newest_first and limit is not None:
        lowest = max(lowest, head.version - limit + 1)
    if head is None or lowest <= 1:
        begin = None if head is None else head.first
    else:
        begin = await record_of(store, aggregate, aggregate_id, lowest, head)
    if begin is None:
        return ()
    found = await store.history(aggregate, aggregate_id, after=begin[0] - 1, most=None if newest_first else limit)
    return found[::-1][:limit] if newest_first else found
