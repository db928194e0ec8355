"""Import many events of many aggregates in batches; an interrupted import is resumed by running it again.

Each event has `<source>/<ordinal>` as its command id, where the ordinal counts the events of its aggregate from 1. A
second run of the same import reads the log where it finds its first event, since the following ones are stored there in
nearly the order in which they are given. What it does not find there, it reads from the histories of the aggregates. It
compares the events with those that are stored, and stores only the missing ones. If the log has none of the aggregates
of the first batch, the run is taken for the first one: it reads nothing until the log refuses a batch.

While one batch is compared and stored, the next one is encoded, and a repeated import reads on in the log. Nothing else
is done ahead (ADR 0073).
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias

from eventjet.codec.catalog import EncodedEvent
from eventjet.codec.headers import (
    COMMAND,
    IMPORTED,
    RECORDED_AT,
    SCHEMA,
    TYPE,
    VERSION,
    RawRecord,
    context_headers,
    header,
    header_lines,
    metadata_of,
    number_of,
    recorded_at,
)
from eventjet.codec.json import differing_fields
from eventjet.codec.records import Decoder
from eventjet.codec.subjects import entity_of
from eventjet.commands.blobs import store_blobs
from eventjet.commands.execute import CONFLICTS_MAX, Conflict, retry
from eventjet.commands.repository import Repositories
from eventjet.domain.blob import blobs_in
from eventjet.domain.identity import new_event_id
from eventjet.domain.moment import check_moment, in_utc
from eventjet.domain.recorded import NO_METADATA, Metadata
from eventjet.domain.subscription import folded_events, shown_name
from eventjet.errors import CodecError, ConcurrencyConflict, Forbidden, Refused, UsageError
from eventjet.log.store import BATCH_MAX, Append, NewEvent
from eventjet.runtime import exceptions_only, gc_frozen
from eventjet.text import listed, shown, utc_text

Key: TypeAlias = tuple[str, str]
"""Name of the aggregate type, and id."""
_SOURCE = re.compile(r"[A-Za-z0-9_.:-]{1,100}")
_EXAMPLES_MAX = 5
_BYTES_MAX = 8_000_000
"""Bytes of bodies and headers in one batch: well below what a connection may have pending."""
_READ_MIN = 50
"""Records of one read of a history at least."""
_NOTED_MAX = 4 * BATCH_MAX
"""Records that are kept until their events are given; there are more only if an import comes in another order."""
_TURN_BYTES = 64_000
"""So many bytes are encoded in one turn of the event loop, which sends the last batch in between."""
_EVENT_BYTES = 1_000
"""An event counts as so many bytes more, for the time that it takes."""
_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Imported:
    """One event to import. The events of one aggregate are given in their order.

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
    """When the event was recorded in its source; None for now. Not earlier than the aggregate's event before it."""
    metadata: Metadata = NO_METADATA
    """Actor, correlation, causation and other metadata, recorded with the event."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of `Jet.append_many`: what became of the `Imported` events."""

    stored: int
    """Events stored by this run."""
    skipped: int
    """Events that an earlier run of the same import had stored."""
    position: int
    """Position of the last event stored by this run; 0 if there was nothing to store."""
    log: str = ""
    """The stream identity of the log; empty if the credentials do not permit to read the stream's configuration."""
    different: int = 0
    """Skipped events that the log has in another form or no longer has; they are left as they are."""
    differences: tuple[str, ...] = ()
    """The first five differences, such as `event 2 of account 'old-1' at position 7: amount, its time`."""


class _Item(NamedTuple):
    """An event to import, encoded."""

    key: Key
    ordinal: int
    """Its number among the events of its aggregate in this import, from 1."""
    imported: Imported
    encoded: EncodedEvent
    """Not checked by reading it back while a repeated import reads the log, since it is probably stored already."""
    context: str
    """The header lines after `Ej-Version`."""


class _Place:
    """How far the import and the reads of one aggregate's history have come."""

    __slots__ = ("_record", "at", "given", "imported", "is_end", "position", "version")

    def __init__(self) -> None:
        self.given = 0
        """Ordinal of the last event that was given to import."""
        self.imported = 0
        """Greatest ordinal up to `position` that this import has stored, in any run; 0 for none."""
        self.position = 0
        """Position of the last event that was read or stored; 0 for none."""
        self.version = 0
        """Version of that event, once `read_last` was called."""
        self.at = _NEVER
        """When that event was recorded, once `read_last` was called."""
        self.is_end = False
        """Whether that event is taken for the aggregate's last."""
        self._record: RawRecord | None = None

    def move_to(self, record: RawRecord, ordinal: int) -> None:
        """Move on to a record of the history; `ordinal` is its number in this import, 0 for another event."""
        self.position, self._record = record[0], (*record[:4], b"")
        self.imported = max(self.imported, ordinal)

    def read_last(self) -> None:
        """Read version and time of the last record: a repeated import passes by many whose version nobody needs."""
        record, self._record = self._record, None
        if record is not None:
            self.version = number_of(record[3], VERSION) or 0
            self.at = max(self.at, recorded_at(record))


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
        self._decoder = Decoder(self._catalog)
        self._source = source
        self._prefix = f"{source}/"
        """How the command ids of this import begin."""
        self._command_line = f"\r\n{COMMAND}: {self._prefix}".encode()
        self._events = {aggregate: frozenset(folded_events(aggregate)) for aggregate in repositories.app.aggregates}
        self._names = {aggregate: info.name for aggregate, info in repositories.app.aggregates.items()}
        self._unclaimed = {
            info.name: repositories.of(aggregate)
            for aggregate, info in repositories.app.aggregates.items()
            if info.unique
        }
        """Aggregate types with unique values whose registers do not say yet that an import adds unclaimed values."""
        self._places: dict[Key, _Place] = {}
        self._stored = self._skipped = self._different = self._position = 0
        self._differences: list[str] = []
        self._log = ""
        """Identity of the log in which the import began; empty until it is known."""
        self._is_first_run: bool | None = None
        """Whether the aggregates are taken to have no events before they are stored; None before the first look."""
        self._read_from: int | None = None
        """From where a repeated import reads the log on; None while it does not find its events there."""
        self._ahead: asyncio.Task[list[RawRecord]] | None = None
        """The next records from `_read_from` on, which are read while the ones before are compared."""
        self._noted: dict[tuple[Key, int], RawRecord] = {}
        """Records of this import by aggregate and ordinal, from when they are read until they are compared."""
        self._kinds: dict[str, bytes] = {}
        """The header lines of each type of event and its schema."""
        self._is_over = False

    async def run(
        self, events: Iterable[Imported] | AsyncIterable[Imported], progress: Callable[[int], object] | None
    ) -> ImportReport:
        """Store the missing events in batches; `progress` is called with the number of the events in the log now."""
        await self._check_log()
        chunks: asyncio.Queue[list[_Item]] = asyncio.Queue()
        room = asyncio.Semaphore(1)  # one chunk is stored, and one is encoded
        encoding = asyncio.create_task(self._encode(events, chunks, room))
        try:
            with gc_frozen():  # the events to import may be many objects, which the collector need not visit
                while chunk := await chunks.get():
                    await self._import_chunk(chunk)
                    if progress is not None:
                        progress(self._stored + self._skipped)
                    room.release()
            await encoding  # raises the error of the source, now that the events before it are stored
        finally:
            self._is_over = True  # a source may take the cancellation for its own, and give its next event
            room.release()
            encoding.cancel()
            await asyncio.gather(encoding, self._end_reading(), return_exceptions=True)
        differences = tuple(self._differences)
        return ImportReport(self._stored, self._skipped, self._position, self._log, self._different, differences)

    async def _encode(
        self,
        events: Iterable[Imported] | AsyncIterable[Imported],
        chunks: asyncio.Queue[list[_Item]],
        room: asyncio.Semaphore,
    ) -> None:
        """Put the events into `chunks`, encoded, and last an empty chunk; after each chunk wait for `room`."""
        chunk: list[_Item] = []
        size = turn = 0
        try:
            async for imported in _imported_events(events):
                if self._is_over:
                    return
                item = self._item(imported)
                chunk.append(item)
                item_size = len(item.encoded.body) + len(item.context)
                size += item_size
                turn += item_size + _EVENT_BYTES
                if len(chunk) == BATCH_MAX or size > _BYTES_MAX:
                    chunks.put_nowait(chunk)
                    chunk, size = [], 0
                    await room.acquire()
                if turn > _TURN_BYTES:
                    turn = 0
                    await asyncio.sleep(0)
            if chunk:
                chunks.put_nowait(chunk)
        finally:
            chunks.put_nowait([])

    def _item(self, imported: Imported) -> _Item:
        """Encode an event; raises `UsageError` for anything that cannot be imported into this app, and `Refused`."""
        if not isinstance(imported, Imported):  # pyright: ignore[reportUnnecessaryIsInstance]  an event alone is easily given
            raise UsageError(
                f"The import gives a {shown_name(type(imported))}. Give Imported(Account, 'a-1', Opened(…)), which "
                "says whose event it is."
            )
        if not isinstance(imported.aggregate, type) or imported.aggregate not in self._events:  # pyright: ignore[reportUnnecessaryIsInstance]
            names = listed(shown_name(aggregate) for aggregate in self._events)
            raise UsageError(
                f"The import names the aggregate {shown_name(imported.aggregate)}, which this app does not have. Give "
                f"its class, one of {names}; others are listed in App(aggregates=[…]) first."
            )
        key = (self._names[imported.aggregate], imported.aggregate_id)
        if type(imported.event) not in self._events[imported.aggregate]:
            raise UsageError(
                f"The import holds a {shown_name(type(imported.event))} for {key[0]} {key[1]!r}, which is not one of "
                "its events. Import events that its `evolve` is annotated with."
            )
        encode = self._catalog.encode if self._read_from is None else self._catalog.encode_unchecked
        encoded = encode(imported.event)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place()
        place.given += 1
        command_id, metadata = f"{self._prefix}{place.given}", imported.metadata
        if metadata is NO_METADATA:  # the id needs no escapes, so most events need no call
            context = f"{COMMAND}: {command_id}\r\n{IMPORTED}: 1\r\n"
        else:
            context = header_lines([*context_headers(command_id, metadata), (IMPORTED, "1")])
        if imported.at is not None:
            check_moment(f"Event {place.given} of {key[0]} {key[1]!r} in the import is of", imported.at)
            context += header_lines([(RECORDED_AT, utc_text(in_utc(imported.at)))])
        return _Item(key, place.given, imported, encoded, context)

    async def _import_chunk(self, chunk: list[_Item]) -> None:
        """Store those events that are missing from the log; raises `Refused`."""
        await self._check_log()
        missing = await self._missing(chunk)
        for name in {item.key[0] for item in missing} & self._unclaimed.keys():
            await self._unclaimed.pop(name).unique.unbuild()
        if self._catalog.with_blobs:
            blobs = [
                (f"the field {path} of {item.encoded.type_name}", blob)
                for item in missing
                if type(item.imported.event) in self._catalog.with_blobs
                for path, blob in blobs_in(item.imported.event)
            ]
            await store_blobs(self._store.objects, blobs)
        limit = len(missing)

        async def attempt(lost_races: int) -> int | Conflict:
            """Store the next batch; return how many events it had, or a conflict with another writer."""
            nonlocal missing, limit
            if lost_races:
                with suppress(Forbidden):  # without permission nobody knows the log's identity
                    await self._store.state()
                await self._check_log()
                self._is_first_run = False
                for item in missing[:limit]:
                    self._places[item.key].is_end = False
                missing = await self._missing(missing)
                limit = max(1, limit // 4)  # A smaller batch is quicker, so it is likelier to win the race.
            batch = missing[:limit]
            try:
                await self._append(batch)
            except ConcurrencyConflict as error:
                return Conflict(error.subject, error.expected, error.rival, error.is_unseen)
            return len(batch)

        while missing:
            try:
                stored_count = await retry(attempt)
            except ConcurrencyConflict as error:
                if error.is_unseen:
                    raise
                raise Refused(
                    f"The import {self._source!r}",
                    f"other writers were quicker {CONFLICTS_MAX} times in a row",
                    "Run it again when its aggregates are quiet; what is stored stays stored.",
                ) from None
            missing = missing[stored_count:]
            limit *= 2
        await self._check_log()  # it may have been replaced while the batch was on its way

    async def _check_log(self) -> None:
        """Raise `Refused` if the log is not the one in which the import began."""
        await self._store.confirm()
        log = self._store.identity
        if self._log and log != self._log:
            raise Refused(
                f"The import {self._source!r}",
                f"it began in the log {self._log}, and now the stream is {log or 'without identity'}",
                "Run it again: it stores in this log what that lacks.",
            )
        self._log = log

    # What the log has already.

    async def _missing(self, items: Sequence[_Item]) -> list[_Item]:
        """Return the events that are not in the log yet; count the others, and those that differ."""
        if self._is_first_run:
            return list(items)  # the log refuses the batch if that is wrong
        await self._read_stored(items)
        missing: list[_Item] = []
        for item in items:
            if item.ordinal > self._places[item.key].imported:
                if item.encoded.event is None:
                    item = item._replace(encoded=self._catalog.encode(item.imported.event))
                missing.append(item)
                continue
            self._skipped += 1
            if difference := self._difference(item, self._noted.pop((item.key, item.ordinal), None)):
                self._different += 1
                if len(self._differences) < _EXAMPLES_MAX:
                    self._differences.append(difference)
        size = sum([len(record[4]) for record in self._noted.values()])
        if len(self._noted) > _NOTED_MAX or size > _BYTES_MAX:
            self._noted.clear()
            self._read_from = None
            await self._end_reading()
        return missing

    async def _read_stored(self, items: Sequence[_Item]) -> None:
        """Read the stored events of the items' aggregates, from the place of each to its last item or to its end."""
        unread = await self._read_on({item.key: item.ordinal for item in items}, len(items))
        if unread:
            newest = await self._store.newest_of(unread)
            if self._is_first_run is None:
                self._is_first_run = not newest
            self._note(newest.values())
            unread = self._advance(unread)
            for key in list(unread):
                if key not in newest or newest[key][0] <= self._places[key].position:
                    self._places[key].is_end = True
                    del unread[key]
        if unread:
            key, last_ordinal = next(iter(unread.items()))
            ordinal = self._places[key].imported + 1
            await self._read_history(key, last_ordinal)
            if (key, ordinal) in self._noted:
                await self._end_reading()
                self._read_from = self._noted[key, ordinal][0]
            unread = await self._read_on(unread, len(items))
        await asyncio.gather(*[self._read_history(key, last_ordinal) for key, last_ordinal in unread.items()])

    async def _read_on(self, last_ordinals: Mapping[Key, int], count: int) -> dict[Key, int]:
        """Read on in the log while a read finds a quarter of what is lacking; return the aggregates left to read."""
        unread = self._advance(last_ordinals)
        while unread and self._read_from is not None:
            lacking = self._lacking(unread)
            reading = self._ahead or self._store.records_from(self._read_from, max(lacking, min(_READ_MIN, count)))
            records, self._ahead = await reading, None
            self._note(records)
            unread = self._advance(unread)
            is_worth_it = records and 4 * (lacking - self._lacking(unread)) >= lacking
            self._read_from = records[-1][0] + 1 if is_worth_it else None
        if self._read_from is not None and self._ahead is None:
            self._ahead = asyncio.create_task(self._store.records_from(self._read_from, count))
        return unread

    async def _end_reading(self) -> None:
        """Forget what is read ahead, since reading goes on elsewhere or ends."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)

    def _lacking(self, unread: Mapping[Key, int]) -> int:
        return sum([last_ordinal - self._places[key].imported for key, last_ordinal in unread.items()])

    def _advance(self, last_ordinals: Mapping[Key, int]) -> dict[Key, int]:
        """Move the places of aggregates on over noted records; return the aggregates that are still to be read."""
        unread: dict[Key, int] = {}
        for key, last_ordinal in last_ordinals.items():
            place = self._places[key]
            while not place.is_end and place.imported < last_ordinal:
                record = self._noted.get((key, place.imported + 1))
                if record is None:
                    unread[key] = last_ordinal
                    break
                place.move_to(record, place.imported + 1)
        return unread

    def _note(self, records: Iterable[RawRecord]) -> None:
        """Keep those records that are of this import until their events are given."""
        for record in records:
            if ordinal := self._ordinal(record):
                try:
                    self._noted[entity_of(record[2]), ordinal] = record
                except ValueError:
                    continue  # it is of no aggregate

    def _ordinal(self, record: RawRecord) -> int:
        """Return the ordinal of a record in this import; 0 if it is none of its events."""
        _, _, rest = record[3].partition(self._command_line)
        ordinal = rest[: rest.find(b"\r\n")]
        return int(ordinal) if ordinal.isdigit() else 0

    async def _read_history(self, key: Key, last_ordinal: int) -> None:
        """Read a history on, to the event with an ordinal or to its end, and note this import's events."""
        place = self._places[key]
        while not place.is_end and place.imported < last_ordinal:
            limit = max(last_ordinal - place.imported, _READ_MIN)
            records = await self._store.history(*key, after=place.position, limit=limit)
            for record in records:
                ordinal = self._ordinal(record)
                place.move_to(record, ordinal)
                if ordinal:
                    self._noted[key, ordinal] = record
                if place.imported >= last_ordinal:
                    return
            place.is_end = len(records) < limit

    def _difference(self, item: _Item, record: RawRecord | None) -> str:
        """Describe how a stored event differs, by names of fields; empty if it is the same.

        Values are left out: they may be personal. Times are compared only if the import gives one.
        """
        imported, encoded = item.imported, item.encoded
        fields: list[str] = []
        if record is not None:
            kind = self._kinds.get(encoded.type_name)
            if kind is None:
                kind = f"\r\n{TYPE}: {encoded.type_name}\r\n{SCHEMA}: {encoded.schema}\r\n".encode()
                self._kinds[encoded.type_name] = kind
            is_same_body = record[4] == encoded.body and kind in record[3]
            if is_same_body and f"\r\n{item.context}".encode() in record[3]:
                return ""  # nearly all are the same to the byte
            stored_type = header(record[3], TYPE) or ""
            if stored_type != encoded.type_name:
                fields = [f"it is {stored_type}, and the import has {encoded.type_name}"]
            else:
                fields = [] if is_same_body else differing_fields(self._rewritten(record), encoded.body)
                if imported.at is not None and imported.at != recorded_at(record):
                    fields.append("its time")
                if metadata_of(record[3])[1] != imported.metadata:
                    fields.append("its metadata")
            if not fields:
                return ""
        label = f"event {item.ordinal} of {item.key[0]} {item.key[1]!r}"
        if record is None:
            return f"{label}: it is not in the log any more"
        return f"{label} at position {record[0]}: {', '.join(fields)}"

    def _rewritten(self, record: RawRecord) -> bytes:
        """Return the body of a record as this release writes it; as it is, if it cannot be decoded or is retired."""
        try:
            event = self._decoder(record)
            return record[4] if event is None else self._catalog.encode(event.data).body
        except (CodecError, KeyError):
            return record[4]

    async def _append(self, batch: Sequence[_Item]) -> None:
        """Store the events in one save; raises `ConcurrencyConflict`, and `Refused` for times that go back."""
        new_events: dict[Key, list[NewEvent]] = {}
        times: dict[Key, datetime] = {}
        now = datetime.now(UTC)
        random = os.urandom(10 * len(batch)).hex()
        for index, (key, ordinal, imported, encoded, context) in enumerate(batch):
            place, at = self._places[key], imported.at
            if key not in times:
                place.read_last()
                new_events[key], times[key] = [], place.at
            events, previous_at = new_events[key], times[key]
            if ordinal != place.imported + len(events) + 1:
                raise Refused(
                    f"Event {ordinal} of {key[0]} {key[1]!r} in the import {self._source!r}",
                    f"the last one before it in the log is event {place.imported + len(events)}",
                    "Run the import again: it reads again what is stored. What is stored stays stored.",
                )
            if at is not None and at < previous_at:
                raise Refused(
                    f"Event {ordinal} of {key[0]} {key[1]!r} in the import {self._source!r}",
                    f"it is of {at.isoformat()}, and the event before it of {previous_at.isoformat()}",
                    "Import the events of an aggregate in the order of their times, before it records others. What is "
                    "stored stays stored.",
                )
            times[key] = at or max(now, previous_at)
            events.append(NewEvent(new_event_id(random[20 * index : 20 * index + 20]), encoded, context))
        if not batch:
            return
        placed = [(key, self._places[key], tuple(events)) for key, events in new_events.items()]
        self._position = await self._store.append(
            [Append(*key, place.position, place.version, events) for key, place, events in placed]
        )
        position = self._position - len(batch)
        for key, place, events in placed:
            position += len(events)
            place.position, place.at = position, times[key]
            place.version += len(events)
            place.imported += len(events)
        self._stored += len(batch)


async def _imported_events(events: Iterable[Imported] | AsyncIterable[Imported]) -> AsyncIterable[Imported]:
    with exceptions_only("What gives the events of an import"):
        if isinstance(events, AsyncIterable):
            async for imported in events:
                yield imported
        else:
            for imported in events:
                yield imported
