"""The port between a repository and the log, and what a save may be. `memory` is its executable specification."""

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
"""Bytes of all other headers at the most: id, expectation, schema, version, and those of a batch."""


@dataclass(frozen=True, slots=True)
class NewEvent:
    """One event that is to be stored, encoded and named."""

    event_id: str
    """UUIDv7; the same on every try."""
    encoded: EncodedEvent
    context: tuple[tuple[str, str], ...] = ()
    """The headers after `Ej-Version`."""


@dataclass(frozen=True, slots=True)
class Append:
    """What one aggregate gets in a save."""

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
    """Appends atomically, reads one aggregate in order, and never says stored for what is not.

    What reads waits for an answer as long as a save, and raises `StoreUnavailable`, `LogUnusable` and `Forbidden`.
    """

    @property
    def identity(self) -> str:
        """UUID of the log when it was looked at last; empty when nobody has, or may."""
        ...

    @property
    def is_certain(self) -> bool:
        """Whether what is remembered of the log may be relied upon: it is still this one. Costs nothing."""
        ...

    @property
    def loss(self) -> str:
        """What was gone from the log when it was looked at last, in words; empty for a whole one."""
        ...

    async def at(self, position: int) -> RawRecord | None:
        """The record at a position as the leader knows it, None for none."""
        ...

    async def confirm(self) -> bool:
        """`is_certain`, after a look at the log if need be; False where that cannot be known. Raises `LogUnusable`."""
        ...

    async def append(self, writes: Sequence[Append]) -> int:
        """Store all of it or nothing; the position of the last event (they are contiguous, in the order given).

        Raises `ConcurrencyConflict`, `Refused`, `Forbidden`, `LogDrifted` (nothing is stored) and `OutcomeUnknown`.
        """
        ...

    async def history(
        self, aggregate: str, aggregate_id: str, *, after: int = 0, most: int | None = None
    ) -> list[RawRecord]:
        """One aggregate's records with a position above `after`, in order; may lag behind the leader on a replica.

        The first `most` of them, where that is given: nothing more is asked for.
        """
        ...

    def pages(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        """As `history`, in pages as they come."""
        ...

    async def last(self, aggregate: str, aggregate_id: str) -> int:
        """Position of one aggregate's last event as the leader knows it, 0 for none."""
        ...

    async def tail(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        """One aggregate's last record as the leader knows it, None for none."""
        ...

    async def newest(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        """One aggregate's last record, None for none; may lag behind the leader on a replica."""
        ...

    async def ends(self, aggregate: str) -> tuple[int, int]:
        """Positions of the first and the last event of all aggregates of a type as the leader knows them; zeros for
        none."""
        ...

    def pages_of(self, aggregate: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        """As `pages`, of all aggregates of a type, in the order of the log."""
        ...

    async def position_at(self, at: datetime) -> int:
        """Position of the first record that the log got at or after a time; one beyond the last when there is none."""
        ...

    async def voids(self) -> dict[int, str]:
        """Position → reason of the records that the log declares void, from the leader."""
        ...

    async def state(self) -> LogState:
        """Identity and ends of the log, from the leader."""
        ...

    async def some(self, start: int, most: int) -> list[RawRecord]:
        """The first records, `most` of them, from a position on, in order; may lag behind the leader on a replica."""
        ...

    def records(self, *, start: int = 1, until: int | None = None, follow: bool = False) -> AsyncIterator[RawRecord]:
        """All records from a position on, in order; ends at the tail unless `follow`. In bulk: `reader.ranges`.

        Ends behind the position `until`, where that is given: with a follower, once the log has come so far.
        """
        ...


def event_headers(write: Append, index: int) -> list[tuple[str, str]]:
    """All headers of one event of a write, in the order of the wire format."""
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
    """Raise `Refused` when the log could not take this, whatever it holds.

    Checked before anything is sent: one oversize frame closes the whole connection.
    """
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
    """Bytes of one event on the wire, at the most."""
    context = sum([len(name) + len(value) + 4 for name, value in new.context])
    return len(new.encoded.body) + len(new.encoded.type_name) + _HEADERS_MAX + context
