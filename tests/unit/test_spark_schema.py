"""The Spark type of each field, and values that reach it unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NewType
from uuid import UUID

import pytest
from pydantic import AfterValidator, BaseModel, Field

from eventjet import event
from eventjet.spark.columns import forms_of
from eventjet.spark.event_rows import recorded_columns


class Kind(Enum):
    SMALL = "small"


class Level(IntEnum):
    HIGH = 3


class Mixed(Enum):
    ONE = 1
    TWO = "two"


class Place(BaseModel):
    zip_code: int


@dataclass(frozen=True, slots=True)
class Address:
    street: str
    limits: list[Decimal] = field(default_factory=list[Decimal])


@dataclass(frozen=True, slots=True)
class Tree:
    name: str
    branches: list[Tree] = field(default_factory=list["Tree"])


Cents = NewType("Cents", int)
Money = Annotated[Decimal, Field(max_digits=12, decimal_places=2)]


@event("everything.happened")
class Everything:
    flag: bool
    count: Cents
    rate: float
    text: str
    amount: Decimal
    money: Money
    tenths: Annotated[Decimal, Field(decimal_places=1)]
    checked: Annotated[Decimal, AfterValidator(lambda value: value)]
    at: datetime
    day: date
    clock: time
    lasted: timedelta
    key: UUID
    raw: bytes
    kind: Kind
    level: Level
    mixed: Mixed
    chosen: Literal["a", "b"]
    perhaps: Address | None
    numbers: tuple[int, ...]
    keys: frozenset[UUID]
    names: Sequence[str]
    by_name: dict[str, Address]
    by_number: dict[int, str]
    place: Place
    either: int | str
    pair: tuple[int, str]
    anything: Any
    tree: Tree


EXAMPLE = Everything(
    flag=True,
    count=Cents(2**62),
    rate=0.1,
    text="ä\x00",
    amount=Decimal("1.000000000000000001"),
    money=Decimal("12.5"),
    tenths=Decimal("0.1"),
    checked=Decimal(3),
    at=datetime(2026, 3, 29, 1, 30, tzinfo=UTC),
    day=date(1, 1, 1),
    clock=time(12, 30),
    lasted=timedelta(days=1, microseconds=1),
    key=UUID(int=7),
    raw=b"\xff",
    kind=Kind.SMALL,
    level=Level.HIGH,
    mixed=Mixed.TWO,
    chosen="b",
    perhaps=None,
    numbers=(1, 2),
    keys=frozenset({UUID(int=2), UUID(int=1)}),
    names=["x"],
    by_name={"home": Address("s", [Decimal(1)])},
    by_number={1: "one"},
    place=Place(zip_code=1),
    either="x",
    pair=(1, "x"),
    anything=[1, {"a": None}],
    tree=Tree("t", [Tree("u")]),
)

DDL = {
    "flag": "boolean",
    "count": "bigint",
    "rate": "double",
    "text": "string",
    "amount": "decimal(38,18)",
    "money": "decimal(12,2)",
    "tenths": "decimal(38,1)",
    "checked": "decimal(38,18)",
    "at": "timestamp",
    "day": "date",
    "clock": "string",
    "lasted": "interval day to second",
    "key": "string",
    "raw": "binary",
    "kind": "string",
    "level": "bigint",
    "mixed": "string",
    "chosen": "string",
    "perhaps": "struct<`street`:string,`limits`:array<decimal(38,18)>>",
    "numbers": "array<bigint>",
    "keys": "array<string>",
    "names": "array<string>",
    "by_name": "map<string,struct<`street`:string,`limits`:array<decimal(38,18)>>>",
    "by_number": "string",
    "place": "struct<`zip_code`:bigint>",
    "either": "string",
    "pair": "string",
    "anything": "string",
    "tree": "string",
}


def test_every_field_has_the_spark_type_of_its_annotation() -> None:
    assert {name: form.ddl for name, form in forms_of(Everything).items()} == DDL


def test_values_are_converted_for_their_columns() -> None:
    pa = pytest.importorskip("pyarrow")
    columns = {}
    for name, form in forms_of(Everything).items():
        value = getattr(EXAMPLE, name)
        columns[name] = pa.array([None if value is None else form.convert(value)], form.arrow).to_pylist()[0]
    assert columns == {
        **{name: getattr(EXAMPLE, name) for name in ("flag", "count", "rate", "text", "amount", "money", "tenths")},
        **{name: getattr(EXAMPLE, name) for name in ("checked", "at", "day", "lasted", "raw", "chosen", "perhaps")},
        "clock": "12:30:00",
        "key": str(UUID(int=7)),
        "kind": "small",
        "level": 3,
        "mixed": '"two"',
        "numbers": [1, 2],
        "keys": [str(UUID(int=1)), str(UUID(int=2))],
        "names": ["x"],
        "by_name": [("home", {"street": "s", "limits": [Decimal(1)]})],
        "by_number": '{"1":"one"}',
        "place": {"zip_code": 1},
        "either": '"x"',
        "pair": '[1,"x"]',
        "anything": '[1,{"a":null}]',
        "tree": '{"name":"t","branches":[{"name":"u","branches":[]}]}',
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("amount", Decimal("1e-19")),
        ("amount", Decimal("1e20")),
        ("money", Decimal("0.005")),
        ("money", Decimal(10000000000)),
        ("count", 2**63),
        ("count", -(2**63) - 1),
        ("text", 7),
    ],
)
def test_a_value_that_does_not_fit_its_type_is_refused_and_never_rounded(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"it does not fit into bigint|it has more digits than|it is a "):
        forms_of(Everything)[name].convert(value)


@pytest.mark.parametrize(
    "value", [Decimal("1.5000000000000000000000"), Decimal("-99999999999999999999.5"), Decimal("1e19")]
)
def test_a_decimal_that_fits_is_the_same_number(value: Decimal) -> None:
    assert forms_of(Everything)["amount"].convert(value) == value


def test_a_field_named_as_a_column_of_the_log_gets_another_name() -> None:
    @event("odd.named")
    class Odd:
        version: str
        Actor: int
        event_version: bool

    columns = recorded_columns(Odd)
    assert [name for name in columns if name.startswith("event_")] == [
        "event_id",
        "event_version",
        "event_Actor",
        "event_event_version",
    ]
    assert columns["version"].ddl == "bigint"
    assert columns["event_version"].ddl == "string"


class Reply(Enum):
    YES = "yes"
    NONE = None


@event("survey.answered")
class Answered:
    reply: Reply
    groups: set[frozenset[str]]
    lines: set[tuple[frozenset[str], ...]]


def test_a_member_whose_value_is_none_is_null() -> None:
    convert = forms_of(Answered)["reply"].convert
    assert [convert(reply) for reply in Reply] == ["yes", None]


def test_sets_within_sets_have_the_same_order_in_every_process() -> None:
    program = (
        "from tests.unit.test_spark_schema import Answered, forms_of\n"
        "groups = {frozenset(text) for text in ('az', 'by', 'cx', 'dw', 'ev')}\n"
        "forms = forms_of(Answered)\n"
        "print(forms['groups'].convert(groups), forms['lines'].convert({(group,) for group in groups}))"
    )
    orders = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(orders) == 1, orders
