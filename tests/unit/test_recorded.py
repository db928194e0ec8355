"""A `Recorded` that reads its time, id, command and metadata late equals any other, from any thread."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError, astuple, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eventjet import Metadata, Recorded, event
from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import (
    BATCH_COMMIT,
    BATCH_ID,
    BATCH_NUMBER,
    EXPECTED,
    MSG_ID,
    RECORDED_AT,
    SCHEMA,
    TYPE,
    VERSION,
    RawRecord,
    context_headers,
    header_block,
)
from eventjet.codec.records import Decoder
from eventjet.errors import CodecError, UndecodableEvent

BODY = b'{"what":"a thing of some length, so that nobody shares it"}'
AT_NS = 1_700_000_000_123_456_789
AT = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=AT_NS // 1000)
METADATA = Metadata("order-9", "cause", "clerk", "00-aa-bb-01", {"channel": "web"})


@event("thing.happened")
class Happened:
    what: str


@event("thing.ended")
class Ended:
    what: str


def catalog() -> Catalog:
    return Catalog({Happened: "thing", Ended: "thing"}, (), ["thing.retired"])


CATALOG = catalog()


def record(*more: tuple[str, str], body: bytes = BODY) -> RawRecord:
    pairs = [(MSG_ID, "id-1"), (EXPECTED, "4"), (TYPE, "thing.happened"), (SCHEMA, "1"), (VERSION, "2")]
    return 5, AT_NS, b"app.thing.a=2Eb", header_block([*pairs, *more]), body


def late(*more: tuple[str, str]) -> Recorded[Happened]:
    recorded = Decoder(CATALOG)(record(*more))
    assert recorded is not None
    return recorded


def early(command: str | None = None, metadata: Metadata | None = None) -> Recorded[Happened]:
    data = Happened(what="a thing of some length, so that nobody shares it")
    return Recorded(data, "a.b", 2, 5, AT, "id-1", "thing", command, metadata or Metadata())


CONTEXT = context_headers("cmd 1", METADATA)


@pytest.mark.parametrize(
    "same", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value)), replace, lambda value: value]
)
def test_a_recorded_event_with_late_fields_equals_and_prints_like_any_other(same: Callable[[Any], Any]) -> None:
    for recorded, expected in ((late(), early()), (late(*CONTEXT), early("cmd 1", METADATA))):
        copied = same(recorded)
        assert type(copied) is Recorded
        assert copied == expected
        assert expected == copied
        assert hash(copied) == hash(expected)
        assert repr(copied) == repr(expected)
        assert astuple(copied) == astuple(expected)


@pytest.mark.parametrize("name", [recorded_field.name for recorded_field in fields(Recorded)])
def test_each_late_field_can_be_read_first_and_cannot_be_set(name: str) -> None:
    recorded = late(*CONTEXT)
    with pytest.raises(FrozenInstanceError):
        setattr(recorded, name, "x")
    assert getattr(recorded, name) == getattr(early("cmd 1", METADATA), name)
    with pytest.raises(FrozenInstanceError):
        delattr(recorded, name)
    assert recorded == early("cmd 1", METADATA)


def test_a_changed_copy_leaves_its_original_unchanged() -> None:
    recorded = late()
    changed = replace(recorded, event_id="other", version=3)
    assert (changed.event_id, changed.version, changed.recorded_at) == ("other", 3, AT)
    assert recorded == early()


def test_threads_that_read_late_fields_at_once_get_equal_values() -> None:
    names = ("recorded_at", "event_id", "command_id", "metadata")
    expected = tuple(getattr(early("cmd 1", METADATA), name) for name in names)
    events = [late(*CONTEXT) for _ in range(2_000)]
    start, results = threading.Barrier(4), list[list[tuple[Any, ...]]]()

    def ask(turn: int) -> None:
        start.wait(60)
        order = [*names[turn:], *names[:turn]]
        answers = [{name: getattr(event, name) for name in order} for event in events]
        results.append([tuple(answer[name] for name in names) for answer in answers])

    threads = [threading.Thread(target=ask, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [[expected] * len(events)] * 4


def test_a_recorded_event_keeps_its_headers_until_they_are_read_and_never_its_body() -> None:
    raw = record(*CONTEXT)
    recorded = Decoder(CATALOG)(raw)
    assert recorded is not None
    referents = gc.get_referents(recorded)
    assert not any(referent is raw or referent is raw[4] for referent in referents)
    assert any(referent is raw[3] for referent in referents)
    assert recorded.event_id == "id-1"
    assert not any(referent is raw[3] for referent in gc.get_referents(recorded))


def test_a_time_that_cannot_be_read_is_refused_when_the_record_is_decoded() -> None:
    beyond = (5, 10**21, *record()[2:])
    for bad in (beyond, record((RECORDED_AT, "yesterday"))):
        with pytest.raises(UndecodableEvent):
            Decoder(CATALOG)(bad)
    assert late((RECORDED_AT, "2020-01-01T00:00:00+00:00")).recorded_at == datetime(2020, 1, 1, tzinfo=UTC)


_PAIRS = st.sampled_from([
    *((MSG_ID, "id-1"), (MSG_ID, "ä"), (EXPECTED, "4"), (EXPECTED, "0"), (EXPECTED, "x"), (EXPECTED, "")),
    *((TYPE, "thing.happened"), (TYPE, "thing.ended"), (TYPE, "thing.retired"), (TYPE, "thing.unheard")),
    *((SCHEMA, "1"), (SCHEMA, "2"), (VERSION, "2"), (VERSION, "1"), (VERSION, "x"), (VERSION, "9" * 30)),
    *((VERSION, "\u0661"), (VERSION, "+2"), (VERSION, " 2"), (EXPECTED, "4_0"), (EXPECTED, " 4")),
    *((BATCH_ID, "abc"), (BATCH_NUMBER, "2"), (BATCH_COMMIT, "1"), ("X-Other", "E"), ("Ej-Encoding", "aes")),
    *((RECORDED_AT, "2020-01-01T00:00:00Z"), (RECORDED_AT, "?"), ("Ej-Encoding", "json"), *CONTEXT),
])  # fmt: skip
ONLY: list[list[type] | None] = [None, [Happened], [Ended]]
_USUAL = [(MSG_ID, "id-1"), (EXPECTED, "4"), (TYPE, "thing.happened"), (SCHEMA, "1"), (VERSION, "2")]


@st.composite
def blocks(draw: st.DrawFn) -> bytes:
    """Draw headers in the usual order, with some added, left out or replaced, and perhaps damaged."""
    pairs = list(_USUAL)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(pairs)))
        pairs[at : at + draw(st.integers(0, 1))] = draw(st.lists(_PAIRS, max_size=2))
    block = header_block(pairs)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(block)))
        new = draw(st.sampled_from([b"", b"\r", b"\n", b"\r\n", b" ", b"\xff", b"E", b"0", b":", b"\r\n\r\n"]))
        block = block[:at] + new + block[at + draw(st.integers(0, 2)) :]
    return block[: len(block) - draw(st.sampled_from([0, 0, 0, 2, 4]))]


def outcome(read: Callable[[RawRecord], Any], raw: RawRecord) -> tuple[str, Any]:
    try:
        decoded = read(raw)
    except CodecError as error:
        return type(error).__name__, str(error)
    return repr(decoded), decoded


SUBJECT = b"app.thing.a"


@given(blocks(), st.sampled_from([SUBJECT, SUBJECT, b"app._void.3", b"app._void.x"]), st.sampled_from(ONLY))
@example(header_block(_USUAL)[:-4], SUBJECT, None)
@example(header_block(_USUAL), b"app._void.3", None)
@example(header_block(_USUAL), b"app._void.3", [Ended])
@example(header_block([_USUAL[0], *_USUAL[2:4], (VERSION, "3"), (EXPECTED, "1")]), SUBJECT, None)
def test_a_decoder_gives_the_same_result_whatever_it_decoded_before(
    block: bytes, subject: bytes, only: list[type] | None
) -> None:
    first, second = catalog(), catalog()
    fresh, linking, warm = Decoder(first, only), Decoder(catalog(), only), Decoder(second, only)
    for type_name in ("thing.happened", "thing.ended", "thing.retired"):
        for version in "12":
            for more in ([], [(BATCH_ID, "x"), (BATCH_NUMBER, "1")]):
                pairs = [(MSG_ID, "m"), (EXPECTED, "4"), (TYPE, type_name), (SCHEMA, "1"), (VERSION, version), *more]
                usual = (5, AT_NS, SUBJECT, header_block(pairs), BODY)
                assert outcome(warm, usual) == outcome(warm, usual)
    raw = (5, AT_NS, subject, block, BODY)
    if subject == SUBJECT:
        assert outcome(warm.link, raw) == outcome(linking.link, raw)
    for _ in range(2):
        assert outcome(warm, raw) == outcome(fresh, raw)
    assert first.skipped == second.skipped
