"""Import many events of many aggregates in batches; an interrupted import is resumed by running it again.

Each event has `<source>/<ordinal>` as its command id, where the ordinal counts the events of its aggregate from 1. A
second run of the same import reads each aggregate up to the events that it comes to, compares them with those that are
stored, and stores only the missing events.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    number_of,
    recorded_at,
)
from eventjet.codec.json import dump_json, read_json
from eventjet.codec.records import Decoder
from eventjet.commands.blobs import store_blobs
from eventjet.commands.execute import CONFLICTS_MAX, Conflict, retry
from eventjet.commands.repository import Repositories
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.blob import Blob, blobs_in
from eventjet.domain.identity import new_event_id
from eventjet.domain.moment import check_moment, in_utc
from eventjet.domain.recorded import NO_METADATA, Metadata
from eventjet.domain.subscription import folded_events, shown_name
from eventjet.errors import CodecError, ConcurrencyConflict, Refused, UsageError
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
    """An event to import, encoded."""

    key: Key
    ordinal: int
    """Its number among the events of its aggregate in this import, from 1."""
    encoded: EncodedEvent
    at: datetime | None
    context: tuple[tuple[str, str], ...]
    """Its further headers."""
    blobs: Sequence[tuple[str, Blob]]


class _Place:
    """How far the import and the reads of one aggregate's history have come."""

    __slots__ = ("at", "imported", "is_end", "last_ordinal", "position", "version")

    def __init__(self) -> None:
        self.position = 0
        """Position of the last event that was read or stored; 0 for none."""
        self.version = 0
        self.at = _NEVER
        """When that event was recorded."""
        self.imported = 0
        """Greatest ordinal up to that event that this import has stored, in any run; 0 for none."""
        self.is_end = False
        """Whether that event is the aggregate's last."""
        self.last_ordinal = 0
        """Ordinal of the last event that was given to import."""


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

    async def run(
        self, events: Iterable[Imported] | AsyncIterable[Imported], progress: Callable[[int], object] | None
    ) -> ImportReport:
        """Store the missing events in batches; `progress` is called with the number of the events in the log now."""
        with settled():  # the events to import may be many objects, which the collector need not visit
            chunk: list[_Item] = []
            size = 0
            async for imported in _imported_events(events):
                item = self._item(imported)
                chunk.append(item)
                size += len(item.encoded.body) + sum(len(value) for _, value in item.context)
                if len(chunk) == BATCH_MAX or size > _BYTES_MAX:
                    await self._import_chunk(chunk, progress)
                    chunk, size = [], 0
            await self._import_chunk(chunk, progress)
        differences = tuple(self._differences)
        return ImportReport(self._stored, self._skipped, self._position, self._log, self._different, differences)

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
        key = (aggregate_info(imported.aggregate).name, imported.aggregate_id)
        where = f"{key[0]} {imported.aggregate_id!r}"
        if type(imported.event) not in self._events[imported.aggregate]:
            raise UsageError(
                f"The import holds a {shown_name(type(imported.event))} for {where}, which is not one of its events. "
                "Import events that its `evolve` is annotated with."
            )
        encoded = self._catalog.encode(imported.event)
        place = self._places.setdefault(key, _Place())
        place.last_ordinal += 1
        headers = (*context_headers(f"{self._source}/{place.last_ordinal}", imported.metadata), (IMPORTED, "1"))
        if imported.at is not None:
            check_moment(f"Event {place.last_ordinal} of {where} in the import is of", imported.at)
            headers = (*headers, (RECORDED_AT, in_utc(imported.at).isoformat().replace("+00:00", "Z")))
        blobs: Sequence[tuple[str, Blob]] = ()
        if type(imported.event) in self._catalog.with_blobs:
            blobs = [(f"the field {path} of {encoded.type_name}", blob) for path, blob in blobs_in(imported.event)]
        return _Item(key, place.last_ordinal, encoded, imported.at, headers, blobs)

    async def _import_chunk(self, chunk: Sequence[_Item], progress: Callable[[int], object] | None) -> None:
        await self._check_log()
        missing = await self._missing(chunk)
        await self._unbuild(missing)
        if self._catalog.with_blobs:
            await store_blobs(self._store.objects, [blob for item in missing for blob in item.blobs])
        limit = len(missing)

        async def attempt(lost_races: int) -> int | Conflict:
            """Store the next batch; return how many events it had, or a conflict with another writer."""
            nonlocal missing, limit
            if lost_races:
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
        last_ordinals = {item.key: item.ordinal for item in items}
        unread = [key for key in last_ordinals if not self._places[key].is_end]
        records: dict[tuple[Key, int], RawRecord] = {}
        for start in range(0, len(unread), _READ_AT_ONCE):
            keys = unread[start : start + _READ_AT_ONCE]
            for stored in await asyncio.gather(*(self._read(key, last_ordinals[key]) for key in keys)):
                records |= stored
        missing: list[_Item] = []
        for item in items:
            if item.ordinal > self._places[item.key].imported:
                missing.append(item)
                continue
            self._skipped += 1
            if difference := self._difference(item, records.get((item.key, item.ordinal))):
                self._different += 1
                if len(self._differences) < _EXAMPLES_MAX:
                    self._differences.append(difference)
        return missing

    async def _read(self, key: Key, last_ordinal: int) -> Mapping[tuple[Key, int], RawRecord]:
        """Read a history on, to the event with an ordinal or to its end; return this import's events by ordinal."""
        place, prefix = self._places[key], f"{self._source}/"
        stored: dict[tuple[Key, int], RawRecord] = {}
        while not place.is_end and place.imported < last_ordinal:
            limit = max(last_ordinal - place.imported, _READ_MIN)
            records = await self._store.history(*key, after=place.position, limit=limit)
            for record in records:
                place.position, place.version = record[0], number_of(record[3], VERSION) or 0
                place.at = max(place.at, recorded_at(record))
                command = header(record[3], COMMAND) or ""
                if command.startswith(prefix) and command[len(prefix) :].isdigit():
                    ordinal = int(command[len(prefix) :])
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
        for key, ordinal, encoded, at, context, _ in batch:
            previous_at = times.get(key) or self._places[key].at
            if at is not None and at < previous_at:
                raise Refused(
                    f"Event {ordinal} of {key[0]} {key[1]!r} in the import {self._source!r}",
                    f"it is of {at.isoformat()}, and the event before it of {previous_at.isoformat()}",
                    "Import the events of an aggregate in the order of their times, before it records others. What is "
                    "stored stays stored.",
                )
            times[key] = at or max(now, previous_at)
            grouped.setdefault(key, []).append(NewEvent(new_event_id(), encoded, context))
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
        name, aggregate_id = item.key
        label = f"event {item.ordinal} of {name} {aggregate_id!r}"
        if record is None:
            return f"{label}: it is not in the log any more"
        kind = header(record[3], TYPE) or ""
        if kind != item.encoded.type_name:
            fields = [f"it is {kind}, and the import has {item.encoded.type_name}"]
        else:
            fields = self._differing_fields(record, item.encoded)
            if item.at is not None and item.at != recorded_at(record):
                fields.append("its time")
            given = (f"{name}: {value}".encode() for name, value in item.context)
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
