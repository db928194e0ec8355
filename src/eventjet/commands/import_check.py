"""What an import finds in the log of an earlier run of itself, and whether that is what it would store now.

Read with the history that tells how far the earlier run came, so nothing more is asked of the server. Of each event a
digest is kept until the import comes to it (32 bytes an event); only the few that a report describes are read again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, cast

from eventjet.codec.catalog import Catalog, EncodedEvent
from eventjet.codec.headers import CAUSATION, CORRELATION, META, TRACEPARENT, TYPE, RawRecord, header, recorded_at
from eventjet.codec.json import dump_json, read_json
from eventjet.codec.records import Decoder
from eventjet.errors import CodecError

_CONTEXT = tuple(f"{name}".encode() for name in (CORRELATION, CAUSATION, TRACEPARENT, META))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class EarlierRun:
    """The events of one aggregate that an earlier run stored, in the order of their ordinals."""

    __slots__ = ("_digests", "_ordinals", "_times", "positions")

    def __init__(self) -> None:
        self._ordinals = array("Q")
        self._digests = array("Q")
        self._times = array("q")
        self.positions = array("Q")

    @property
    def last(self) -> int:
        """The greatest ordinal; 0 for none."""
        return self._ordinals[-1] if self._ordinals else 0

    def add(self, ordinal: int, record: RawRecord, body: bytes) -> None:
        """`body` as this release would write it."""
        self._ordinals.append(ordinal)
        self._digests.append(_digest(header(record[3], TYPE) or "", body, _context_in(record[3])))
        self._times.append((recorded_at(record) - _EPOCH) // _MICROSECOND)
        self.positions.append(record[0])

    def differs(
        self, ordinal: int, event: EncodedEvent, at: datetime | None, context: Sequence[tuple[str, str]]
    ) -> int | None:
        """The position of an event that is stored otherwise, 0 where it is gone; None for one that is the same."""
        index = bisect_left(self._ordinals, ordinal)
        if index == len(self._ordinals) or self._ordinals[index] != ordinal:
            return 0
        is_same = self._digests[index] == _digest(event.type_name, event.body, _context_of(context))
        # An import that tells no time says nothing about it.
        is_same &= at is None or self._times[index] == (at - _EPOCH) // _MICROSECOND
        return None if is_same else self.positions[index]


def as_written_now(catalog: Catalog, decoder: Decoder, record: RawRecord) -> bytes:
    """The body of a stored event as this release would write it, upcast where it is older; as it is where none can."""
    try:
        found = decoder(record)
        return record[4] if found is None else catalog.encode(found.data).body
    except (CodecError, KeyError):
        return record[4]


def fields_that_differ(
    record: RawRecord, body: bytes, event: EncodedEvent, at: datetime | None, context: Sequence[tuple[str, str]]
) -> str:
    """What is stored otherwise, by its name: `amount, its time`. No values, which may be personal."""
    kind = header(record[3], TYPE) or ""
    if kind != event.type_name:
        return f"it is {kind}, and the import has {event.type_name}"
    found = _fields(body, event.body)
    if at is not None and at != recorded_at(record):
        found.append("its time")
    if _context_in(record[3]) != _context_of(context):
        found.append("its metadata")
    return ", ".join(found)


def _fields(stored: bytes, given: bytes) -> list[str]:
    try:
        one, other = read_json(stored), read_json(given)
    except ValueError:
        return ["its body"]
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [] if dump_json(one) == dump_json(other) else ["its body"]
    before, now = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
    # As JSON, in which 1, 1.0 and true differ.
    return sorted(
        name
        for name in {*before, *now}
        if name not in before or name not in now or dump_json(before[name]) != dump_json(now[name])
    )


def _digest(type_name: str, body: bytes, context: Sequence[bytes]) -> int:
    made = blake2b(body, digest_size=8, key=b"import")
    made.update(b"\0".join((b"", type_name.encode(), *context)))
    return int.from_bytes(made.digest())


def _context_in(block: bytes) -> list[bytes]:
    """The metadata among the headers of a record, in one order."""
    if b"\r\nEj-C" not in block and b"\r\nEj-Meta-" not in block and b"\r\ntraceparent" not in block:
        return []
    return sorted(line for line in block.split(b"\r\n") if line.startswith(_CONTEXT))


def _context_of(headers: Sequence[tuple[str, str]]) -> list[bytes]:
    lines = (f"{name}: {value}".encode() for name, value in headers)
    return sorted(line for line in lines if line.startswith(_CONTEXT))
