"""The laws of `eventjet.testing` fail for applications that break them, and pass for others."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Union
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from sqlalchemy import Column, ForeignKey, Integer, MetaData, Numeric, String, Table, insert
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import TypeAliasType

from eventjet import App, Recorded, SqlProjection, aggregate, event, projection
from eventjet.codec.catalog import Catalog
from eventjet.errors import DefinitionError, UsageError
from eventjet.examples.transfer.transfers import Transfer
from eventjet.testing import AggregateLaws, CodecLaws, ProjectionLaws
from eventjet.testing.golden import Golden
from eventjet.testing.strategies import Values, instances_of


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Line:
    goods: str
    price: Decimal = Decimal(1)


Sku = NewType("Sku", str)
Place = TypeAliasType("Place", Annotated[str, Field(max_length=3)])


class Parcel(BaseModel):
    """A model that names a class which is declared after it."""

    label: Label
    pieces: Annotated[int, Field(gt=0)] = 1


class Label(BaseModel):
    text: str


@event("order.filled")
class Filled:
    """An event with a field of each type that has a strategy."""

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
    place: Place
    parcel: Parcel
    maybe: int | None
    counts: Mapping[str, int]
    key: Annotated[bytes, Field(min_length=32, max_length=32)]
    pause: Annotated[timedelta, Field(gt=timedelta(0), le=timedelta(seconds=9))]
    due: Annotated[datetime, Field(ge=datetime(2190, 1, 1, tzinfo=UTC))]
    opens: Annotated[date, Field(gt=date(2190, 1, 1), lt=date(2190, 1, 4))]
    rate: Annotated[Decimal, Field(ge=Decimal("0.001"), le=Decimal("0.004"))]
    fee: Annotated[Decimal, Field(max_digits=3, decimal_places=2, multiple_of=Decimal("0.05"))]
    dozens: Annotated[int, Field(multiple_of=12_000)]
    evens: Annotated[Decimal, Field(ge=Decimal(7), le=Decimal(9), multiple_of=Decimal(2))]
    debts: Annotated[Decimal, Field(ge=Decimal(-9), le=Decimal("-7.5"), multiple_of=Decimal(2))]
    pair: tuple[int, str]
    flag: bool = False


@event("order.strange")
class Strange:
    what: Path


@event("order.boxed")
class Boxed:
    box: deque[int]


@settings(max_examples=30, deadline=None)
@given(instances_of(Filled, Values()))
def test_events_are_generated_from_annotations_and_survive_the_codec(filled: Filled) -> None:
    catalog = Catalog([Filled])
    encoded = catalog.encode(filled)
    resolved = catalog.resolve("order.filled", 1)
    assert resolved is not None
    assert resolved.decode(encoded.body) == encoded.event
    assert 3 < filled.number <= 9
    assert len(filled.code) == 3


def test_a_type_without_a_strategy_is_refused_with_a_fix() -> None:
    with pytest.raises(UsageError, match=r"Strange\.what is of the type Path.*strategies = \{Path: …\}"):
        instances_of(Strange, Values())
    with pytest.raises(UsageError, match=r"Boxed\.box is of the type deque.*strategies = \{deque\[int\]: …\}"):
        instances_of(Boxed, Values())
    instances_of(Boxed, Values({deque[int]: st.just(deque[int]())}))


@settings(max_examples=5)
@given(instances_of(Strange, Values({Path: st.just(Path("a"))})))
def test_a_strategy_of_the_application_is_used(strange: Strange) -> None:
    assert strange == Strange(what=Path("a"))


@event("tally.counted")
class Counted:
    by: int


@aggregate("tally", snapshot_every=10)
class Tally:
    total: int = 0

    def count(self, by: int) -> Counted:
        return Counted(by=by)

    @staticmethod
    def parse(text: str) -> Counted:
        return Counted(by=int(text))

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
    """An aggregate whose state does not survive JSON: it has a tuple where its annotation says Any."""

    seen: Any = field(default=())

    def evolve(self, event: Counted) -> Unkept:
        return replace(self, seen=(*self.seen, event.by))


@aggregate("tally")
class Changing:
    total: int = 0

    def count(self, by: list[int]) -> Counted:
        by.append(1)
        return Counted(by=len(by))

    def evolve(self, event: Counted) -> Changing:
        return self


@aggregate("tally")
class ChangingByPosition:
    """An aggregate whose decisions cannot be called by the names of their arguments."""

    def count(self, by: list[int], /) -> Counted:
        return Changing.count(Changing(), by)

    def evolve(self, event: Counted) -> ChangingByPosition:
        return self


@aggregate("tally")
class ChangingSeveral:
    def count(self, *by: list[int]) -> list[Counted]:
        return [Changing.count(Changing(), each) for each in by]

    def evolve(self, event: Counted) -> ChangingSeveral:
        return self


class Counts:
    def count(self, by: list[int]) -> Counted:
        return Changing.count(Changing(), by)


@aggregate("tally")
class ChangingByInheritance(Counts):
    def evolve(self, event: Counted) -> ChangingByInheritance:
        return self


@aggregate("tally")
class Unannotated:
    def count(self, by) -> Counted:  # type: ignore[no-untyped-def]
        return Counted(by=by)

    def evolve(self, event: Counted) -> Unannotated:
        return self


def failure_of(law: Callable[[Any], object], cls: Any) -> str:
    """Return the message with which the law fails for this aggregate."""

    class Laws(AggregateLaws):
        aggregate = cls

    with pytest.raises((AssertionError, DefinitionError, BaseExceptionGroup)) as raised:
        law(Laws())
    error: BaseException = raised.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "\n".join((str(error), *getattr(error, "__notes__", ())))


def test_a_fold_that_refuses_an_event_is_reported_with_the_shortest_history() -> None:
    message = failure_of(AggregateLaws.test_evolve_takes_every_history, Refusing)
    assert "Refusing.evolve raised ValueError for Counted: negative. It takes every event" in message
    assert "the event: Counted(by=-1)\nthe state: Refusing(total=0)" in message


def test_a_fold_that_returns_no_state_is_reported_with_the_error_of_production() -> None:
    assert "Forgetting.evolve returned None for Counted" in failure_of(
        AggregateLaws.test_evolve_takes_every_history, Forgetting
    )


@pytest.mark.slow
def test_a_state_that_a_snapshot_does_not_restore_is_reported() -> None:
    message = failure_of(AggregateLaws.test_a_snapshot_and_the_events_after_it_are_the_whole_history, Unkept)
    assert "would not come back equal from a snapshot" in message


@pytest.mark.parametrize("cls", [Changing, ChangingByPosition, ChangingSeveral, ChangingByInheritance])
@pytest.mark.slow
def test_a_decision_that_changes_its_arguments_is_reported(cls: Any) -> None:
    message = failure_of(AggregateLaws.test_decisions_leave_alone_what_they_are_given, cls)
    assert f"{cls.__name__}.count changed what it was given" in message


def test_a_decision_whose_arguments_cannot_be_made_up_is_refused() -> None:
    class Laws(AggregateLaws):
        aggregate = Unannotated

    law: Any = AggregateLaws.test_decisions_leave_alone_what_they_are_given
    with pytest.raises(UsageError, match=r"The parameter `by` of Unannotated\.count has no annotation.*Annotate it"):
        law(Laws())


MANY = [event(f"many.n{number}")(type(f"Many{number}", (), {})) for number in range(80)]


def test_a_golden_file_has_a_history_with_each_of_many_events(tmp_path: Path) -> None:
    def evolve(self: Any, event: Any) -> Any:
        return self

    evolve.__annotations__["event"] = Union[tuple(MANY)]  # noqa: UP007

    class Laws(AggregateLaws):
        aggregate = aggregate("many")(type("Many", (), {"evolve": evolve}))

        def golden(self, name: str, pytestconfig: Any) -> Golden:
            return Golden(tmp_path / f"{name}.json", write=pytestconfig)

    for write in (True, False):
        Laws().test_what_was_folded_once_folds_to_the_same(write)  # type: ignore[arg-type]


def test_the_law_of_the_codec_holds_for_each_of_many_events() -> None:
    seen: set[type] = set()

    def evolve(self: Any, event: Any) -> Any:
        return self

    evolve.__annotations__["event"] = Union[tuple(MANY)]  # noqa: UP007
    kinds = {kind: st.builds(lambda kind=kind: seen.add(kind) or kind()) for kind in MANY}

    class Laws(CodecLaws):
        app = App("many", aggregates=[aggregate("many")(type("Many", (), {"evolve": evolve}))])
        strategies = kinds

    Laws().test_what_is_stored_comes_back_equal()
    assert seen == {*MANY}


class TestTally(AggregateLaws):
    aggregate = Tally


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


@pytest.mark.slow
def test_a_projection_that_is_no_function_of_the_log_is_reported() -> None:
    class Laws(ProjectionLaws):
        projection = impure

    with pytest.raises(AssertionError, match=r"the rows of totals depend on how the log is read"):
        Laws().test_every_way_to_read_the_log_gives_the_same_rows()


NARROW = Table(
    "narrow",
    MetaData(),
    Column("id", String(20), primary_key=True),
    Column("code", String(3), nullable=False),
    Column("total", Numeric(4, 2), nullable=False),
)


@event("narrow.named")
class Named:
    code: str


@event("narrow.paid")
class Paid:
    amount: Decimal


@dataclass(frozen=True, slots=True)
class Narrow:
    id: str
    code: str | None
    total: Decimal = Decimal(0)


@projection("narrow", table=NARROW)
def narrow(row: Narrow | None, event: Recorded[Named | Paid]) -> Narrow | None:
    match row, event.data:
        case _, Named(code=code):
            return Narrow(event.aggregate_id, code)
        case Narrow(total=total), Paid(amount=amount):
            return replace(row, total=total + amount)
        case _:
            return row


@projection("narrow", table=NARROW)
def nameless(row: Narrow | None, event: Recorded[Named]) -> Narrow:
    return Narrow(event.aggregate_id, None)


class TestNarrow(ProjectionLaws):
    """A projection with narrow columns: generated values fit them, and so do their sums."""

    projection = narrow


PARENTS = Table("parents", META := MetaData(), Column("id", String(20), primary_key=True))
CHILDREN = Table(
    "children", META, Column("n", Integer, primary_key=True), Column("parent", ForeignKey("parents.id"), nullable=False)
)
family = SqlProjection("family", tables=[PARENTS, CHILDREN])


@family.handler
async def on_named(event: Recorded[Named], connection: AsyncConnection) -> None:
    await connection.execute(insert(PARENTS).values(id=event.aggregate_id))


@family.handler
async def on_paid(event: Recorded[Paid], connection: AsyncConnection) -> None:
    await connection.execute(insert(CHILDREN).values(n=event.position, parent=event.aggregate_id))


class TestFamily(ProjectionLaws):
    """A projection with a foreign key: its histories are in an order that the key allows."""

    projection = family
    histories = st.just([Named(code="a"), Paid(amount=Decimal(1)), Paid(amount=Decimal(2))])


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (nameless, r"narrow\.code cannot hold None"),
        (family, r"family cannot take (Named|Paid)\(.*\): IntegrityError: "),
    ],
    ids=["none", "order"],
)
def test_a_failing_projection_is_reported_with_its_event(declared: Any, message: str) -> None:
    class Laws(ProjectionLaws):
        projection = declared

    with pytest.raises(AssertionError, match=message) as raised:
        Laws().test_every_way_to_read_the_log_gives_the_same_rows()
    assert any(note.startswith("log:\n  1 a-") for note in raised.value.__notes__)


class TestTransfer(AggregateLaws):
    """A process: its decisions on errors and outcomes of steps are left out."""

    aggregate = Transfer
