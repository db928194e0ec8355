"""The targets of fuzzing: for each kind of foreign bytes, inputs near the real ones, and what must hold.

A law returns nothing and lets through what the code promises to raise; anything else is a finding. Inputs that were
findings once are in `findings.py`, and every run of the tests tries them again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import field
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import orjson
from hypothesis import strategies as st

from eventjet import aggregate, event
from eventjet.archive.reading import dump_segment, load_archive
from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import context_headers, header, header_block, metadata_of, number_of, recorded_at
from eventjet.codec.records import Decoder
from eventjet.codec.subjects import entity_of, entity_shown
from eventjet.domain.history import Commands, FoldedState
from eventjet.domain.identity import decode_id, encode_id
from eventjet.domain.recorded import Metadata
from eventjet.errors import ArchiveBroken, CodecError, EventjetError, Refused, UnencodableEvent, UsageError
from eventjet.jet import position_in
from eventjet.jetstream.api import answer_in as api_answer_in
from eventjet.jetstream.api import direct_record, end_of_page
from eventjet.jetstream.reader import parse_ack
from eventjet.log.outcome import answer_in
from eventjet.log.snapshots import SnapshotCodec
from eventjet.nats.protocol import FrameParser, nobody_listens, server_fault, status_of
from tests.unit.test_frames import CONTROLS, MESSAGES, printed
from tests.unit.test_manifest import SEALED


class Target(NamedTuple):
    """A kind of input."""

    name: str
    inputs: st.SearchStrategy[Any]
    law: Callable[[Any], None]


@event("fuzz.happened")
class Happened:
    """An event with a field of every kind that a body can have."""

    text: str
    number: int = 0
    share: float = 0.0
    amount: Decimal = Decimal(0)
    at: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    day: date = date(2026, 1, 1)
    named: UUID | None = None
    raw: bytes = b""
    many: tuple[int | str, ...] = ()
    by_name: dict[str, Decimal] = field(default_factory=dict[str, Decimal])


@aggregate("fuzz", snapshot_every=10)
class Fuzzed:
    count: int = 0
    total: Decimal = Decimal(0)
    names: tuple[str, ...] = ()

    def evolve(self, event: Happened) -> Fuzzed:
        return self


CATALOG = Catalog([Happened])
DECODER = Decoder(CATALOG)
SNAPSHOTS = SnapshotCodec[Fuzzed](Fuzzed)

ODD = st.sampled_from(
    [
        b"", b"\r\n", b"\r\n\r\n", b": ", b"%", b"%zz", b"=", b"=4", b"\x00", b"\xff\xfe", b"-1", b"+1", b"1_0", b" 1",
        b"9" * 30, b"9" * 5_000, b"1e999", b"-0", b"NaN", b"\xd9\xa3", b"null", b"[" * 3_000, b"{\"a\":" * 3_000,
        b"0001-01-01T00:00:00+23:59", b"9999-12-31T23:59:59-23:59", b"NATS/1.0", b"Nats-Stream: x\r\n",
        b"2026-01-01T24:00:00Z", b"1969-12-31T23:59:59Z", b"Ej-Type: ", b"Ej-Version: ", b"Ej-Encoding: zip\r\n",
    ]
)  # fmt: skip
"""Bytes that readers stumble over."""


@st.composite
def mutated(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Draw bytes near well-formed ones: some cut out, some inserted, some doubled."""
    data = draw(whole)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 12)))
        inserted = draw(st.one_of(ODD, st.binary(max_size=8), st.just(data[start : end + 8])))
        data = data[:start] + inserted + data[end:]
    return data


PAIRS = st.sampled_from(
    [
        ("Nats-Msg-Id", "0192"), ("Nats-Expected-Last-Subject-Sequence", "3"), ("Ej-Type", "fuzz.happened"),
        ("Ej-Schema", "1"), ("Ej-Version", "2"), ("Ej-Command", "c%201"), ("Ej-Correlation", "x"),
        ("traceparent", "00-1-2-3"), ("Ej-Meta-actor", "a"), ("Ej-Meta-x-y", "%C3%A4"),
        ("Ej-Recorded-At", "2026-01-01T00:00:00+01:00"), ("Ej-Encoding", "json"), ("Other", "1"),
    ]
)  # fmt: skip
USUAL = [("Nats-Msg-Id", "0192"), ("Ej-Type", "fuzz.happened"), ("Ej-Schema", "1"), ("Ej-Version", "2")]
BLOCKS = st.one_of(
    st.just(header_block(USUAL)),
    st.lists(PAIRS, max_size=5).map(lambda more: header_block([*USUAL, *more])),
    st.lists(PAIRS, max_size=9).map(header_block),
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8),
    st.sampled_from(["1.5", "-0", "NaN", "1e999", "9" * 30, "2026-01-01T00:00:00Z", "0001-01-01T00:00:00+23:59"]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner)),
    max_leaves=8,
)
FIELDS = st.sampled_from(list(Happened.__annotations__))
OBJECTS = st.dictionaries(st.one_of(FIELDS, st.text(max_size=4)), VALUES, max_size=6)
BODIES = st.one_of(
    OBJECTS.map(lambda fields: json.dumps({"text": "a", **fields}).encode()),
    st.just(CATALOG.encode(Happened(text="a", named=UUID(int=7), many=(1, "2"), by_name={"a": Decimal(1)})).body),
)
TIMES = st.one_of(st.just(1_750_000_000_123_456_789), st.integers(0, 2**63 - 1))
SUBJECTS = st.one_of(st.just(b"app.fuzz.a"), mutated(st.just(b"app.fuzz.=2A-b")), st.binary(max_size=20))


def parsed(chunks: Sequence[bytes]) -> tuple[list[Any], bool]:
    """Return what was parsed, and whether that ended in `ValueError`."""
    parser = FrameParser()
    parts: list[Any] = []
    for chunk in chunks:
        try:
            frames, controls = parser.feed(chunk)
        except ValueError:
            return parts, True
        parts += [*frames, *controls]
    return parts, False


def frames_law(stream: tuple[bytes, int]) -> None:
    data, cut = stream
    _, is_refused = parsed([data])
    once, is_refused_again = parsed([data])
    assert is_refused == is_refused_again
    in_parts, is_refused_in_parts = parsed([data[:cut], data[cut:]])
    if not is_refused:
        assert not is_refused_in_parts
        assert sorted(map(repr, once)) == sorted(map(repr, in_parts))


def replies_law(data: bytes) -> None:
    """Read a server's answers, statuses and subjects of acknowledgement."""
    answer_in(data)
    number_of(data, "Nats-Last-Sequence")
    server_fault(data.decode("utf-8", "replace"), "a server")
    frame = (b"1", b"subject", b"", data, data)
    nobody_listens(frame)
    with suppress(ValueError):
        parse_ack(data)
    for read in (lambda: api_answer_in(frame, "STREAM.INFO.x"), lambda: direct_record(frame)):
        with suppress(EventjetError):
            read()
    for read in (lambda: status_of(data), lambda: end_of_page(frame, "a page")):
        with suppress(EventjetError, ValueError):
            read()


def records_law(record: tuple[int, int, bytes, bytes, bytes]) -> None:
    for read in (DECODER, DECODER.link, recorded_at):
        with suppress(CodecError):
            read(record)
    entity_shown(record[2])
    with suppress(ValueError):
        entity_of(record[2])


def headers_law(block: bytes) -> None:
    header(block, "Ej-Type")
    metadata_of(block)


def metadata_law(context: tuple[str, Metadata]) -> None:
    """Metadata that is written is read again; metadata that cannot travel is refused."""
    command_id, metadata = context
    try:
        pairs = context_headers(command_id, metadata)
    except Refused:
        return
    assert metadata_of(header_block([*USUAL, *pairs])) == (command_id, metadata)


def bodies_law(body: bytes) -> None:
    resolved = CATALOG.resolve("fuzz.happened", 1)
    assert resolved is not None
    try:
        event = resolved.decode(body)
    except ValueError:
        return
    with suppress(UnencodableEvent):
        encoded = CATALOG.encode(event)
        assert resolved.decode(encoded.body) == event


def ids_law(text: str) -> None:
    with suppress(Refused):
        token = encode_id(text)
        assert decode_id(token) == text
        assert not set(token) & set(".*> \t\r\n\0")
    with suppress(ValueError):
        assert encode_id(decode_id(text)) == text
    with suppress(UsageError):
        assert 0 <= position_in(text, "app") < 2**63


def sealed_snapshot(inner: bytes) -> bytes:
    """Return a snapshot whose checksum fits, as a client with the right to write can make it."""
    with suppress(ValueError):
        body = orjson.dumps(orjson.loads(inner))
        checksum = hashlib.blake2b(body, digest_size=16).hexdigest()
        return orjson.dumps({"checksum": checksum, "snapshot": orjson.Fragment(body)})
    return inner


def snapshots_law(value: bytes) -> None:
    for snapshot in (value, sealed_snapshot(value)):
        decoded = SNAPSHOTS.decode(snapshot)
        if decoded is not None:
            assert isinstance(decoded.state, Fuzzed)
            # A state that came out goes in again.
            SNAPSHOTS.encode(decoded)


def manifests_law(lines: list[bytes]) -> None:
    with suppress(ArchiveBroken):
        archive = load_archive("an archive", [line.decode("utf-8", "replace") for line in lines])
        assert archive.events >= 0
        list(archive.files(1, archive.last))


_FOLDED = FoldedState(
    Fuzzed(count=3, total=Decimal("1.5"), names=("a",)), 3, 9, "0192", Commands({"c": (1, 2)}, complete=True)
)
_VALUE = SNAPSHOTS.encode(_FOLDED)
assert _VALUE is not None
INNER: dict[str, Any] = orjson.loads(_VALUE)["snapshot"]
INNERS = st.dictionaries(st.sampled_from(list(INNER)), VALUES, max_size=3).map(
    lambda changed: json.dumps({**INNER, **changed}).encode()
)
_LINE: dict[str, Any] = orjson.loads(dump_segment(SEALED[0]))
_FILE: dict[str, Any] = _LINE["files"][0]


def line_of(changed: dict[str, Any], file: dict[str, Any]) -> bytes:
    """A line of a manifest with values of it, and of its first file, replaced."""
    files = {"files": [{**_FILE, **file}]} if file else {}
    return json.dumps({**_LINE, **files, **changed}).encode()


LINES = st.builds(
    line_of,
    st.dictionaries(st.sampled_from(list(_LINE)), VALUES, max_size=3),
    st.dictionaries(st.sampled_from(list(_FILE)), VALUES, max_size=2),
)
RECORD = b"NATS/1.0\r\nA: b\r\nNats-Stream: s\r\nNats-Subject: a.b.c\r\nNats-Sequence: 3\r\nNats-Time-Stamp: %s\r\n\r\n"
STATUSES = st.sampled_from(
    [
        b"$JS.ACK.s.c.1.2.3.4.5",
        b"$JS.ACK.d.h.s.c.1.2.3.4.5.t",
        b"NATS/1.0 408 Request Timeout\r\n\r\n",
        b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 3\r\nNats-Last-Sequence: 9\r\n\r\n",
        RECORD % b"2026-01-01T00:00:00.123456789Z",
        b'Permissions Violation for Publish to "x"',
    ]
)
ANSWERS = st.one_of(
    st.dictionaries(st.sampled_from(["seq", "duplicate", "error", "stream", "state"]), VALUES, max_size=3).map(
        lambda fields: json.dumps(fields).encode()
    ),
    st.dictionaries(st.sampled_from(["code", "err_code", "description"]), VALUES, max_size=3).map(
        lambda error: json.dumps({"error": error}).encode()
    ),
    STATUSES,
)
TEXTS = st.one_of(st.none(), st.text(max_size=20))
KEYS = st.one_of(st.from_regex(r"[a-z][a-z0-9-]{0,5}", fullmatch=True), st.text(max_size=5))
EXTRA = st.dictionaries(KEYS, st.text(max_size=9), max_size=3)
METADATA = st.builds(Metadata, TEXTS, TEXTS, TEXTS, TEXTS, EXTRA)
STREAMS = st.lists(st.one_of(MESSAGES, CONTROLS), max_size=5).map(lambda items: b"".join(map(printed, items)))

TARGETS = (
    Target("frames", st.tuples(mutated(STREAMS), st.integers(0, 300)), frames_law),
    Target("replies", mutated(ANSWERS), replies_law),
    Target("records", st.tuples(st.integers(1, 2**63 - 1), TIMES, SUBJECTS, mutated(BLOCKS), BODIES), records_law),
    Target("headers", mutated(BLOCKS), headers_law),
    Target("metadata", st.tuples(st.text(max_size=20), METADATA), metadata_law),
    Target("bodies", mutated(BODIES), bodies_law),
    Target("ids", st.one_of(st.text(max_size=80), st.from_regex(r"(=[0-9A-F]{2}|[a-zA-Z0-9_-]){1,9}")), ids_law),
    Target("snapshots", st.one_of(INNERS, mutated(INNERS), mutated(st.just(_VALUE))), snapshots_law),
    Target("manifests", st.lists(st.one_of(LINES, mutated(LINES)), max_size=3), manifests_law),
)
