"""Read a part of one aggregate's history within bounds, and read the log in its order.

Only the requested records are read and decoded; the record of a version is located by bisection. `History` reads the
records as they are, whatever other programs wrote between them. `HistoryReader` reads events: its records must follow
one another, as a fold requires, and the first must follow the record before it. If they do not, it reads the whole
history, which gives the same result or the same error as loading the aggregate.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from eventjet.codec.headers import EXPECTED, VERSION, RawRecord, number_of
from eventjet.codec.records import Decoder
from eventjet.domain.history import SKIPPED, FoldedState, Link, fold_history
from eventjet.domain.moment import check_moment
from eventjet.domain.recorded import Recorded
from eventjet.errors import CodecError, HistoryBroken, StoreUnavailable, UsageError
from eventjet.log.store import LAG_PAUSES_S, EventStore
from eventjet.text import shown

_UNVERSIONED_MAX = 50
"""How many records without a version in a row are passed over; other programs wrote them."""
_BISECTION_STEPS_MAX = 160
"""Bound of a bisection: more than twice the bits of a position. An evenly spread history takes two steps."""
_WINDOW_MAX = 1_000
"""Records of one request."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which part of a history is read."""

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

    def cut(self, events: Sequence[Recorded[Any]]) -> list[Recorded[Any]]:
        """Return those events of a whole history that are within the bounds."""
        part = [
            event
            for event in events
            if event.version > self.after
            and (self.version is None or event.version <= self.version)
            and (self.position is None or event.position <= self.position)
        ]
        return (part[::-1] if self.newest_first else part)[: self.limit]


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


class History:
    """The records of one aggregate. Its reads raise as `EventStore`, and `Refused` for an invalid id."""

    def __init__(self, store: EventStore, aggregate: str, aggregate_id: str, end: int = 0) -> None:
        """`end` is a position of the aggregate that a replica has to reach before a read counts; 0 for none."""
        self._store = store
        self._of = aggregate, aggregate_id
        self._end = end

    async def newest(self) -> RawRecord | None:
        """Return the last record; None for an empty history."""
        return await self._store.newest(*self._of) if not self._end else await self._store.tail(*self._of)

    async def page(self, after: int, limit: int | None) -> Sequence[RawRecord]:
        """Return the records after a position, in order, at most `limit` of them.

        Raises `StoreUnavailable` if a replica stays behind `end`.
        """
        for pause_s in LAG_PAUSES_S:
            records = await self._store.history(*self._of, after=after, limit=limit)
            if len(records) == limit or (records[-1][0] if records else after) >= self._end:
                return records
            await asyncio.sleep(pause_s)
        raise StoreUnavailable(
            f"The history of {self._of[0]} {self._of[1]!r}", "the replica that was asked lags behind"
        )

    async def head(self) -> Head | None:
        """Return both ends of the history; None if it is empty."""
        newest, first_records = await self.newest(), await self.page(0, 1)
        if newest is None or not first_records:
            return None
        last, distance = newest, 1
        while version_in(last) is None:
            # Another program wrote behind the last event: go back to a record with a version, in steps that double.
            after = max(first_records[0][0] - 1, newest[0] - 1 - distance)
            records = await self.page(after, _UNVERSIONED_MAX)
            last = next((record for record in reversed(records) if version_in(record) is not None), newest)
            if after < first_records[0][0]:
                break
            distance *= 2
        return Head(first_records[0], last, version_in(last) or 0, newest[0])

    async def record(self, version: int, last: RawRecord) -> RawRecord | None:
        """Return the record of a version, or of the next higher version if that one is missing; None beyond the end.

        `last` is the last record that has a version. Takes about log2(positions) requests at most, and two or three if
        the events are evenly spread.
        """
        low, high, low_version, high_version, high_record = 1, last[0], 1, version_in(last) or 0, last
        if version >= high_version:
            return last if version == high_version else None
        for step in range(_BISECTION_STEPS_MAX):
            if low >= high:
                break
            share = (version - low_version) / max(high_version - low_version, 1) if step % 2 == 0 else 0.5
            middle = min(max(low + int((high - low) * min(max(share, 0.0), 1.0)), low), high - 1)
            record = await self._next_versioned(middle)
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

    async def _next_versioned(self, start: int) -> RawRecord | None:
        """Return the first record at or after a position that has a version."""
        records = await self.page(start - 1, 1)
        if records and version_in(records[0]) is None:
            records = await self.page(start - 1, _UNVERSIONED_MAX)
        return next((record for record in records if version_in(record) is not None), None)

    async def records(self, bounds: Bounds, head: Head | None = None) -> Sequence[RawRecord]:
        """Return the records of the versions within the bounds, unchecked; `limit` counts none of other programs."""
        head = head or await self.head()
        if head is None:
            return ()
        low, high = bounds.after + 1, head.version if bounds.version is None else min(bounds.version, head.version)
        if bounds.limit is not None and bounds.newest_first:
            low = max(low, high - bounds.limit + 1)
        elif bounds.limit is not None:
            high = min(high, low + bounds.limit - 1)
        if low > max(high, 1):
            return ()
        first_record = head.first if low == 1 else await self.record(low, head.last)
        if first_record is None:
            return ()
        is_whole = bounds.limit is None and high == head.version
        records = await self.page(first_record[0] - 1, None if is_whole else high - low + 1 + _UNVERSIONED_MAX)
        end = next((index for index, record in enumerate(records) if (version_in(record) or 0) > high), len(records))
        return records[:end][::-1] if bounds.newest_first else records[:end]


class _NotLocatedError(Exception):
    """Raised if only the whole history can say which events are within the bounds."""


class HistoryReader:
    """The reader of the events of one aggregate type's histories."""

    def __init__(self, store: EventStore, aggregate: str, decoder: Decoder, skipped: Mapping[int, str]) -> None:
        self._store = store
        self._aggregate = aggregate
        self._decoder = decoder
        self._skipped = skipped

    async def read(self, aggregate_id: str, bounds: Bounds, end: int = 0) -> list[Recorded[Any]]:
        """Return the events within the bounds, without retired events; `end` as in `History`.

        Raises `HistoryBroken`, `CodecError`, and what `EventStore` raises.
        """
        if bounds.limit == 0 or (bounds.version is not None and bounds.version <= bounds.after):
            return []
        history = History(self._store, self._aggregate, aggregate_id, end)
        try:
            if bounds.newest_first and bounds.limit is not None:
                return await self._backwards(history, bounds, bounds.limit)
            first: RawRecord | None = None
            if bounds.after:
                newest = await history.newest()
                if newest is None:
                    return []
                first = await self._record(history, min(bounds.after + 1, self._version(newest)), newest)
            events = await self._events(history, first, bounds)
            return events[::-1] if bounds.newest_first else events
        except (HistoryBroken, CodecError, _NotLocatedError):
            return bounds.cut(await self._events(history, None, Bounds()))

    async def _backwards(self, history: History, bounds: Bounds, limit: int) -> list[Recorded[Any]]:
        """Return the events, newest first, read in as many windows of versions as it takes."""
        newest = await history.newest()
        if newest is None:
            return []
        high, end = self._version(newest), newest[0]
        if bounds.position is not None and end > bounds.position:
            later = await history.page(bounds.position, 1)
            if not later:
                raise _NotLocatedError  # the replica that was asked lags behind
            high, end = self._version(later[0]) - 1, _position_before(later[0])
        if bounds.version is not None and bounds.version < high:
            high, end = bounds.version, None
        result: list[Recorded[Any]] = []
        window = 0
        while True:
            if high < 1:
                raise _NotLocatedError
            # Retired events do not count, so a window with few events is followed by a wider window.
            window = min(max(limit - len(result), 2 * window), _WINDOW_MAX)
            low = max(high - window, min(bounds.after, high - 1)) + 1
            first = await self._record(history, low, newest)
            part = Bounds(max(low - 1, bounds.after), high)
            result += (await self._events(history, first, part, end))[::-1]
            if low - 1 <= bounds.after or len(result) >= limit:
                return result[:limit]
            high, end = low - 1, _position_before(first)

    async def _events(
        self, history: History, first: RawRecord | None, bounds: Bounds, end: int | None = None
    ) -> list[Recorded[Any]]:
        """Return the events within the bounds, oldest first, from the record `first` or the beginning on.

        Raises `HistoryBroken` if records do not follow one another or `first` does not follow the record before it, and
        `_NotLocatedError` if the last record is not at the position `end`.
        """
        part = _Part(bounds, self._decoder, self._skipped, first)
        state: FoldedState[None] = FoldedState(None, 0, 0)
        if first is not None and (version := self._version(first)) > 1:
            # The record before the first one is read as well; which record that follows is not known.
            state = FoldedState(None, version - 2, _position_before(first) - 1)
            part.is_follower_known = False
        while True:
            limits = [_WINDOW_MAX]
            if bounds.version is not None:
                limits.append(bounds.version - state.version)
            if bounds.limit is not None and not bounds.newest_first:
                limits.append(bounds.limit - len(part.events) + max(bounds.after - state.version, 0))
            page = await history.page(state.position, min(limits))
            subject = page[0][2].decode("utf-8", "replace") if page else ""
            state = fold_history(state, part.links(page, state), subject, "")
            if part.is_complete or len(page) < min(limits):
                break
        if end not in (None, state.position):
            raise _NotLocatedError
        return part.events

    async def _record(self, history: History, version: int, newest: RawRecord) -> RawRecord:
        record = await history.record(version, newest)
        if record is None or self._version(record) != version:
            raise _NotLocatedError
        return record

    def _version(self, record: RawRecord) -> int:
        """Return a record's version, unless it is not certain: a skipped record may have any."""
        version = version_in(record)
        if version is None or record[0] in self._skipped:
            raise _NotLocatedError
        return version


def _position_before(record: RawRecord) -> int:
    """Return the position of the record before one that has a later version than 1; raises `_NotLocatedError`.

    The header of the expected position says where it is. An event without this header is in the same save as the event
    before it, and directly behind it.
    """
    expected = number_of(record[3], EXPECTED)
    position = record[0] - 1 if expected is None else expected
    if not 0 < position < record[0]:
        raise _NotLocatedError
    return position


class _Part:
    """The events within bounds, collected while `fold_history` checks by headers that their records follow."""

    def __init__(self, bounds: Bounds, decoder: Decoder, skipped: Mapping[int, str], first: RawRecord | None) -> None:
        """The record `first` is checked even if it is beyond the bounds."""
        self.events: list[Recorded[Any]] = []
        self.is_complete = False
        self.is_follower_known = True
        """Whether the position is known that the next record has to be written after."""
        self._bounds = bounds
        self._decoder = decoder
        self._skipped = skipped
        self._first = 0 if first is None else first[0]

    def links(self, page: Sequence[RawRecord], state: FoldedState[None]) -> Iterator[Link]:
        """Yield the link of each record, and decode it if it is within the bounds; end where they end."""
        bounds, version = self._bounds, state.version
        limit = None if bounds.newest_first else bounds.limit
        for record in page:
            position, is_skipped = record[0], record[0] in self._skipped
            is_beyond = bounds.position is not None and position > bounds.position
            if is_beyond and position > self._first:
                self.is_complete = True
                return
            number = number_of(record[3], VERSION)
            is_within = not (is_skipped or is_beyond) and (not bounds.after or number is None or number > bounds.after)
            event = self._decoder(record) if is_within else None
            expected = SKIPPED if is_skipped else number_of(record[3], EXPECTED)
            if not is_skipped and (not self.is_follower_known or expected in self._skipped):
                expected = None
            self.is_follower_known = True
            yield Link(number or 0, position, expected, None, None)
            if number is None or number != version + 1:
                continue  # a skipped record that was passed over
            version = number
            if event is not None:
                self.events.append(event)
            if version == bounds.version or len(self.events) == limit:
                self.is_complete = True
                return


_DELIVER = ("all", "last", "new")


async def tail_log(
    store: EventStore,
    decoder: Decoder,
    *,
    deliver: str = "all",
    position: int | None = None,
    since: datetime | None = None,
    until: int | None = None,
    limit: int | None = None,
    follow: bool = False,
) -> AsyncIterator[Recorded[Any]]:
    """Yield the events of a log; arguments and errors are those of `Jet.tail`."""
    if deliver not in _DELIVER:
        raise UsageError(f"`tail` cannot deliver {shown(deliver, 60)}. Give one of {', '.join(_DELIVER)}.")
    for number in (position, until):
        if number is not None and not isinstance(number, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"{shown(number, 60)} is not a position. Give a whole number, such as `Recorded.position`."
            )
    if limit is not None and (not isinstance(limit, int) or limit < 0):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"{shown(limit, 60)} is no limit of events. Give a whole number, 0 or more.")
    if since is not None:
        check_moment("`since` is", since, to_come=True)
    state = await store.state()
    if position is not None:
        start = max(position, 1)
    elif since is not None:
        start = await store.position_at(since)
    else:
        start = {"all": 1, "last": max(state.last, 1), "new": state.last + 1}[deliver]
    remaining = limit
    # With a limit the log is read in windows, because skipped and retired events do not count.
    window = _WINDOW_MAX if remaining is None else min(remaining, _WINDOW_MAX)
    while remaining != 0:
        end = until if remaining is None else start + window - 1
        if end is not None and until is not None:
            end = min(end, until)
        async for record in store.records(start=start, until=end, follow=follow):
            recorded = decoder(record)
            if recorded is not None:
                yield recorded
                remaining = None if remaining is None else remaining - 1
                if remaining == 0:
                    return
        if end is None or end == until or (not follow and end >= state.last):
            return
        start, window = end + 1, min(2 * window, _WINDOW_MAX)
