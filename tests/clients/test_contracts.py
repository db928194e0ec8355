"""AsyncAPI's own parser accepts the document of an app, and ajv accepts the bodies that the codec writes.

The part in node is `contract.mjs`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import Field

from eventjet import App, Incoming, Reaction, Recorded, aggregate, event, inbox, publication, served
from eventjet.contracts.asyncapi import asyncapi_of
from eventjet.contracts.contract import contract_of, text_of
from tests import javascript

SCRIPT = Path(__file__).with_name("contract.mjs")
BOUND_S = 120.0

pytestmark = pytest.mark.slow


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Line:
    """A line of an order."""

    price: Decimal
    count: int = 1
    inside: tuple[Line, ...] = ()


@dataclass(frozen=True)
class Card:
    kind: Literal["card"]
    digits: str


@dataclass(frozen=True)
class Cash:
    kind: Literal["cash"]


@event("thing:made.all")
class Made:
    """Everything that an event may hold."""

    text: str
    amount: Decimal
    count: int
    few: Annotated[int, Field(ge=0, le=9)]
    ratio: float
    at: datetime
    day: date
    when: time
    took: timedelta
    key: UUID
    raw: bytes
    colour: Colour
    lines: tuple[Line, ...]
    pair: tuple[int, str]
    seen: frozenset[int]
    named: dict[int, Decimal]
    coloured: dict[Colour, bool]
    paid: Annotated[Card | Cash, Field(discriminator="kind")]
    maybe: bool | str | None = None
    exact: Annotated[Decimal, Field(gt=0, decimal_places=2)] = Decimal("0.01")
    first: Line = Line(price=Decimal(1))


@event("thing.gone", formerly=("thing.lost",))
class Gone:
    pass


@event("public.made")
class Told:
    line: Line


@aggregate("thing")
class Thing:
    made: int = 0

    def make(self, made: Decimal, at: datetime, lines: tuple[Line, ...] = ()) -> Gone:
        """Make it."""
        return Gone()

    def evolve(self, event: Made | Gone) -> Thing:
        return replace(self, made=self.made + 1)


@publication("news", stream="PUBLIC", source="https://thing.example/")
def news(event: Recorded[Made]) -> Told:
    return Told(line=event.data.first)


@inbox("orders", stream="SHOP", subject="shop.orders.*")
async def orders(message: Incoming[dict[str, int]], reaction: Reaction) -> None:
    """Receive orders of another system."""


APP = App("things", aggregates=[Thing], publications=[news], reactors=[orders], served=[served(Thing, Thing.make)])


def event_with(**other: Any) -> Made:
    plain: dict[str, Any] = {
        "text": "é",
        "amount": Decimal("1.50"),
        "count": 1,
        "few": 9,
        "ratio": 1.0,
        "at": datetime(2026, 1, 2, 3, 4, 5, 6, UTC),
        "day": date(2026, 1, 2),
        "when": time(1, 2, 3, 4),
        "took": timedelta(days=400, seconds=1.5),
        "key": UUID(int=1),
        "raw": b"\xff\x00",
        "colour": Colour.RED,
        "lines": (Line(price=Decimal("1E+3"), inside=(Line(price=Decimal(0)),)),),
        "pair": (2**60, "x"),
        "seen": frozenset({1, 2}),
        "named": {-1: Decimal("-0.00")},
        "coloured": {Colour.BLUE: True},
        "paid": Card(kind="card", digits="12"),
    }
    return Made(**{**plain, **other})


MADE = [
    event_with(),
    event_with(count=2**53 + 1, took=-timedelta(milliseconds=1), when=time(1, 2, tzinfo=UTC), paid=Cash(kind="cash")),
    event_with(count=-(2**90), maybe="text", lines=(), seen=frozenset(), named={}, exact=Decimal("12.34")),
    event_with(maybe=True, amount=Decimal("1E-30"), took=timedelta(0), ratio=-1e-300, at=datetime(1, 1, 1, tzinfo=UTC)),
]


def judged(folder: Path, how: str, text: str) -> Any:
    shutil.copy(SCRIPT, folder)
    (folder / "given.json").write_text(text)
    arguments = [SCRIPT.name, how, "given.json"]
    done = javascript.run(arguments, folder=folder, environ=dict(os.environ), timeout_s=BOUND_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_asyncapis_own_parser_accepts_the_document(tmp_path: Path) -> None:
    result = judged(tmp_path, "asyncapi", text_of(asyncapi_of(APP, contract_of(APP), "1.2.3")))
    assert result["faults"] == []
    assert result["title"] == "things"
    channels = {channel["id"]: (channel["address"], channel["messages"]) for channel in result["channels"]}
    assert channels == {
        "thing": ("things.thing.{id}", [["thing.gone", True], ["thing:made.all", True]]),
        "publication.news": ("PUBLIC.news.{id}", [["public.made", True]]),
        "inbox.orders": ("shop.orders.*", [["dict[str, int]", True]]),
        "command.thing.make": ("cmd.things.thing.make.{id}", [["make", True]]),
        "command.thing.make.answer": (None, [["make.done", True], ["make.problem", True]]),
    }
    assert sorted(map(tuple, result["operations"])) == [
        ("publish_news", "send"),
        ("record_thing", "send"),
        ("serve_thing_make", "receive"),
        ("take_orders", "receive"),
    ]


def test_ajv_accepts_only_the_bodies_that_the_codec_writes(tmp_path: Path) -> None:
    schemas = {event.name: event.document() for event in contract_of(APP).events}
    bodies = [APP.catalog.encode(event).body for event in MADE]
    plain = json.loads(bodies[0])
    wrong = [{**plain, **other} for other in WRONG] + [{name: plain[name] for name in plain if name != "key"}]
    cases = [
        [schemas["thing:made.all"], [body.decode() for body in bodies], list(map(json.dumps, wrong))],
        [schemas["thing.gone"], ["{}"], ["[]"]],
    ]
    assert judged(tmp_path, "bodies", json.dumps(cases)) == []


WRONG: list[dict[str, Any]] = [
    {"amount": 1.5},
    {"count": "1"},
    {"count": 1.5},
    {"few": 10},
    {"at": "2026-01-02"},
    {"day": "yesterday"},
    {"when": "noon"},
    {"took": 1.5},
    {"key": "1"},
    {"raw": "é"},
    {"colour": "green"},
    {"lines": [{"count": 1}]},
    {"pair": [1]},
    {"seen": [1, 1]},
    {"named": {"x": "1"}},
    {"coloured": {"green": True}},
    {"paid": {"kind": "cheque"}},
    {"maybe": 1.5},
]
