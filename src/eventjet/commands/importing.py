"""Import many events of many aggregates in batches; an interrupted import is resumed by running it again.

Each event has `<source>/<ordinal>` as its command id, where the ordinal counts the events of its aggregate from 1. A
second run of the same import reads the log where it finds its first event, since the following ones are stored there in
nearly the order in which they are given. What it does not find there, it reads from the histories of the aggregates. It
compares the events with those that are stored, and stores only the missing ones.

While one batch is compared and stored, the next one is encoded, and nothing else is done ahead (ADR 0073).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias, cast

from eventjet.codec.catalog import EncodedEvent
from eventjet.codec.headers import (
    CAUSATION,
    COMMAND,
    CORRELATION,
    IMPORTED,
    META,
    RECORDED_AT,
    SCHEMA,
    TRACEPARENT,
    TYPE,
    VERSION,
    RawRecord,
    context_headers,
    header,
    header_block,
    number_of,
    recorded_at,
)
from eventjet.codec.json import dump_json, read_json
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
from eventjet.runtime import exceptions_only, settled
from eventjet.text import listed, shown

Key: TypeAlias = tuple[str, str]
"""Name of the aggregate type, and id."""
_SOURCE = re.compile(r"[A-Za-z0-9_.:-]{1,100}")
_EXAMPLES_MAX = 5
_BYTES_MAX = 8_000_000
"""Bytes of bodies and headers in one batch: well below what a connection may have pending."""
_READ_AT_ONCE = 64
"""Histories that are read concurrently."""
_READ_MIN = 50
"""Records of one read of a history at least."""
_NOTED_MAX = 4 * BATCH_MAX
"""Records that are kept until their events are given; there are more only if an import comes in another order."""
_TURN_BYTES = 64_000
"""So many bytes are encoded in one turn of the event loop, which sends the last batch in between."""
_EVENT_BYTES = 1_000
"""An event counts as so many bytes more, for the time that it takes."""
_TYPE, _SCHEMA = TYPE.encode(), SCHEMA.encode()
_METADATA_HEADERS = tuple(name.encode() for name in (CORRELATION, CAUSATION, TRACEPARENT, META))
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
    """An event to import."""

    key: Key
    ordinal: int
    """Its number among the events of its aggregate in this import, from 1."""
    event: Any
    new: NewEvent
    """The event, encoded; only to be compared, if it is probably stored already."""
    at: datetime | None


class _Place:
    """How far the import and the reads of one aggregate's history have come."""

    __slots__ = ("_record", "at", "imported", "is_end", "last_ordinal", "position", "version")

    def __init__(self) -> None:
        self.position = 0
        """Position of the last event that was read or stored; 0 for none."""
        self.version = 0
        """Version of that event, once `settle` was called."""
        self.at = _NEVER
        """When that event was recorded, once `settle` was called."""
        self._record: RawRecord | None = None
        self.imported = 0
        """Greatest ordinal up to that event that this import has stored, in any run; 0 for none."""
        self.is_end = False
        """Whether that event is the aggregate's last."""
        self.last_ordinal = 0
        """Ordinal of the last event that was given to import."""

    def pass_by(self, record: RawRecord) -> None:
        """Move on to a record of the history."""
        self.position, self._record = record[0], (*record[:4], b"")

    def settle(self) -> None:
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
        self._prefix = f"{source}/"
        """How the command ids of this import begin."""
        self._command = f"\r\n{COMMAND}: {self._prefix}".encode()
        self._ahead: AsyncGenerator[RawRecord] | None = None
        """Records of the log from where a repeated import found its events; None while it does not find them there."""
        self._noted: dict[tuple[Key, int], RawRecord] = {}
        """Records of this import that were read ahead, by aggregate and ordinal."""

    async def run(
        self, events: Iterable[Imported] | AsyncIterable[Imported], progress: Callable[[int], object] | None
    ) -> ImportReport:
        """Store the missing events in batches; `progress` is called with the number of the events in the log now."""
        await self._check_log()
        chunks: asyncio.Queue[list[_Item]] = asyncio.Queue()
        room = asyncio.Semaphore(1)  # one chunk is stored, and one is encoded
        encoding = asyncio.create_task(self._encode(events, chunks, room))
        try:
            with settled():  # the events to import may be many objects, which the collector need not visit
                while chunk := await chunks.get():
                    await self._import_chunk(chunk, progress)
                    room.release()
            await encoding  # raises the error of the source, now that the events before it are stored
        finally:
            encoding.cancel()
            await asyncio.gather(encoding, return_exceptions=True)
            await self._stop_reading_ahead()
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
                item = self._item(imported)
                chunk.append(item)
                item_size = len(item.new.encoded.body)
                if imported.metadata is not NO_METADATA:
                    item_size += sum([len(value) for _, value in item.new.context])
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
        encode = self._catalog.encode if self._ahead is None else self._catalog.encode_unchecked
        encoded = encode(imported.event)
        place = self._places.setdefault(key, _Place())
        place.last_ordinal += 1
        command_id, metadata = f"{self._prefix}{place.last_ordinal}", imported.metadata
        # The id needs no escapes, so most events need no call.
        pairs = [(COMMAND, command_id)] if metadata is NO_METADATA else context_headers(command_id, metadata)
        headers = (*pairs, (IMPORTED, "1"))
        if imported.at is not None:
            check_moment(f"Event {place.last_ordinal} of {key[0]} {key[1]!r} in the import is of", imported.at)
            headers = (*headers, (RECORDED_AT, in_utc(imported.at).isoformat().replace("+00:00", "Z")))
        new = NewEvent(new_event_id(), encoded, headers)
        return _Item(key, place.last_ordinal, imported.event, new, imported.at)

    async def _import_chunk(self, chunk: list[_Item], progress: Callable[[int], object] | None) -> None:
        """Store those events that are missing from the log; raises `Refused`."""
        await self._check_log()
        missing = await self._missing(chunk)
        await self._unbuild(missing)
        if self._catalog.with_blobs:
            blobs = [
                (f"the field {path} of {item.new.encoded.type_name}", blob)
                for item in missing
                if type(item.event) in self._catalog.with_blobs
                for path, blob in blobs_in(item.event)
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
                stored = await retry(attempt)
            except ConcurrencyConflict:
                raise Refused(
                    f"The import {self._source!r}",
                    f"other writers were quicker {CONFLICTS_MAX} times in a row",
                    "Run it again when its aggregates are quiet; what is stored stays stored.",
                ) from None
            missing = missing[stored:]
            limit *= 2
        await self._check_log()  # it may have been replaced while the batch was on its way
        if progress is not None:
            progress(self._stored + self._skipped)

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

    async def _unbuild(self, missing: Sequence[_Item]) -> None:
        """Record, before the first event of a type with unique values, that they are not claimed; raises `Refused`."""
        for name in {item.key[0] for item in missing} & self._unclaimed.keys():
            await self._unclaimed[name].unique.unbuild()
            del self._unclaimed[name]

    async def _missing(self, items: Sequence[_Item]) -> list[_Item]:
        """Return the events that are not in the log yet; count the others, and those that differ."""
        records = await self._read_stored(items)
        missing: list[_Item] = []
        for item in items:
            if item.ordinal > self._places[item.key].imported:
                if item.new.encoded.event is None:
                    item = item._replace(new=replace(item.new, encoded=self._catalog.encode(item.event)))
                missing.append(item)
                continue
            self._skipped += 1
            if difference := self._difference(item, records.get((item.key, item.ordinal))):
                self._different += 1
                if len(self._differences) < _EXAMPLES_MAX:
                    self._differences.append(difference)
        return missing

    async def _read_stored(self, items: Sequence[_Item]) -> dict[tuple[Key, int], RawRecord]:
        """Return the stored events of the items' aggregates, from the place of each to its last item or to its end."""
        stored: dict[tuple[Key, int], RawRecord] = {}
        at_once = min(_READ_MIN, len(items))
        unread = await self._take_ahead({item.key: item.ordinal for item in items}, stored, at_once)
        if unread:
            newest = await self._store.newest_of(unread)
            for record in newest.values():
                self._note(record)
            self._take(unread, stored)
            for key in unread:
                if key not in newest or newest[key][0] <= self._places[key].position:
                    self._places[key].is_end = True
            unread = self._take(unread, stored)
        if unread:
            (key, last_ordinal), *_ = unread.items()
            ordinal = self._places[key].imported + 1
            stored |= await self._read(key, last_ordinal)
            if (key, ordinal) in stored:
                self._ahead = self._store.records(start=stored[key, ordinal][0])
            unread = await self._take_ahead(unread, stored, at_once)
        keys = list(unread)
        for start in range(0, len(keys), _READ_AT_ONCE):
            histories = [self._read(key, unread[key]) for key in keys[start : start + _READ_AT_ONCE]]
            for history in await asyncio.gather(*histories):
                stored |= history
        noted_size = sum([len(record[4]) for record in self._noted.values()])
        if len(self._noted) > _NOTED_MAX or noted_size > _BYTES_MAX:
            self._noted.clear()
            await self._stop_reading_ahead()
        return stored

    async def _take_ahead(
        self, last_ordinals: Mapping[Key, int], stored: dict[tuple[Key, int], RawRecord], at_once: int
    ) -> dict[Key, int]:
        """Take records as `_take` does, reading on in the log as long as a quarter of its records can be taken."""
        unread = self._take(last_ordinals, stored)
        while unread and self._ahead is not None:
            read, taken, count = 0, len(stored), max(len(unread), at_once)
            async for record in self._ahead:
                read += 1
                self._note(record)
                if read == count:
                    break
            unread = self._take(unread, stored)
            if 4 * (len(stored) - taken) < count:
                await self._stop_reading_ahead()
        return unread

    def _take(self, last_ordinals: Mapping[Key, int], stored: dict[tuple[Key, int], RawRecord]) -> dict[Key, int]:
        """Take the noted records that come next; return the aggregates that are still to be read."""
        unread: dict[Key, int] = {}
        for key, last_ordinal in last_ordinals.items():
            place = self._places[key]
            while not place.is_end and place.imported < last_ordinal:
                record = self._noted.pop((key, place.imported + 1), None)
                if record is None:
                    break
                place.pass_by(record)
                place.imported += 1
                stored[key, place.imported] = record
            if not place.is_end and place.imported < last_ordinal:
                unread[key] = last_ordinal
        return unread

    def _note(self, record: RawRecord) -> None:
        """Keep a record until its event is given, if it is one of this import."""
        if ordinal := self._ordinal(record):
            with suppress(ValueError):
                self._noted[entity_of(record[2]), ordinal] = record

    def _ordinal(self, record: RawRecord) -> int:
        """Return the ordinal of a record in this import; 0 if it is none of its events."""
        _, _, rest = record[3].partition(self._command)
        ordinal = rest[: rest.find(b"\r\n")]
        return int(ordinal) if ordinal.isdigit() else 0

    async def _stop_reading_ahead(self) -> None:
        if self._ahead is not None:
            await self._ahead.aclose()
            self._ahead = None

    async def _read(self, key: Key, last_ordinal: int) -> Mapping[tuple[Key, int], RawRecord]:
        """Read a history on, to the event with an ordinal or to its end; return this import's events by ordinal."""
        place = self._places[key]
        stored: dict[tuple[Key, int], RawRecord] = {}
        while not place.is_end and place.imported < last_ordinal:
            limit = max(last_ordinal - place.imported, _READ_MIN)
            records = await self._store.history(*key, after=place.position, limit=limit)
            for record in records:
                place.pass_by(record)
                if ordinal := self._ordinal(record):
                    stored[key, ordinal] = record
                    place.imported = max(place.imported, ordinal)
                    if place.imported >= last_ordinal:
                        return stored
            place.is_end = len(records) < limit
        return stored

    async def _append(self, batch: Sequence[_Item]) -> None:
        """Store the events in one save; raises `ConcurrencyConflict`, and `Refused` for times that go back."""
        grouped: dict[Key, list[NewEvent]] = {}
        times: dict[Key, datetime] = {}
        now = datetime.now(UTC)
        for key, ordinal, _, new, at in batch:
            place = self._places[key]
            if key not in times:
                place.settle()
            news = grouped.setdefault(key, [])
            if ordinal != place.imported + len(news) + 1:
                raise Refused(
                    f"Event {ordinal} of {key[0]} {key[1]!r} in the import {self._source!r}",
                    f"the last one before it in the log is event {place.imported + len(news)}",
                    "Run the import again: it reads again what is stored. What is stored stays stored.",
                )
            previous_at = times.get(key) or place.at
            if at is not None and at < previous_at:
                raise Refused(
                    f"Event {ordinal} of {key[0]} {key[1]!r} in the import {self._source!r}",
                    f"it is of {at.isoformat()}, and the event before it of {previous_at.isoformat()}",
                    "Import the events of an aggregate in the order of their times, before it records others. What is "
                    "stored stays stored.",
                )
            times[key] = at or max(now, previous_at)
            news.append(new)
        if not batch:
            return
        placed = [(key, self._places[key], events) for key, events in grouped.items()]
        writes = [Append(*key, place.position, place.version, tuple(events)) for key, place, events in placed]
        self._position = await self._store.append(writes)
        position = self._position - len(batch)
        for key, place, events in placed:
            position += len(events)
            place.position, place.at = position, times[key]
            place.version += len(events)
            place.imported += len(events)
        self._stored += len(batch)

    def _difference(self, item: _Item, record: RawRecord | None) -> str:
        """Describe how a stored event differs, by names of fields; empty if it is the same.

        Values are left out: they may be personal. Times are compared only if the import gives one.
        """
        label = f"event {item.ordinal} of {item.key[0]} {item.key[1]!r}"
        if record is None:
            return f"{label}: it is not in the log any more"
        imported = item.new.encoded
        kind_lines = b"\r\n%b: %b\r\n%b: %d\r\n" % (_TYPE, imported.type_name.encode(), _SCHEMA, imported.schema)
        is_body_same = record[4] == imported.body and kind_lines in record[3]
        if is_body_same and header_block(item.new.context)[8:-2] in record[3]:
            return ""  # nearly all are the same to the byte
        kind = header(record[3], TYPE) or ""
        if kind != imported.type_name:
            fields = [f"it is {kind}, and the import has {imported.type_name}"]
        else:
            fields = self._differing_fields(record, imported)
            if item.at is not None and item.at != recorded_at(record):
                fields.append("its time")
            given = (f"{name}: {value}".encode() for name, value in item.new.context)
            if _metadata_lines(record[3].split(b"\r\n")) != _metadata_lines(given):
                fields.append("its metadata")
        return f"{label} at position {record[0]}: {', '.join(fields)}" if fields else ""

    def _differing_fields(self, record: RawRecord, imported: EncodedEvent) -> list[str]:
        """Return the fields that differ between a stored event, as this release would write it, and another."""
        body = record[4]
        if body == imported.body and number_of(record[3], SCHEMA) == imported.schema:
            return []
        try:
            event = self._decoder(record)
            body = body if event is None else self._catalog.encode(event.data).body
        except (CodecError, KeyError):
            pass  # a body that cannot be decoded, or of a retired event, is compared as it is
        return [] if body == imported.body else differing_fields(body, imported.body)


def differing_fields(stored: bytes, imported: bytes) -> list[str]:
    """Return the names of the fields that differ between two bodies, compared as JSON: 1, 1.0 and true differ."""
    try:
        stored_value, imported_value = read_json(stored), read_json(imported)
    except ValueError:
        return ["its body"]
    if not isinstance(stored_value, dict) or not isinstance(imported_value, dict):
        return [] if dump_json(stored_value) == dump_json(imported_value) else ["its body"]
    stored_fields, imported_fields = _json_fields(stored_value), _json_fields(imported_value)
    names = {*stored_fields, *imported_fields}
    return sorted(name for name in names if stored_fields.get(name) != imported_fields.get(name))


def _json_fields(value: Any) -> dict[str, bytes]:
    return {name: dump_json(field) for name, field in cast("dict[str, Any]", value).items()}


async def _imported_events(events: Iterable[Imported] | AsyncIterable[Imported]) -> AsyncIterable[Imported]:
    with exceptions_only("What gives the events of an import"):
        if isinstance(events, AsyncIterable):
            async for imported in events:
                yield imported
        else:
            for imported in events:
                yield imported


def _metadata_lines(lines: Iterable[bytes]) -> list[bytes]:
    return sorted(line for line in lines if line.startswith(_METADATA_HEADERS))
