"""A function that changes a row, state, event or argument in place changes it for no other function."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, make_dataclass, replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.dataclasses import dataclass as pydantic_dataclass
from sqlalchemy import JSON, BigInteger, Column, Integer, MetaData, String, Table
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import TypeAliasType

from eventjet import (
    App,
    Deadline,
    Reaction,
    Recorded,
    SqlProjection,
    after,
    aggregate,
    entries,
    event,
    listens,
    process,
    projection,
    reactor,
)
from eventjet.commands.repository import Repositories
from eventjet.domain.recorded import own_event
from eventjet.domain.state import is_fixed, own_copy
from eventjet.errors import DefinitionError, RowRefused
from eventjet.jet import Jet
from eventjet.log.memory import MemoryStore
from eventjet.projections.fold import Fold
from eventjet.projections.row_codec import RowCodec
from eventjet.settings import Settings
from eventjet.testing import on, projected, world
from eventjet.testing.read_model import read_model_case, resolved_alone

ADDED = 5


class Box:
    """A mutable class without annotations."""

    def __init__(self, items: Sequence[Any] = ()) -> None:
        self.items = list(items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and self.items == other.items

    __hash__ = None  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]


@dataclass
class Loose:
    items: list[str] = field(default_factory=list[str])


class LooseModel(BaseModel):
    items: list[str] = []


@event("cart.added")
class Added:
    item: str
    tags: list[str] = field(default_factory=list[str])


# Rows


def table_of(name: str, *columns: Column[Any]) -> Table:
    return Table(name, MetaData(), Column("id", String(60), primary_key=True), *columns)


def fold_of(row_type: Any) -> Any:
    def fold(row: Any, event: Recorded[Added]) -> Any:
        return row

    fold.__annotations__["return"] = row_type
    return fold


@dataclass
class Total:
    id: str
    total: int = 0


@pydantic_dataclass
class TotalToo:
    id: str
    total: int = 0


@pytest.mark.parametrize("row_type", [Total, TotalToo], ids=["dataclass", "pydantic"])
def test_a_row_class_that_is_not_frozen_is_refused_with_a_fix(row_type: Any) -> None:
    declared = projection("totals", table=table_of("totals", Column("total", Integer)))(fold_of(row_type))
    with pytest.raises(DefinitionError) as caught:
        resolved_alone(declared)
    (fault,) = caught.value.faults
    assert f"{row_type.__name__} is not frozen" in fault
    assert "frozen=True" in fault
    assert "replace(row" in fault


def test_an_entry_class_that_is_not_frozen_is_refused() -> None:
    @dataclass
    class Line:
        position: int

    def lines(event: Recorded[Added]) -> Any: ...

    lines.__annotations__["return"] = Line
    table = Table("lines", MetaData(), Column("position", BigInteger, primary_key=True))
    with pytest.raises(DefinitionError, match="Line is not frozen"):
        resolved_alone(entries("lines", table=table)(lines))


@pytest.mark.parametrize(
    ("hint", "instead"),
    [
        (list[str], "tuple"),
        (list, "tuple"),
        (dict[str, int] | None, "Mapping"),
        (Mapping[str, list[int]], "tuple"),
        (tuple[dict[str, int], ...], "Mapping"),
    ],
    ids=str,
)
def test_a_row_field_with_a_mutable_type_is_refused_with_its_class_name_and_fix(hint: Any, instead: str) -> None:
    kind = dataclass(frozen=True)(type("Items", (), {"__annotations__": {"id": str, "items": hint}}))
    declared = projection("items", table=table_of("items", Column("items", JSON)))(fold_of(kind))
    with pytest.raises(DefinitionError) as caught:
        resolved_alone(declared)
    (fault,) = caught.value.faults
    assert "Items.items holds a" in fault
    assert f"take {instead}" in fault


@dataclass(frozen=True)
class Items:
    id: str
    items: Any


@dataclass(frozen=True, slots=True)
class Sequenced:
    id: str
    items: Sequence[str]


@dataclass(frozen=True)
class Mapped:
    id: str
    items: Mapping[str, Any]


def append(row: Any, event: Recorded[Added]) -> Any:
    row.items.append(event.data.item)
    return row


def append_within(row: Any, event: Recorded[Added]) -> Any:
    row.items["of"]["all"].append(event.data.item)
    return row


def append_and_return_another(row: Any, event: Recorded[Added]) -> Any:
    row.items.append(event.data.item)
    return replace(row)


def turn_into_true(row: Any, event: Recorded[Added]) -> Any:
    row.items["n"] = True if row.items["n"] == 1 else 1
    return row


NAMES = [f"i{number}" for number in range(ADDED)]
CHANGING: dict[str, tuple[Any, Callable[[], Any], Callable[..., Any], Any]] = {
    "any": (Items, list[str], append, NAMES),
    "sequence": (Sequenced, list[str], append, NAMES),
    "mapping": (Mapped, lambda: {"of": {"all": []}}, append_within, {"of": {"all": NAMES}}),
    "another row": (Items, list[str], append_and_return_another, NAMES),
    "equal and other": (Mapped, lambda: {"n": 1}, turn_into_true, {"n": True}),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_a_fold_that_changes_its_row_gives_the_same_in_a_worker_a_rebuild_and_a_test(kind: str) -> None:
    row_type, first, change, after_all = CHANGING[kind]

    def fold(row: Any, event: Recorded[Added]) -> Any:
        return change(row or row_type(event.aggregate_id, first()), event)

    fold.__annotations__["return"] = row_type
    table = table_of("items", Column("items", JSON))
    declared: Any = projection("items", table=table)(fold)
    history = on("c", *(Added(item=name) for name in NAMES))
    expected = [{"id": "c", "items": after_all}]
    with read_model_case(resolved_alone(declared)) as case:
        assert repr(case.written(history, range(1, ADDED))["items"]) == repr(expected)
        assert repr(case.written(history, ())["items"]) == repr(expected)
        assert repr(case.in_one_pass(history)["items"]) == repr(expected)
    assert repr(projected(declared, history).row().items) == repr(after_all)


def test_an_unchanged_row_is_not_written_again() -> None:
    def fold(row: Items | None, event: Recorded[Added]) -> Items:
        return row or Items(event.aggregate_id, {"a": [1]})

    resolved: Any = resolved_alone(projection("items", table=table_of("items", Column("items", JSON)))(fold))
    codec = RowCodec(resolved.table, resolved.row_type)
    row = codec.normalise(Items("c", {"a": [1]}))
    assert Fold(resolved, codec)({("c",): row}, on("c", Added(item="x"))) == {}


def test_a_fold_that_changes_a_row_and_then_raises_leaves_the_row_as_it_was() -> None:
    def fold(row: Items | None, event: Recorded[Added]) -> Items:
        row = row or Items(event.aggregate_id, [])
        row.items.append(event.data.item)
        if event.data.item == "bad":
            raise ValueError("bad")
        return row

    resolved: Any = resolved_alone(projection("items", table=table_of("items", Column("items", JSON)))(fold))
    codec = RowCodec(resolved.table, resolved.row_type)
    rows = {("c",): codec.normalise(Items("c", ["a"]))}
    with pytest.raises(Exception, match="bad"):
        Fold(resolved, codec)(rows, on("c", Added(item="b"), Added(item="bad")))
    assert rows == {("c",): Items("c", ["a"])}


@dataclass(frozen=True)
class Nested:
    id: str
    pairs: tuple[tuple[int, str], ...]
    named: Mapping[str, tuple[int, ...]] | None
    both: tuple[str, ...] | str = ""


def test_tuples_in_a_json_column_come_back_as_tuples() -> None:
    def fold(row: Nested | None, event: Recorded[Added]) -> Nested:
        row = row or Nested(event.aggregate_id, (), {"all": ()}, ())
        named = row.named or {}
        assert isinstance(row.both, tuple)
        return replace(
            row,
            pairs=(*row.pairs, (len(row.pairs), event.data.item)),
            named={"all": (*named["all"], len(row.pairs))},
            both=(*row.both, event.data.item),
        )

    table = table_of("nested", Column("pairs", JSON), Column("named", JSON), Column("both", JSON))
    declared = projection("nested", table=table)(fold)
    history = on("c", *(Added(item=name) for name in NAMES))
    pairs = tuple(enumerate(NAMES))
    projected(declared, history).rows(Nested("c", pairs, {"all": tuple(range(ADDED))}, tuple(NAMES)))
    with read_model_case(resolved_alone(declared)) as case:
        live = case.written(history, range(1, ADDED))["nested"]
        assert live == case.in_one_pass(history)["nested"]
        assert live[0]["pairs"] == [list(pair) for pair in pairs]


# Events


def empty_the_tags(event: Recorded[Added]) -> list[str]:
    tags = list(event.data.tags)
    event.data.tags.clear()
    return tags


@dataclass(frozen=True)
class Tagged:
    id: str
    tags: tuple[str, ...]


@dataclass(frozen=True)
class TagEntry:
    position: int
    tags: tuple[str, ...]


def clearing(row: Tagged | None, event: Recorded[Added]) -> Tagged:
    return Tagged(event.aggregate_id, tuple(empty_the_tags(event)))


def clearing_entries(event: Recorded[Added]) -> TagEntry:
    return TagEntry(event.position, tuple(empty_the_tags(event)))


def clearing_key(event: Recorded[Added]) -> str:
    return empty_the_tags(event)[0]


def clearing_keys(event: Recorded[Added]) -> list[str]:
    return empty_the_tags(event)


def keyed(row: Tagged | None, event: Recorded[Added]) -> Tagged:
    return Tagged("a", tuple(empty_the_tags(event)))


def keyed_by_each(row: Tagged | None, event: Recorded[Added], key: str) -> Tagged:
    return Tagged(key, tuple(empty_the_tags(event)))


TAGS = Column("tags", JSON)
FOLDS: dict[str, Any] = {
    "row": projection("tags", table=table_of("tags", Column("tags", JSON)))(clearing),
    "key": projection("tags", table=table_of("tags", Column("tags", JSON)), key=clearing_key)(keyed),
    "keys": projection("tags", table=table_of("tags", Column("tags", JSON)), keys=clearing_keys)(keyed_by_each),
    "entries": entries("tags", table=Table("tags", MetaData(), Column("position", BigInteger, primary_key=True), TAGS))(
        clearing_entries
    ),
}


@pytest.mark.parametrize("kind", FOLDS)
def test_a_fold_that_changes_its_event_changes_it_for_no_other_fold(kind: str) -> None:
    resolved: Any = resolved_alone(FOLDS[kind])
    fold = Fold(resolved, RowCodec(resolved.table, resolved.row_type))
    history = on("c", Added(item="x", tags=["a", "b"]))
    first, second = fold({}, history), fold({}, history)
    assert first == second
    assert {row.tags for row in first.values()} == {("a", "b")}
    assert history[0].data.tags == ["a", "b"]


def test_an_sql_handler_that_changes_its_event_changes_it_for_no_other_handler() -> None:
    table = table_of("tags", Column("tags", JSON))
    tags = SqlProjection("tags", tables=[table])

    @tags.handler
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await connection.execute(table.insert(), {"id": event.aggregate_id, "tags": empty_the_tags(event)})

    history = on("c", Added(item="x", tags=["a"]))
    projected(tags, history).rows(table, {"tags": ["a"]})
    assert history[0].data.tags == ["a"]


def test_an_event_of_an_immutable_type_is_passed_on_without_a_copy() -> None:
    @event("cart.counted")
    class Counted:
        n: int
        names: tuple[str, ...] = ()

    (recorded_event,) = on("c", Counted(n=1))
    assert own_event(recorded_event) is recorded_event
    assert is_fixed(Counted)
    assert not is_fixed(Added)


# States


@aggregate("room")
class Room:
    seats: Mapping[int, str] = field(default_factory=dict[int, str])
    names: Sequence[str] = ()
    tree: Mapping[str, Any] = field(default_factory=dict[str, Any])
    box: object = field(default_factory=Box)
    model: Any = field(default_factory=LooseModel)

    def book(self, seat: int, by: str, *, error: Exception | None = None) -> Booked:
        if seat in self.seats:
            raise KeyError(seat)
        change_all(self, seat, by)
        if error is not None:
            raise error
        return Booked(seat=seat, by=by, tags=[by])

    def look(self) -> None:
        change_all(self, 99, "nobody")

    def evolve(self, event: Booked) -> Room:
        tags = [*self.names, *event.tags]
        event.tags.append("changed")
        return replace(
            self,
            seats={**self.seats, event.seat: event.by},
            names=tags,
            tree={"names": tags},
            box=Box(tags),
            model=LooseModel(items=tags),
        )


@event("room.booked")
class Booked:
    seat: int
    by: str
    tags: list[str] = field(default_factory=list[str])


def change_all(state: Any, seat: int, by: str) -> None:
    state.seats[seat] = by
    if isinstance(state.names, list):
        state.names.append(by)
    state.tree.setdefault("names", []).append(by)
    state.box.items.append(by)
    state.model.items.append(by)


def is_as_booked(state: Any, *names: str) -> None:
    assert dict(state.seats) == dict(enumerate(names, 1))
    assert list(state.names) == list(names)
    assert state.tree == ({"names": list(names)} if names else {})
    assert state.box.items == list(names)
    assert state.model.items == list(names)


async def test_a_decision_that_changes_its_state_changes_it_for_no_other_call() -> None:
    async with App("rooms", aggregates=[Room]).in_memory() as jet:
        rooms = jet.repository(Room)
        with pytest.raises(PermissionError):
            await rooms.execute("r", Room.book, 1, "banned", error=PermissionError())
        is_as_booked(await rooms.load("r"))
        is_as_booked((await rooms.execute("r", Room.book, 1, "ada")).state, "ada")
        with pytest.raises(PermissionError):
            await rooms.execute("r", Room.book, 2, "banned", error=PermissionError())
        await rooms.execute("r", Room.look)
        is_as_booked((await rooms.execute("r", Room.book, 2, "bob")).state, "ada", "bob")
        is_as_booked(await rooms.load("r"), "ada", "bob")
        is_as_booked(await rooms.load("r", version=1), "ada")


async def test_a_caller_that_changes_a_returned_state_or_event_changes_it_for_no_later_call() -> None:
    async with App("rooms", aggregates=[Room]).in_memory() as jet:
        rooms = jet.repository(Room)
        execution = await rooms.execute("r", Room.book, 1, "ada")
        assert execution.events[0].tags == ["ada"]  # `evolve` changed only its own copy
        execution.events[0].tags.append("later")
        change_all(execution.state, 5, "eve")
        change_all(await rooms.load("r"), 6, "eve")
        change_all((await rooms.execute("r", lambda room: None)).state, 7, "eve")
        is_as_booked(await rooms.load("r"), "ada")
        is_as_booked((await rooms.execute("r", Room.book, 2, "bob")).state, "ada", "bob")


SHARED: dict[int, str] = {}


@aggregate("shared")
class Shared:
    seats: Mapping[int, str] = field(default_factory=lambda: SHARED)
    fixed: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({1: "a"}))

    def book(self, seat: int) -> Booked:
        return Booked(seat=seat, by="x")

    def evolve(self, event: Booked) -> Shared:
        seats: Any = self.seats
        seats[event.seat] = event.by
        return self


async def test_an_evolve_that_changes_its_state_changes_no_other_aggregate_and_no_default() -> None:
    async with App("rooms", aggregates=[Shared]).in_memory() as jet:
        rooms = jet.repository(Shared)
        for name in ("one", "two"):
            await rooms.execute(name, Shared.book, 1)
            assert dict((await rooms.execute(name, Shared.book, 2)).state.seats) == {1: "x", 2: "x"}
            assert dict((await rooms.load(name)).seats) == {1: "x", 2: "x"}
        assert dict((await rooms.load("three")).seats) == {}
        assert SHARED == {}


async def test_a_repeated_decision_gets_the_original_arguments() -> None:
    app = App("rooms", aggregates=[Room])
    store = MemoryStore(app.name)
    rooms, rival = (Jet(Repositories(app, store), Settings()).repository(Room) for _ in range(2))
    calls: list[tuple[Any, ...]] = []

    def take(room: Room, names: list[str], named: dict[str, list[str]], loose: Loose, *, model: LooseModel) -> Booked:
        arguments = (names.pop(), named["all"].pop(), loose.items.pop(), model.items.pop())
        calls.append(arguments)
        return Booked(seat=len(room.seats) + 1, by="".join(arguments))

    await rooms.execute("r", Room.book, 1, "ada")
    await rival.execute("r", Room.book, 2, "bob")  # makes the state that `rooms` remembers stale
    names, named, loose, model = ["a"], {"all": ["b"]}, Loose(["c"]), LooseModel(items=["d"])
    execution = await rooms.execute("r", take, names, named, loose, model=model)
    assert execution.events == (Booked(seat=3, by="abcd"),)
    assert calls == [("a", "b", "c", "d")] * 2
    assert (names, named, loose, model) == (["a"], {"all": ["b"]}, Loose(["c"]), LooseModel(items=["d"]))


async def test_an_argument_of_an_unknown_class_is_passed_on_without_a_copy() -> None:
    async with App("rooms", aggregates=[Room]).in_memory() as jet:
        lock, box = threading.Lock(), Box()

        def look(room: Room, *things: Any) -> Booked:
            assert things[0] is lock
            assert things[1] is box
            return Booked(seat=1, by="x")

        assert (await jet.repository(Room).execute("r", look, lock, box)).version == 1


# Processes and reactors


@event("watch.noted")
class Noted:
    by: str
    tags: list[str] = field(default_factory=list[str])


@event("watch.late")
class Late:
    names: tuple[str, ...]


@process("watch")
class Watch:
    waiting: Sequence[str] = ()
    late: tuple[str, ...] = ()

    @listens()
    def note(self, event: Recorded[Booked]) -> Noted:
        return Noted(by=event.data.by, tags=empty_tags(event.data))

    def step(self) -> None:
        waiting: Any = self.waiting
        if waiting:
            waiting.append("changed by step")

    def deadline(self) -> Deadline[Watch, Late] | None:
        waiting: Any = self.waiting
        if not waiting or self.late:
            return None
        waiting.append("changed by deadline")
        return after(timedelta(minutes=1), Watch.be_late)

    def be_late(self) -> Late:
        return Late(names=tuple(self.waiting))

    def evolve(self, event: Noted | Late) -> Watch:
        match event:
            case Noted():
                return replace(self, waiting=[*self.waiting, event.by, *event.tags])
            case Late():
                return replace(self, late=event.names)


def empty_tags(event: Any) -> list[str]:
    tags = list(event.tags)
    event.tags.clear()
    return tags


@reactor("first", start="beginning")
async def first(event: Recorded[Booked], reaction: Reaction[list[str]]) -> None:
    reaction.deps.extend(empty_tags(event.data))


@reactor("second", start="beginning")
async def second(event: Recorded[Booked], reaction: Reaction[list[str]]) -> None:
    reaction.deps.extend(empty_tags(event.data))


@aggregate("room")
class Hall:
    n: int = 0

    def book(self, by: str, tags: list[str]) -> Booked:
        return Booked(seat=1, by=by, tags=tags)

    def evolve(self, event: Booked) -> Hall:
        return replace(self, n=self.n + 1)


@asynccontextmanager
async def no_deps() -> AsyncIterator[list[str]]:
    yield []


async def test_listeners_reactors_and_deadlines_that_change_an_event_or_state_affect_no_other() -> None:
    tags: list[str] = []
    app: Any = App("halls", aggregates=[Hall], processes=[Watch], reactors=[first, second], deps=no_deps)
    async with world(app, now=datetime(2030, 1, 1, tzinfo=UTC), deps=tags) as test_world:
        await test_world.jet.repository(Hall).execute("h", Hall.book, "ada", ["t"])
        await test_world.settle()
        assert tags == ["t", "t"]
        await test_world.pass_time(timedelta(minutes=2))
        assert (await test_world.jet.repository(Watch).load("h")).late == ("ada", "t")


# Copies


@dataclass(frozen=True)
class Fixed:
    names: tuple[str, ...] = ()
    at: datetime | None = None


@dataclass(frozen=True)
class Open:
    fixed: Fixed
    named: Mapping[str, Fixed]
    anything: Any = None


class Sentinel:
    pass


MISSING, BARE = Sentinel(), object()


def test_a_copy_of_a_mutable_value_is_equal_and_another_object() -> None:
    for value in (
        [1, [2]], {"a": {"b": [1]}}, {1, 2}, bytearray(b"x"), ([1], 2), MappingProxyType({"a": [1]}), Box([1]),
        Loose(["a"]), LooseModel(items=["a"]), Open(Fixed(("a",)), {"a": Fixed()}, [1]),
    ):  # fmt: skip
        copy = own_copy(value)
        assert copy == value
        assert type(copy) is type(value)
        assert copy is not value


@pytest.mark.parametrize(
    "value", [1, "a", (1, ("b",)), Fixed(("a",)), MISSING, BARE, (MISSING, BARE), int, len, frozenset("a")]
)
def test_an_immutable_value_is_not_copied(value: Any) -> None:
    assert own_copy(value) is value
    assert own_copy(Open(Fixed(), {}, value)).anything is value


def test_a_copy_shares_its_immutable_fields() -> None:
    original = Open(Fixed(("a",)), {"a": Fixed()}, [1])
    copy = own_copy(original)
    assert copy.fixed is original.fixed
    assert copy.named["a"] is original.named["a"]


def test_a_value_that_cannot_be_copied_is_refused_with_class_and_field() -> None:
    with pytest.raises(DefinitionError, match=r"Open\.anything holds a lock, which cannot be copied"):
        own_copy(Open(Fixed(), {}, threading.Lock()))


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (tuple[int, int] | tuple[tuple[int, int], ...], ((1, 2), (3, 4))),
        (tuple[int, ...], ((1, 2),)),
        (TypeAliasType("Pairs", tuple[tuple[str, int], ...]), (("a", 1),)),
    ],
)
def test_a_row_of_tuples_converts_lists_and_refuses_mappings(hint: Any, value: Any) -> None:
    columns = Column("id", Integer, primary_key=True), Column("v", JSON, nullable=False)
    row_type: Any = make_dataclass("Row", [("id", int), ("v", hint)], frozen=True)
    codec = RowCodec(Table("fixed", MetaData(), *columns), row_type)
    assert codec.normalise(row_type(1, value)).v == codec.normalise(row_type(1, list(value))).v == value
    assert not codec.is_open
    with pytest.raises(RowRefused):
        codec.normalise(row_type(1, ({"a": 1},)))
