"""Personal values are hidden wherever they are, and no others are; long values are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, ParamSpec, TypeVar

import pytest
from pydantic import AfterValidator, BaseModel, Field, PlainSerializer, RootModel, computed_field, model_serializer
from sqlalchemy import Column, MetaData, String, Table
from typing_extensions import TypeAliasType, TypedDict

from eventjet import App, Personal, aggregate, event, served, upcaster
from eventjet.codec.bodies import BodyCodec
from eventjet.codec.catalog import Catalog
from eventjet.codec.reasons import reason_of, traceback_of
from eventjet.domain.personal import MASK, decisions_are_private, is_private, masked, masked_row, parameter_hint
from eventjet.domain.process import Call
from eventjet.errors import RowRefused, UnencodableEvent
from eventjet.operations.processes import _call_text
from eventjet.projections.row_codec import RowCodec
from eventjet.projections.row_type import row_faults
from eventjet.text import cut, cut_values, shown

if TYPE_CHECKING:
    Email = Personal[str]
    Later = Any

T = TypeVar("T")
U = TypeVar("U")
P = ParamSpec("P")
SECRET = "ada@example.org"


@dataclass(frozen=True)
class Home:
    street: Personal[str]
    country: str


class Pair(NamedTuple):
    code: str
    phone: Personal[str]


class Extra(TypedDict):
    """On Python 3.11, pydantic takes only a TypedDict of typing_extensions."""

    note: Personal[str]
    size: int


class Model(BaseModel):
    nickname: Personal[str]
    plan: str = "free"


@dataclass(frozen=True)
class Node:
    label: str
    children: tuple[Node, ...] = ()
    owner: Personal[str] = ""


@dataclass(frozen=True)
class Plain:
    size: int = 0
    inner: tuple[int, ...] = ()


@event("person.joined")
class Joined:
    email: Personal[str]
    plan: str
    home: Home | None = None
    others: tuple[Home, ...] = ()
    by_name: Mapping[str, Home] = field(default_factory=dict)
    keyed: Mapping[Personal[str], int] = field(default_factory=dict)
    maybe: Personal[str] | None = None
    amount: Decimal = Decimal(0)


@event("person.left")
class Left:
    reason: str = ""


@event("person.moved", schema=2)
class Moved:
    home: Home


@aggregate("person")
class Person:
    plan: str = ""

    def join(self, email: Personal[str]) -> Joined:
        return Joined(email=email, plan="free")

    def evolve(self, event: Joined | Left | Moved) -> Person:
        return self


HIDDEN = {"street": MASK, "country": "GB"}
HOME = {"street": SECRET, "country": "GB"}


@pytest.mark.parametrize("hint", [Home, Pair, Extra, Model, Node, Joined, list[Home], Home | None, dict[str, Home]])
def test_a_class_with_a_personal_field_at_any_depth_is_private(hint: Any) -> None:
    assert is_private(hint)


@pytest.mark.parametrize("hint", [Plain, Left, int, dict[str, int], Any, tuple[Plain, ...]])
def test_a_class_without_a_personal_field_is_not_private(hint: Any) -> None:
    assert not is_private(hint)


def test_every_personal_value_of_an_event_is_hidden_and_no_others() -> None:
    body = {
        "email": SECRET,
        "plan": "free",
        "home": HOME,
        "others": [HOME, HOME],
        "by_name": {"first": HOME},
        "keyed": {SECRET: 1},
        "maybe": None,
        "amount": "1.50",
        "unheard": SECRET,
    }
    assert masked(body, Joined) == {
        "email": MASK,
        "plan": "free",
        "home": HIDDEN,
        "others": [HIDDEN, HIDDEN],
        "by_name": {"first": HIDDEN},
        "keyed": MASK,
        "maybe": MASK,
        "amount": "1.50",
        "unheard": MASK,
    }


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (Pair, ["+44", SECRET], [MASK, MASK]),
        (Extra, {"note": SECRET, "size": 3}, {"note": MASK, "size": 3}),
        (Model, {"nickname": SECRET, "plan": "free"}, {"nickname": MASK, "plan": "free"}),
        (
            Node,
            {"label": "a", "children": [{"label": "b", "children": [], "owner": SECRET}], "owner": SECRET},
            {"label": "a", "children": [{"label": "b", "children": [], "owner": MASK}], "owner": MASK},
        ),
        (Home, SECRET, MASK),
        (Plain, {"size": 1, "strange": "kept"}, {"size": 1, "strange": "kept"}),
    ],
)
def test_containers_and_other_classes_are_masked_alike(hint: Any, value: Any, expected: Any) -> None:
    assert masked(value, hint) == expected


@dataclass(frozen=True)
class Changed(Generic[T]):
    before: T
    after: list[T]
    count: int = 0


@dataclass(frozen=True)
class ChangedEmail(Changed[Personal[str]]):
    """A class whose base has a personal type argument."""


@dataclass(frozen=True)
class Other(Generic[T]):
    other: T


@dataclass(frozen=True)
class ChangedBoth(Changed[list[U]], Other[int], Generic[U]):
    """A class whose type variable is part of an argument of one of its bases."""


@dataclass(frozen=True)
class Called(Generic[T, P]):
    result: T


class ModelOf(BaseModel, Generic[T]):
    value: T
    count: int = 0


class Emails(RootModel[list[Personal[str]]]):
    pass


Maybe = TypeAliasType("Maybe", Personal[T] | None, type_params=(T,))
Several = TypeAliasType("Several", dict[str, T], type_params=(T,))
JOINED = Annotated[tuple[Personal[str], ...], PlainSerializer(",".join)]


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (
            Changed[Personal[str]],
            {"before": SECRET, "after": [SECRET], "count": 2},
            {"before": MASK, "after": [MASK], "count": 2},
        ),
        (ModelOf[Personal[str]], {"value": SECRET, "count": 2}, {"value": MASK, "count": 2}),
        (
            Changed[Home],
            {"before": HOME, "after": [HOME], "count": 2},
            {"before": HIDDEN, "after": [HIDDEN], "count": 2},
        ),
        (ChangedBoth[Personal[str]], {"before": [SECRET], "after": [[SECRET]]}, {"before": [MASK], "after": [[MASK]]}),
        (ChangedBoth[str], {"before": ["free"], "other": 3}, {"before": ["free"], "other": 3}),
        (Called[Personal[str], [int]], {"result": SECRET}, {"result": MASK}),
        (ChangedEmail, {"before": SECRET, "after": [SECRET]}, {"before": MASK, "after": [MASK]}),
        (Changed[int], {"before": 1, "after": [2], "count": 3}, {"before": 1, "after": [2], "count": 3}),
        (Emails, [SECRET], [MASK]),
        (Maybe[str], SECRET, MASK),
        (Several[Personal[str]], {"a": SECRET}, MASK),
        (Several[int], {"a": 1}, {"a": 1}),
        (JOINED, SECRET, MASK),
        (Home | str, "plain", "plain"),
        (Home | None, None, MASK),
    ],
)
def test_a_personal_type_argument_or_alias_is_hidden(hint: Any, value: Any, expected: Any) -> None:
    assert masked({"given": value}, event_of(hint)) == {"given": expected}


class Household(BaseModel):
    """A model that names a class which is declared after it, so pydantic cannot complete it."""

    head: Head


@event("household.moved")
class Relocated:
    household: Household


class Head(BaseModel):
    name: Personal[str]


@event("household.left")
class HeadLeft:
    head: LateHead


PRIVATE_BEFORE_ITS_CLASS = is_private(HeadLeft)


class LateHead(BaseModel):
    name: Personal[str]


def test_a_personal_field_of_a_class_that_is_declared_later_is_hidden() -> None:
    assert PRIVATE_BEFORE_ITS_CLASS
    catalog = Catalog([Relocated, HeadLeft])
    assert catalog.is_private
    body = {"household": {"head": {"name": SECRET}}}
    assert catalog.masked("household.moved", 1, body) == {"household": {"head": {"name": MASK}}}


def event_of(hint: Any) -> Any:
    return event("person.given")(type("Given", (), {"__annotations__": {"given": hint}, "__module__": __name__}))


@event("person.named", schema=2)
class Named:
    plan: str


def test_a_removed_field_is_hidden_in_an_app_with_personal_fields() -> None:
    """The field may have been removed because it is personal."""

    @aggregate("name")
    class Name:
        def evolve(self, event: Named) -> Name:
            return self

    apps = [App("people", aggregates=kinds, upcasters=[upcaster("person.named", schema=1)(dict)]) for kinds in
            ([Name], [Name, Plainer])]  # fmt: skip
    body = {"plan": "free", "email": SECRET}
    assert apps[0].catalog.masked("person.named", 1, body) == body, "no field of the app is personal"
    assert apps[1].catalog.masked("person.named", 1, body) == {"plan": "free", "email": MASK}
    assert apps[1].catalog.masked("person.named", 3, body) == {"plan": "free", "email": MASK}
    assert apps[1].catalog.masked("person.named", 2, body) == {"plan": "free", "email": MASK}


@aggregate("plainer")
class Plainer:
    def evolve(self, event: Joined) -> Plainer:
        return self


class Loose(BaseModel, extra="allow"):
    size: int = 0


class Inches(BaseModel):
    size: int = Field(0, serialization_alias="inches")

    @computed_field
    def feet(self) -> float:
        return self.size / 12


class Money(BaseModel):
    units: int = 0

    @model_serializer
    def written(self) -> dict[str, Any]:
        return {"cents": self.units}


class Sizes(RootModel[dict[str, int]]):
    pass


class Shade(Enum):
    RED = (255, 0, 0)


@event("shirt.sewn", schema=2)
class Sewn:
    plain: Plain
    plains: tuple[Plain, ...]
    by_name: Mapping[str, Plain]
    maybe: Plain | None
    loose: Loose
    inches: Inches
    money: Money
    sizes: Sizes
    shade: Shade
    anything: Any
    text: str


@aggregate("shirt")
class Shirt:
    def evolve(self, event: Sewn) -> Shirt:
        return self


STRANGE = {"size": 1, "inner": [1], "email": SECRET}
KNOWN = {"size": 1, "inner": [1], "email": MASK}
IN_TEXT = {"size": {"email": SECRET}}
MEASURED = {"inches": 12, "feet": 1.0}


@pytest.mark.parametrize(
    ("name", "value", "of_same_schema", "of_other_schema"),
    [
        ("plain", STRANGE, KNOWN, KNOWN),
        ("plain", IN_TEXT, IN_TEXT, {"size": {"email": MASK}}),
        ("plains", [STRANGE], [KNOWN], [KNOWN]),
        ("by_name", {"a": STRANGE}, {"a": KNOWN}, {"a": KNOWN}),
        ("maybe", STRANGE, KNOWN, KNOWN),
        ("maybe", SECRET, SECRET, MASK),
        ("maybe", None, None, None),
        ("loose", {"size": 1, "more": 2}, {"size": 1, "more": 2}, {"size": 1, "more": MASK}),
        ("inches", MEASURED, MEASURED, MEASURED),
        ("money", {"cents": 1}, {"cents": 1}, {"cents": MASK}),
        ("sizes", {"a": 1}, {"a": 1}, {"a": 1}),
        ("anything", {"a": [{"b": 1}]}, {"a": [{"b": 1}]}, {"a": [{"b": 1}]}),
        ("shade", [255, 0, 0], [255, 0, 0], MASK),
        ("text", [SECRET], [SECRET], MASK),
        ("unknown", SECRET, MASK, MASK),
    ],
)
def test_an_undeclared_field_is_hidden_at_any_depth(
    name: str, value: Any, of_same_schema: Any, of_other_schema: Any
) -> None:
    """A personal field may have been removed from a class inside an event, too."""
    step = upcaster("shirt.sewn", schema=1)(dict)
    catalog = App("shirts", aggregates=[Shirt, Plainer], upcasters=[step]).catalog
    assert catalog.masked("shirt.sewn", 2, {name: value}) == {name: of_same_schema}
    assert catalog.masked("shirt.sewn", 1, {name: value}) == {name: of_other_schema}
    without_personal = App("shirts", aggregates=[Shirt], upcasters=[step]).catalog
    assert without_personal.masked("shirt.sewn", 1, {name: value}) == {name: value}


def test_a_stored_body_is_shown_without_values_that_may_be_personal() -> None:
    catalog = App("people", aggregates=[Person], upcasters=[upcaster("person.moved", schema=1)(dict)]).catalog
    left = b'{"reason" : "cost"}'
    assert catalog.masked_body("person.left", 1, left) == left
    assert (
        catalog.masked_body("person.left", 1, b'{"reason":"cost","email":"a"}')
        == b'{"reason":"cost","email":"<personal>"}'
    )
    for name in ("person.moved", "person.forgotten", None):
        assert catalog.masked_body(name, 2, b"{}") is None
    for body in (b"{", b"\xff", b"[" * 5000):
        assert catalog.masked_body("person.left", 1, body) is None


def test_an_unreadable_body_is_hidden_in_an_app_with_personal_fields() -> None:
    catalog = App("people", aggregates=[Person], upcasters=[upcaster("person.moved", schema=1)(dict)]).catalog
    assert catalog.masked("person.left", 1, {"reason": "cost"}) == {"reason": "cost"}
    assert catalog.masked("person.moved", 2, {"home": HOME}) == {"home": HIDDEN}
    assert catalog.masked("person.moved", 1, {"address": SECRET}) == {"address": MASK}
    assert catalog.masked("person.forgotten", 1, {"email": SECRET}) == {"email": MASK}
    assert catalog.masked("person.joined", 1, f'{{"email":"{SECRET}') == MASK


def test_a_personal_parameter_of_a_decision_is_recognised() -> None:
    assert decisions_are_private(Person)
    assert is_private(parameter_hint(Person.join, "email"))
    assert not is_private(parameter_hint(Person.evolve, "event")) or is_private(Joined)


class Leaves:
    def leave(self, reason: Personal[str]) -> Left:
        return Left()


def change_plan(person: Visitor, email: Personal[str]) -> Left:
    return Left()


@aggregate("visitor")
class Visitor:
    def evolve(self, event: Left) -> Visitor:
        return self


@aggregate("visitor")
class LeavingVisitor(Leaves):
    def evolve(self, event: Left) -> LeavingVisitor:
        return self


def test_a_personal_parameter_of_an_inherited_or_a_served_decision_makes_an_app_private() -> None:
    assert not App("visits", aggregates=[Visitor]).catalog.is_private
    assert App("visits", aggregates=[LeavingVisitor]).catalog.is_private
    assert App("visits", aggregates=[Visitor], served=[served(Visitor, change_plan)]).catalog.is_private


def test_a_parameter_with_an_unresolvable_annotation_is_hidden() -> None:
    """An alias behind TYPE_CHECKING may stand for `Personal`."""

    class Local:
        pass

    class Decisions:
        def call(self, email: Email, plan: str, *others: Email, note: Personal[str] = "", **more: Email) -> Later:
            return Local()

        def plain(self, plan: str, of: Local, bare=1, *rest: int, **more: str) -> Later:  # type: ignore[no-untyped-def]
            return Local()

    assert decisions_are_private(Decisions)
    assert is_private(parameter_hint(Decisions.call, "email"))
    assert not is_private(parameter_hint(Decisions.call, "plan"))
    call = Call.of(Decisions.call, (SECRET, "free", SECRET, SECRET), {"note": SECRET, "other": SECRET})
    mask = f'"{MASK}"'
    assert _call_text(call) == f'call({mask}, "free", {mask}, {mask}, note={mask}, other={mask})'
    plain = Call.of(Decisions.plain, ("free", "x", 2, 3, 4), {"kind": "red"})
    assert _call_text(plain) == 'plain("free", "x", 2, 3, 4, kind="red")', "a local class is found"


def test_the_return_type_of_a_decision_makes_no_parameter_personal() -> None:
    class Returning:
        def plain(self, plan: str) -> Later:
            return plan

    assert not decisions_are_private(Returning)


def test_an_error_of_a_private_class_is_printed_without_its_message() -> None:
    def fail() -> None:
        try:
            raise KeyError(SECRET)
        except KeyError:
            raise ValueError(f"no {SECRET}")  # noqa: B904 - its context is printed, too

    with pytest.raises(ValueError, match=SECRET) as raised:
        fail()
    printed = reason_of(raised.value, private=True) + traceback_of(raised.value, private=True)
    assert SECRET not in printed
    assert all(word in printed for word in ("ValueError", "KeyError", "test_personal.py"))
    assert SECRET in reason_of(raised.value)


def test_an_error_that_causes_itself_or_has_no_text_can_be_printed() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    error = ValueError("a")
    error.__cause__ = error
    assert "ValueError" in traceback_of(error, private=True)
    assert reason_of(Silent()) == "Silent: it cannot be printed"


def test_a_refused_event_and_row_do_not_repeat_a_personal_value() -> None:
    with pytest.raises(ValueError, match="email") as refused:
        Joined(email=SECRET.encode(), plan=SECRET, amount=SECRET)  # type: ignore[arg-type]
    assert SECRET not in str(refused.value)
    assert SECRET not in str(UnencodableEvent(Joined(email=SECRET, plan=""), "reason"))

    @dataclass(frozen=True, slots=True)
    class Contact:
        person_id: str
        email: Personal[str]

    table = Table("contacts", MetaData(), Column("person_id", String(36), primary_key=True), Column("email", String(5)))
    with pytest.raises(RowRefused) as too_long:
        RowCodec(table, Contact).normalise(Contact("p-1", SECRET))
    assert SECRET not in str(too_long.value)
    assert SECRET not in repr(vars(too_long.value))
    assert masked_row(Contact("p-1", SECRET)) == {"person_id": "p-1", "email": MASK}


def refuse(value: str) -> str:
    raise ValueError(f"{value} is refused")


@event("person.written")
class Written:
    email: Annotated[Personal[str], PlainSerializer(refuse)] = ""


@event("person.read")
class Read:
    email: Annotated[Personal[str], AfterValidator(lambda value: refuse(value) if value.endswith("!") else value + "!")]


def test_what_code_of_the_application_says_of_a_personal_field_is_not_repeated() -> None:
    for given in (Written(email=SECRET), Read(email=SECRET)):
        with pytest.raises(UnencodableEvent, match=r"email: .* is not shown, since it may be personal") as refused:
            BodyCodec(type(given)).read_back(given)
        assert SECRET not in str(refused.value)

    @event("person.planned")
    class Planned:
        email: Personal[str]
        plan: Annotated[str, PlainSerializer(refuse)]

    with pytest.raises(UnencodableEvent, match="plan: gold is refused"):
        BodyCodec(Planned).read_back(Planned(email=SECRET, plan="gold"))


def test_a_key_cannot_be_personal() -> None:
    table = Table("homes", MetaData(), Column("street", String, primary_key=True), Column("country", String))
    assert any("personal and a key" in fault for fault in row_faults(Home, table))


def test_a_long_value_is_cut_and_shows_its_length() -> None:
    long = "x" * 800_000
    assert cut(long) == "x" * 500 + "… (800,000 characters)"
    assert cut("short") == "short"
    assert shown(long) == f"{'x' * 300!r}… (800,000 characters)"
    assert len(shown(list(range(800_000)))) < 400
    assert cut_values({"a": [long, 1], "b": {"c": long}})["a"][0].endswith("… (800,000 characters)")
    assert len(reason_of(ValueError(long))) < 600


def test_a_generic_class_with_a_parameter_specification_may_be_personal() -> None:
    @dataclass
    class Handler(Generic[P, T]):
        function: Callable[P, T]

    assert is_private(Handler[[int], str])
