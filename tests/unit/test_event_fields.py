"""An event has what it is made with: unknown keywords are refused, and unknown fields of a stored body passed over."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

import orjson
import pytest
from hypothesis import given, settings
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic import ValidationError as Invalid
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import NotRequired, TypedDict  # noqa: UP035 - pydantic asks for both of there

from eventjet import App, aggregate, event, process
from eventjet.codec.catalog import Catalog
from eventjet.codec.cloud_events import IncomingDecoder
from eventjet.codec.shape import shape_of
from eventjet.errors import DefinitionError
from eventjet.testing import scenario, story
from eventjet.testing.strategies import Values, instances_of

T = TypeVar("T")


class Line(TypedDict):
    sku: str
    count: NotRequired[int]


@dataclass(frozen=True)
class Place:
    street: str = ""


class Note(BaseModel):
    text: str = ""


@event("account.withdrawn")
class Withdrawn:
    currency: ClassVar[str] = "EUR"
    amount: int
    reason: str = "cash"
    made: int = field(default=7, init=False)
    line: Line = field(default_factory=lambda: Line(sku="a"))
    place: Place = Place()
    note: Note = field(default_factory=Note)


@dataclass(frozen=True, kw_only=True)
class Audited:
    clerk: str = ""


@event("account.closed")
class Closed(Audited):
    reason: str = ""


@event("account.reopened")
class Reopened(Closed):
    """An event that has the fields of another."""


class Bare:
    clerk: str
    limit: ClassVar[int] = 3


class BareGeneric(Bare, Generic[T]):
    team: T


@event("account.frozen")
class Frozen(Bare):
    reason: str = ""


@event("account.named")
class Named(Bare):
    clerk: str = ""
    """Declared again, so nothing is lost."""


@event("account.teamed")
class Teamed(BareGeneric[int]):
    pass


@event("account.later")
class Later:
    """Its annotation cannot be resolved when it is declared."""

    place: LaterPlace


@dataclass(frozen=True)
class LaterPlace:
    street: str


@event("account.counted")
class Counted:
    start: InitVar[int]
    end: int = 0

    def __post_init__(self, start: int) -> None:
        object.__setattr__(self, "end", start + 1)


UNKNOWN: tuple[tuple[Callable[[], Any], str, str], ...] = (
    (lambda: Withdrawn(amount=4, raeson="rent"), "raeson", "reason"),  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    (lambda: replace(Withdrawn(amount=4), raeson="rent"), "raeson", "reason"),  # type: ignore[call-arg]
    (lambda: Withdrawn(amount=4, currency="USD"), "currency", ""),  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    (lambda: Withdrawn(amount=4, made=8), "made", ""),  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    (lambda: Closed(clerc="ada"), "clerc", "clerk"),  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    (lambda: Reopened(reasons="x"), "reasons", "reason"),  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    (lambda: Counted(start=1, stop=2), "stop", ""),  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    (lambda: Later(place=LaterPlace("x"), plaec=1), "plaec", "place"),  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
)  # fmt: skip


@pytest.mark.parametrize(("make", "keyword", "near"), UNKNOWN, ids=[keyword for _, keyword, _ in UNKNOWN])
def test_an_event_refuses_a_keyword_that_is_no_field_and_says_which_was_meant(
    make: Callable[[], Any], keyword: str, near: str
) -> None:
    with pytest.raises(TypeError, match=rf"has no field '{keyword}'") as caught:
        make()
    assert (f"Did you mean '{near}'?" in str(caught.value)) == bool(near)


def test_a_value_given_as_a_dict_is_refused_keys_that_it_does_not_have() -> None:
    line: Any = {"sku": "a", "coutn": 3}
    with pytest.raises(Invalid, match="coutn"):
        Withdrawn(amount=1, line=line)


def test_an_unknown_keyword_is_named_before_a_value_of_another_type_and_shows_no_value() -> None:
    with pytest.raises(TypeError, match="raeson") as caught:
        Withdrawn(amount="secret", raeson="hidden")  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_what_is_given_rightly_is_taken_as_before() -> None:
    made = Closed(clerk="ada", reason="moved")
    assert (made.clerk, made.reason) == ("ada", "moved")
    assert replace(made, clerk="bob") == Closed(clerk="bob", reason="moved")
    assert Counted(start=1).end == 2
    assert list(inspect.signature(Closed).parameters) == ["clerk", "reason"]
    with pytest.raises(Invalid):
        Withdrawn(amount="4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


STORED = (
    b'{"amount":4,"raeson":"rent"}',
    b'{"amount":4,"line":{"sku":"a","shelf":3}}',
    b'{"amount":4,"place":{"street":"x","town":"y"},"note":{"text":"x","by":"y"}}',
)


@pytest.mark.parametrize("body", STORED, ids=["field", "dict", "classes"])
def test_a_stored_body_with_unknown_fields_is_read(body: bytes) -> None:
    read = Catalog([Withdrawn]).resolve("account.withdrawn", 1)
    assert read is not None
    known = orjson.loads(body)
    assert read.decode(body).amount == known["amount"]


@pytest.mark.parametrize("kind", [Withdrawn, Withdrawn | Closed], ids=["event", "union"])
def test_an_inbox_passes_over_what_others_tell_beyond_the_fields_of_an_event(kind: Any) -> None:
    message = IncomingDecoder(kind, "2026")((1, 1, b"s", b"", b'{"amount":4,"raeson":"rent","line":{"sku":"a","x":1}}'))
    assert message.data.amount == 4


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    line: Line


@pydantic_dataclass(frozen=True, config={"extra": "forbid"})
class StrictToo:
    street: str = ""


@event("account.checked")
class Checked:
    strict: Strict
    other: StrictToo = StrictToo()


@pytest.mark.parametrize(
    "field_of", [{"strict": {"line": {"sku": "a"}, "x": 1}}, {"strict": {"line": {"sku": "a"}}, "other": {"x": 1}}]
)
def test_a_class_of_the_application_that_forbids_unknown_fields_goes_on_to_do_so(field_of: Any) -> None:
    read = Catalog([Checked]).resolve("account.checked", 1)
    assert read is not None
    with pytest.raises(ValueError, match="x"):
        read.decode(orjson.dumps(field_of))


def test_an_exported_schema_goes_on_to_allow_what_readers_pass_over() -> None:
    assert b"additionalProperties" not in orjson.dumps(shape_of(Withdrawn))
    assert b"additionalProperties" not in orjson.dumps(
        shape_of(list[Withdrawn], TypeAdapter(list[Withdrawn]).core_schema)
    )


@aggregate("account")
class Account:
    def evolve(self, event: Frozen | Teamed | Named) -> Account:
        return self


@aggregate("bare")
class BareState(Bare):
    def evolve(self, event: Named) -> BareState:
        return self


@process("account")
class Watch:
    def step(self) -> None:
        return None

    def evolve(self, event: Frozen) -> Watch:
        return self


def test_an_event_that_lacks_the_fields_of_its_base_is_refused_with_their_names() -> None:
    with pytest.raises(DefinitionError) as caught:
        App("bank", aggregates=[Account])
    assert [fault.partition(", which")[0] for fault in caught.value.faults] == [
        "Frozen lacks clerk of its base Bare",
        "Teamed lacks team of its base BareGeneric",
        "Teamed lacks clerk of its base Bare",
    ]
    with pytest.raises(DefinitionError, match="Frozen lacks clerk of its base Bare"):
        scenario(Account)
    with pytest.raises(DefinitionError, match="Frozen lacks clerk of its base Bare"):
        story(Watch)
    with pytest.raises(TypeError, match="Frozen lacks clerk of its base Bare"):
        Frozen(clerk="ada")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def test_a_state_that_lacks_the_fields_of_its_base_is_refused_with_their_names() -> None:
    with pytest.raises(DefinitionError, match="BareState lacks clerk of its base Bare"):
        App("bank", aggregates=[BareState])


def test_a_scenario_whose_decision_makes_an_event_wrongly_raises_its_type_error() -> None:
    def name(state: BareNamed, clerk: str) -> Named:
        return Named(clrek=clerk)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]

    with pytest.raises(TypeError, match="clrek"):
        scenario(BareNamed).when(name, "ada").then(Named(clerk="ada"))
    scenario(BareNamed).when(name, "ada").then_raises(TypeError)


@aggregate("bare_named")
class BareNamed:
    def evolve(self, event: Named) -> BareNamed:
        return self


@event("account.drawn")
class Drawn:
    amount: int
    made: int = field(default=7, init=False)


@given(instances_of(Drawn, Values()))
@settings(max_examples=5)
def test_drawn_events_leave_out_what_a_constructor_does_not_take(made: Drawn) -> None:
    assert made.made == 7


@pytest.mark.parametrize("alias", ["alias", "validation_alias", "serialization_alias"])
def test_a_field_with_an_alias_is_refused_where_its_event_is_declared(alias: str) -> None:
    options: Any = {alias: "amt"}
    with pytest.raises(DefinitionError, match=r"Aliased\.amount has an alias"):

        @event("o.aliased")
        class Aliased:  # pyright: ignore[reportUnusedClass]
            amount: int = Field(default=4, **options)
