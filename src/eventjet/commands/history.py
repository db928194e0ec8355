"""Read parts of one aggregate's history, by version, position or number of events, and read the log in its order.

Only the requested records are read and decoded. A version is located by bisection. The records read from there must
follow one another, as a fold requires, and the first must follow the record before it. If they do not, the whole
history is read and cut, which gives the same result or the same error as loading the aggregate.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from eventjet.codec.headers import EXPECTED, VERSION, RawRecord, number_of
from eventjet.codec.records import Decoder
from eventjet.domain.history import FoldedState, fold_history
from eventjet.domain.moment import check_moment
from eventjet.domain.recorded import Recorded
from eventjet.errors import UsageError
from eventjet.log.store import EventStore, LogState
from eventjet.text import shown

PAGE_MAX = 50
"""Events of one page."""
_UNVERSIONED_MAX = 50
"""How many records without a version in a row are passed over; other programs wrote them."""
_BISECTION_STEPS_MAX = 160
"""Bound of a bisection: more than twice the bits of a position. An evenly spread history takes two steps."""


@dataclass(frozen=True, slots=True)
class Head:
    """The first and the last record of one history."""

    first: RawRecord
    last: RawRecord
    """The last record that has a version; the last record of all if none has."""
    version: int
    """Version of `last`; 0 if no record has one."""
    end: int
    """Position of the last record, with or without a version."""


def version_in(record: RawRecord) -> int | None:
    """Return the version of a record; None if it has none, or one that is impossible at its position."""
    version = number_of(record[3], VERSION)
    return version if version is not None and 0 < version <= record[0] else None


async def head_of(store: EventStore, aggregate: str, aggregate_id: str) -> Head | None:
    """Return both ends of a history; None if it is empty. Raises as `EventStore`, and `Refused` for an invalid id."""
    newest = await store.newest(aggregate, aggregate_id)
    first_records = await store.history(aggregate, aggregate_id, limit=1)
    if newest is None or not first_records:
        return None
    last, distance = newest, 1
    while version_in(last) is None:
        # Another program wrote behind the last event: go back to a record with a version, in steps that double.
        after = max(first_records[0][0] - 1, newest[0] - 1 - distance)
        records = await store.history(aggregate, aggregate_id, after=after, limit=_UNVERSIONED_MAX)
        last = next((record for record in reversed(records) if version_in(record) is not None), newest)
        if after < first_records[0][0]:
            break
        distance *= 2
    return Head(first_records[0], last, version_in(last) or 0, newest[0])


async def record_of(store: EventStore, aggregate: str, aggregate_id: str, version: int, head: Head) -> RawRecord | None:
    """Return the record of a version, or of the next higher version if that one is missing; None beyond the end.

    Takes about log2(positions) requests at most, and two if the events are evenly spread.
    """
    if version > head.version:
        return None
    if version == head.version:
        return head.last
    low, high = head.first[0], head.last[0]
    low_version, high_version, high_record = 1, head.version, head.last
    for step in range(_BISECTION_STEPS_MAX):
        if low >= high:
            break
        share = (version - low_version) / max(high_version - low_version, 1) if step % 2 == 0 else 0.5
        middle = min(max(low + int((high - low) * min(max(share, 0.0), 1.0)), low), high - 1)
        record = await _next_versioned(store, aggregate, aggregate_id, middle)
        record_version = None if record is None else version_in(record)
        if record is None or record_version is None:
            high = middle
        elif record_version == version:
            return record
        elif record_version > version:
            high, high_version, high_record = middle, record_version, record
        else:
            low, low_version = record[0] + 1, record_version
    return high_record


async def _next_versioned(store: EventStore, aggregate: str, aggregate_id: str, start: int) -> RawRecord | None:
    """Return the first record at or after a position that has a version."""
    records = await store.history(aggregate, aggregate_id, after=start - 1, limit=1)
    if records and version_in(records[0]) is None:
        records = await store.history(aggregate, aggregate_id, after=start - 1, limit=_UNVERSIONED_MAX)
    return next((record for record in records if version_in(record) is not None), None)


async def page_of(store: EventStore, aggregate: str, aggregate_id: str, upto: int, head: Head) -> Sequence[RawRecord]:
    """Return the records of the `PAGE_MAX` versions up to `upto`, newest first.

    Records that other programs wrote between and behind them are included.
    """
    lowest = max(upto - PAGE_MAX + 1, 1)
    first_record = head.first if lowest == 1 else await record_of(store, aggregate, aggregate_id, lowest, head)
    if first_record is None:
        return ()
    records: list[RawRecord] = []
    after, highest = first_record[0] - 1, 0
    for limit in (PAGE_MAX, _UNVERSIONED_MAX):  # the second request if some records of the first have no version
        page = await store.history(aggregate, aggregate_id, after=after, limit=limit)
        for record in page:
            highest = max(version_in(record) or 0, highest)
            if highest > upto:
                break
            records.append(record)
        if highest >= upto or len(page) < limit:
            break
        after = page[-1][0]
    return records[::-1]


async def part_of(
    store: EventStore, aggregate: str, aggregate_id: str, *, after: int, newest_first: bool, limit: int | None
) -> Sequence[RawRecord]:
    """Return the records after a version, at most `limit` of them, from either end, without decoding them."""
    head = await head_of(store, aggregate, aggregate_id)
    lowest = after + 1
    if head is not None and newest_first and limit is not None:
        lowest = max(lowest, head.version - limit + 1)
    if head is None or lowest <= 1:
        first_record = None if head is None else head.first
    else:
        first_record = await record_of(store, aggregate, aggregate_id, lowest, head)
    if first_record is None:
        return ()
    records = await store.history(
        aggregate, aggregate_id, after=first_record[0] - 1, limit=None if newest_first else limit
    )
    return records[::-1][:limit] if newest_first else records


_PAGE = 1_000
"""Records of one request."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Bounds of a requested part of a history."""

    after: int = 0
    """Exclusive lower bound: only events of later versions."""
    version: int | None = None
    """Inclusive upper bound of the version."""
    position: int | None = None
    """Inclusive upper bound of the position in the log."""
    newest_first: bool = False
    limit: int | None = None
    """Greatest number of events."""

    def check(self) -> None:
        """Raise `UsageError` for a bound that is not a whole number of 0 or more."""
        for name in ("after", "version", "position", "limit"):
            bound: object = getattr(self, name)
            if bound is None and name != "after":
                continue
            if not isinstance(bound, int):
                raise UsageError(f"`{name}` of a history is given as {shown(bound, 60)}. Give a whole number.")
            if bound < 0:
                raise UsageError(f"`{name}` of a history is {bound}. Give 0 or more.")

    @property
    def is_everything(self) -> bool:
        return self.after == 0 and self.version is None and self.position is None and self.limit is None

    def cut(self, events: list[Recorded[Any]]) -> list[Recorded[Any]]:
        """Return those events of a whole history that are within the bounds."""
        part = [
            event
            for event in events
            if event.version > self.after
            and (self.version is None or event.version <= self.version)
            and (self.position is None or event.position <= self.position)
        ]
        return (part[::-1] if self.newest_first else part)[: self.limit]


class Excerpts:
    """The reader of parts of histories, of one aggregate type."""

    def __init__(self, store: EventStore, aggregate: str, decoder: Decoder, skipped: Mapping[int, str]) -> None:
        self._store = store
        self._aggregate = aggregate
        self._decoder = decoder
        self._skipped = skipped

    async def read(self, aggregate_id: str, excerpt: Excerpt) -> list[Recorded[Any]]:
        """Return the events within the bounds, without retired events.

        Raises `HistoryBroken`, `CodecError`, and what `EventStore` raises.
        """
        if excerpt.limit == 0 or (excerpt.version is not None and excerpt.version <= excerpt.after):
            return []
        events: list[Recorded[Any]] | None = None
        if not excerpt.is_everything:
            read = self._backwards if excerpt.newest_first and excerpt.limit is not None else self._forwards
            events = await read(aggregate_id, excerpt)
        if events is not None:
            return events
        return excerpt.cut(await self._whole_history(aggregate_id))

    async def _whole_history(self, aggregate_id: str) -> list[Recorded[Any]]:
        records = await self._store.history(self._aggregate, aggregate_id)
        chain, follows = _ChainCheck(self._skipped), True
        decoded: list[Recorded[Any] | None] = []
        for record in records:
            decoded.append(self._decoder(record))
            if follows and not (follows := chain.takes(record)):
                # The fold raises the error that loading the aggregate raises.
                links = (self._decoder.link(raw)._replace(data=None) for raw in records)
                fold_history(FoldedState(None, 0, 0), links, record[2].decode("utf-8", "replace"), "")
        return [event for event in decoded if event is not None]

    async def _forwards(self, aggregate_id: str, excerpt: Excerpt) -> list[Recorded[Any]] | None:
        """Return the events, read from the oldest on; None if only the whole history can answer.

        That is so if the versions do not follow one another, or a skipped record is where the part begins.
        """
        first: RawRecord | None = None
        if excerpt.after:
            head = await head_of(self._store, self._aggregate, aggregate_id)
            if head is None:
                return []
            if not self._is_last(head):
                return None
            first = await record_of(
                self._store, self._aggregate, aggregate_id, min(excerpt.after + 1, head.version), head
            )
            if first is None or first[0] in self._skipped:
                return None  # the event of that version may be before this record
        events = await self._events_from(aggregate_id, first, excerpt)
        return events[::-1] if events is not None and excerpt.newest_first else events

    async def _events_from(
        self, aggregate_id: str, first: RawRecord | None, excerpt: Excerpt, *, end: int | None = None
    ) -> list[Recorded[Any]] | None:
        """Return the events from the record `first` on, or from the beginning, oldest first.

        None if records do not follow one another, if `first` is of a later version than the first requested event or
        does not follow the record before it, or if `end` is given and the last event is not at that position.
        """
        chain = _ChainCheck(self._skipped)
        if first is not None and not chain.begins_before(first, excerpt.after + 1):
            return None
        events, after = list[Recorded[Any]](), max(chain.position - 1, 0)
        limit = excerpt.limit if not excerpt.newest_first else None
        while True:
            page_limit = min(
                _PAGE,
                _PAGE if limit is None else limit - len(events) + max(excerpt.after - chain.version, 0),
                _PAGE if excerpt.version is None else excerpt.version - chain.version,
            )
            page = await self._store.history(self._aggregate, aggregate_id, after=after, limit=page_limit)
            for record in page:
                is_beyond = excerpt.position is not None and record[0] > excerpt.position
                if is_beyond and (first is None or record[0] > first[0]):
                    return events
                previous_version = chain.version
                if not chain.takes(record):
                    return None
                is_wanted = chain.version > max(previous_version, excerpt.after) and not is_beyond
                event = self._decoder(record) if is_wanted else None
                if event is not None:
                    events.append(event)
                if chain.version == excerpt.version and end not in (None, record[0]):
                    return None
                if chain.version == excerpt.version or len(events) == limit:
                    return events
            if len(page) < page_limit:
                return events if end is None else None
            after = page[-1][0]

    async def _backwards(self, aggregate_id: str, excerpt: Excerpt) -> list[Recorded[Any]] | None:
        """Return the events, newest first, read in as many windows of versions as it takes; None as in `_forwards`."""
        if excerpt.version is None and excerpt.position is None and excerpt.limit == 1:
            newest = await self._store.newest(self._aggregate, aggregate_id)
            if newest is None:
                return []
            newest_events = await self._single_event(aggregate_id, newest)
            if newest_events is None or newest_events:
                return newest_events and [event for event in newest_events if event.version > excerpt.after]
        head = await head_of(self._store, self._aggregate, aggregate_id)
        last = head and await self._last_in_bounds(aggregate_id, excerpt, head)
        if head is None or last is None or excerpt.limit is None:
            return None
        upto, result, window = version_in(last) or 0, list[Recorded[Any]](), 0
        if upto <= excerpt.after:
            return None if await self._single_event(aggregate_id, last) is None else []
        while upto > excerpt.after and len(result) < excerpt.limit:
            # Retired events do not count, so a window with few events is followed by a wider window.
            window = min(max(excerpt.limit - len(result), 2 * window), _PAGE)
            lowest = max(upto - window, excerpt.after)
            first = await record_of(self._store, self._aggregate, aggregate_id, lowest + 1, head)
            part = Excerpt(after=lowest, version=upto)
            if first is None or first[0] in self._skipped or last[0] in self._skipped:
                return None
            events = await self._events_from(aggregate_id, first, part, end=last[0])
            if events is None:
                return None
            result += events[::-1][: excerpt.limit - len(result)]
            upto = lowest
            if upto > excerpt.after and len(result) < excerpt.limit:
                last = await self._record_before(aggregate_id, first, upto, head)
                if last is None:
                    return None
        return result

    async def _single_event(self, aggregate_id: str, record: RawRecord) -> list[Recorded[Any]] | None:
        """Return the event of one record, nothing if it is retired; None if it does not follow the record before it."""
        if record[0] in self._skipped:
            return None
        version = version_in(record) or 0
        return await self._events_from(aggregate_id, record, Excerpt(version - 1, version), end=record[0])

    async def _last_in_bounds(self, aggregate_id: str, excerpt: Excerpt, head: Head) -> RawRecord | None:
        """Return the last record within the bounds; None if it is not certain which record that is."""
        if not self._is_last(head):
            return None
        last: RawRecord | None = head.last
        if excerpt.version is not None and excerpt.version < head.version:
            last = await record_of(self._store, self._aggregate, aggregate_id, excerpt.version, head)
        if last is None or excerpt.position is None or last[0] <= excerpt.position:
            return last
        later = await self._store.history(self._aggregate, aggregate_id, after=excerpt.position, limit=1)
        if not later or later[0][0] in self._skipped:
            return None
        return await self._record_before(aggregate_id, later[0], (version_in(later[0]) or 0) - 1, head)

    def _is_last(self, head: Head) -> bool:
        """Return whether the last record of all has the newest version.

        A skipped record may have any version, and a record of another program has none.
        """
        return head.end == head.last[0] and head.end not in self._skipped

    async def _record_before(self, aggregate_id: str, record: RawRecord, version: int, head: Head) -> RawRecord | None:
        """Return the record of a version if `record` follows it directly; None if not."""
        previous = await record_of(self._store, self._aggregate, aggregate_id, version, head)
        if previous is None or version_in(previous) != version:
            return None
        following = await self._store.history(self._aggregate, aggregate_id, after=previous[0], limit=1)
        return previous if following and following[0][0] == record[0] else None


class _ChainCheck:
    """A check, by headers alone, that records follow one another as `fold_history` requires."""

    __slots__ = ("_is_known", "_skipped", "position", "version")

    def __init__(self, skipped: Mapping[int, str]) -> None:
        self._skipped = skipped
        self.version = self.position = 0
        self._is_known = True

    def begins_before(self, record: RawRecord, max_version: int) -> bool:
        """Start at the record before the given one; False if there can be none, or its version exceeds `max_version`.

        The header of the expected position says where the record before is. An event without this header is in the
        same save as the event before it, and directly behind it.
        """
        version = version_in(record)
        if version is None or version > max_version:
            return False
        if version > 1:
            expected = number_of(record[3], EXPECTED)
            self.version, self.position = version - 2, record[0] - 1 if expected is None else expected
            self._is_known = False
        return version == 1 or 0 < self.position < record[0]

    def takes(self, record: RawRecord) -> bool:
        """Move on to a record and return whether it comes next; a skipped record that does not is passed over."""
        position, is_void = record[0], record[0] in self._skipped
        is_next = version_in(record) == self.version + 1
        if not is_next and not is_void:
            return False
        expected = None if is_void else number_of(record[3], EXPECTED)
        if expected is not None and self._is_known and expected not in self._skipped and expected != self.position:
            return False
        self.version += is_next
        self.position, self._is_known = position, True
        return True


_DELIVER = ("all", "last", "new")
_WINDOW_MAX = 1_000
"""Records of one read with a limit, at most."""


@dataclass(frozen=True, slots=True)
class LogTail:
    """The arguments of `Jet.tail`, and the read of the log that they describe."""

    deliver: str = "all"
    position: int | None = None
    since: datetime | None = None
    until: int | None = None
    limit: int | None = None
    follow: bool = False

    def check(self) -> None:
        """Raise `UsageError` for an invalid start position, end or limit."""
        if self.deliver not in _DELIVER:
            raise UsageError(f"`tail` cannot deliver {shown(self.deliver, 60)}. Give one of {', '.join(_DELIVER)}.")
        for position in (self.position, self.until):
            if position is not None and not isinstance(position, int):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(
                    f"{shown(position, 60)} is not a position. Give a whole number, such as `Recorded.position`."
                )
        if self.limit is not None and (not isinstance(self.limit, int) or self.limit < 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{shown(self.limit, 60)} is no limit of events. Give a whole number, 0 or more.")
        if self.since is not None:
            check_moment("`since` is", self.since, to_come=True)

    async def read(self, store: EventStore, decoder: Decoder) -> AsyncIterator[Recorded[Any]]:
        """Yield the events; raises as `Jet.tail`."""
        state = await store.state()
        start = await self._start(store, state)
        remaining = self.limit
        # With a limit the log is read in windows, because skipped and retired events do not count.
        window = _WINDOW_MAX if remaining is None else min(remaining, _WINDOW_MAX)
        while remaining != 0:
            end = self.until if remaining is None else start + window - 1
            if end is not None and self.until is not None:
                end = min(end, self.until)
            async for record in store.records(start=start, until=end, follow=self.follow):
                recorded = decoder(record)
                if recorded is not None:
                    yield recorded
                    remaining = None if remaining is None else remaining - 1
                    if remaining == 0:
                        return
            if end is None or end == self.until or (not self.follow and end >= state.last):
                return
            start, window = end + 1, min(2 * window, _WINDOW_MAX)

    async def _start(self, store: EventStore, state: LogState) -> int:
        if self.position is not None:
            return max(self.position, 1)
        if self.since is not None:
            return await store.position_at(self.since)
        return {"all": 1, "last": max(state.last, 1), "new": state.last + 1}[self.deliver]
