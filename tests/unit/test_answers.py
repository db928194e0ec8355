"""Which of several answers to a publish is that of the stream, in any number and order."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from eventjet.jetstream.answers import Answerers, ExpectedAnswer, stream_answer
from eventjet.nats.protocol import Frame

CONFLICT = {"error": {"code": 400, "err_code": 10071, "description": "wrong last sequence: 3"}, "stream": "shop"}


def frame(value: Any) -> Frame:
    return b"1", b"_INBOX.1", b"", b"", value if isinstance(value, bytes) else orjson.dumps(value)


def ack(sequence: int = 7, **more: Any) -> Frame:
    return frame({"stream": "shop", "seq": sequence, **more})


def expected(domain: str | None = "", messages: int = 1, answerers: Answerers | None = None) -> ExpectedAnswer:
    return ExpectedAnswer("shop", "shop.thing.a", messages, domain, answerers or Answerers())


@pytest.mark.parametrize(
    ("domain", "fields", "is_own"),
    [
        ("", {}, True),
        ("", {"domain": "hub"}, False),
        ("leaf", {"domain": "leaf"}, True),
        ("leaf", {"domain": "hub"}, False),
        ("leaf", {}, False),
        (None, {"domain": "hub"}, True),
        ("", {"stream": "shop2"}, False),
        ("", {"seq": True}, False),
        ("", {"seq": 0}, False),
        ("", {"seq": 7.0}, False),
        ("", {"count": 2}, False),
        ("", {"batch": "b", "count": 1}, True),
    ],
)
def test_an_acknowledgement_is_accepted_if_it_names_the_stream_and_its_domain(
    domain: str | None, fields: dict[str, Any], is_own: bool
) -> None:
    assert expected(domain).accepts(ack(**fields)) is is_own


def test_an_acknowledgement_of_a_batch_names_its_number_of_messages() -> None:
    assert expected(messages=3).accepts(ack(count=3))
    assert not expected(messages=3).accepts(ack())


@pytest.mark.parametrize(
    "nonsense", [b"", b"+OK", b"[]", b"7", b"null", b"{}", b'{"stream":"shop","error":7}', b"\xff"]
)
def test_an_answer_that_is_not_of_a_stream_is_ignored(nonsense: bytes) -> None:
    assert stream_answer(nonsense) is None
    assert not expected().accepts(frame(nonsense))


def test_an_acknowledgement_after_an_error_is_the_answer() -> None:
    expected_answer = expected("leaf")
    frames = [frame(CONFLICT), ack(domain="leaf")]
    assert all(map(expected_answer.accepts, frames))
    best_frame, answer = expected_answer.best(frames)
    assert best_frame == frames[1]
    assert answer is not None
    assert not answer.is_error


def test_an_error_is_doubted_after_an_answer_of_another_domain() -> None:
    answerers = Answerers()
    first = expected("leaf", answerers=answerers)
    assert not first.accepts(ack(domain="hub"))
    assert first.accepts(ack(domain="leaf"))
    later = expected("leaf", answerers=answerers)
    error, own = stream_answer(frame(CONFLICT)[4]), stream_answer(ack(domain="leaf")[4])
    assert error is not None
    assert own is not None
    assert later.doubt(error)
    assert not later.doubt(own)
    (stranger,) = answerers.others
    assert "the stream shop of the JetStream domain hub" in stranger


@pytest.mark.parametrize("second", [ack(8), frame(CONFLICT)], ids=["acknowledgement", "error"])
def test_acknowledgements_are_doubted_after_two_answers_to_a_publish(second: Frame) -> None:
    answerers = Answerers()
    expected_answer = expected(answerers=answerers)
    own = stream_answer(ack()[4])
    assert own is not None
    assert expected_answer.accepts(ack())
    assert not expected_answer.doubt(own)
    assert expected_answer.accepts(second)
    assert expected_answer.doubt(own)


def test_an_acknowledgement_is_doubted_if_the_domain_is_unknown() -> None:
    answer = stream_answer(ack(domain="hub")[4])
    assert answer is not None
    assert expected(None).doubt(answer)
