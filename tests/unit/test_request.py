"""The request of a command is distinguished from other requests, alike in every process and release."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from ipaddress import ip_address, ip_network
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from pydantic import BaseModel

from eventjet.codec.commands import differing_arguments, is_same_request, request_of
from eventjet.errors import UsageError


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Line:
    text: str
    pieces: int = 1


class Body(BaseModel):
    amount: Decimal


def place(state: object, amount: Any, *more: Any, reason: str = "cash", **extra: Any) -> None:
    """A decision with every kind of parameter."""


def put(state: object, amount: Any) -> None:
    """Another decision."""


class Open(BaseModel, extra="allow"):
    amount: int


def test_undeclared_values_of_a_model_are_part_of_the_request() -> None:
    first, second = (Open.model_validate({"amount": 1, "note": [note]}) for note in ("a", "b"))
    assert request_text(first) != request_text(second) != request_text(Open(amount=1))
    assert request_text([first]) != request_text({"x": [second]})
    assert request_text({"a": first}) != request_text({"a": second})
    # Earlier releases left such values out, and recorded the same text for both.
    former = {request_of(place, (model,), {}, whose="c").former for model in (first, second)}
    assert former == {request_text(Open(amount=1))}
    assert request_of(place, (Open(amount=1),), {}, whose="c").former == ""


def sign(state: object, amount: int, /, **more: int) -> None:
    """A decision with a positional-only parameter, whose name another argument may have."""


@dataclass
class Unset:
    number: int = field(init=False)


@pytest.mark.parametrize("value", [Decimal("sNaN"), Unset(), Body.model_construct()])
def test_an_argument_that_cannot_be_read_leaves_only_the_name_of_the_decision(value: Any) -> None:
    assert request_text(value) == "place"


def test_an_argument_with_the_name_of_a_positional_one_is_another_argument() -> None:
    texts = {request_of(sign, (amount,), {"amount": 2}, whose="c").text for amount in (1, 2, 3)}
    assert len(texts | {request_of(sign, (2,), {}, whose="c").text}) == 4


def request_text(*args: Any, **kwargs: Any) -> str:
    return request_of(place, args, kwargs, whose="c").text


def test_a_request_is_the_same_in_every_process_and_release() -> None:
    """Recorded texts must be recognised for as long as the log is read."""
    things = {"b", "a"}, {2: Decimal("1.50"), "x": b"\x00"}, Line("l"), Colour.RED, UUID(int=7), date(2026, 5, 1)
    assert request_text(Decimal(3)) == "place:8dab130465ef2d90"
    assert (
        request_text(*things, timedelta(1), 2.5, None, True, Body(amount=Decimal(1)), 2**70) == "place:519173946489401a"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Decimal("1.50"), Decimal("1.5")),
        (Decimal(100), Decimal("1E+2")),
        ([1, 2], (1, 2)),
        ({1, 2, 3}, frozenset({3, 2, 1})),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (datetime(2026, 5, 1, 2, tzinfo=timezone(timedelta(hours=2))), datetime(2026, 5, 1, tzinfo=UTC)),
    ],
)
def test_equal_arguments_are_the_same_request(first: Any, second: Any) -> None:
    assert request_text(first) == request_text(second) == request_text(amount=first)
    assert request_text(first, reason="cash") == request_text(first)
    assert request_of(partial(place, amount=first), (), {}, whose="c").text == request_text(first)


@pytest.mark.parametrize(
    "others",
    [
        (1, 2, "1", None, "", [], [1], [[1]], {"a": 1}, {"a": 2}),
        (Decimal(1), Decimal("1.00000000000000000000000000000000000001"), Decimal(-1), Decimal("NaN")),
        (Line("x"), Line("x", 2), Body(amount=Decimal(1)), Body(amount=Decimal(2))),
        (datetime(2026, 5, 1, tzinfo=UTC), datetime(2026, 5, 1, 0, 0, 0, 1, tzinfo=UTC)),
        (
            time(9),
            time(9, tzinfo=UTC),
            time(9, tzinfo=ZoneInfo("Europe/Berlin")),
            time(9, tzinfo=ZoneInfo("Asia/Tokyo")),
        ),
        (
            ip_address("10.0.0.1"),
            ip_address("10.0.0.2"),
            ip_address("::1"),
            ip_network("10.0.0.0/8"),
            Fraction(1, 3),
            deque([1]),
            deque([2]),
        ),
    ],
)
def test_different_arguments_are_different_requests(others: tuple[Any, ...]) -> None:
    texts = [request_text(argument) for argument in others]
    assert len(set(texts)) == len(texts)
    assert not any(
        is_same_request(text, other_text) for text in texts for other_text in texts if text is not other_text
    )


def test_each_parameter_is_part_of_the_request() -> None:
    texts = {
        request_text(1),
        request_text(1, 2),
        request_text(1, 2, 3),
        request_text(1, reason="x"),
        request_text(1, extra="x"),
        request_text(1, reason="x", y=1),
    }
    assert len(texts) == 6
    assert not is_same_request(request_of(put, (1,), {}, whose="c").text, request_text(1))


def test_the_same_arguments_of_another_command_give_another_text() -> None:
    texts = {
        request_of(put, ("ada@example.org",), {}, whose=whose).text
        for whose in ("a\nc1\n", "a\nc2\n", "b\nc1\n", "\ud800")
    }
    assert len(texts) == 4


def test_a_decision_behind_a_plain_wrapper_keeps_its_arguments() -> None:
    def wrapper(*args: Any, **kwargs: Any) -> None:
        place(*args, **kwargs)

    texts = {
        request_of(wrapper, args, kwargs, whose="c").text for args, kwargs in (((1,), {}), ((2,), {}), ((2,), {"x": 1}))
    }
    assert len(texts) == 3


class Slotted:
    __slots__ = ()

    def __call__(self, state: object, amount: int) -> None: ...


def test_an_argument_without_a_form_leaves_only_the_name_of_the_decision() -> None:
    looped: list[Any] = []
    looped.append(looped)
    for odd in (object(), looped, int, lambda: 0):
        assert request_text(odd) == "place"
        assert is_same_request(request_text(odd), request_text(1))
        assert not is_same_request(request_text(odd), request_of(put, (1,), {}, whose="c").text)
    assert request_of(put, (), {}, whose="c").text == "put", "a call that the decision itself will refuse"
    assert request_of(Slotted(), (1,), {}, whose="c").text.startswith("Slotted:")


@dataclass(frozen=True)
class Placed:
    total: Decimal
    lines: list[Line]
    at: datetime


def order(
    state: object, lines: list[Line], total: Decimal, now: datetime, *, gift: bool = False, code: str = ""
) -> None:
    """A decision with an argument, `code`, that its event does not record."""


NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
LINES = [Line("nails", 3)]


@pytest.mark.parametrize(
    ("arguments", "differing"),
    [  # pyright: ignore[reportUnknownArgumentType]
        (((LINES, Decimal(2), NOON), {}), ("total",)),
        ((([Line("nails", 4)], Decimal(1), NOON), {}), ("lines",)),
        (((LINES, Decimal(1), NOON), {"gift": True}), ("gift",)),
        ((([], Decimal(2), NOON), {}), ("lines", "total")),
        ((([], Decimal(2), NOON + timedelta(1)), {}), ("lines", "total", "now")),
        (((LINES, Decimal(1), NOON), {"code": "x"}), ("code",)),
    ],
)
def test_recorded_events_prove_which_arguments_differ(arguments: Any, differing: tuple[str, ...]) -> None:
    recorded = request_of(order, (LINES, Decimal(1), NOON), {}, whose="c")
    events = [Placed(Decimal(1), LINES, NOON)]
    args, kwargs = arguments
    assert differing_arguments(request_of(order, args, kwargs, whose="c"), recorded.text, events) == differing


def test_a_difference_that_the_events_do_not_prove_is_not_named() -> None:
    recorded = request_of(order, (LINES, Decimal(1), NOON), {"code": "secret"}, whose="c").text
    events = [Placed(Decimal(1), LINES, NOON), object()]
    assert differing_arguments(request_of(order, (LINES, Decimal(1), NOON), {}, whose="c"), recorded, events) == ()
    assert differing_arguments(request_of(put, (1,), {}, whose="c"), recorded, events) == ()
    assert differing_arguments(request_of(order, (LINES, object()), {}, whose="c"), recorded, events) == ()
    only = request_of(put, (2,), {}, whose="c")
    assert list(differing_arguments(only, request_of(put, (1,), {}, whose="c").text, ())) == ["amount"]


def test_an_ignored_argument_needs_no_form_and_must_exist() -> None:
    first, other = [request_of(order, (LINES, 1, odd), {}, whose="c", ignoring="now").text for odd in (object(), NOON)]
    assert first == other
    assert first.startswith("order:")
    with pytest.raises(
        UsageError, match=r"order has no argument 'state' that could be ignored. Its arguments are lines"
    ):
        request_of(order, (LINES, 1, NOON), {}, whose="c", ignoring=("now", "state"))
    assert request_of(place, (1,), {"x": 1}, whose="c", ignoring=("x",)).text == request_text(1)
