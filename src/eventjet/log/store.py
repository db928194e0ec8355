"""`EventStore`, the port between commands and the log; `eventjet.log.memory` is its executable specification."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, cast

from eventjet.codec.catalog import EncodedEvent
from eventjet.codec.headers import EXPECTED, MSG_ID, SCHEMA, TYPE, VERSION, RawRecord
from eventjet.codec.json import dump_json, read_json
from eventjet.codec.subjects import SERVER_MESSAGE_MAX, subject_of
from eventjet.errors import Refused

BATCH_MAX = 1_000
"""Messages in one atomic batch at most (ADR-50)."""
LAG_PAUSES_S = (0.01, 0.05, 0.2, 0.5, 1.0, 1.0, 1.0, 1.0, 0.0)
"""Pauses, in seconds, after each read of a replica that lags behind the leader; then the read gives up."""
command_deadline: ContextVar[float] = ContextVar("eventjet_command_deadline", default=math.inf)
"""When the command of this task ends, in seconds of the monotonic clock: its reads and its save end by then."""
_HEADERS_MAX = 400
"""Bytes of an event's headers at most, without context and type: id, expectation, schema, version, batch."""


class NewEvent(NamedTuple):
    """An encoded event that is to be stored, with its id."""

    event_id: str
    """UUIDv7; the same on every try of the save."""
    encoded: EncodedEvent
    context: str = ""
    """The header lines after `Ej-Version`."""


@dataclass(frozen=True, slots=True)
class Append:
    """The events to append to one aggregate, and the last event that the aggregate is expected to have."""

    aggregate: str
    aggregate_id: str
    expected: int
    """Expected position of the aggregate's last event, 0 for none."""
    version: int
    """Version of that event, 0 for none."""
    events: tuple[NewEvent, ...]


@dataclass(frozen=True, slots=True)
class LogState:
    """The identity and the ends of the log: the result of `Jet.log`."""

    identity: str
    """UUID of the log, from the stream's metadata."""
    first: int
    """Position of the first record; `last` + 1 in an empty log."""
    last: int
    """Position of the last record; 0 in an empty log."""


class ObjectStore(Protocol):
    """Large bodies, each under its digest (`sha256:…`)."""

    name: str
    """The name of the store, for messages."""

    async def claim(self, digest: str, size: int) -> bool:
        """Return whether the store has a body whole; a sweep then leaves it for the event that will refer to it.

        Raises `Refused` if its size is another than that of the reference.
        """
        ...

    async def put(self, content: AsyncIterator[bytes], digest: str = "") -> tuple[str, int]:
        """Store and claim a body, and return (digest, size); raises `StreamFull`, and `Refused` for another digest."""
        ...

    async def size(self, digest: str) -> int | None:
        """Return the size of a body in bytes; None if the store does not have it."""
        ...

    def chunks(self, digest: str, size: int | None = None) -> AsyncIterator[bytes]:
        """Yield a body in chunks, the last once all of them have the digest.

        Raises `BlobMissing`, `BlobDamaged`, and `Refused` before the first if `size` is not that of the body.
        """
        ...


class EventStore(Protocol):
    """The log of an app: events are stored atomically, and read in order. Only stored events are acknowledged.

    Reads wait for an answer as long as a save does, and raise `StoreUnavailable`, `LogUnusable` and `Forbidden`. Reads
    from the leader are exact; other reads may lag behind it on a replica.
    """

    save_timeout_s: float = math.inf
    """How long a command may take from its call on, in seconds; infinite for a log that answers at once."""
    objects: ObjectStore
    """The content of the blobs in its events."""

    @property
    def identity(self) -> str:
        """UUID of the log when its stream was last looked at; empty before the first look, or without permission."""
        ...

    @property
    def is_confirmed(self) -> bool:
        """Whether the stream is known, without a request, to be the same log, so that what is remembered counts."""
        ...

    @property
    def may_lag(self) -> bool:
        """Whether reads that are not from the leader may lag: the log has replicas, or may have."""
        return False

    def continuing(self, log: str, position: int) -> str:
        """Return the identity of this log if a position of the log `log` is its own, else `log`."""
        del position
        return log

    @property
    def missing_range(self) -> str:
        """Which positions were missing from the log at the last look, in words; empty for a complete log."""
        ...

    async def at(self, position: int) -> RawRecord | None:
        """Return the record at a position, from the leader; None if there is none."""
        ...

    async def confirm(self) -> bool:
        """Return `is_confirmed`, after a look if necessary; False if the look fails. Raises `LogUnusable`."""
        ...

    async def append(self, writes: Sequence[Append]) -> int:
        """Store all events or none, and return the position of the last event.

        The events get contiguous positions, in the order of `writes`. Raises `ConcurrencyConflict`, `Refused`,
        `Forbidden`, `LogDrifted`, `StoreUnavailable` if the command ends before anything is sent (nothing is
        stored), and `OutcomeUnknown`.
        """
        ...

    async def history(
        self, aggregate: str, aggregate_id: str, *, after: int = 0, limit: int | None = None
    ) -> list[RawRecord]:
        """Return one aggregate's records after a position, in order, at most `limit` of them; may lag."""
        ...

    def pages(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        """Yield one aggregate's records after a position, in order, in pages as they arrive; may lag."""
        ...

    async def last(self, aggregate: str, aggregate_id: str) -> int:
        """Return the position of one aggregate's last event, from the leader; 0 if it has none."""
        ...

    async def tail(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        """Return one aggregate's last record, from the leader; None if it has none."""
        ...

    async def newest(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        """Return one aggregate's last record; None if it has none. May lag."""
        ...

    async def newest_of(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], RawRecord]:
        """Return the last record of each of up to 1,000 (aggregate, id) that have one, in one request. May lag."""
        ...

    async def ends(self, aggregate: str) -> tuple[int, int]:
        """Return the first and the last position of an aggregate type, from the leader; (0, 0) without any event."""
        ...

    def pages_of(self, aggregate: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        """Yield the records of an aggregate type after a position, in the order of the log, in pages; may lag."""
        ...

    async def position_at(self, at: datetime) -> int:
        """Return the position of the first record logged at or after a time; last position + 1 if there is none."""
        ...

    async def skip_markers(self) -> dict[int, str]:
        """Return the position and reason of each record that a skip marker declares skipped, from the leader."""
        ...

    async def state(self) -> LogState:
        """Return the identity and the ends of the log, from the leader."""
        ...

    async def records_from(self, start: int, limit: int) -> list[RawRecord]:
        """Return up to `limit` records from a position on, in order; may lag."""
        ...

    def records(self, *, start: int = 1, until: int | None = None, follow: bool = False) -> AsyncGenerator[RawRecord]:
        """Yield all records from a position on, in order, up to `until` or to the end that the log has now.

        With `follow`, it waits for new records at the end of the log, and ends only once the log has reached `until`.
        For many records use `eventjet.jetstream.reader.read_range`.
        """
        ...


def changed_content(digest: str, other: str) -> Refused:
    """Return the error for content that has not the digest that its blob says."""
    return Refused(
        f"The content of the body {digest}",
        f"it has the digest {other} now: what it is read from has changed since the blob was made",
        "Make the blob again; nothing refers to the old one.",
    )


def wrong_size(digest: str, stated: int | None, size: int) -> Refused:
    """Return the error for a reference whose size is not that of the body."""
    return Refused(
        f"The body {digest}",
        f"the reference says that it has {stated:,} bytes, and it has {size:,}",
        "Refer to it with the `Blob` that `put`, `Blob.of` or `Blob.from_file` returned.",
    )


def event_lines(write: Append, index: int) -> str:
    """Return the header lines of the event at `index` in a write, in the order of the wire format."""
    event = write.events[index]
    expected = f"{EXPECTED}: {write.expected}\r\n" if index == 0 else ""
    return (
        f"{MSG_ID}: {event.event_id}\r\n{expected}{TYPE}: {event.encoded.type_name}\r\n"
        f"{SCHEMA}: {event.encoded.schema}\r\n{VERSION}: {write.version + index + 1}\r\n{event.context}"
    )


def check_save(app: str, writes: Sequence[Append]) -> None:
    """Raise `Refused` for a save that no log can store; too large a message would end the whole connection."""
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
        for event in write.events:
            size = len(subject) + message_size(event)
            if size > SERVER_MESSAGE_MAX:
                path, bytes_of_field = largest_field(event.encoded.body)
                raise Refused(
                    f"{event.encoded.type_name} of {size:,} bytes",
                    f"a message holds {SERVER_MESSAGE_MAX:,}, headers included"
                    + (f", and its field {path} has {bytes_of_field:,} of them" if path else ""),
                    f"Make {path or 'what is large'} a `Blob`, whose content is stored beside the log, in chunks "
                    "(docs/how-to/large-bodies.md).",
                )


def largest_field(body: bytes) -> tuple[str, int]:
    """Return the path of the field that makes a body large, and its bytes as JSON; the path is empty if none does.

    It is the innermost field with more than half of the bytes of the field around it, such as `pages[2].scan`.
    """
    try:
        value: Any = read_json(body)
    except ValueError:
        return "", 0
    path, size = "", len(body)
    while isinstance(value, dict | list) and value:
        is_list = isinstance(value, list)
        items = enumerate(cast("list[Any]", value)) if is_list else cast("dict[str, Any]", value).items()
        inner_size, key, inner = max(((len(dump_json(item)), key, item) for key, item in items), key=itemgetter(0))
        if inner_size * 2 < size:
            break
        path += f"[{key}]" if is_list else f".{key}" if path else str(key)
        value, size = inner, inner_size
    return path, size if path else 0


def message_size(event: NewEvent) -> int:
    """Return how many bytes one event has on the wire at most, without its subject."""
    return len(event.encoded.body) + len(event.encoded.type_name) + len(event.context) + _HEADERS_MAX
