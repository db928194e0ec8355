"""The laws of `eventjet.testing`: each breaks where an application breaks it, and holds where it does not."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NewType
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field
from sqlalchemy import Column, Integer, MetaData, String, Table

from eventjet import App, Recorded, aggregate, event, projection, upcaster
from eventjet.codec.catalog import Catalog
from eventjet.errors import DefinitionError, UsageError
from eventjet.testing import AggregateLaws, CodecLaws, ProjectionLaws
from eventjet.testing.golden import Golden
from eventjet.testing.strategies import Given, instances_of


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Line:
    goods: str
    price: Decimal = Decimal(1)


Sku = NewType("Sku", str)


@event("order.filled")
class Filled:
    """One field of each kind that there is a strategy for."""

    lines: tuple[Line, ...]
    number: Annotated[int, Field(gt=3, le=9)]
    price: Annotated[Decimal, Field(ge=0, decimal_places=3)]
    code: Annotated[str, Field(pattern=r"[A-Z]{3}")]
    short: Annotated[str, Field(min_length=2, max_length=3)]
    colour: Colour
    kind: Literal["a", "b"]
    day: date
    at: datetime
    id: UUID
    share: float
    sku: Sku
    maybe: int | None
    counts: Mapping[str, int]
    pair: tuple[int, str]
    flag: bool = False


@event("order.strange")
class Strange:
    what: Path


@settings(max_examples=30, deadline=None)
@given(instances_of(Filled, Given()))
def test_events_are_made_up_from_their_annotations_and_come_back_from_the_wire(filled: Filled) -> None:
    catalog = Catalog([Filled])
    encoded = catalog.encode(filled)
    resolved = catalog.resolve("order.filled", 1)
    assert resolved is not None
    assert resolved.decode(encoded.body) == encoded.event
    assert 3 < filled.number <= 9
    assert len(filled.code) == 3


def test_a_type_that_nothing_is_known_of_is_named_with_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"Strange\.what is of the type Path.*strategies = \{Path: …\}"):
        instances_of(Strange, Given())


@settings(max_examples=5)
@given(instances_of(Strange, Given({Path: st.just(Path("a"))})))
def test_a_strategy_that_is_given_is_taken(strange: Strange) -> None:
    assert strange == Strange(what=Path("a"))


@event("tally.counted")
class Counted:
    by: int


@aggregate("tally", snapshot_every=10)
class Tally:
    total: int = 0

    def count(self, by: int) -> Counted:
        return Counted(by=by)

    def evolve(self, event: Counted) -> Tally:
        return replace(self, total=self.total + event.by)


@aggregate("tally")
class Refusing:
    total: int = 0

    def evolve(self, event: Counted) -> Refusing:
        if event.by < 0:
            raise ValueError("negative")
        return replace(self, total=self.total + event.by)


@aggregate("tally")
class Forgetting:
    total: int = 0

    def evolve(self, event: Counted) -> Any:
        return None if event.by else self


@aggregate("tally", snapshot_every=10)
class Unkept:
    """Its state holds what JSON does not give back: a tuple where its annotation says anything."""

    seen: Any = field(default=())

    def evolve(self, event: Counted) -> Unkept:
        return replace(self, seen=(*self.seen, event.by))


HELD: list[int] = []


@aggregate("tally")
class Changing:
    total: int = 0

    def count(self, by: list[int]) -> Counted:
        by.append(1)
        return Counted(by=len(by))

    def evolve(self, event: Counted) -> Changing:
        return self


def broken(law: Callable[[Any], object], cls: Any) -> str:
    """What the law says of this aggregate."""

    class Laws(AggregateLaws):
        aggregate = cls

    with pytest.raises((AssertionError, DefinitionError, BaseExceptionGroup)) as raised:
        law(Laws())
    error: BaseException = raised.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "\n".join((str(error), *getattr(error, "__notes__", ())))


def test_a_fold_that_refuses_an_event_is_found_with_the_shortest_history() -> None:
    said = broken(AggregateLaws.test_evolve_takes_every_history, Refusing)
    assert "Refusing.evolve raised ValueError for Counted: negative. It takes every event" in said
    assert "the event: Counted(by=-1)\nthe state: Refusing(total=0)" in said


def test_a_fold_that_returns_something_else_is_found_in_the_words_of_production() -> None:
    assert "Forgetting.evolve returned None for Counted" in broken(
        AggregateLaws.test_evolve_takes_every_history, Forgetting
    )


def test_a_state_that_a_snapshot_does_not_give_back_is_found() -> None:
    said = broken(AggregateLaws.test_a_snapshot_and_the_events_after_it_are_the_whole_history, Unkept)
    assert "would not come back equal from a snapshot" in said


def test_a_decision_that_changes_its_arguments_is_found() -> None:
    said = broken(AggregateLaws.test_decisions_leave_alone_what_they_are_given, Changing)
    assert "Changing.count changed what it was given" in said


class TestTally(AggregateLaws):
    aggregate = Tally


@event("tally.reset")
class Reset:
    pass


@dataclass(frozen=True)
class Counting:
    total: int = 0
    seen: frozenset[str] = frozenset()


def counting(step: int = 1) -> Callable[[Any], Counting]:
    return lambda events: Counting(sum(one.by for one in events) * step, frozenset("abc"))


class GoldenCase:
    """A file of folds, and runs that compare or write it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "golden" / "tally.json"
        self.kinds: list[type] = [Counted]

    def run(self, fold: Callable[[Any], Any], *, revision: int = 1, write: bool = False) -> None:
        histories = [[Counted(by=2), Counted(by=1)], [Counted(by=2)], [Reset()]][: len(self.kinds) + 1]
        catalog = Catalog([Counted, Reset])
        Golden(self.file, write=write).check_folds(revision, catalog, self.kinds, lambda: histories, fold)


def test_folds_are_compared_with_what_was_written_down(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    with pytest.raises(AssertionError, match="is not there yet: run `pytest --write-golden`"):
        case.run(counting())
    case.run(counting(), write=True)
    case.run(counting())


def test_a_fold_that_changed_its_mind_at_the_same_revision_is_found_and_not_written_over(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    case.run(counting(), write=True)
    written = case.file.read_bytes()
    for write in (False, True):
        with pytest.raises(AssertionError) as raised:
            case.run(counting(step=2), write=write)
        said = str(raised.value)
        assert '  tally.counted {"by":2}\n  total was "2" and is "4"\n' in said, "the shortest history, and the field"
        assert "Raise `revision`" in said
    assert case.file.read_bytes() == written


def test_a_revision_that_was_raised_asks_for_new_states_of_the_same_histories(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    case.run(counting(), write=True)
    with pytest.raises(AssertionError, match="is of revision 1, declared is 2"):
        case.run(counting(step=2), revision=2)
    case.run(counting(step=2), revision=2, write=True)
    case.run(counting(step=2), revision=2)
    with pytest.raises(AssertionError, match="Raise `revision`"):
        case.run(counting(), revision=2)


def test_an_event_that_is_new_is_asked_for_and_what_was_written_stays(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    case.run(counting(), write=True)
    before = case.file.read_text(encoding="utf-8").splitlines()
    case.kinds.append(Reset)
    resetting = lambda events: Counting(sum(getattr(one, "by", 0) for one in events), frozenset("abc"))  # noqa: E731
    with pytest.raises(AssertionError, match=r"no history with tally\.reset schema 1"):
        case.run(resetting)
    case.run(resetting, write=True)
    after = case.file.read_text(encoding="utf-8").splitlines()
    assert [line.rstrip(",]}") for line in after if "reset" not in line] == [line.rstrip(",]}") for line in before]


def test_a_field_that_a_state_gained_is_not_a_change_of_mind(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    case.run(lambda events: Tally(total=len(events)), write=True)
    case.run(lambda events: Counting(len(events)))


@event("tally.counted", schema=2)
class CountedOnce:
    by: int
    reason: str


@upcaster("tally.counted", schema=1)
def with_reason(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "reason": ""}


def test_a_stored_schema_that_is_not_read_any_more_is_found(tmp_path: Path) -> None:
    file = tmp_path / "golden" / "app.events.json"
    Golden(file, write=True).check_schemas(Catalog([Counted]), [Counted], lambda kind: Counted(by=1))
    Golden(file, write=False).check_schemas(Catalog([Counted]), [Counted], lambda kind: None)
    newer = Catalog([CountedOnce], [with_reason])
    with pytest.raises(AssertionError, match=r"no example of tally\.counted schema 2"):
        Golden(file, write=False).check_schemas(newer, [CountedOnce], lambda kind: None)
    Golden(file, write=True).check_schemas(newer, [CountedOnce], lambda kind: CountedOnce(by=1, reason="x"))
    Golden(file, write=False).check_schemas(newer, [CountedOnce], lambda kind: None)
    with pytest.raises(AssertionError, match=r"tally\.counted.*schema 1 was stored once"):
        Golden(file, write=False).check_schemas(Catalog([CountedOnce]), [CountedOnce], lambda kind: None)
    Golden(file, write=False).check_schemas(Catalog([], retired=["tally.counted"]), [], lambda kind: None)


class TestCodec(CodecLaws):
    app = App("tally", aggregates=[Tally])


@dataclass(frozen=True, slots=True)
class Total:
    tally_id: str
    total: int


TOTALS = Table("totals", MetaData(), Column("tally_id", String(200), primary_key=True), Column("total", Integer))
CALLS: dict[str, int] = {}


@projection("totals", table=TOTALS)
def totals(row: Total | None, event: Recorded[Counted]) -> Total:
    return Total(event.aggregate_id, (row.total if row else 0) + event.data.by)


@projection("totals", table=TOTALS)
def impure(row: Total | None, event: Recorded[Counted]) -> Total:
    CALLS[event.aggregate_id] = CALLS.get(event.aggregate_id, 0) + 1
    return Total(event.aggregate_id, CALLS[event.aggregate_id])


class TestTotals(ProjectionLaws):
    projection = totals


def test_a_projection_that_is_no_function_of_the_log_is_found() -> None:
    class Laws(ProjectionLaws):
        projection = impure

    with pytest.raises(AssertionError, match=r"the rows of totals depend on how the log is read"):
        Laws().test_every_way_to_read_the_log_gives_the_same_rows()
