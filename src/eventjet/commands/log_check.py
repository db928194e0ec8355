"""Check, within bounds, whether this release can read a log: decode events of each type and schema, fold histories.

The server keeps no index of event types, so a long log is sampled: its beginning, its end, and places evenly between.
The result says how much was read. `rebuild/auditing.py` reads the whole log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from eventjet.codec.headers import SCHEMA, TYPE, RawRecord, header, number_of, skipped_by
from eventjet.codec.reasons import faults_of
from eventjet.codec.records import Decoder
from eventjet.codec.subjects import entity_of
from eventjet.domain.history import FoldedState, fold_history
from eventjet.errors import CodecError, DefinitionError, EventjetError, StoreUnavailable, UndecodableEvent
from eventjet.log.store import EventStore
from eventjet.projections.app_ref import Application

WHOLE_MAX = 20_000
"""A log of at most so many positions is read completely."""
ENDS = 1_000
"""Events that are read at the beginning, and at the end, of a longer log."""
PLACES = 2_000
"""Events that are read between them, one at a time."""
HISTORIES_MAX = 500
EVENTS_MAX = 10_000
"""Events of one history that are folded; the rest of a longer history is not."""
FAULTS_MAX = 100
KINDS_MAX = 1_000
_AT_ONCE = 32
_NAME_MAX = 100


@dataclass(slots=True)
class EventTypeRead:
    """One event type at one schema, and where it was read."""

    type: str
    schema: int
    first: int
    """Position of the first event that was read."""
    last: int
    events: int = 0
    folded: int = 0
    """Histories that were folded because they have such an event."""


@dataclass(slots=True)
class LogFault:
    """Events that this release cannot read for one reason, and the first of them."""

    type: str
    schema: int
    subject: str
    position: int
    reason: str
    """Why the events cannot be read, with the names of the fields."""
    count: int = 1


@dataclass(slots=True)
class LogCheck:
    """The result of a check: how much was read, which events there are, and which cannot be read."""

    stream: str
    first: int
    last: int
    is_whole: bool
    """Whether every event of the log was read."""
    events: int = 0
    """Events that were read."""
    histories: int = 0
    """Histories that were folded."""
    event_types: list[EventTypeRead] = field(default_factory=list[EventTypeRead])
    faults: list[LogFault] = field(default_factory=list[LogFault])

    @property
    def readable(self) -> bool:
        """Whether this release can read every event of the check."""
        return not self.faults


async def check_log(app: Application, store: EventStore, histories: int) -> LogCheck:
    """Read a log within this module's limits; fold up to `histories` histories of each event type and schema."""
    state = await store.state()
    result = LogCheck(app.name, state.first, state.last, state.last - state.first < WHOLE_MAX)
    check = _Check(app, store, await store.skip_markers(), histories, result)
    read = _records if result.is_whole else _sample
    async for record in read(store, state.first, state.last):
        check.take(record)
    await check.fold()
    result.event_types.sort(key=lambda kind: (kind.type, kind.schema))
    return result


async def _records(store: EventStore, first: int, last: int) -> AsyncIterator[RawRecord]:
    if first > last:
        return
    async for record in store.records(start=first):
        if record[0] > last:
            return
        yield record


async def _sample(store: EventStore, first: int, last: int) -> AsyncIterator[RawRecord]:
    async for record in _records(store, first, first + ENDS - 1):
        yield record
    start, end = first + ENDS, last - ENDS
    positions = [start + (end - start) * number // (PLACES - 1) for number in range(PLACES)]
    for offset in range(0, PLACES, _AT_ONCE):
        for record in await asyncio.gather(*map(store.at, positions[offset : offset + _AT_ONCE])):
            if record is not None:
                yield record
    async for record in _records(store, last - ENDS + 1, last):
        yield record


class _Check:
    def __init__(
        self, app: Application, store: EventStore, skipped: dict[int, str], histories: int, result: LogCheck
    ) -> None:
        self._result = result
        self._event_types: dict[tuple[str, int], EventTypeRead] = {}
        self._faults: dict[tuple[str, int, str], LogFault] = {}
        self._store = store
        self._skipped = skipped
        self._histories_limit = histories
        self._decoder = Decoder(app.catalog.of_log(skipped))
        self._classes: dict[str, Any] = {info.name: cls for cls, info in app.aggregates.items()}
        self._subjects: dict[bytes, dict[tuple[str, int], None]] = {}
        """Subjects whose histories are to be folded, and for which event types."""

    def take(self, record: RawRecord) -> None:
        """Decode a record, and select its history for folding while few histories of its event type are selected."""
        position, _, subject, _, _ = record
        if position in self._skipped or skipped_by(subject) is not None:
            return
        self._result.events += 1
        key = _kind_of(record)
        if key not in self._event_types and len(self._event_types) >= KINDS_MAX:
            key = ("…", 0)
        if key not in self._event_types:
            self._event_types[key] = EventTypeRead(*key, position, position)
            self._result.event_types.append(self._event_types[key])
        kind = self._event_types[key]
        kind.events += 1
        kind.first, kind.last = min(kind.first, position), max(kind.last, position)
        try:
            event = self._decoder(record)
        except CodecError as error:
            self._add_fault(record, _reason_of(error))
            return
        if event is not None and kind.folded < self._histories_limit:
            keys = self._subjects.setdefault(subject, {})
            if key not in keys:
                keys[key] = None
                kind.folded += 1

    async def fold(self) -> None:
        """Fold the selected histories, at most `HISTORIES_MAX`."""
        for subject in list(self._subjects)[HISTORIES_MAX:]:
            for key in self._subjects.pop(subject):
                self._event_types[key].folded -= 1
        for subject in self._subjects:
            aggregate, aggregate_id = entity_of(subject)
            cls = self._classes.get(aggregate)
            if cls is not None:
                self._result.histories += 1
                await self._fold(cls, aggregate, aggregate_id)

    async def _fold(self, cls: Any, aggregate: str, aggregate_id: str) -> None:
        folded: FoldedState[Any] = FoldedState(cls(), 0, 0)
        count = 0
        async for page in self._store.pages(aggregate, aggregate_id):
            for record in page[: EVENTS_MAX - count]:
                try:
                    folded = fold_history(folded, [self._decoder.link(record)], record[2].decode(), "")
                except StoreUnavailable:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever stands in the way of reading it is to be told
                    self._add_fault(record, _reason_of(error))
                    return
            count += len(page)
            if count >= EVENTS_MAX:
                return

    def _add_fault(self, record: RawRecord, reason: str) -> None:
        kind = _kind_of(record)
        fault = self._faults.get((*kind, reason))
        if fault is None and len(self._faults) < FAULTS_MAX:
            subject = record[2].decode("utf-8", "replace")
            self._faults[*kind, reason] = LogFault(*kind, subject, record[0], reason)
            self._result.faults.append(self._faults[*kind, reason])
        elif fault is not None and fault.position != record[0]:
            fault.count += 1


def _kind_of(record: RawRecord) -> tuple[str, int]:
    return (header(record[3], TYPE) or "?")[:_NAME_MAX], number_of(record[3], SCHEMA) or 0


def _reason_of(error: Exception) -> str:
    if isinstance(error, UndecodableEvent):
        return f"it cannot be decoded: {error.reason}"
    if isinstance(error, CodecError):
        return "this app declares no such event and schema"
    if isinstance(error, EventjetError):
        return "; ".join(error.faults) if isinstance(error, DefinitionError) else str(error)
    return f"folding it raised {type(error).__name__}: {faults_of(error)}".rstrip(": ")
