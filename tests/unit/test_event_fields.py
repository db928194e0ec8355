"""An event refuses unknown keywords, and unknown fields of a stored body are ignored."""

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
    """An event that inherits the fields of another event."""


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
def test_an_event_refuses_an_unknown_keyword_and_suggests_the_closest_field(
    make: Callable[[], Any], keyword: str, near: str
) -> None:
    with pytest.raises(TypeError, match=rf"has no field '{keyword}'") as caught:
        make()
    assert (f"Did you mean '{near}'?" in str(caught.value)) == bool(near)


def test_unknown_keys_of_a_typed_dict_are_refused() -> None:
    line: Any = {"sku": "a", "coutn": 3}
    with pytest.raises(Invalid, match="coutn"):
        Withdrawn(amount=1, line=line)


def test_an_unknown_keyword_is_named_first_and_no_value_is_shown() -> None:
    with pytest.raises(TypeError, match="raeson") as caught:
        Withdrawn(amount="secret", raeson="hidden")  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_an_event_takes_its_declared_fields() -> None:
    closed = Closed(clerk="ada", reason="moved")
    assert (closed.clerk, closed.reason) == ("ada", "moved")
    assert replace(closed, clerk="bob") == Closed(clerk="bob", reason="moved")
    assert Counted(start=1).end == 2
    assert list(inspect.signature(Closed).parameters) == ["clerk", "reason"]
    with pytest.raises(Invalid):
        Withdrawn(amount="4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


STORED_BODIES = (
    b'{"amount":4,"raeson":"rent"}',
    b'{"amount":4,"line":{"sku":"a","shelf":3}}',
    b'{"amount":4,"place":{"street":"x","town":"y"},"note":{"text":"x","by":"y"}}',
)


@pytest.mark.parametrize("body", STORED_BODIES, ids=["field", "dict", "classes"])
def test_a_stored_body_with_unknown_fields_is_read(body: bytes) -> None:
    event_kind = Catalog([Withdrawn]).resolve("account.withdrawn", 1)
    assert event_kind is not None
    known = orjson.loads(body)
    assert event_kind.decode(body).amount == known["amount"]


@pytest.mark.parametrize("kind", [Withdrawn, Withdrawn | Closed], ids=["event", "union"])
def test_an_inbox_ignores_unknown_fields_of_a_message(kind: Any) -> None:
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
    "body", [{"strict": {"line": {"sku": "a"}, "x": 1}}, {"strict": {"line": {"sku": "a"}}, "other": {"x": 1}}]
)
def test_a_model_that_forbids_unknown_fields_refuses_them_in_a_stored_body(body: Any) -> None:
    event_kind = Catalog([Checked]).resolve("account.checked", 1)
    assert event_kind is not None
    with pytest.raises(ValueError, match="x"):
        event_kind.decode(orjson.dumps(body))


def test_an_exported_schema_allows_unknown_fields() -> None:
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


def test_an_event_without_the_fields_of_its_base_is_refused_with_their_names() -> None:
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


def test_a_state_without_the_fields_of_its_base_is_refused_with_their_names() -> None:
    with pytest.raises(DefinitionError, match="BareState lacks clerk of its base Bare"):
        App("bank", aggregates=[BareState])


def test_a_scenario_raises_the_type_error_of_a_wrong_event() -> None:
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
def test_generated_events_leave_out_fields_that_a_constructor_does_not_take(drawn: Drawn) -> None:
    assert drawn.made == 7


@pytest.mark.parametrize("alias", ["alias", "validation_alias", "serialization_alias"])
def test_a_field_with_an_alias_is_refused_at_the_declaration(alias: str) -> None:
    options: Any = {alias: "amt"}
    with pytest.raises(DefinitionError, match=r"Aliased\.amount has an alias"):

        @event("o.aliased")
        class Aliased:  # pyright: ignore[reportUnusedClass]
            amount: int = Field(default=4, **options)
