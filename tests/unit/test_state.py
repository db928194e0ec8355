"""A state must be immutable, and a fold must return another state: faults at declaration, decision and test."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, field, replace
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypedDict
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict

from eventjet import App, aggregate, event
from eventjet.commands.repository import Repositories
from eventjet.domain.history import FoldedState
from eventjet.domain.state import state_faults
from eventjet.errors import DefinitionError
from eventjet.jet import Jet
from eventjet.log.memory import MemoryStore
from eventjet.log.snapshots import SnapshotCodec
from eventjet.settings import Settings
from eventjet.testing import scenario


@event("parcel.seen")
class Seen:
    place: str


@dataclass
class Label:
    text: str = ""


@dataclass(frozen=True)
class Address:
    lines: list[str] = field(default_factory=list[str])


class Stop(NamedTuple):
    place: str
    hours: set[int]


class Size(TypedDict):
    grams: int


class Loose(BaseModel):
    n: int = 0


class Fixed(BaseModel):
    model_config = ConfigDict(frozen=True)
    n: int = 0


class Colour(Enum):
    RED = 1


@dataclass(frozen=True)
class Node:
    parent: Node | None = None


Grams = NewType("Grams", int)
Places = NewType("Places", list[str])

FIXED = (
    int, str | None, Decimal, UUID, Colour, Fixed, Node, Grams, object, Any,
    tuple[str, ...], frozenset[int], Mapping[str, tuple[int, ...]], Sequence[str], Literal["a"], Annotated[int, "x"],
    Callable[[list[int]], int] | None,
)  # fmt: skip
CHANGEABLE = (
    (list[str], "tuple"),
    (list, "tuple"),
    (deque[int], "tuple"),
    (set[int], "frozenset"),
    (bytearray, "bytes"),
    (dict[str, int], "Mapping"),
    (Counter[str], "Mapping"),
    (Size, "Mapping"),
    (list[int] | None, "tuple"),
    (tuple[list[int], ...], "tuple"),
    (Mapping[str, set[int]], "frozenset"),
    (Annotated[dict[str, int], "x"], "Mapping"),
    (Places, "tuple"),
    (Label, "Label declared with frozen=True"),
    (Loose, "Loose declared with frozen=True"),
    (Address, "tuple"),
    (tuple[Stop, ...], "frozenset"),
)


def state_of(kind: Any) -> Any:
    class Parcel:
        held: Any = None

        def evolve(self, event: Any) -> Any:
            return self

    Parcel.__annotations__["held"] = kind
    return aggregate("parcel")(Parcel)


@pytest.mark.parametrize("kind", FIXED, ids=str)
def test_a_state_can_have_fields_of_immutable_types(kind: Any) -> None:
    assert state_faults(state_of(kind)) == []


@pytest.mark.parametrize(("kind", "instead"), CHANGEABLE, ids=str)
def test_a_state_with_a_mutable_field_is_refused_with_another_type(kind: Any, instead: str) -> None:
    (fault,) = state_faults(state_of(kind))
    assert "Parcel.held" in fault
    assert instead in fault


@aggregate("parcel")
class Careless:
    places: list[str] = field(default_factory=list[str])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    address: Address = field(default_factory=Address)

    def evolve(self, event: Seen) -> Careless:
        return self


def test_all_mutable_fields_are_named_at_once() -> None:
    with pytest.raises(DefinitionError) as caught:
        App("post", aggregates=[Careless])
    assert [fault.split(" holds ")[0] for fault in caught.value.faults] == [
        "Careless.places", "Careless.counts", "Careless.address.lines",
    ]  # fmt: skip
    with pytest.raises(DefinitionError, match=r"Careless\.places"):
        scenario(Careless)


def test_a_field_with_an_unresolvable_annotation_is_refused_with_a_fix() -> None:
    (fault,) = state_faults(state_of("NoSuchName"))
    assert "NoSuchName" in fault
    assert "at module level" in fault


@aggregate("parcel")
class Parcel:
    places: tuple[str, ...] = ()
    seen: Mapping[str, int] = field(default_factory=dict[str, int])

    def look(self, place: str) -> Seen:
        return Seen(place=place)

    def evolve(self, event: Seen) -> Parcel | Other:
        if event.place == "elsewhere":
            return Other()
        if event.place == "nowhere":
            return None  # type: ignore[return-value]  # pyright: ignore[reportReturnType]
        if event.place == "here":
            self.seen["here"] = 1  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
        return replace(self, places=(*self.places, event.place))


@dataclass(frozen=True)
class Other:
    n: int = 0


@pytest.mark.parametrize(("place", "returned"), [("elsewhere", "a Other"), ("nowhere", "None")])
async def test_a_fold_that_returns_no_state_is_refused_before_a_save(place: str, returned: str) -> None:
    app = App("post", aggregates=[Parcel])
    store = MemoryStore(app.name)
    parcels = Jet(Repositories(app, store), Settings()).repository(Parcel)
    says = f"Parcel.evolve returned {returned} for Seen; return a Parcel"
    with pytest.raises(DefinitionError, match=says):
        await parcels.execute("p", Parcel.look, place)
    assert (await store.state()).last == 0
    with pytest.raises(DefinitionError, match=says):
        scenario(Parcel).given(Seen(place=place))


async def test_a_fold_that_returns_another_class_is_refused_on_load() -> None:
    """The event was recorded when `evolve` returned its state."""
    app = App("post", aggregates=[Parcel])
    async with app.in_memory() as jet:
        await jet.repository(Parcel).execute("p", Parcel.look, "x")
        record = (await jet.store.history("parcel", "p"))[0]
        store: Any = jet.store
        store._records[0] = (*record[:4], b'{"place":"elsewhere"}')
        with pytest.raises(DefinitionError, match="return a Parcel"):
            await Jet(Repositories(app, jet.store), Settings()).repository(Parcel).load("p")


def test_a_fold_that_changes_its_state_fails_in_a_scenario() -> None:
    with pytest.raises(AssertionError, match=r"Parcel\.evolve changed what it was given"):
        scenario(Parcel).given(Seen(place="here"))


def test_a_fold_that_assigns_to_its_state_is_told_to_return_another() -> None:
    @aggregate("door")
    class Door:
        place: str = ""

        def evolve(self, event: Seen) -> Door:
            self.place = event.place  # type: ignore[misc]  # pyright: ignore  the mistake
            return self

    with pytest.raises(DefinitionError, match=r"FrozenInstanceError for Seen.*Return replace\(self, …\)"):
        scenario(Door).given(Seen(place="here"))


def test_an_assignment_to_what_is_no_field_is_named() -> None:
    for changed in (Parcel(), Seen(place="here")):
        with pytest.raises(FrozenInstanceError, match=r"there is no field 'hint' to assign to in (Parcel|Seen)"):
            changed.hint = 5  # type: ignore[union-attr]  # pyright: ignore  the mistake
    with pytest.raises(FrozenInstanceError, match=r"cannot assign to field 'place' of Seen, which never changes"):
        Seen(place="here").place = "there"  # type: ignore[misc]  # pyright: ignore  the mistake


def test_a_decision_that_changes_its_state_fails_in_a_scenario_even_if_it_raises() -> None:
    def meddle(parcel: Parcel, error: Exception | None) -> Seen:
        counts: Any = parcel.seen
        counts["x"] = 1
        if error is not None:
            raise error
        return Seen(place="x")

    for error in (None, ValueError("no")):
        with pytest.raises(AssertionError, match="meddle changed what it was given"):
            scenario(Parcel).when(meddle, error)


def test_a_mapping_in_a_state_is_restored_from_a_snapshot() -> None:
    codec = SnapshotCodec[Parcel](Parcel)
    folded = FoldedState(Parcel(places=("x",), seen={"b": 1, "a": 2}), 2, 2)
    value = codec.encode(folded)
    assert value is not None
    assert codec.decode(value) == folded
