"""Bulk import: many events of many aggregates, in batches, resumable.

Each event carries `<source>/<ordinal>` as its command id, the ordinal counting within its aggregate. Running the same
import again finds how far each aggregate got and stores what is missing, and nothing twice.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from eventjet.calls import exceptions_only
from eventjet.codec.catalog import EncodedEvent
from eventjet.codec.headers import (
    COMMAND,
    IMPORTED,
    RECORDED_AT,
    VERSION,
    context_headers,
    header,
    number_of,
    recorded_at,
)
from eventjet.codec.records import Decoder
from eventjet.collecting import settled
from eventjet.commands.decisions import CONFLICTS_MAX, retried
from eventjet.commands.import_check import as_written_now, fields_that_differ
from eventjet.commands.import_places import Place, Places
from eventjet.commands.repositories import Repositories
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.identity import new_event_id
from eventjet.domain.moment import check_moment, in_utc
from eventjet.domain.recorded import NO_METADATA, Metadata
from eventjet.domain.subscription import folded_events, shown_name
from eventjet.errors import ConcurrencyConflict, Refused, UsageError
from eventjet.log.store import BATCH_MAX, Append, NewEvent
from eventjet.shown import shown
from eventjet.spelling import listed

_Context = tuple[tuple[str, str], ...]
_Item = tuple[tuple[str, str], int, EncodedEvent, datetime | None, _Context]
"""(aggregate and id, ordinal within it, event, its time, headers)."""
_SOURCE = re.compile(r"[A-Za-z0-9_.:-]{1,100}")
_EXAMPLES_MAX = 5
_BYTES_MAX = 8_000_000
"""Bodies of one batch, in bytes: well below what a connection may have pending."""


@dataclass(frozen=True, slots=True)
class Imported:
    """One event to import; the events of one aggregate in their order.

    ```python
    events = [Imported(Account, "old-1", Opened(owner="ada")), Imported(Account, "old-1", Deposited(amount=Decimal(9)))]
    report = await jet.append_many(events, source="old-bank")
    assert (report.stored, report.skipped) == (2, 0)
    ```
    """

    aggregate: type
    aggregate_id: str
    event: Any
    at: datetime | None = None
    """When it was recorded where it comes from; None for now. Never before that of the aggregate's event before it."""
    metadata: Metadata = NO_METADATA
    """Who, in which conversation, because of what; recorded beside it."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What `Jet.append_many` did with what was `Imported`."""

    stored: int
    skipped: int
    """Events an earlier run of the same import had stored."""
    position: int
    """Position of the last event stored, 0 when there was nothing to store."""
    log: str = ""
    """The identity of the log it is in; empty where these credentials may not look at the stream."""
    different: int = 0
    """Those of `skipped` that the log has otherwise, or no more: it was left as it is."""
    differences: tuple[str, ...] = ()
    """The first five of them, and what differs, as `event 2 of account 'old-1' at position 7: amount, its time`."""


class Importer:
    """One run of one import."""

    def __init__(self, repositories: Repositories, source: str) -> None:
        if not isinstance(source, str) or not _SOURCE.fullmatch(source):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"The source {shown(source, 120)} of an import must be 1 to 100 of `A-Za-z0-9_.:-`, the same on every "
                "run of it."
            )
        self._store = repositories.store
        self._catalog = repositories.catalog
        self._source = source
        self._events = {one: frozenset(folded_events(one)) for one in repositories.app.aggregates}
        self._unclaimed = {
            info.name: repositories.of(one) for one, info in repositories.app.aggregates.items() if info.unique
        }
        """Aggregates with unique values, of which it is not said yet that an import claims none."""
        self._places = Places()
        self._stored = 0
        self._skipped = 0
        self._different = 0
        self._examples: list[tuple[_Item, int]] = []
        self._decoder = Decoder(self._catalog)
        self._position = 0
        self._log = ""
        """Whose positions are known."""
        self._times: dict[tuple[str, str], datetime] = {}
        """When the last event of each aggregate in the piece under way was recorded."""

    async def run(
        self, events: Iterable[Imported] | AsyncIterable[Imported], progress: Callable[[int], object] | None
    ) -> ImportReport:
        """Store what is missing, in batches; `progress` is told how many events are in the log now."""
        with settled():  # what the application holds to import is many objects
            return await self._run(events, progress)

    async def _run(
        self, events: Iterable[Imported] | AsyncIterable[Imported], progress: Callable[[int], object] | None
    ) -> ImportReport:
        chunk: list[_Item] = []
        size = 0
        async for one in _each(events):
            self._check(one)
            key = (aggregate_info(one.aggregate).name, one.aggregate_id)
            encoded = self._encoded(one)
            ordinal = self._places.next_ordinal(key)
            context = self._context(one, ordinal)
            chunk.append((key, ordinal, encoded, one.at, context))
            size += len(encoded.body) + sum(len(value) for _, value in context)
            if len(chunk) == BATCH_MAX or size > _BYTES_MAX:
                await self._store_chunk(chunk, progress)
                chunk, size = [], 0
        await self._store_chunk(chunk, progress)
        told = tuple([await self._difference(*example) for example in self._examples])
        return ImportReport(self._stored, self._skipped, self._position, self._log, self._different, told)

    async def _difference(self, item: _Item, position: int) -> str:
        """What is stored otherwise; it is read again, which nobody waits for where all is the same."""
        (name, aggregate_id), ordinal, encoded, at, context = item
        what = f"event {ordinal} of {name} {aggregate_id!r}"
        record = await self._store.at(position) if position else None
        if record is None:
            return f"{what}: it is not in the log any more"
        body = as_written_now(self._catalog, self._decoder, record)
        return f"{what} at position {position}: {fields_that_differ(record, body, encoded, at, context)}"

    def _check(self, one: Imported) -> None:
        """Raise `UsageError` for what cannot be imported into this app."""
        if not isinstance(one, Imported):  # pyright: ignore[reportUnnecessaryIsInstance]  an event alone is easily given
            raise UsageError(
                f"The import gives a {shown_name(type(one))}. Give Imported(Account, 'a-1', Opened(…)), which says "
                "whose event it is."
            )
        if not isinstance(one.aggregate, type) or one.aggregate not in self._events:  # pyright: ignore[reportUnnecessaryIsInstance]
            known = listed(shown_name(each) for each in self._events)
            raise UsageError(
                f"The import names the aggregate {shown_name(one.aggregate)}, which this app does not have. Give its "
                f"class, one of {known}; others are listed in App(aggregates=[…]) first."
            )
        if type(one.event) not in self._events[one.aggregate]:
            name = aggregate_info(one.aggregate).name
            raise UsageError(
                f"The import holds a {shown_name(type(one.event))} for {name} {one.aggregate_id!r}, which is not one "
                "of its events. Import events that its `evolve` is annotated with."
            )

    def _encoded(self, one: Imported) -> EncodedEvent:
        return self._catalog.encode(one.event)

    def _context(self, one: Imported, ordinal: int) -> _Context:
        """Its headers; raises `UsageError` for a time that cannot be one of the past, and `Refused`."""
        told = (*context_headers(f"{self._source}/{ordinal}", one.metadata), (IMPORTED, "1"))
        if one.at is None:
            return told
        where = f"{aggregate_info(one.aggregate).name} {one.aggregate_id!r}"
        check_moment(f"Event {ordinal} of {where} in the import is of", one.at)
        return (*told, (RECORDED_AT, in_utc(one.at).isoformat().replace("+00:00", "Z")))

    async def _store_chunk(self, chunk: Sequence[_Item], progress: Callable[[int], object] | None) -> None:
        await self._check_log()
        await self._learn({key for key, *_ in chunk if not self._places.is_known(key)})
        missing = self._missing(chunk)
        await self._unbuild(missing)
        limit = len(missing)

        async def attempt(again: bool) -> int | ConcurrencyConflict:
            """Store the next piece; how many events it had, or a conflict with somebody who writes to one of them."""
            nonlocal missing, limit
            if again:
                await self._learn({key for key, *_ in missing[:limit]})
                missing = self._missing(missing)
                limit = max(1, limit // 4)  # A smaller piece is quicker, so it wins sooner.
            writes = self._writes(missing[:limit])
            try:
                last = await self._store.append(writes) if writes else self._position
            except ConcurrencyConflict as conflict:
                return conflict
            self._account(writes, last)
            return len(missing[:limit])

        while missing:
            try:
                stored = await retried(attempt)
            except ConcurrencyConflict:
                raise Refused(
                    f"The import {self._source!r}",
                    f"other writers were quicker {CONFLICTS_MAX} times in a row",
                    "Run it again when its aggregates are quiet; what is stored stays stored.",
                ) from None
            missing = missing[stored:]
            limit *= 2
        if progress is not None:
            progress(self._stored + self._skipped)

    async def _check_log(self) -> None:
        """Raise `Refused` when the log is not the one that the import began in."""
        await self._store.confirm()
        log = self._store.identity
        if self._log and log != self._log:
            raise Refused(
                f"The import {self._source!r}",
                f"it began in the log {self._log}, and now the stream is {log or 'without identity'}",
                "Run it again: it stores in this log what that lacks.",
            )
        self._log = log

    async def _unbuild(self, missing: Sequence[_Item]) -> None:
        """Say before the first event of a type with unique values that they are not claimed; raises `Refused`."""
        for name in {key[0] for key, *_ in missing} & self._unclaimed.keys():
            claims = self._unclaimed[name].claims
            assert claims is not None
            await claims.unbuild()
            del self._unclaimed[name]

    def _missing(self, items: Sequence[_Item]) -> list[_Item]:
        """Those that are not in the log yet, the others counted."""
        missing: list[_Item] = []
        for item in items:
            key, ordinal, encoded, at, context = item
            if ordinal > self._places.of(key).imported:
                missing.append(item)
                continue
            self._skipped += 1
            earlier = self._places.stored_earlier(key, ordinal)
            position = 0 if earlier is None else earlier.differs(ordinal, encoded, at, context)
            if position is not None:
                self._different += 1
                if len(self._examples) < _EXAMPLES_MAX:
                    self._examples.append((item, position))
        return missing

    def _writes(self, missing: Sequence[_Item]) -> list[Append]:
        grouped: dict[tuple[str, str], list[NewEvent]] = {}
        times: dict[tuple[str, str], datetime] = {}
        now = datetime.now(UTC)
        for key, ordinal, encoded, at, context in missing:
            before = times.get(key) or self._places.of(key).at
            if at is not None and at < before:
                raise Refused(
                    f"Event {ordinal} of {key[0]} {key[1]!r} in the import {self._source!r}",
                    f"it is of {at.isoformat()}, and the event before it of {before.isoformat()}",
                    "Import the events of an aggregate in the order of their times, before it records others. What is "
                    "stored stays stored.",
                )
            times[key] = at or max(now, before)
            grouped.setdefault(key, []).append(NewEvent(new_event_id(), encoded, context))
        self._times = times
        placed = ((key, self._places.of(key), events) for key, events in grouped.items())
        return [Append(*key, place.position, place.version, tuple(events)) for key, place, events in placed]

    def _account(self, writes: Sequence[Append], last: int) -> None:
        position = last - sum(len(write.events) for write in writes)
        for write in writes:
            count, key = len(write.events), (write.aggregate, write.aggregate_id)
            position += count
            known = self._places.of(key)
            place = Place(position, known.version + count, known.imported + count, self._times[key])
            self._places.put(key, place)
            self._stored += count
        self._position = last

    async def _learn(self, keys: set[tuple[str, str]]) -> None:
        ordered = sorted(keys)
        for start in range(0, len(ordered), 64):
            await asyncio.gather(*(self._learn_one(key) for key in ordered[start : start + 64]))

    async def _learn_one(self, key: tuple[str, str]) -> None:
        position, version, imported, at = self._places.of(key)
        prefix = f"{self._source}/"
        for record in await self._store.history(*key, after=position):
            position, _, _, block, _ = record
            at = max(at, recorded_at(record))
            version = number_of(block, VERSION) or 0
            command = header(block, COMMAND) or ""
            if command.startswith(prefix) and command[len(prefix) :].isdigit():
                ordinal = int(command[len(prefix) :])
                imported = max(imported, ordinal)
                earlier = self._places.earlier(key)
                earlier.add(ordinal, record, as_written_now(self._catalog, self._decoder, record))
        self._places.put(key, Place(position, version, imported, at))


async def _each(events: Iterable[Imported] | AsyncIterable[Imported]) -> AsyncIterable[Imported]:
    with exceptions_only("What gives the events of an import"):
        if isinstance(events, AsyncIterable):
            async for one in events:
                yield one
        else:
            for one in events:
                yield one
