"""Import many events of many aggregates in batches; an interrupted import is resumed by running it again.

Each event has `<source>/<ordinal>` as its command id, where the ordinal counts the events of its aggregate from 1. A
second run of the same import finds how many events of each aggregate are stored, stores only the missing events, and
reports events that the log has in another form. For this it keeps a digest of each event of an earlier run until the
import reaches that event.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from bisect import bisect_left
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias, cast

from eventjet.codec.catalog import Catalog, EncodedEvent
from eventjet.codec.headers import (
    CAUSATION,
    COMMAND,
    CORRELATION,
    IMPORTED,
    META,
    RECORDED_AT,
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
from eventjet.commands.execute import CONFLICTS_MAX, Conflict, retry
from eventjet.commands.repository import Repositories
from eventjet.domain.aggregate import aggregate_info
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
_Context: TypeAlias = tuple[tuple[str, str], ...]
_Item: TypeAlias = tuple[Key, int, EncodedEvent, datetime | None, _Context]
"""(key of the aggregate, ordinal of the event within it, event, its time, headers)."""
_SOURCE = re.compile(r"[A-Za-z0-9_.:-]{1,100}")
_EXAMPLES_MAX = 5
_BYTES_MAX = 8_000_000
"""Bytes of bodies and headers in one batch: well below what a connection may have pending."""
_READ_AT_ONCE = 64
"""Histories that are read concurrently."""
_METADATA_HEADERS = tuple(name.encode() for name in (CORRELATION, CAUSATION, TRACEPARENT, META))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
NEVER = datetime.min.replace(tzinfo=UTC)


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
        self._events = {aggregate: frozenset(folded_events(aggregate)) for aggregate in repositories.app.aggregates}
        self._unclaimed = {
            info.name: repositories.of(aggregate)
            for aggregate, info in repositories.app.aggregates.items()
            if info.unique
        }
        """Aggregate types with unique values whose registers do not say yet that an import adds unclaimed values."""
        self._places = Places()
        self._stored = 0
        self._skipped = 0
        self._different = 0
        self._examples: list[tuple[_Item, int]] = []
        self._decoder = Decoder(self._catalog)
        self._position = 0
        self._log = ""
        """Identity of the log in which the import began; empty until it is known."""
        self._times: dict[Key, datetime] = {}
        """The time of the last event of each aggregate in the current batch."""

    async def run(
        self, events: Iterable[Imported] | AsyncIterable[Imported], progress: Callable[[int], object] | None
    ) -> ImportReport:
        """Store the missing events in batches; `progress` is called with the number of the events in the log now."""
        with settled():  # the events to import may be many objects, which the collector need not visit
            return await self._run(events, progress)

    async def _run(
        self, events: Iterable[Imported] | AsyncIterable[Imported], progress: Callable[[int], object] | None
    ) -> ImportReport:
        chunk: list[_Item] = []
        size = 0
        async for imported in _imported_events(events):
            self._check(imported)
            key = (aggregate_info(imported.aggregate).name, imported.aggregate_id)
            encoded = self._catalog.encode(imported.event)
            ordinal = self._places.next_ordinal(key)
            context = self._context(imported, ordinal)
            chunk.append((key, ordinal, encoded, imported.at, context))
            size += len(encoded.body) + sum(len(value) for _, value in context)
            if len(chunk) == BATCH_MAX or size > _BYTES_MAX:
                await self._store_chunk(chunk, progress)
                chunk, size = [], 0
        await self._store_chunk(chunk, progress)
        differences = tuple([await self._difference(*example) for example in self._examples])
        return ImportReport(self._stored, self._skipped, self._position, self._log, self._different, differences)

    async def _difference(self, item: _Item, position: int) -> str:
        """Describe how a stored event differs; only differing events are read a second time."""
        (name, aggregate_id), ordinal, encoded, at, context = item
        label = f"event {ordinal} of {name} {aggregate_id!r}"
        record = await self._store.at(position) if position else None
        if record is None:
            return f"{label}: it is not in the log any more"
        body = as_written_now(self._catalog, self._decoder, record)
        return f"{label} at position {position}: {fields_that_differ(record, body, encoded, at, context)}"

    def _check(self, imported: Imported) -> None:
        """Raise `UsageError` for anything that cannot be imported into this app."""
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
        if type(imported.event) not in self._events[imported.aggregate]:
            name = aggregate_info(imported.aggregate).name
            raise UsageError(
                f"The import holds a {shown_name(type(imported.event))} for {name} {imported.aggregate_id!r}, which is "
                "not one of its events. Import events that its `evolve` is annotated with."
            )

    def _context(self, imported: Imported, ordinal: int) -> _Context:
        """Return the headers of an event; raises `UsageError` for a time that is not in the past, and `Refused`."""
        headers = (*context_headers(f"{self._source}/{ordinal}", imported.metadata), (IMPORTED, "1"))
        if imported.at is None:
            return headers
        where = f"{aggregate_info(imported.aggregate).name} {imported.aggregate_id!r}"
        check_moment(f"Event {ordinal} of {where} in the import is of", imported.at)
        return (*headers, (RECORDED_AT, in_utc(imported.at).isoformat().replace("+00:00", "Z")))

    async def _store_chunk(self, chunk: Sequence[_Item], progress: Callable[[int], object] | None) -> None:
        await self._check_log()
        await self._read_places({key for key, *_ in chunk if not self._places.is_known(key)})
        missing = self._missing(chunk)
        await self._unbuild(missing)
        limit = len(missing)

        async def attempt(lost_races: int) -> int | Conflict:
            """Store the next batch; return how many events it had, or a conflict with another writer."""
            nonlocal missing, limit
            if lost_races:
                await self._read_places({key for key, *_ in missing[:limit]})
                missing = self._missing(missing)
                limit = max(1, limit // 4)  # A smaller batch is quicker, so it is likelier to win the race.
            writes = self._writes(missing[:limit])
            try:
                last = await self._store.append(writes) if writes else self._position
            except ConcurrencyConflict as error:
                return Conflict(error.subject, error.expected, error.rival, error.is_unseen)
            self._count_stored(writes, last)
            return len(missing[:limit])

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
        for name in {key[0] for key, *_ in missing} & self._unclaimed.keys():
            await self._unclaimed[name].unique.unbuild()
            del self._unclaimed[name]

    def _missing(self, items: Sequence[_Item]) -> list[_Item]:
        """Return the events that are not in the log yet; count the others, and those that differ."""
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
        grouped: dict[Key, list[NewEvent]] = {}
        times: dict[Key, datetime] = {}
        now = datetime.now(UTC)
        for key, ordinal, encoded, at, context in missing:
            previous_at = times.get(key) or self._places.of(key).at
            if at is not None and at < previous_at:
                raise Refused(
                    f"Event {ordinal} of {key[0]} {key[1]!r} in the import {self._source!r}",
                    f"it is of {at.isoformat()}, and the event before it of {previous_at.isoformat()}",
                    "Import the events of an aggregate in the order of their times, before it records others. What is "
                    "stored stays stored.",
                )
            times[key] = at or max(now, previous_at)
            grouped.setdefault(key, []).append(NewEvent(new_event_id(), encoded, context))
        self._times = times
        placed = ((key, self._places.of(key), events) for key, events in grouped.items())
        return [Append(*key, place.position, place.version, tuple(events)) for key, place, events in placed]

    def _count_stored(self, writes: Sequence[Append], last: int) -> None:
        position = last - sum(len(write.events) for write in writes)
        for write in writes:
            count, key = len(write.events), (write.aggregate, write.aggregate_id)
            position += count
            previous = self._places.of(key)
            place = Place(position, previous.version + count, previous.imported + count, self._times[key])
            self._places.put(key, place)
            self._stored += count
        self._position = last

    async def _read_places(self, keys: set[Key]) -> None:
        ordered = sorted(keys)
        for start in range(0, len(ordered), _READ_AT_ONCE):
            await asyncio.gather(*map(self._read_place, ordered[start : start + _READ_AT_ONCE]))

    async def _read_place(self, key: Key) -> None:
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


async def _imported_events(events: Iterable[Imported] | AsyncIterable[Imported]) -> AsyncIterable[Imported]:
    with exceptions_only("What gives the events of an import"):
        if isinstance(events, AsyncIterable):
            async for imported in events:
                yield imported
        else:
            for imported in events:
                yield imported


class Place(NamedTuple):
    """The end of one aggregate's history, and how far its import is."""

    position: int = 0
    """Position of the last event; 0 for none."""
    version: int = 0
    imported: int = 0
    """Greatest ordinal that this import has stored, in any run; 0 for none."""
    at: datetime = NEVER
    """When the last event was recorded."""


class Places:
    """The places of all aggregates of one import, in some 50 bytes each beside its key."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, int]] = {}
        """Row number by aggregate and id; the garbage collector does not track dictionaries of text and numbers."""
        self._positions = array("Q")
        self._versions = array("Q")
        self._imported = array("Q")
        self._times = array("q")
        self._last_ordinals = array("Q")
        self._has_place = bytearray()
        self._earlier_runs: dict[Key, EarlierRun] = {}

    def next_ordinal(self, key: Key) -> int:
        """Count an event of an aggregate and return its ordinal, from 1."""
        row = self._row(key)
        self._last_ordinals[row] += 1
        return self._last_ordinals[row]

    def is_known(self, key: Key) -> bool:
        """Return whether the place of an aggregate was `put`."""
        return bool(self._has_place[self._row(key)])

    def of(self, key: Key) -> Place:
        """Return the place of an aggregate as it was `put` last; an empty place if it never was."""
        row = self._row(key)
        if not self._has_place[row]:
            return Place()
        at = _EPOCH + self._times[row] * _MICROSECOND
        return Place(self._positions[row], self._versions[row], self._imported[row], at)

    def put(self, key: Key, place: Place) -> None:
        """Store the place of an aggregate."""
        row = self._row(key)
        self._has_place[row] = 1
        self._positions[row], self._versions[row], self._imported[row], at = place
        self._times[row] = (at - _EPOCH) // _MICROSECOND

    def earlier(self, key: Key) -> EarlierRun:
        """Return the record of what an earlier run stored of an aggregate, to add to it; create it if there is none."""
        return self._earlier_runs.setdefault(key, EarlierRun())

    def stored_earlier(self, key: Key, ordinal: int) -> EarlierRun | None:
        """Return the record of what an earlier run stored of an aggregate, and drop it with the last ordinal in it."""
        earlier_run = self._earlier_runs.get(key)
        if earlier_run is not None and ordinal >= earlier_run.last:
            del self._earlier_runs[key]
        return earlier_run

    def _row(self, key: Key) -> int:
        aggregate, aggregate_id = key
        row = self._rows.setdefault(aggregate, {}).setdefault(aggregate_id, len(self._has_place))
        if row == len(self._has_place):
            for column in (self._positions, self._versions, self._imported, self._times, self._last_ordinals):
                column.append(0)
            self._has_place.append(0)
        return row


class EarlierRun:
    """Digests, times and positions of one aggregate's events that an earlier run stored, ordered by ordinal."""

    __slots__ = ("_digests", "_ordinals", "_times", "positions")

    def __init__(self) -> None:
        self._ordinals = array("Q")
        self._digests = array("Q")
        self._times = array("q")
        self.positions = array("Q")

    @property
    def last(self) -> int:
        """The greatest stored ordinal; 0 for none."""
        return self._ordinals[-1] if self._ordinals else 0

    def add(self, ordinal: int, record: RawRecord, body: bytes) -> None:
        """Add a stored event; `body` is its body as this release would write it."""
        self._ordinals.append(ordinal)
        self._digests.append(_digest(header(record[3], TYPE) or "", body, _metadata_in(record[3])))
        self._times.append((recorded_at(record) - _EPOCH) // _MICROSECOND)
        self.positions.append(record[0])

    def differs(
        self, ordinal: int, event: EncodedEvent, at: datetime | None, context: Sequence[tuple[str, str]]
    ) -> int | None:
        """Return the position of the stored event if it differs, 0 if it is gone, None if it is the same."""
        index = bisect_left(self._ordinals, ordinal)
        if index == len(self._ordinals) or self._ordinals[index] != ordinal:
            return 0
        is_same = self._digests[index] == _digest(event.type_name, event.body, _metadata_of(context))
        # Times are compared only if the import gives one.
        is_same &= at is None or self._times[index] == (at - _EPOCH) // _MICROSECOND
        return None if is_same else self.positions[index]


def as_written_now(catalog: Catalog, decoder: Decoder, record: RawRecord) -> bytes:
    """Return the body of a stored event as this release would write it, upcast if it is of an older schema.

    A body that cannot be decoded or is of a retired event is returned as it is.
    """
    try:
        event = decoder(record)
        return record[4] if event is None else catalog.encode(event.data).body
    except (CodecError, KeyError):
        return record[4]


def fields_that_differ(
    record: RawRecord, body: bytes, event: EncodedEvent, at: datetime | None, context: Sequence[tuple[str, str]]
) -> str:
    """Return what differs, by names of fields: `amount, its time`. Values are left out: they may be personal."""
    kind = header(record[3], TYPE) or ""
    if kind != event.type_name:
        return f"it is {kind}, and the import has {event.type_name}"
    differences = _differing_fields(body, event.body)
    if at is not None and at != recorded_at(record):
        differences.append("its time")
    if _metadata_in(record[3]) != _metadata_of(context):
        differences.append("its metadata")
    return ", ".join(differences)


def _differing_fields(stored: bytes, imported: bytes) -> list[str]:
    try:
        stored_value, imported_value = read_json(stored), read_json(imported)
    except ValueError:
        return ["its body"]
    if not isinstance(stored_value, dict) or not isinstance(imported_value, dict):
        return [] if dump_json(stored_value) == dump_json(imported_value) else ["its body"]
    stored_fields, imported_fields = cast("dict[str, Any]", stored_value), cast("dict[str, Any]", imported_value)
    # Values are compared as JSON, in which 1, 1.0 and true differ.
    return sorted(
        name
        for name in {*stored_fields, *imported_fields}
        if name not in stored_fields
        or name not in imported_fields
        or dump_json(stored_fields[name]) != dump_json(imported_fields[name])
    )


def _digest(type_name: str, body: bytes, context: Sequence[bytes]) -> int:
    hasher = blake2b(body, digest_size=8, key=b"import")
    hasher.update(b"\0".join((b"", type_name.encode(), *context)))
    return int.from_bytes(hasher.digest())


def _metadata_in(block: bytes) -> list[bytes]:
    """Return the metadata lines among the headers of a record, sorted."""
    if b"\r\nEj-C" not in block and b"\r\nEj-Meta-" not in block and b"\r\ntraceparent" not in block:
        return []
    return sorted(line for line in block.split(b"\r\n") if line.startswith(_METADATA_HEADERS))


def _metadata_of(headers: Sequence[tuple[str, str]]) -> list[bytes]:
    lines = (f"{name}: {value}".encode() for name, value in headers)
    return sorted(line for line in lines if line.startswith(_METADATA_HEADERS))
