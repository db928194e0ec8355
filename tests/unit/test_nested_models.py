"""pydantic models inside events: the stored body, the contract, the columns and personal fields agree."""

from __future__ import annotations

import json
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any

import pytest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from eventjet import App, Incoming, Personal, Reaction, aggregate, event, inbox
from eventjet.codec.catalog import Catalog
from eventjet.codec.cloud_events import IncomingDecoder
from eventjet.codec.commands import Arguments
from eventjet.codec.shape import shape_of
from eventjet.contracts.compatibility import Compatibility, changes_between
from eventjet.contracts.contract import contract_of
from eventjet.domain.personal import is_private
from eventjet.errors import DefinitionError, UndecodableMessage, UnencodableEvent
from eventjet.spark.columns import forms_of

ALIAS = Field(alias="firstName")


class ByName(BaseModel, frozen=True, populate_by_name=True):
    first: int = ALIAS


class ByAlias(BaseModel, frozen=True, serialize_by_alias=True):
    first: int = ALIAS


class ByBoth(BaseModel, frozen=True, serialize_by_alias=True, validate_by_name=True):
    first: int = ALIAS


class OfChoices(BaseModel, frozen=True):
    first: int = Field(validation_alias=AliasChoices("firstName", "first"))


class Written(BaseModel, frozen=True):
    first: int = Field(serialization_alias="firstName")


@dataclass(frozen=True, config=ConfigDict(populate_by_name=True))
class OfDataclass:
    first: int = ALIAS


class Around(BaseModel, frozen=True, serialize_by_alias=True, populate_by_name=True):
    inner: ByName = Field(alias="innerName")


class ByAliasOnly(BaseModel, frozen=True):
    first: int = Field(0, alias="firstName")


class WrittenOnly(BaseModel, frozen=True, serialize_by_alias=True):
    first: int = Field(0, serialization_alias="firstName")


class ReadByCode(BaseModel, frozen=True):
    first: int = ALIAS

    @model_validator(mode="before")
    @classmethod
    def named(cls, value: Any) -> Any:
        return {"firstName": value.get("first", value.get("firstName"))}


class Open(BaseModel, frozen=True, extra="allow"):
    first: int


@dataclass(frozen=True, config=ConfigDict(extra="allow"))
class OpenDataclass:
    first: int


class OpenToPersons(BaseModel, frozen=True, extra="allow"):
    __pydantic_extra__: dict[str, Personal[str]]  # pyright: ignore[reportIncompatibleVariableOverride]


@plain_dataclass(frozen=True)
class Line:
    count: int


def event_of(kind: Any) -> Any:
    """Return an event class with a field of this class."""
    return event("order.placed")(type("Placed", (), {"__annotations__": {"value": kind}, "__module__": __name__}))


def event_with(kind: Any, value: Any) -> Any:
    return event_of(kind)(value=value)


def body_of(placed: Any) -> dict[str, Any]:
    return json.loads(Catalog([type(placed)]).encode(placed).body)["value"]


def app_of(placed: Any) -> App:
    @aggregate("order")
    class Order:
        def evolve(self, event: Any) -> Any:
            return self

    Order.evolve.__annotations__["event"] = placed
    return App("shop", aggregates=[Order])


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        (ByName, {"firstName": 1}, {"first": 1}),
        (ByAlias, {"firstName": 1}, {"firstName": 1}),
        (ByBoth, {"first": 1}, {"firstName": 1}),
        (OfChoices, {"firstName": 1}, {"first": 1}),
        (Written, {"first": 1}, {"first": 1}),
        (OfDataclass, {"firstName": 1}, {"first": 1}),
        (Around, {"innerName": {"first": 1}}, {"innerName": {"first": 1}}),
        (ReadByCode, {"first": 1}, {"first": 1}),
        (Line, {"count": 1}, {"count": 1}),
    ],
)
def test_a_field_has_the_same_name_in_body_contract_and_column(kind: Any, value: Any, stored: dict[str, Any]) -> None:
    placed = event_with(kind, kind(**value) if kind is not Around else Around(innerName=ByName(first=1)))
    assert body_of(placed) == stored
    if kind is not ReadByCode:  # a contract does not know what code of the application reads
        assert list(shape_of(type(placed))["$defs"][kind.__name__]["properties"]) == list(stored)
    assert forms_of(type(placed))["value"].convert(placed.value) == stored
    app_of(type(placed))


@pytest.mark.parametrize(("kind", "written"), [(ByAliasOnly, "first"), (WrittenOnly, "firstName")])
@pytest.mark.parametrize("hint", [lambda kind: kind, lambda kind: list[kind], lambda kind: dict[str, kind | None]])
def test_a_field_stored_under_a_name_that_is_not_read_is_refused(kind: Any, written: str, hint: Any) -> None:
    with pytest.raises(DefinitionError, match=rf"{kind.__name__}\.first would be stored as '{written}' and is read by"):
        app_of(event_of(hint(kind)))


def test_a_field_that_gets_another_stored_name_breaks_old_events() -> None:
    before, after = (contract_of(app_of(event_of(renamed(kind)))) for kind in (ByName, ByAlias))
    (change,) = changes_between(before, after, app_of(event_of(renamed(ByAlias))).catalog)
    assert change.compatibility is Compatibility.OLD_EVENTS


def renamed(kind: type[BaseModel]) -> Any:
    """Return the class under a name that both releases use."""
    return type("Name", (kind,), {"__module__": __name__})


@pytest.mark.parametrize("hint", [lambda kind: kind, lambda kind: list[kind], lambda kind: dict[str, kind]])
def test_a_model_with_undeclared_fields_is_stored_in_its_column_as_text(hint: Any) -> None:
    opened = Open(first=1, more=[2])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    annotation = hint(Open)
    value = {list[Open]: [opened], dict[str, Open]: {"a": opened}}.get(annotation, opened)
    placed = event_with(annotation, value)
    text = '{"first":1,"more":[2]}'
    assert text in json.dumps(body_of(placed), separators=(",", ":"))
    assert forms_of(type(placed))["value"].convert(placed.value) in (text, [text], [("a", text)])


def test_an_undeclared_field_of_a_dataclass_is_refused() -> None:
    body_of(event_with(OpenDataclass, OpenDataclass(first=1)))
    opened = OpenDataclass(first=1, more=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    with pytest.raises(UnencodableEvent, match=r"value\.more: a dataclass stores no field that it does not declare"):
        body_of(event_with(OpenDataclass, opened))


Positive = Annotated[int, Field(gt=0)]


def buy(self: Any, count: Positive, notes: tuple[Annotated[str, Field(max_length=3)], ...] = ()) -> None:
    """Order so many."""


async def taken(message: Incoming[list[Positive]], reaction: Reaction) -> None:
    """Take numbers."""


def test_limits_of_a_served_parameter_are_kept() -> None:
    arguments = Arguments(buy)
    assert arguments.decode(b'{"count":1,"notes":["abc"]}') == {"count": 1, "notes": ("abc",)}
    for body in (b'{"count":0}', b'{"count":1,"notes":["abcd"]}'):
        with pytest.raises(ValueError, match=r"count|notes"):
            arguments.decode(body)
    assert arguments.schema()["properties"]["count"]["exclusiveMinimum"] == 0


def test_limits_of_an_inbox_s_messages_are_kept() -> None:
    decode = IncomingDecoder(inbox("taken", stream="town", subject="town.>")(taken).type, "x")
    assert decode((1, 1, b"s", b"", b"[1]")).data == [1]
    with pytest.raises(UndecodableMessage):
        decode((1, 1, b"s", b"", b"[0]"))


def test_fields_that_a_model_does_not_declare_may_be_marked_personal() -> None:
    assert is_private(OpenToPersons)
    assert not is_private(Open)
