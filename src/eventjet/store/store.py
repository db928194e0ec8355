"""The port between a repository and the log. `memory` is its executable specification."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from eventjet.codec.catalog import EncodedEvent
from eventjet.codec.envelope import EXPECTED, MSG_ID, SCHEMA, TYPE, VERSION, RawRecord


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
    """Where the log stands."""

    identity: str
    """UUID of the log, from the stream's metadata."""
    first: int
    last: int


class EventStore(Protocol):
    """Appends atomically, reads one aggregate in order, and never says stored for what is not."""

    async def append(self, writes: Sequence[Append]) -> int:
        """Store all of it or nothing; the position of the last event (they are contiguous, in the order given).

        Raises `ConcurrencyConflict`, `Refused`, `Forbidden` (nothing is stored) and `OutcomeUnknown`.
        """
        ...

    async def history(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> list[RawRecord]:
        """One aggregate's records with a position above `after`, in order; may lag behind the leader on a replica."""
        ...

    def pages(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        """As `history`, in pages as they come."""
        ...

    async def last(self, aggregate: str, aggregate_id: str) -> int:
        """Position of one aggregate's last event as the leader knows it, 0 for none."""
        ...

    async def newest(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        """One aggregate's last record, None for none; may lag behind the leader on a replica."""
        ...

    async def position_at(self, at: datetime) -> int:
        """Position of the first record recorded at or after a time; one beyond the last when there is none."""
        ...

    async def state(self) -> LogState:
        """Identity and ends of the log, from the leader."""
        ...

    def records(self, *, start: int = 1, follow: bool = False) -> AsyncIterator[RawRecord]:
        """All records from a position on, in order; ends at the tail unless `follow`."""
        ...


def event_headers(write: Append, index: int) -> list[tuple[str, str]]:
    """All headers of one event of a write, in the order of the wire format."""
    new = write.events[index]
    pairs = [(MSG_ID, new.event_id)]
    if index == 0:
        pairs.append((EXPECTED, str(write.expected)))
    pairs += [
        (TYPE, new.encoded.type_name),
        (SCHEMA, str(new.encoded.schema)),
        (VERSION, str(write.version + index + 1)),
    ]
    pairs.extend(new.context)
    return pairs
