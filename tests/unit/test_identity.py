"""Any id becomes a token of a subject and is decoded exactly, or is refused."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventjet.codec.subjects import entity_of, is_name, subject_of
from eventjet.domain.identity import ENCODED_MAX, decode_id, encode_id
from eventjet.errors import Refused
from tests.hostile_ids import hostile_ids

PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
TOKEN = re.compile(r"[A-Za-z0-9_=-]{1,200}")
"""The form of a token of a subject and of a key of a key-value bucket, without wildcards."""


def encoded_length(aggregate_id: str) -> int | None:
    """Return the length of the token of an id, or None if the id is not text."""
    try:
        raw = aggregate_id.encode()
    except UnicodeEncodeError:
        return None
    return sum(1 if byte in PLAIN else 3 for byte in raw)


def check(aggregate_id: str) -> str | None:
    """Return the token of an id after checking it, or None if the id was rightly refused."""
    length = encoded_length(aggregate_id)
    is_possible = length is not None and 0 < length <= ENCODED_MAX and "\0" not in aggregate_id
    try:
        token = encode_id(aggregate_id)
    except Refused:
        assert not is_possible
        return None
    assert is_possible
    assert TOKEN.fullmatch(token)
    assert len(token) == length
    assert decode_id(token) == aggregate_id
    return token


def test_hostile_ids_are_decoded_exactly_or_refused() -> None:
    tokens: dict[str, str] = {}
    refused = 0
    for aggregate_id in hostile_ids(10_000, seed=3):
        token = check(aggregate_id)
        if token is None:
            refused += 1
        else:
            assert tokens.setdefault(token, aggregate_id) == aggregate_id, "two ids have one token"
    assert refused > 500
    assert len(tokens) > 3_000


@pytest.mark.parametrize(
    "token",
    ["", "=", "=4", "=41", "=2a", "a.b", "*", ">", "a b", "a\n", "=C3", "=ED=A0=80", "=C0=80", "x" * 201, "=2A" * 67],
)
def test_a_token_with_a_malformed_encoding_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match=r"encod|decode"):
        decode_id(token)


def test_a_refusal_does_not_repeat_a_long_id() -> None:
    with pytest.raises(Refused) as caught:
        encode_id("x" * 5_000)
    assert len(str(caught.value)) < 500


@given(
    st.from_regex(r"[a-z][a-z0-9_]{0,62}", fullmatch=True),
    st.from_regex(r"[a-z][a-z0-9_]{0,62}", fullmatch=True),
    st.text(),
)
def test_the_entity_of_a_subject_is_the_encoded_entity(app: str, aggregate: str, aggregate_id: str) -> None:
    assert is_name(app)
    assert is_name(aggregate)
    try:
        subject = subject_of(app, aggregate, aggregate_id)
    except Refused:
        return
    assert entity_of(subject.encode()) == (aggregate, aggregate_id)


@given(st.binary(max_size=60) | st.from_regex(rb"[a-z.=*>A-F0-9_-]{0,40}", fullmatch=True))
def test_any_bytes_are_the_subject_of_a_single_entity_or_of_none(subject: bytes) -> None:
    try:
        aggregate, aggregate_id = entity_of(subject)
    except ValueError:
        return
    app = subject.decode().partition(".")[0]
    assert subject_of(app, aggregate, aggregate_id).encode() == subject


@given(st.text())
def test_any_text_is_decoded_exactly_or_refused(aggregate_id: str) -> None:
    check(aggregate_id)


def test_a_token_that_encoding_does_not_produce_is_refused() -> None:
    random = Random(4)
    decoded = 0
    for _ in range(10_000):
        token = "".join(random.choices("=0123456789ABCDEFabcdefG.*> \n", k=random.randrange(9)))
        try:
            aggregate_id = decode_id(token)
        except ValueError:
            continue
        decoded += 1
        assert encode_id(aggregate_id) == token
    assert decoded > 100


def test_ids_that_look_alike_have_different_tokens() -> None:
    alike = {"\u00e9", "e\u0301", "\ufb01", "fi", "A", "a", "\u0391", "\u0410", "\u0130", "i\u0307", "=41", "%41"}
    alike |= {"a\u200d", "a\u00a0", "a "}
    assert len({encode_id(aggregate_id) for aggregate_id in alike}) == len(alike)
