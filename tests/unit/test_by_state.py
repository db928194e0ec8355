"""`by_state`: its valid and refused declarations, the arguments of its function, and rows that move."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from functools import partial
from operator import attrgetter
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Column, Date, DateTime, Integer, MetaData, Numeric, String, Table, Uuid
from sqlalchemy import Enum as EnumType

from eventjet import App, Key, Recorded, aggregate, by_state, event, projection
from eventjet.codec.catalog import Catalog
from eventjet.codec.states import StateCodec
from eventjet.errors import DefinitionError, HandlerFailed, ProjectionStopped, StoreUnavailable, Unreachable
from eventjet.log.predecessors import PredecessorReader
from eventjet.nats.endpoint import Endpoint
from eventjet.operations.events import rows_touched
from eventjet.projections.columns import key_forms
from eventjet.projections.fold import Fold, reader
from eventjet.projections.resolve import ResolvedProjection, resolve
from eventjet.projections.row_codec import RowCodec
from eventjet.projections.state_fold import Cell
from eventjet.rebuild.folding import Folding, Foldings
from eventjet.settings import Settings
from eventjet.spark.shuffle_blocks import in_windows, window_of
from eventjet.sql.database import Database
from eventjet.testing import on, projected
from eventjet.testing.read_model import ReadModelCase, read_model_case, resolved_alone
from eventjet.writers import fold_writer
from tests.logs import block


@event("seat.taken")
class Taken:
    guest: str


@event("seat.moved")
class Moved:
    place: str | None


@event("seat.left")
class Left:
    pass


@event("bill.paid")
class Paid:
    place: str


@aggregate("seat")
class Seat:
    guest: str = ""
    place: str | None = None
    extra: Mapping[str, int] = field(default_factory=dict[str, int])

    def evolve(self, event: Taken | Moved | Left) -> Seat:
        match event:
            case Taken(guest="nobody"):
                raise ValueError("nobody")
            case Taken(guest=guest):
                return replace(self, guest=guest)
            case Moved(place=place):
                return replace(self, place=place)
            case Left():
                return self


@aggregate("bill")
class Bill:
    def evolve(self, event: Paid) -> Bill:
        return self


@dataclass(frozen=True, slots=True)
class Place:
    place: Key[str]
    guests: int = 0


def place_of(seat: Seat) -> str | None:
    return seat.place


def place_of_bill(event: Recorded[Paid]) -> str:
    return event.data.place


def taken(row: Place | None, event: Recorded[Taken], seat: Seat) -> Place:
    row = row or Place(seat.place or "")
    return replace(row, guests=row.guests + 1)


def without_state(row: Place | None, event: Recorded[Taken]) -> Place:
    return row or Place("")


def of_both(row: Place | None, event: Recorded[Taken | Paid], seat: Seat) -> Place:
    return row or Place("")


def of_another(row: Place | None, event: Recorded[Taken], bill: Bill) -> Place:
    return row or Place("")


def crowded(row: Place | None, event: Recorded[Taken], key: str, seat: Seat, other: int) -> Place:
    return row or Place(key)


KEEP, MOVE = by_state(Seat, place_of, on_change="keep"), by_state(Seat, place_of, on_change="move")


def by_event(seat: Seat, event: Recorded[Any]) -> str:
    return event.aggregate_id


def seat_of(event: Recorded[Paid]) -> str | None:
    return event.data.place or None


def seat_of_both(event: Recorded[Paid | Taken]) -> str | None:
    return event.aggregate_id


def of_bill(row: Place | None, event: Recorded[Paid], seat: Seat) -> Place:
    return Place(seat.place or "nowhere", 1 + (row.guests if row else 0))


@pytest.mark.parametrize(
    ("key", "fold", "fault"),
    [
        ([KEEP, MOVE], taken, "two by_state name Seat; give one that returns all keys"),
        (by_state(Bill, lambda bill: "x", on_change="keep"), taken, "it takes no event of Bill"),
        (by_state(Taken, lambda taken: "x", on_change="keep"), taken, "Taken is not an aggregate"),  # type: ignore[arg-type,call-overload,misc]
        (by_state(Seat, place_of, on_change="stay"), taken, 'give "keep", "move" or "both"'),  # type: ignore[arg-type,call-overload,misc]
        (by_state(Seat, by_event, on_change="move"), taken, "so its function takes the state alone"),  # type: ignore[arg-type,call-overload,misc]
        (by_state(Seat, lambda: "x", on_change="keep"), taken, "takes 0 parameters"),  # type: ignore[arg-type,call-overload,misc]
        (by_state(Seat, "place", on_change="keep"), taken, "takes 0 parameters"),  # type: ignore[arg-type,call-overload,misc]
        (by_state(Seat, place_of, on_change="both"), taken, "so it takes the key: (row, event, key)"),
        ([MOVE, place_of_bill], of_both, "so nothing stands beside it"),
        ([KEEP, place_of_bill], of_both, "annotate it `Seat | None`"),
        (KEEP, of_both, "its `key` gives no key for Paid"),
        (KEEP, of_another, "the parameter `bill` is Bill; a state is one of Seat"),
        (KEEP, crowded, "crowded takes more than (row, event, key, state)"),
        ([place_of_bill, place_of_bill], without_state, "its `key` is a list without a by_state"),
        ([KEEP, place_of_bill, place_of_bill], without_state, "several key functions"),
        (by_state(Seat, place_of, on_change="move", via=seat_of), of_both, "`via` does not go with it"),
        (by_state(Seat, place_of, on_change="keep", via=seat_of), taken, "`via` takes Paid, which the projection does"),
        (by_state(Seat, place_of, on_change="keep", via=seat_of_both), of_both, "`via` takes Taken, whose key comes"),
        (by_state(Seat, place_of, on_change="keep", via=lambda event: "s-1"), of_both, "has no annotation"),  # type: ignore[arg-type,return-value]
        (
            [KEEP, by_state(Bill, lambda bill: "x", on_change="keep", via=seat_of)],
            of_both,
            "`via` takes Paid, whose key comes from the state of its own aggregate",
        ),
    ],
)
def test_an_incomplete_or_ambiguous_declaration_is_refused(key: Any, fold: Any, fault: str) -> None:
    with pytest.raises(DefinitionError) as raised:
        App("house", aggregates=[Seat, Bill], projections=[projection("places", key=key)(fold)])
    assert any(fault in line for line in raised.value.faults), raised.value.faults


@aggregate("chair")
class Chair:
    def evolve(self, event: Taken | Moved | Left) -> Chair:
        return self


def test_a_class_that_is_not_the_declared_aggregate_is_refused() -> None:
    key = by_state(Chair, lambda chair: "x", on_change="keep")
    with pytest.raises(DefinitionError, match="folds events of seat, and is not the aggregate of that name"):
        App("house", aggregates=[Seat], projections=[projection("places", key=key)(without_state)])


@pytest.mark.parametrize(
    ("on_change", "why"),
    [("keep", "a row has events of several aggregates"), ("move", "a row that moves would have to wait")],
)
def test_a_quarantining_projection_cannot_have_keys_of_states(on_change: Any, why: str) -> None:
    key: Any = by_state(Seat, place_of, on_change=on_change)
    declared: Any = projection("places", key=key, on_error="quarantine")
    with pytest.raises(DefinitionError, match=f"does not go with by_state: {why}"):
        App("house", aggregates=[Seat], projections=[declared(taken)])


def declared(on_change: Any, fold: Callable[..., Any] = taken, key: Callable[..., Any] = place_of) -> Any:
    return projection("places", key=by_state(Seat, key, on_change=on_change))(fold)


def test_a_row_that_moves_keeps_its_values_under_the_new_key() -> None:
    before = on("s-1", Moved(place="a"), Taken(guest="x"))
    projected(declared("move"), before).rows(Place("a", 1))
    projected(declared("move"), [*before, *on("s-1", Moved(place="b"))]).rows(Place("b", 1))
    projected(declared("keep"), [*before, *on("s-1", Moved(place="b"), Taken(guest="y"))]).rows(
        Place("a", 1), Place("b", 1)
    )


def test_a_row_whose_key_becomes_none_is_deleted_and_a_later_key_starts_a_new_row() -> None:
    history = on("s-1", Moved(place="a"), Taken(guest="x"), Moved(place=None), Taken(guest="y"))
    projected(declared("move"), history).rows()
    projected(declared("move"), [*history, *on("s-1", Moved(place="b"), Taken(guest="z"))]).rows(Place("b", 1))


@pytest.mark.parametrize(
    "events",
    [[Moved(place="a"), Taken(guest="y")], [Moved(place="b"), Taken(guest="y"), Moved(place="a")]],
    ids=["made there", "moved there"],
)
def test_a_row_of_another_aggregate_is_never_overwritten(events: list[Any]) -> None:
    with pytest.raises(HandlerFailed, match="another aggregate has the row") as raised:
        projected(declared("move"), on("s-1", Moved(place="a"), Taken(guest="x")), on("s-2", *events))
    assert raised.value.aggregate_id == "s-2"


def test_an_aggregate_without_a_row_does_not_move_the_row_of_another() -> None:
    early = on("s-1", Moved(place="a"))
    late = on("s-2", Moved(place="a"), Taken(guest="y"))
    projected(declared("move"), early, late, on("s-1", Moved(place="b"))).rows(Place("a", 1))
    with pytest.raises(HandlerFailed, match="another aggregate has the row") as raised:
        projected(declared("move"), early, late, on("s-1", Taken(guest="x")))
    assert (raised.value.aggregate_id, raised.value.position) == ("s-1", 4)


def with_leaving(row: Place | None, event: Recorded[Taken | Left], seat: Seat) -> Place | None:
    if isinstance(event.data, Left):
        return None
    row = row or Place(seat.place or "")
    return replace(row, guests=row.guests + 1)


SEAT_EVENTS = st.one_of(
    st.just(Taken(guest="x")), st.just(Left()), st.builds(Moved, place=st.sampled_from(["a", "b", "c", None]))
)


def moved_by_hand(pairs: list[tuple[str, Any]]) -> tuple[set[Place], int]:
    """Return (the rows, the position at which two seats first have rows of one place, or 0), without eventjet."""
    places: dict[str, str | None] = {}
    rows: dict[str, Place | None] = {}
    for position, (seat, data) in enumerate(pairs, 1):
        row, place = rows.get(seat), data.place if isinstance(data, Moved) else places.get(seat)
        places[seat] = place
        row = None if row is None or place is None else replace(row, place=place)
        if isinstance(data, Taken) and place is not None:
            row = replace(row or Place(place), guests=(row.guests if row else 0) + 1)
        rows[seat] = None if isinstance(data, Left) else row
        present = [row.place for row in rows.values() if row is not None]
        if len(present) > len(set(present)):
            return set(), position
    return {row for row in rows.values() if row is not None}, 0


@pytest.fixture(scope="module")
def seats() -> Iterator[ReadModelCase]:
    app = App("house", aggregates=[Seat], projections=[declared("move", with_leaving)])
    with read_model_case(app.projections["places"]) as case:
        yield case


@given(
    st.lists(st.tuples(st.sampled_from(["s-1", "s-2"]), SEAT_EVENTS), min_size=4, max_size=16),
    st.lists(st.integers(1, 16), max_size=5),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_rows_move_alike_with_any_batches_and_any_remembered_rows(
    seats: ReadModelCase, pairs: list[tuple[str, Any]], ends: list[int], remembers: bool
) -> None:
    assert isinstance(seats.resolved, ResolvedProjection)
    rows, collision = moved_by_hand(pairs)
    log = [replace(on(seat, data)[0], position=position) for position, (seat, data) in enumerate(pairs, 1)]
    log = [replace(event, event_id=f"e-{event.position}") for event in log]
    with pytest.MonkeyPatch.context() as patch:
        if not remembers:
            for limit in ("RECENT_ROWS_MAX", "RECENT_STATES_MAX"):
                patch.setattr(fold_writer, limit, 0)
        cut = [end for end in ends if end <= len(log)]
        for read in (lambda: seats.in_one_pass(log), lambda: seats.written(log, cut)):
            if collision:
                with pytest.raises(HandlerFailed) as raised:
                    read()
                assert raised.value.position == collision
            else:
                assert {Place(**row) for row in read()["places"]} == rows
    # A partition of Spark has the events of some aggregates alone.
    fold = Fold(seats.resolved, RowCodec(seats.resolved.table, seats.resolved.row_type))
    assert fold.states is not None
    partition_rows: list[Place] = []
    for seat in ("s-1", "s-2") if not collision else ():
        joining = fold.join(fold.states.numbered([event for event in log if event.aggregate_id == seat]), {})
        partition_rows += filter(None, fold({}, joining.events, joining.keys).values())
    assert collision or set(partition_rows) == rows


def test_a_moving_row_has_a_single_key() -> None:
    with pytest.raises(HandlerFailed, match="its state gives 2 keys"):
        projected(declared("move", key=lambda seat: ["a", "b"]), on("s-1", Taken(guest="x")))
    projected(declared("keep", key=lambda seat: {"a"}), on("s-1", Moved(place="a"), Taken(guest="x"))).rows(
        Place("a", 1)
    )


@pytest.mark.parametrize(
    ("key", "events", "reason"),
    [
        (place_of, [Taken(guest="nobody")], "Seat.evolve raised ValueError"),
        (lambda seat: seat.nothing, [Taken(guest="x")], "nothing"),
        (lambda seat: 7, [Taken(guest="x")], "it takes text, not int"),
        (
            lambda seat: ("a", "b"),
            [Taken(guest="x")],
            "by_state(Seat) gives has 2 parts, and the key of the table is (place)",
        ),
    ],
    ids=["evolve", "key", "type", "parts"],
)
def test_an_error_of_a_key_or_an_evolve_names_its_event(key: Any, events: list[Any], reason: str) -> None:
    with pytest.raises(HandlerFailed) as raised:
        projected(declared("keep", key=key), on("s-0", Left()), on("s-1", Left(), *events))
    assert (raised.value.position, raised.value.aggregate_id) == (3, "s-1")
    assert reason in raised.value.reason


def test_a_key_function_cannot_change_the_state() -> None:
    def spoil(seat: Seat) -> str:
        extra: Any = seat.extra
        if isinstance(extra, dict):
            extra["spoilt"] = 1
        return "a"

    def count(row: Place | None, event: Recorded[Taken], seat: Seat) -> Place:
        return Place("a", len(seat.extra))

    projected(declared("keep", count, spoil), on("s-1", Taken(guest="x"), Taken(guest="y"))).rows(Place("a", 0))


@aggregate("seat")
class Counting:
    by_guest: Mapping[str, int] = field(default_factory=dict[str, int])

    def evolve(self, event: Taken | Moved | Left) -> Counting:
        counts: Any = self.by_guest
        counts["all"] = counts.get("all", 0) + 1
        return replace(self)


def counted(row: Place | None, event: Recorded[Taken], seat: Counting) -> Place:
    return Place("a", (row.guests if row else 0) * 10 + seat.by_guest["all"])


def test_a_state_that_changes_in_place_is_passed_as_it_was_after_each_event() -> None:
    counted_places = projection("places", key=by_state(Counting, lambda seat: "a", on_change="keep"))(counted)
    log = [replace(event, position=n) for n, event in enumerate(on("s-1", *[Taken(guest="x")] * 3), 1)]
    projected(counted_places, log).rows(Place("a", 123))
    with read_model_case(resolved_alone(counted_places)) as case:
        for rows in (case.in_one_pass(log), case.written(log, [1, 2])):
            assert rows["places"] == [{"place": "a", "guests": 123}]


@aggregate("seat")
class Inexact:
    extra: Any = None

    def evolve(self, event: Taken | Moved | Left) -> Inexact:
        return replace(self, extra=(1, 2))


def at_a(row: Place | None, event: Recorded[Taken]) -> Place:
    return row or Place("a")


def test_a_state_that_cannot_be_stored_fails_in_projected() -> None:
    key = by_state(Inexact, lambda seat: "a", on_change="keep")
    with pytest.raises(HandlerFailed, match="the state after it cannot be stored as JSON"):
        projected(projection("places", key=key)(at_a), on("s-1", Taken(guest="x")))


def place_in(seat: Seat, suffix: str = "") -> str:
    return f"{seat.place}{suffix}"


@pytest.mark.parametrize("key", [attrgetter("place"), place_in, partial(place_in, suffix="")])
def test_a_key_can_be_any_callable_of_the_state(key: Any) -> None:
    projected(declared("keep", key=key), on("s-1", Moved(place="a"), Taken(guest="x"))).rows(Place("a", 1))


def test_the_docstring_of_an_aggregate_does_not_change_its_fingerprint() -> None:
    def states(doc: str, default: int = 0) -> str:
        inner: Any = make_dataclass("Inner", [("title", str, "")], frozen=True, namespace={"__doc__": doc})
        fields = {"description": (str, ""), "count": (int, default), "inner": (inner, inner())}
        members = {name: value for name, (_, value) in fields.items()}
        hints = {name: hint for name, (hint, _) in fields.items()}
        more = {"__annotations__": hints, "__doc__": doc, "__module__": __name__, "evolve": Seat.evolve}
        cls: Any = aggregate("seat")(type("Documented", (), members | more))
        assert doc in str(StateCodec[Any](cls, "kept", "").shape)
        return StateCodec[Any](cls, "kept", "").fingerprint

    assert states("One text.") == states("Another text.")
    assert states("One text.") != states("One text.", 1)


def test_the_table_of_states_is_in_the_schema_of_the_rows() -> None:
    columns = Column("place", String, primary_key=True), Column("guests", Integer)
    resolved = resolve(projection("places", table=Table("places", MetaData(), *columns, schema="x"), key=KEEP)(taken),
                       seat_catalog())  # fmt: skip
    assert [(table.schema, table.name) for table in resolved.tables] == [("x", "places"), ("x", "ej_state_places")]


def test_an_unreachable_log_is_not_reported_as_a_fault_of_an_event() -> None:
    resolved = resolved_of()
    (encoded,) = [seat_catalog().encode(Left())]
    headers = block(encoded.type_name, encoded.schema, 2, Nats_Expected_Last_Subject_Sequence="1")
    nowhere = PredecessorReader(Endpoint.of(Settings(servers=("nats://127.0.0.1:1",))), "house")
    nowhere.close()  # it makes no further attempt
    foldings = Foldings([Folding(resolved, Database("sqlite:///nowhere.db").dialect, {})], seat_catalog(), nowhere)
    with pytest.raises((Unreachable, StoreUnavailable)):
        foldings.take([(2, 0, b"house.seat.s-1", headers, encoded.body)])


def seat_catalog() -> Catalog:
    return Catalog({Taken: "seat", Moved: "seat", Left: "seat"})


def of_named(key: Callable[[Seat], Any] = lambda seat: seat.place or "nowhere") -> Any:
    return projection("places", key=by_state(Seat, key, on_change="keep", via=seat_of))(of_bill)


def test_via_takes_the_state_of_the_named_aggregate_at_the_position_of_the_event() -> None:
    history = [
        *on("b-1", Paid(place="s-1")),
        *on("s-1", Moved(place="a")),
        *on("b-1", Paid(place="s-1")),
        *on("b-2", Paid(place="s-1"), Paid(place="")),
        *on("s-1", Moved(place="b")),
        *on("b-1", Paid(place="s-1")),
        *on("s-1", Moved(place="c")),
    ]
    projected(of_named(), history).rows(Place("nowhere", 1), Place("a", 2), Place("b", 1))


def test_via_can_name_an_id_with_any_characters() -> None:
    history = [*on("s 1.*", Moved(place="a")), *on("b-1", Paid(place="s 1.*"))]
    projected(of_named(), history).rows(Place("a", 1))


@pytest.mark.parametrize(("place", "reason"), [("\0", "`via` gives no id of an aggregate"), ("x" * 300, "`via` gives")])
def test_an_invalid_id_of_via_is_refused_with_its_event(place: str, reason: str) -> None:
    with pytest.raises(HandlerFailed) as raised:
        projected(of_named(), on("s-1", Moved(place="a")), on("b-1", Paid(place=place)))
    assert (raised.value.position, raised.value.aggregate_id) == (2, "b-1")
    assert reason in raised.value.reason


def resolved_of(on_change: Any = "keep", catalog: Catalog | None = None) -> ResolvedProjection:
    return resolve(declared(on_change), catalog or seat_catalog())


def test_skipped_and_retired_records_count_for_the_version() -> None:
    catalog = Catalog({Taken: "seat", Moved: "seat", Left: "seat"}, retired=["seat.swept"])
    resolved = resolved_of(catalog=catalog)
    encoded = [catalog.encode(data) for data in (Moved(place="a"), Taken(guest="x"))]
    kinds = [
        ("seat.swept", 1, b"{}"),
        *((encoded_event.type_name, encoded_event.schema, encoded_event.body) for encoded_event in encoded),
    ]
    records: Any = [
        (position, 0, b"house.seat.s-1", block(name, schema, position), body)
        for position, (name, schema, body) in enumerate(kinds, 1)
    ]
    skipped = catalog.of_log({2: "somebody skipped it"})
    read = reader(skipped, resolved)
    read.expect(records)
    fold = Fold(resolved, RowCodec(resolved.table, resolved.row_type))
    joining = fold.join([event for event in map(read, records) if event is not None], {})
    assert joining.cells == {("seat", "s-1"): Cell(Seat(guest="x"), 3, 3)}


def test_an_event_whose_state_is_missing_stops_the_projection() -> None:
    fold = Fold(resolved_of(), RowCodec(resolved_of().table, resolved_of().row_type))
    (_, second) = on("s-1", Left(), Left())
    for cells in ({}, {("seat", "s-1"): Cell(Seat(), 2, 2)}):
        with pytest.raises(ProjectionStopped, match=r"eventjet rebuild places.*eventjet audit"):
            fold.join([second], cells)
    assert fold.join([second], {("seat", "s-1"): Cell(Seat(), 1, 1)}).cells == {("seat", "s-1"): Cell(Seat(), 2, 2)}


def test_the_rows_of_an_event_by_state_need_the_whole_history() -> None:
    (event,) = on("s-1", Taken(guest="x"))
    (touched,) = rows_touched(App("house", aggregates=[Seat], projections=[declared("keep")]), event)
    assert (touched.keys, "only the whole history" in touched.reason) == ((), True)
    (event,) = on("s-1", Moved(place="a"))
    for on_change, count in (("keep", 0), ("move", 1)):
        house = App("house", aggregates=[Seat], projections=[declared(on_change)])
        assert len(rows_touched(house, event)) == count


def test_keys_of_every_column_type_can_be_dumped_and_loaded() -> None:
    class Size(Enum):
        small = 1
        large = 1.5

    at = datetime(2030, 1, 2, 3, 4, 5, 6, UTC)
    kinds: list[tuple[Any, Any]] = [
        (String(), "x"), (Integer(), 7), (Numeric(8, 2), Decimal("1.50")), (DateTime(timezone=True), at),
        (Date(), at.date()),
        (DateTime(), at.replace(tzinfo=None)), (Uuid(), uuid4()), (EnumType(Size), Size.large),
    ]  # fmt: skip
    for kind, part in kinds:
        dump, load = key_forms(Column("part", kind))
        dumped = marshal.loads(marshal.dumps(dump(part)))
        assert (load(dumped), type(load(dumped))) == (part, type(part))


def test_blocks_of_several_tasks_are_merged_window_by_window() -> None:
    chance = Random(3)
    positions = sorted(chance.sample(range(1, 1_000_000), 3_000))
    blocks: list[tuple[int, list[Any]]] = []
    for task in range(5):
        own = [position for position in positions if position % 5 == task]
        for window in sorted({window_of(position, 2) for position in own}):
            inside = [position for position in own if window_of(position, 2) == window]
            blocks += [(0, [(("key",), (position,)) for position in part]) for part in (inside[:9], inside[9:]) if part]
    blocks.sort(key=lambda entry: entry[1][0][1][0])
    blocks[:0] = [(7, []), (0, [(None, (0, "a state"))])]
    merged = list(in_windows(iter(blocks), 2))
    assert sum(events for events, _ in merged) == 7
    assert [pairs for _, pairs in merged if pairs and pairs[0][0] is None] == [[(None, (0, "a state"))]]
    arrived = [record[0] for _, pairs in merged for entry, record in pairs if entry is not None]
    assert arrived == positions
    assert max(len(pairs) for _, pairs in merged) < len(positions) / 5


@event("case.filed")
class Filed:
    pages: dict[str, int]
    """A dict can be changed, so functions are given copies of such events."""


@aggregate("case")
class Case:
    pages: int = 0

    def evolve(self, event: Filed) -> Case:
        return replace(self, pages=self.pages + sum(event.pages.values()))


def size_of(case: Case) -> int:
    return case.pages


@dataclass(frozen=True, slots=True)
class Size:
    pages: Key[int]
    kinds: int = 0


def test_the_state_is_given_beside_an_event_that_can_be_changed() -> None:
    @projection("sizes", key=by_state(Case, size_of, on_change="keep"))
    def sizes(row: Size | None, event: Recorded[Filed], case: Case) -> Size:
        kinds = len(event.data.pages)
        event.data.pages.clear()
        return Size(case.pages, (row.kinds if row else 0) + kinds)

    filed = on("c-1", Filed(pages={"text": 1, "plan": 2}), Filed(pages={"text": 4}))
    projected(sizes, filed).rows(Size(3, 2), Size(7, 1))
