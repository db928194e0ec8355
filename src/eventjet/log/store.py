"""The port between commands and the log, and what a save may be. `memory` is its executable specification."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from eventjet.codec.catalog import EncodedEvent
from eventjet.codec.headers import EXPECTED, MSG_ID, SCHEMA, TYPE, VERSION, RawRecord
from eventjet.codec.subjects import SERVER_MESSAGE_MAX, subject_of
from eventjet.errors import Refused

BATCH_MAX = 1_000
"""Messages in one atomic batch (ADR-50)."""
_HEADERS_MAX = 400
"""Bytes of all other headers at most: id, expectation, schema, version, and those of a batch."""


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event to be stored, encoded and named."""

    event_id: str
    """UUIDv7; the same on every try."""
    encoded: EncodedEvent
    context: tuple[tuple[str, str], ...] = ()
    """The headers after `Ej-Version`."""


@dataclass(frozen=True, slots=True)
class Append:
    """The events to append to one aggregate, and where they expect it to be."""

    aggregate: str
    aggregate_id: str
    expected: int
    """Position of its last event, 0 for none."""
    version: int
    """Version of its last event, 0 for none."""
    events: tuple[NewEvent, ...]


@dataclass(frozen=True, slots=True)
class LogState:
    """Where the log stands: `Jet.log`."""

    identity: str
    """UUID of the log, from the stream's metadata."""
    first: int
    last: int


class EventStore(Protocol):
    """Store events atomically and read one aggregate in order. Only stored events are acknowledged.

    Reads wait for an answer as long as a save does, and raise `StoreUnavailable`, `LogUnusable` and `Forbidden`. Those
    from the leader are exact; the others may lag behind it on a replica.
    """

    @property
    def identity(self) -> str:
        """UUID of the log at the last look; empty when nobody has looked, or may."""
        ...

    @property
    def is_confirmed(self) -> bool:
        """Whether what is remembered of the log may be relied on: it is still this one. Costs nothing."""
        ...

    @property
    def missing_range(self) -> str:
        """What was gone from the log at the last look, in words; empty for a complete one."""
        ...

    async def at(self, position: int) -> RawRecord | None:
        """Return the record at a position, from the leader; None for none."""
        ...

    async def confirm(self) -> bool:
        """Return `is_confirmed`, after a look at the log if need be; False where that cannot be known.

        Raises `LogUnusable`.
        """
        ...

    async def append(self, writes: Sequence[Append]) -> int:
        """Store all of it or nothing; return the position of the last event. Positions are contiguous, in this order.

        Raises `ConcurrencyConflict`, `Refused`, `Forbidden`, `LogDrifted` (nothing is stored) and `OutcomeUnknown`.
        """
        ...

    async def history(
        self, aggregate: str, aggregate_id: str, *, after: int = 0, most: int | None = None
    ) -> list[RawRecord]:
        """Return one aggregate's records after a position, in order, `most` of them; may lag."""
        ...

    def pages(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        """Yield one aggregate's records after a position, in order, in pages as they come; may lag."""
        ...

    async def last(self, aggregate: str, aggregate_id: str) -> int:
        """Return the position of one aggregate's last event, from the leader; 0 for none."""
        ...

    async def tail(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        """Return one aggregate's last record, from the leader; None for none."""
        ...

    async def newest(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        """Return one aggregate's last record, None for none; may lag."""
        ...

    async def ends(self, aggregate: str) -> tuple[int, int]:
        """Return the first and the last position of an aggregate type, from the leader; zeros for none."""
        ...

    def pages_of(self, aggregate: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        """Yield the records of an aggregate type after a position, in the order of the log, in pages; may lag."""
        ...

    async def position_at(self, at: datetime) -> int:
        """Return the position of the first record logged at or after a time; one beyond the last when there is none."""
        ...

    async def skip_markers(self) -> dict[int, str]:
        """Return position and reason of the records that the log declares skipped, from the leader."""
        ...

    async def state(self) -> LogState:
        """Return identity and ends of the log, from the leader."""
        ...

    async def some(self, start: int, most: int) -> list[RawRecord]:
        """Return the first `most` records from a position on, in order; may lag."""
        ...

    def records(self, *, start: int = 1, until: int | None = None, follow: bool = False) -> AsyncIterator[RawRecord]:
        """Yield all records from a position on, in order, up to `until` or to the tail; may lag.

        With `follow` it waits at the tail, and ends only once the log has come to `until`. In bulk use
        `eventjet.jetstream.reader.read_range`.
        """
        ...


def event_headers(write: Append, index: int) -> list[tuple[str, str]]:
    """Return all headers of one event of a write, in the order of the wire format."""
    new = write.events[index]
    return [
        (MSG_ID, new.event_id),
        *([(EXPECTED, str(write.expected))] if index == 0 else ()),
        (TYPE, new.encoded.type_name),
        (SCHEMA, str(new.encoded.schema)),
        (VERSION, str(write.version + index + 1)),
        *new.context,
    ]


def check_save(app: str, writes: Sequence[Append]) -> None:
    """Raise `Refused` for a save that no log could take. One oversize frame would close the whole connection."""
    subjects = [subject_of(app, write.aggregate, write.aggregate_id) for write in writes]
    if not writes:
        raise Refused("A save", "it records nothing", "Give it at least one event.")
    if len(writes) > 1 and len(set(subjects)) < len(subjects):
        raise Refused("A save", "it names one aggregate twice", "Give each aggregate one list of events.")
    count = sum([len(write.events) for write in writes])
    if count > BATCH_MAX:
        raise Refused(f"A save of {count} events", f"{BATCH_MAX} is the limit", "Record fewer at once.")
    for subject, write in zip(subjects, writes, strict=True):
        if not write.events:
            raise Refused("A save", "it records nothing for one of its aggregates", "Leave that aggregate out.")
        for new in write.events:
            size = len(subject) + message_size(new)
            if size > SERVER_MESSAGE_MAX:
                raise Refused(
                    f"{new.encoded.type_name} of {size:,} bytes",
                    f"a message holds {SERVER_MESSAGE_MAX:,}, headers included",
                    "Keep large content elsewhere and record where it is.",
                )


def message_size(new: NewEvent) -> int:
    """Return the bytes of one event on the wire, at most."""
    context = sum([len(name) + len(value) + 4 for name, value in new.context])
    return len(new.encoded.body) + len(new.encoded.type_name) + _HEADERS_MAX + context
