"""What a command asked for is told apart from another request, in every process and release alike."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from functools import partial
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
    """A decision of every kind of parameter."""


def put(state: object, amount: Any) -> None:
    """Another one."""


class Open(BaseModel, extra="allow"):
    amount: int


def test_what_a_model_keeps_without_declaring_it_is_asked_for_too() -> None:
    one, other = (Open.model_validate({"amount": 1, "note": [note]}) for note in ("a", "b"))
    assert asked(one) != asked(other) != asked(Open(amount=1))
    assert asked([one]) != asked({"x": [other]})
    assert asked({"a": one}) != asked({"a": other})
    # Releases that left such values out recorded this for both.
    former = {request_of(place, (each,), {}, whose="c").former for each in (one, other)}
    assert former == {asked(Open(amount=1))}
    assert request_of(place, (Open(amount=1),), {}, whose="c").former == ""


def asked(*args: Any, **kwargs: Any) -> str:
    return request_of(place, args, kwargs, whose="c").text


def test_a_request_is_the_same_in_every_process_and_release() -> None:
    """Golden: what is recorded must be known again for as long as the log is read."""
    things = {"b", "a"}, {2: Decimal("1.50"), "x": b"\x00"}, Line("l"), Colour.RED, UUID(int=7), date(2026, 5, 1)
    assert asked(Decimal(3)) == "place:8dab130465ef2d90"
    assert asked(*things, timedelta(1), 2.5, None, True, Body(amount=Decimal(1)), 2**70) == "place:519173946489401a"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Decimal("1.50"), Decimal("1.5")),
        (Decimal(100), Decimal("1E+2")),
        ([1, 2], (1, 2)),
        ({1, 2, 3}, frozenset({3, 2, 1})),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (datetime(2026, 5, 1, 2, tzinfo=timezone(timedelta(hours=2))), datetime(2026, 5, 1, tzinfo=UTC)),
    ],
)
def test_arguments_that_are_equal_are_the_same_request(one: Any, other: Any) -> None:
    assert asked(one) == asked(other) == asked(amount=one)
    assert asked(one, reason="cash") == asked(one)
    assert request_of(partial(place, amount=one), (), {}, whose="c").text == asked(one)


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
    ],
)
def test_arguments_that_differ_are_other_requests(others: tuple[Any, ...]) -> None:
    told = [asked(one) for one in others]
    assert len(set(told)) == len(told)
    assert not any(is_same_request(one, other) for one in told for other in told if one is not other)


def test_each_parameter_counts() -> None:
    told = {asked(1), asked(1, 2), asked(1, 2, 3), asked(1, reason="x"), asked(1, extra="x"), asked(1, reason="x", y=1)}
    assert len(told) == 6
    assert not is_same_request(request_of(put, (1,), {}, whose="c").text, asked(1))


def test_the_same_arguments_of_another_command_look_different() -> None:
    told = {
        request_of(put, ("ada@example.org",), {}, whose=whose).text
        for whose in ("a\nc1\n", "a\nc2\n", "b\nc1\n", "\ud800")
    }
    assert len(told) == 4


def test_a_decision_behind_a_plain_wrapper_still_has_its_arguments() -> None:
    def wrapper(*args: Any, **kwargs: Any) -> None:
        place(*args, **kwargs)

    told = {
        request_of(wrapper, args, kwargs, whose="c").text for args, kwargs in (((1,), {}), ((2,), {}), ((2,), {"x": 1}))
    }
    assert len(told) == 3


class Slotted:
    __slots__ = ()

    def __call__(self, state: object, amount: int) -> None: ...


def test_where_an_argument_has_no_form_the_name_decides() -> None:
    looped: list[Any] = []
    looped.append(looped)
    for odd in (object(), looped, int, lambda: 0):
        assert asked(odd) == "place"
        assert is_same_request(asked(odd), asked(1))
        assert not is_same_request(asked(odd), request_of(put, (1,), {}, whose="c").text)
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
    """A decision with an argument that it does not record: `code`."""


NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
LINES = [Line("nails", 3)]


@pytest.mark.parametrize(
    ("again", "differing"),
    [  # pyright: ignore[reportUnknownArgumentType]
        (((LINES, Decimal(2), NOON), {}), ("total",)),
        ((([Line("nails", 4)], Decimal(1), NOON), {}), ("lines",)),
        (((LINES, Decimal(1), NOON), {"gift": True}), ("gift",)),
        ((([], Decimal(2), NOON), {}), ("lines", "total")),
        ((([], Decimal(2), NOON + timedelta(1)), {}), ("lines", "total", "now")),
        (((LINES, Decimal(1), NOON), {"code": "x"}), ("code",)),
    ],
)
def test_recorded_events_prove_which_arguments_differ(again: Any, differing: tuple[str, ...]) -> None:
    recorded = request_of(order, (LINES, Decimal(1), NOON), {}, whose="c")
    events = [Placed(Decimal(1), LINES, NOON)]
    args, kwargs = again
    assert differing_arguments(request_of(order, args, kwargs, whose="c"), recorded.text, events) == differing


def test_what_the_events_do_not_prove_is_not_named() -> None:
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
    assert request_of(place, (1,), {"x": 1}, whose="c", ignoring=("x",)).text == asked(1)
