"""The parser of the protocol: the same frames for any division of the bytes, and other bytes refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventjet.codec.headers import number_of
from eventjet.errors import UsageError
from eventjet.jetstream.reader import parse_ack
from eventjet.nats.protocol import (
    LINE_MAX,
    Control,
    Frame,
    FrameParser,
    publish_frame,
    status_of,
)

TOKENS = st.text("abcXYZ019-_=$*>.", min_size=1, max_size=20).map(str.encode)
BODIES = st.one_of(
    st.binary(max_size=60), st.sampled_from([b"\r\n", b"PING\r\n", b"MSG a 1 3\r\nabc\r\n", b"\x00\xff"])
)
HEADERS = st.sampled_from([b"NATS/1.0\r\n\r\n", b"NATS/1.0 503\r\n\r\n", b"NATS/1.0\r\nA: b\r\nC: d\r\n\r\n"])
SIDS = st.integers(1, 999).map(lambda n: b"%d" % n)
MESSAGES = st.tuples(SIDS, TOKENS, st.one_of(st.just(b""), TOKENS), st.one_of(st.just(b""), HEADERS), BODIES)
CONTROLS = st.sampled_from(
    [(b"PING", b""), (b"PONG", b""), (b"+OK", b""), (b"INFO", b'{"a": 1}'), (b"-ERR", b"'Stale Connection'")]
)


def printed(item: Frame | Control) -> bytes:
    """Return the bytes that a server sends for a frame."""
    if len(item) == 2:
        return (item[0] + b" " + item[1]).strip() + b"\r\n"
    sid, subject, reply, headers, body = item
    start = subject + b" " + sid + (b" " + reply if reply else b"")
    if headers:
        return b"HMSG %b %d %d\r\n%b%b\r\n" % (start, len(headers), len(headers + body), headers, body)
    return b"MSG %b %d\r\n%b\r\n" % (start, len(body), body)


def parsed(chunks: list[bytes]) -> tuple[list[Frame], list[Control]]:
    parser = FrameParser()
    frames: list[Frame] = []
    controls: list[Control] = []
    for chunk in chunks:
        more, others = parser.feed(chunk)
        frames += more
        controls += others
    return frames, controls


@given(st.lists(st.one_of(MESSAGES, CONTROLS), max_size=8), st.lists(st.integers(0, 2000), max_size=12))
def test_a_stream_gives_the_same_frames_for_any_division(items: list[Frame | Control], cuts: list[int]) -> None:
    data = b"".join(map(printed, items))
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    chunks = [data[start:end] for start, end in pairwise(edges)]
    expected = [item for item in items if len(item) == 5], [item for item in items if len(item) == 2]
    assert parsed(chunks) == expected
    assert parsed([data[at : at + 1] for at in range(len(data))]) == expected


def test_a_large_message_in_small_pieces_is_joined_once() -> None:
    body = b"x" * 900_000
    data = printed((b"1", b"a.b", b"", b"", body))
    chunks = [data[at : at + 1400] for at in range(0, len(data), 1400)]
    assert parsed(chunks) == ([(b"1", b"a.b", b"", b"", body)], [])


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"HMSG\r\n",
        b"HELO a 1 2 2\r\nxx\r\n",
        b"MSG a 1\r\n",
        b"MUG a 1 1\r\nx\r\n",
        b"MSG a 1 x\r\nx\r\n",
        b"MSG a 1 -5\r\nx\r\n",
        b"MSG a 1 1\r\nxyz\r\n",
        b"HMSG a 1 9 4\r\nabcd\r\n",
        b"HMSG a 1 -1 4\r\nabcd\r\n",
        b"MSG a 1 999999999999\r\n",
        b"\x16\x03\x01\r\n",
        b"PINGS\r\n",
    ],
)
def test_bytes_that_are_not_the_protocol_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parsed([data])


def test_a_control_line_has_a_limit() -> None:
    parser = FrameParser()
    assert parser.feed(b"INFO " + b"x" * (LINE_MAX - 5)) == ([], [])
    with pytest.raises(ValueError, match="control line"):
        parser.feed(b"x")


def test_a_publish_frame_has_the_form_of_the_protocol() -> None:
    assert publish_frame("a.b") == b"PUB a.b 0\r\n\r\n"
    assert publish_frame("a.b", b"xy", reply=b"r.1") == b"PUB a.b r.1 2\r\nxy\r\n"
    block = b"NATS/1.0\r\nK: v\r\n\r\n"
    assert publish_frame(b"a", b"xy", headers=block) == b"HPUB a 18 20\r\n" + block + b"xy\r\n"


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB x 0", "a\tb", "a\x00", "x" * 2001])
def test_a_subject_that_would_end_its_line_is_refused(subject: str) -> None:
    with pytest.raises(UsageError, match="subject"):
        publish_frame(subject)


def test_status_lines_are_read() -> None:
    block = b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 17\r\nNats-Pending-Bytes: 0\r\n\r\n"
    assert status_of(block) == (408, "Request Timeout")
    assert number_of(block, "Nats-Pending-Messages") == 17
    assert number_of(block, "Nats-Pending") is None
    assert status_of(b"NATS/1.0 503\r\n\r\n") == (503, "")
    assert status_of(b"NATS/1.0\r\nA: b\r\n\r\n") == (0, "")
    assert status_of(b"") == (0, "")


def test_both_forms_of_an_ack_subject_are_parsed() -> None:
    first = b"$JS.ACK.bank.reader.1.42.7.1700000000123456789.3"
    second = b"$JS.ACK.hub.2yZLcZ.bank.reader.1.42.7.1700000000123456789.3"
    expected = ("bank", "reader", 1, 42, 7)
    assert parse_ack(first) == (b"$JS.ACK.bank.reader", *expected)
    for reply in (second, second + b".random"):
        assert parse_ack(reply) == (b"$JS.ACK.hub.2yZLcZ.bank.reader", *expected)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"_INBOX.x",
        b"$JS.ACK.a.b.1.2.3.4",
        b"$JS.ACK.a.b.1.2.3.4.5.6",
        b"$JS.ACK.a.b.x.2.3.4.5",
        b"$JS.FC.a.b.1.2.3",
    ],
)
def test_a_subject_that_is_no_ack_is_refused(reply: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_ack(reply)
