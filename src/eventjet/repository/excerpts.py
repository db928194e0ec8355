"""A part of one aggregate's history: between two versions, up to a position, from either end, so many events of it.

Only what is asked for is read and decoded. A version is found by bisection, and what is read from there must be the
versions that follow one another, as the fold would have them; where they do not, the whole history is read, and cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eventjet.codec.decoder import Decoder
from eventjet.codec.envelope import RawRecord
from eventjet.domain.recorded import Recorded
from eventjet.errors import UsageError
from eventjet.repository.timeline import Head, head_of, record_of, version_in
from eventjet.shown import shown
from eventjet.store.store import EventStore

_PAGE = 1_000
"""Records that are asked for at once."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Which events."""

    after: int = 0
    """Those of later versions."""
    version: int | None = None
    """Up to this one."""
    position: int | None = None
    """Up to this one of the log."""
    newest_first: bool = False
    limit: int | None = None
    """How many at the most."""

    def check(self) -> None:
        """Raise `UsageError` for what is no bound."""
        for name in ("after", "version", "position", "limit"):
            given: object = getattr(self, name)
            if given is None and name != "after":
                continue
            if not isinstance(given, int):
                raise UsageError(f"`{name}` of a history is given as {shown(given, 60)}. Give a whole number.")
            if given < 0:
                raise UsageError(f"`{name}` of a history is {given}. Give 0 or more.")

    @property
    def is_everything(self) -> bool:
        return self.after == 0 and self.version is None and self.position is None and self.limit is None

    def cut(self, events: list[Recorded[Any]]) -> list[Recorded[Any]]:
        """Its part of all events of a history."""
        found = [
            one
            for one in events
            if one.version > self.after
            and (self.version is None or one.version <= self.version)
            and (self.position is None or one.position <= self.position)
        ]
        return (found[::-1] if self.newest_first else found)[: self.limit]


class Excerpts:
    """Excerpts of the histories of one aggregate type."""

    def __init__(self, store: EventStore, aggregate: str, decoder: Decoder, voids: Mapping[int, str]) -> None:
        self._store = store
        self._aggregate = aggregate
        self._decoder = decoder
        self._voids = voids

    async def read(self, aggregate_id: str, wanted: Excerpt) -> list[Recorded[Any]]:
        """The events, without retired ones. Raises `CodecError`, and what `EventStore` does."""
        if wanted.limit == 0 or (wanted.version is not None and wanted.version <= wanted.after):
            return []
        found: list[Recorded[Any]] | None = None
        if not wanted.is_everything:
            read = self._backwards if wanted.newest_first and wanted.limit is not None else self._forwards
            found = await read(aggregate_id, wanted)
        if found is not None:
            return found
        decoded = map(self._decoder, await self._store.history(self._aggregate, aggregate_id))
        return wanted.cut([one for one in decoded if one is not None])

    async def _forwards(self, aggregate_id: str, wanted: Excerpt) -> list[Recorded[Any]] | None:
        """None where the versions do not follow one another."""
        begin = 0
        if wanted.after:
            head = await head_of(self._store, self._aggregate, aggregate_id)
            if head is None:
                return []
            if not self._is_last(head):
                return None
            first = await record_of(self._store, self._aggregate, aggregate_id, wanted.after + 1, head)
            if first is None:
                return []
            if first[0] in self._voids:
                return None  # the event of that version may be before it
            begin = first[0] - 1
        found = await self._from(aggregate_id, begin, wanted)
        return found[::-1] if found is not None and wanted.newest_first else found

    async def _from(
        self, aggregate_id: str, begin: int, wanted: Excerpt, *, end: int | None = None
    ) -> list[Recorded[Any]] | None:
        """The events after a position, the oldest first; where the last is to be at `end`, None if it is not."""
        found: list[Recorded[Any]] = []
        told, limit = wanted.after, wanted.limit if not wanted.newest_first else None
        while True:
            most = min(
                _PAGE,
                _PAGE if limit is None else limit - len(found),
                _PAGE if wanted.version is None else wanted.version - told,
            )
            page = await self._store.history(self._aggregate, aggregate_id, after=begin, most=most)
            for record in page:
                if wanted.position is not None and record[0] > wanted.position:
                    return found
                is_next = version_in(record) == told + 1
                if not is_next:
                    if record[0] in self._voids:
                        continue
                    return None
                told += 1
                event = self._decoder(record)
                if event is not None:
                    found.append(event)
                if told == wanted.version and end not in (None, record[0]):
                    return None
                if told == wanted.version or len(found) == limit:
                    return found
            if len(page) < most:
                return found if end is None else None
            begin = page[-1][0]

    async def _backwards(self, aggregate_id: str, wanted: Excerpt) -> list[Recorded[Any]] | None:
        """The newest first, in as many windows of versions as it takes; None as for `_forwards`."""
        if wanted.version is None and wanted.position is None and wanted.limit == 1:
            newest = await self._store.newest(self._aggregate, aggregate_id)
            event = None if newest is None else self._decoder(newest)
            if newest is None or event is not None:
                return [event] if event is not None and event.version > wanted.after else []
        head = await head_of(self._store, self._aggregate, aggregate_id)
        last = head and await self._last(aggregate_id, wanted, head)
        if head is None or last is None or wanted.limit is None:
            return None
        upto, found, window = version_in(last) or 0, list[Recorded[Any]](), 0
        while upto > wanted.after and len(found) < wanted.limit:
            # Retired events are passed over: a window that held few is followed by a wider one.
            window = min(max(wanted.limit - len(found), 2 * window), _PAGE)
            lowest = max(upto - window, wanted.after)
            first = await record_of(self._store, self._aggregate, aggregate_id, lowest + 1, head)
            part = Excerpt(after=lowest, version=upto)
            if first is None or first[0] in self._voids or last[0] in self._voids:
                return None
            events = await self._from(aggregate_id, first[0] - 1, part, end=last[0])
            if events is None:
                return None
            found += events[::-1][: wanted.limit - len(found)]
            upto = lowest
            if upto > wanted.after and len(found) < wanted.limit:
                last = await self._before(aggregate_id, first, upto, head)
                if last is None:
                    return None
        return found

    async def _last(self, aggregate_id: str, wanted: Excerpt, head: Head) -> RawRecord | None:
        """The last record within the bounds; None where that is not certain."""
        if not self._is_last(head):
            return None
        last: RawRecord | None = head.last
        if wanted.version is not None and wanted.version < head.version:
            last = await record_of(self._store, self._aggregate, aggregate_id, wanted.version, head)
        if last is None or wanted.position is None or last[0] <= wanted.position:
            return last
        later = await self._store.history(self._aggregate, aggregate_id, after=wanted.position, most=1)
        if not later or later[0][0] in self._voids:
            return None
        return await self._before(aggregate_id, later[0], (version_in(later[0]) or 0) - 1, head)

    def _is_last(self, head: Head) -> bool:
        """Whether the version at the end is the newest: a void record may tell any, and what others wrote none."""
        return head.end == head.last[0] and head.end not in self._voids

    async def _before(self, aggregate_id: str, record: RawRecord, version: int, head: Head) -> RawRecord | None:
        """The record of a version, None where another one than that follows on it."""
        found = await record_of(self._store, self._aggregate, aggregate_id, version, head)
        if found is None or version_in(found) != version:
            return None
        following = await self._store.history(self._aggregate, aggregate_id, after=found[0], most=1)
        return found if following and following[0][0] == record[0] else None
