"""Whose answer the answer to a publish is, in whatever number and order they come."""

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
    ("domain", "told", "is_own"),
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
def test_an_acknowledgement_counts_when_it_names_the_stream_and_its_domain(
    domain: str | None, told: dict[str, Any], is_own: bool
) -> None:
    assert expected(domain).accepts(ack(**told)) is is_own


def test_an_acknowledgement_of_a_batch_names_how_many_it_stored() -> None:
    assert expected(messages=3).accepts(ack(count=3))
    assert not expected(messages=3).accepts(ack())


@pytest.mark.parametrize(
    "nonsense", [b"", b"+OK", b"[]", b"7", b"null", b"{}", b'{"stream":"shop","error":7}', b"\xff"]
)
def test_what_no_stream_says_is_passed_over(nonsense: bytes) -> None:
    assert stream_answer(nonsense) is None
    assert not expected().accepts(frame(nonsense))


def test_an_acknowledgement_that_comes_after_an_error_is_the_answer() -> None:
    one = expected("leaf")
    frames = [frame(CONFLICT), ack(domain="leaf")]
    assert all(map(one.accepts, frames))
    found, answer = one.best(frames)
    assert found == frames[1]
    assert answer is not None
    assert not answer.is_error


def test_an_error_is_doubted_once_a_namesake_has_answered_and_the_own_domains_acknowledgement_is_not() -> None:
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
def test_acknowledgements_are_doubted_once_two_answers_in_the_same_words_came_to_one_publish(second: Frame) -> None:
    answerers = Answerers()
    one = expected(answerers=answerers)
    own = stream_answer(ack()[4])
    assert own is not None
    assert one.accepts(ack())
    assert not one.doubt(own)
    assert one.accepts(second)
    assert one.doubt(own)


def test_an_acknowledgement_is_doubted_where_the_domain_is_not_known() -> None:
    answer = stream_answer(ack(domain="hub")[4])
    assert answer is not None
    assert expected(None).doubt(answer)
