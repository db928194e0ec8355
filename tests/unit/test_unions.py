"""A union is refused, or every value of its members comes back with its type."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Any, Literal, Optional, Union
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from eventjet import App, aggregate, event, served
from eventjet.codec.catalog import Catalog
from eventjet.codec.json import dump_json, read_json
from eventjet.errors import DefinitionError


class Colour(Enum):
    RED = "red"
    LONG = "9007199254740993"
    DAY = "2026-01-01"


class Tone(StrEnum):
    HIGH = "high"
    RED = "red"


class Rank(IntEnum):
    ONE = 1


class Odd(Enum):
    NOTHING = None


@dataclass(frozen=True)
class Cash:
    amount: Decimal


@dataclass(frozen=True)
class Card:
    amount: Decimal
    number: str


@dataclass(frozen=True)
class Cheque:
    amount: Decimal
    number: str = ""


class Paid(BaseModel):
    kind: Literal["paid"] = "paid"
    by: Cash | None = None


class Owed(BaseModel):
    kind: Literal["owed"] = "owed"
    by: Cash | None = None


class Open(BaseModel):
    value: bool


class Rate(BaseModel):
    value: float


class Shade(BaseModel):
    value: Colour


@dataclass(frozen=True)
class Sum:
    value: Decimal


@dataclass(frozen=True)
class Fee:
    amount: float


class Within(BaseModel):
    held: Cash


class Without(BaseModel):
    held: Fee


texts = st.sampled_from(
    ["", "x", "1", "9007199254740993", "2026-01-01", "2026-01-01T00:00:00Z", "09:00:00", "P1D", "red"]
)
moments = st.datetimes(timezones=st.just(UTC)).map(lambda at: at.replace(fold=0)) | st.dates().map(
    lambda day: datetime(day.year, day.month, day.day, tzinfo=UTC)
)
whole = st.integers() | st.sampled_from([1, 2**60, -(2**53) - 1])
decimals = st.decimals(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [Decimal(2**60), Decimal(1), Decimal(86400)]
)
cash, card, cheque = st.builds(Cash, decimals), st.builds(Card, decimals, texts), st.builds(Cheque, decimals, texts)
SHORT: Any = Annotated[int, Field(ge=-(2**53), le=2**53)]
LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: whole,
    SHORT: st.integers(-(2**53), 2**53),
    float: st.floats(allow_nan=False, allow_infinity=False) | st.integers().map(float),
    str: texts,
    bytes: st.binary(max_size=9)
    | texts.filter(lambda text: text.isalnum() and not len(text) % 4).map(base64.b64decode),
    Decimal: decimals,
    UUID: st.uuids(),
    date: st.dates(),
    datetime: moments,
    time: st.times().map(lambda at: at.replace(fold=0)),
    timedelta: st.timedeltas(),
    Colour: st.sampled_from(Colour),
    Tone: st.sampled_from(Tone),
    Rank: st.sampled_from(Rank),
    Odd: st.sampled_from(Odd),
    Literal["red", "2026-01-01"]: st.sampled_from(["red", "2026-01-01"]),
    Literal[1, True]: st.sampled_from([1, True]),
    None: st.none(),
    Cash: cash,
    Card: card,
    Cheque: cheque,
    Paid: st.builds(Paid, by=st.none() | cash),
    Owed: st.builds(Owed, by=st.none() | cash),
}


def members() -> st.SearchStrategy[tuple[Any, st.SearchStrategy[Any]]]:
    leaves = st.sampled_from(list(LEAVES.items()))

    def container(leaf: tuple[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[tuple[Any, st.SearchStrategy[Any]]]:
        kind, values = leaf
        return st.sampled_from(
            [
                (list[kind], st.lists(values, max_size=3)),
                (tuple[kind, ...], st.lists(values, max_size=3).map(tuple)),
                (tuple[kind, kind], st.tuples(values, values)),
                (dict[str, kind], st.dictionaries(texts, values, max_size=2)),
            ]
        )

    return leaves | leaves.flatmap(container)


def declared(kind: Any) -> Any:
    return event("union.made")(type("Made", (), {"__annotations__": {"given": kind}, "__module__": __name__}))


@settings(max_examples=100)
@given(st.lists(members(), min_size=2, max_size=3, unique_by=lambda member: str(member[0])), st.data())
def test_a_union_is_refused_or_restores_each_value_with_its_type(
    union: list[tuple[Any, st.SearchStrategy[Any]]], data: st.DataObject
) -> None:
    check(*union, data=data)


def check(*union: tuple[Any, st.SearchStrategy[Any]], data: st.DataObject) -> None:
    event_class = declared(Union[tuple(kind for kind, _ in union)])  # noqa: UP007  of any number
    catalog = Catalog([event_class])
    if catalog.faults():
        return
    resolved = catalog.resolve("union.made", 1)
    assert resolved is not None
    for _, values in union:
        given_value = data.draw(values)
        body = catalog.encode(event_class(given=given_value)).body
        for text in (body, dump_json(read_json(body))):
            assert type_and_repr(resolved.decode(text).given) == type_and_repr(given_value)


def type_and_repr(value: Any) -> str:
    return f"{type(value)} {value!r}"


@st.composite
def classes(draw: st.DrawFn) -> tuple[Any, st.SearchStrategy[Any]]:
    """Draw a dataclass or a pydantic model of up to three fields."""
    names = sorted(draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)))
    fields = {name: draw(st.sampled_from(list(LEAVES.items()))) for name in names}
    bare = dict.fromkeys(names, draw(st.booleans()))
    annotations = {name: kind if bare[name] else Optional[kind] for name, (kind, _) in fields.items()}  # noqa: UP045  of any kind
    body = {"__annotations__": annotations, "__module__": __name__}
    body |= {name: None for name in names if not bare[name]}
    is_model = draw(st.booleans())
    cls: Any = type("Made", (BaseModel,) if is_model else (), body)
    cls = cls if is_model else dataclass(frozen=True)(cls)
    strategies = {name: values if bare[name] else st.none() | values for name, (_, values) in fields.items()}
    return cls, st.fixed_dictionaries(strategies).map(lambda values: cls(**values))


@settings(max_examples=50)
@given(classes(), classes(), st.data())
def test_a_union_of_classes_is_refused_or_restores_each_object_with_its_class(
    first: tuple[Any, st.SearchStrategy[Any]], second: tuple[Any, st.SearchStrategy[Any]], data: st.DataObject
) -> None:
    check(first, second, data=data)


CLEAR: list[Any] = [
    int | None,
    int | float,
    bool | Decimal | None,
    date | int,
    date | datetime,
    date | datetime | time | timedelta | UUID,
    Decimal | date | UUID,
    Annotated[int, Field(ge=0, le=100)] | str,
    Literal["all"] | int,
    Literal["all"] | str,
    Rank | str,
    SHORT | bytes,
    bool | SHORT | bytes,
    Cash | Card,
    Open | Shade,
    Cash | Decimal | list[Cash],
    Paid | Owed,
    list[Paid | Owed],
    list[int] | int,
    list[int] | list[date],
    Annotated[Paid | Owed, Field(discriminator="kind")],
]


@pytest.mark.parametrize("kind", CLEAR, ids=str)
def test_a_union_whose_members_json_distinguishes_is_accepted(kind: Any) -> None:
    assert Catalog([declared(kind)]).faults() == []


CONFUSED: list[Any] = [
    UUID | str,
    date | str,
    Decimal | str,
    int | str,
    int | Decimal,
    Colour | str,
    Colour | Tone,
    Colour | date,
    Rank | int,
    Rank | float,
    Odd | None,
    bytes | Decimal,
    Literal[1, True] | Decimal,
    Rank | Decimal,
    Literal[0] | bool,
    Literal[0, True] | int,
    Literal[True] | int,
    Literal[True] | float,
    Literal[1] | Literal[True],
    Rank | Literal[True],
    tuple[float, ...] | tuple[Annotated[int, Field(ge=0, le=9)], ...],
    dict[str, float] | dict[str, Annotated[int, Field(ge=0, le=9)]],
    list[int] | tuple[int, ...],
    list[date | str],
    dict[str, date | str],
    list[date] | list[str],
    Cash | Cheque,
    Cash | dict[str, Any],
    Open | Sum,
    Rate | Sum,
    Rate | Shade,
    Without | Within,
    Union[Any, int],  # noqa: UP007
]


@pytest.mark.parametrize("kind", CONFUSED, ids=str)
def test_a_union_whose_members_json_does_not_distinguish_is_refused(kind: Any) -> None:
    (fault, *_) = Catalog([declared(kind)]).faults()
    assert fault.startswith("Made.given holds ")


@dataclass(frozen=True)
class Place:
    name: str
    since: date | str


@event("account.moved")
class Moved:
    places: tuple[Place, ...]
    by: UUID | str


@event("limit.raised")
class Raised:
    pass


@aggregate("limit", snapshot_every=10)
class Limited:
    limit: Decimal | str = ""

    def evolve(self, event: Raised) -> Limited:
        return self


@aggregate("account")
class Account:
    def move(self, at: date | str) -> Moved:
        return Moved(places=(Place("a", at),), by="x")

    def evolve(self, event: Moved) -> Account:
        return self


def test_an_app_names_each_ambiguous_union_with_its_field_and_members() -> None:
    with pytest.raises(DefinitionError) as caught:
        App("bank", aggregates=[Account], served=[served(Account, Account.move)])
    faults = [fault.partition(", which JSON")[0] for fault in caught.value.faults]
    with pytest.raises(DefinitionError) as caught:
        App("bank", aggregates=[Limited])
    faults += [fault.partition(", which JSON")[0] for fault in caught.value.faults]
    assert sorted(faults) == [
        "Account.move.at holds date | str",
        "Limited.limit holds Decimal | str",
        "Moved.by holds UUID | str",
        "Moved.places.since holds date | str",
    ]
