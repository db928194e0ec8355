"""Row classes that declare their tables, mapped classes as tables, and refusals with a fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, NewType
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict
from sqlalchemy import Column, ForeignKey, Index, MetaData, Numeric, String, Table, Text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column
from sqlalchemy.schema import CreateTable

from eventjet import App, Key, Personal, Recorded, SqlProjection, aggregate, entries, event, projection
from eventjet.errors import DefinitionError, HandlerFailed, RowRefused, UsageError
from eventjet.projections.resolve import _key_checker  # pyright: ignore[reportPrivateUsage]
from eventjet.projections.row_codec import RowCodec
from eventjet.testing import on, projected


@event("item.listed")
class Listed:
    name: str


@aggregate("item")
class Item:
    name: str = ""

    def evolve(self, event: Listed) -> Item:
        return replace(self, name=event.name)


class Kind(Enum):
    FRESH = "fresh"
    FROZEN = "frozen"


Name = NewType("Name", str)
Money = Annotated[Decimal, Numeric(12, 2)]


@dataclass(frozen=True)
class Everything:
    item_id: Annotated[Key[str], String(40)]
    name: Annotated[Personal[Name], mapped_column(String(100), unique=True)]
    price: Money | None
    digits: Decimal
    n: int
    ratio: float
    sold: bool
    day: date
    at: datetime
    number: UUID
    picture: bytes
    kind: Kind
    grade: Literal["a", "b"]
    tags: tuple[str, ...]
    sizes: Mapping[str, int]
    notes: Annotated[str, Text, Column(comment="free")]


def faults_of(*declared: Any) -> str:
    with pytest.raises(DefinitionError) as caught:
        App("shop", aggregates=[Item], projections=declared)
    return str(caught.value)


def test_each_type_of_field_has_its_column() -> None:
    @projection("items")
    def items(row: Everything | None, event: Recorded[Listed]) -> Everything | None:
        return row

    App("shop", aggregates=[Item], projections=[items])
    ddl = str(CreateTable(items.table).compile(dialect=postgresql.dialect()))
    lines = [line.strip().rstrip(", ") for line in ddl.splitlines() if line]
    assert lines == [
        "CREATE TABLE items (",
        "item_id VARCHAR(40) NOT NULL",
        "name VARCHAR(100) NOT NULL",
        "price NUMERIC(12, 2)",
        "digits NUMERIC NOT NULL",
        "n BIGINT NOT NULL",
        "ratio DOUBLE PRECISION NOT NULL",
        "sold BOOLEAN NOT NULL",
        "day DATE NOT NULL",
        "at TIMESTAMP WITH TIME ZONE NOT NULL",
        "number UUID NOT NULL",
        "picture BYTEA NOT NULL",
        "kind VARCHAR(63) NOT NULL",
        "grade VARCHAR NOT NULL",
        "tags JSON NOT NULL",
        "sizes JSON NOT NULL",
        "notes TEXT NOT NULL",
        "PRIMARY KEY (item_id)",
        "UNIQUE (name)",
        ")",
    ]
    assert items.table is items.table
    assert items.table.c.notes.comment == "free"


def test_a_row_class_can_declare_the_tables_of_two_projections() -> None:
    @dataclass(frozen=True)
    class Row:
        item_id: Key[str]
        name: Annotated[str, mapped_column(index=True)]

    @projection("first")
    def first(row: Row | None, event: Recorded[Listed]) -> Row:
        return Row(event.aggregate_id, event.data.name)

    @projection("second")
    def second(row: Row | None, event: Recorded[Listed]) -> Row:
        return Row(event.aggregate_id, event.data.name)

    App("shop", aggregates=[Item], projections=[first, second])
    assert [first.table.name, second.table.name] == ["first", "second"]
    projected(second, on("i", Listed(name="tea"))).rows(Row("i", "tea"))


@dataclass(frozen=True)
class Keyless:
    item_id: str


@dataclass(frozen=True)
class Odd:
    item_id: Key[str]
    opens: time
    lasts: timedelta
    either: str | int
    lost: Nowhere  # type: ignore[name-defined]  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


@dataclass(frozen=True)
class Price:
    price: Key[Decimal]


class Model(BaseModel):
    model_config = ConfigDict(frozen=True)
    item_id: Key[str]
    name: str = ""


class Open(BaseModel):
    item_id: Key[str]


def test_a_row_class_without_a_complete_table_is_refused_with_a_fix() -> None:
    @projection("keyless")
    def keyless(row: Keyless | None, event: Recorded[Listed]) -> Keyless | None: ...

    @projection("odd")
    def odd(row: Odd | None, event: Recorded[Listed]) -> Odd | None: ...

    @projection("nothing")
    def nothing(row: Any, event: Recorded[Listed]) -> str | None: ...

    faults = faults_of(keyless, odd, nothing)
    assert "Keyless is its key; mark it, as in `item_id: Key[…]`, or give a `table`" in faults
    assert (
        "Odd.opens is time, which no column keeps as it is; keep its text: declare the field as `str`, and write "
        "`value.isoformat()`" in faults
    )
    assert (
        "Odd.lasts is timedelta, which no column keeps as it is; keep its seconds: declare the field as `float`"
        in faults
    )
    assert (
        "Odd.either is str | int, which says no type of column; name it, as in `either: Annotated[str | int, JSON]`"
        in faults
    )
    assert "Odd.lost is Any, or names what is not found in the class's module" in faults
    assert "must be annotated to return one dataclass (or pydantic model), or None" in faults


Indexed = Annotated[str, mapped_column(index=True)]


@dataclass(frozen=True)
class Dropped:
    a: Key[str | None]
    b: Annotated[Indexed, mapped_column(comment="who")]
    c: Annotated[str, mapped_column("other", nullable=True)]
    d: Annotated[str | None, Column(nullable=False, key="x")]
    e: Annotated[str, Index("ix")]
    f: Annotated[str, String(3), String]
    g: Annotated[Key[int], mapped_column(autoincrement=True)]
    h: Annotated[str, ForeignKey("stored.item_id")]


@dataclass(frozen=True)
class Agreeing:
    item_id: Annotated[Key[str], mapped_column("item_id", String(40), nullable=False)]
    note: Annotated[Personal[str] | None, mapped_column(nullable=True, index=True), "a word of somebody else"]


def test_an_annotation_that_contradicts_its_column_is_refused() -> None:
    @projection("rows")
    def rows(row: Dropped | None, event: Recorded[Listed]) -> Dropped | None: ...

    @projection("agreeing")
    def agreeing(row: Agreeing | None, event: Recorded[Listed]) -> Agreeing | None: ...

    no_column = "in its annotation, which is no column and no type; put it into `mapped_column(…)`, or beside the"
    faults = [
        "Dropped.a is a key and may be None",
        "Dropped.b names 2 columns; leave one",
        "Dropped.c names its column 'other'; a column has the name of its field, so rename the field",
        "Dropped.c says nullable=True, and by its type it is never None; write `… | None`",
        "Dropped.d names its column 'x'",
        "Dropped.d says nullable=False, and by its type it may be None; leave `nullable` out",
        f"Dropped.e has Index {no_column}",
        "Dropped.f names 2 types; leave one",
        "Dropped.g is numbered by the database (autoincrement), and a rebuild would number it anew",
        f"Dropped.h has ForeignKey {no_column}",
    ]
    for line, fault in zip(faults_of(rows).splitlines()[1:], faults, strict=True):
        assert fault in line
    App("shop", aggregates=[Item], projections=[agreeing])
    assert [column.nullable for column in agreeing.table.columns] == [False, True]
    assert [column.name for index in agreeing.table.indexes for column in index.columns] == ["note"]


def test_a_decimal_key_without_a_precision_is_refused() -> None:
    def price_of(event: Recorded[Listed]) -> Decimal:
        return Decimal(1)

    @projection("prices", key=price_of)
    def prices(row: Price | None, event: Recorded[Listed]) -> Price | None: ...

    assert "name it, as in `price: Annotated[Key[Decimal], Numeric(12, 2)]`" in faults_of(prices)


def test_a_pydantic_model_can_be_a_row_only_if_it_is_frozen() -> None:
    @projection("rows")
    def rows(row: Model | None, event: Recorded[Listed]) -> Model:
        return (row or Model(item_id=event.aggregate_id)).model_copy(update={"name": event.data.name})

    @projection("opens")
    def opens(row: Open | None, event: Recorded[Listed]) -> Open | None: ...

    App("shop", aggregates=[Item], projections=[rows])
    projected(rows, on("i", Listed(name="tea"), Listed(name="salt"))).rows(Model(item_id="i", name="salt"))
    assert "ConfigDict(frozen=True), and return row.model_copy(update=…)" in faults_of(opens)


class Base(DeclarativeBase):
    pass


class Stored(Base):
    __tablename__ = "stored"

    item_id: Mapped[str] = mapped_column(String(40), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))


class AsData(MappedAsDataclass, Base):
    __tablename__ = "as_data"

    item_id: Mapped[str] = mapped_column(String(40), primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)


@dataclass(frozen=True)
class Plain:
    item_id: str
    name: str


@pytest.mark.parametrize("model", [Stored, AsData])
def test_a_mapped_class_is_the_table_of_a_projection(model: type[Any]) -> None:
    @projection("rows", table=model)
    def rows(row: Plain | None, event: Recorded[Listed]) -> Plain:
        return Plain(event.aggregate_id, event.data.name)

    @entries("no_position", table=model)
    def no_position(event: Recorded[Listed]) -> Plain: ...

    assert rows.table is model.__table__
    App("shop", aggregates=[Item], projections=[rows])
    projected(rows, on("i", Listed(name="tea"))).rows(Plain("i", "tea"))
    assert "must be the position" in faults_of(no_position)


@pytest.mark.parametrize("model", [Stored, AsData])
def test_a_projection_that_returns_a_mapped_class_is_refused(model: Any) -> None:
    def fold(row: Any, event: Recorded[Listed]) -> Any: ...

    fold.__annotations__["return"] = model
    faults = faults_of(projection("rows", table=model)(fold))
    assert (
        f"a mapped class, whose objects change in place, and a row does not; return a frozen dataclass with its "
        f"columns, and give the class as table={model.__name__}" in faults
    )


def test_a_class_without_a_table_is_refused_with_a_fix() -> None:
    @projection("rows", table=Plain)
    def rows(row: Plain | None, event: Recorded[Listed]) -> Plain | None: ...

    sql = SqlProjection("sql", tables=[Plain])

    @sql.handler
    async def listed(event: Recorded[Listed], session: AsyncSession) -> None: ...

    faults = faults_of(rows, sql)
    assert faults.count("Plain has no table; give a `Table`, a mapped class with `__tablename__`, or no table") == 2


def by_session(handler: Any) -> SqlProjection:
    declared = SqlProjection("sql", tables=[Stored, AsData])
    declared.handler(handler)
    return declared


TWO = [*on("a", Listed(name="tea"), Listed(name="salt"))]


def test_pending_objects_of_a_session_are_written_after_the_handler() -> None:
    async def listed(event: Recorded[Listed], session: AsyncSession) -> None:
        stored = await session.get(Stored, event.aggregate_id)
        if stored is None:
            session.add(Stored(item_id=event.aggregate_id, name=event.data.name))
        else:
            stored.name += f" {event.data.name}"

    projected(by_session(listed), TWO).rows(Stored, {"item_id": "a", "name": "tea salt"})


def test_a_batch_handler_has_a_single_session_for_its_events() -> None:
    async def listed(events: Sequence[Recorded[Listed]], session: AsyncSession) -> None:
        session.add_all([Stored(item_id=f"{event.position}", name=event.data.name) for event in events])

    projected(by_session(listed), TWO).rows(Stored, {"item_id": "1", "name": "tea"}, {"item_id": "2", "name": "salt"})


def test_a_handler_can_roll_back_a_savepoint_of_its_session() -> None:
    async def listed(event: Recorded[Listed], session: AsyncSession) -> None:
        try:
            async with session.begin_nested():
                session.add(AsData(item_id=f"{event.version}", name="the same"))
        except IntegrityError:
            session.add(Stored(item_id=f"{event.version}", name="refused"))

    projected_tables = projected(by_session(listed), TWO)
    projected_tables.rows(AsData, {"item_id": "1", "name": "the same"})
    projected_tables.rows(Stored, {"item_id": "2", "name": "refused"})


@pytest.mark.parametrize("hides", [False, True])
def test_a_failed_flush_names_the_event_even_if_the_handler_hides_the_error(hides: bool) -> None:
    async def listed(event: Recorded[Listed], session: AsyncSession) -> None:
        session.add(AsData(item_id=f"{event.version}", name="the same"))
        try:
            await session.flush()
        except IntegrityError:
            if not hides:
                raise

    message = r"listed went on after an error" if hides else r"UNIQUE constraint failed: as_data\.name"
    with pytest.raises(HandlerFailed, match=message) as caught:
        projected(by_session(listed), TWO)
    assert caught.value.position == 2


PLACED_AT = datetime(2030, 7, 1)  # noqa: DTZ001 - without a zone


@event("order.sent")
class Sent:
    at: Personal[str] = "secret"


@dataclass(frozen=True)
class Daily:
    day: Key[date]
    shop: Annotated[Key[str], String(3)]
    price: Annotated[Decimal, Numeric(4, 2)] | None = None
    at: datetime | None = None


def refusal_of(key: Any) -> str:
    """Return the reason why `projected` refuses a key that a function returns."""

    def day_of(event: Recorded[Sent]) -> tuple[date, str]:
        return key

    @projection("daily", key=day_of)
    def daily(row: Daily | None, event: Recorded[Sent]) -> Daily: ...

    with pytest.raises(HandlerFailed) as caught:
        projected(daily, on("a", Sent()))
    return caught.value.reason


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ((PLACED_AT, "abc"), "daily.day cannot hold the datetime that day_of returned: it takes dates, not datetime. "),
        (
            (date(2030, 7, 1), "secret"),
            "daily.shop cannot hold the str that day_of returned: it holds 3 characters and this has 6. Widen",
        ),
        (
            (date(2030, 7, 1), None),
            "daily.shop cannot hold the NoneType that day_of returned: a key has a value in each row. Return a value",
        ),
    ],
)
def test_a_key_that_does_not_fit_is_refused_with_its_function_column_and_type(key: Any, message: str) -> None:
    reason = refusal_of(key).replace("refusal_of.<locals>.", "")
    assert reason.startswith(message)
    assert "secret" not in reason


def test_a_key_with_a_wrong_number_of_parts_is_refused_with_its_function_and_columns() -> None:
    @projection("daily", key=lambda event: None)
    def daily(row: Daily | None, event: Recorded[Listed]) -> Daily: ...

    check = _key_checker("day_of returned", list(daily.table.primary_key.columns))
    with pytest.raises(ValueError, match=r"day_of returned has 1 parts, and the key of the table is \(day, shop\)"):
        check("secret")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"at": PLACED_AT},
            r"names no instant\. Give it its zone, as in `value\.replace\(tzinfo=UTC\)`, or declare `DateTime",
        ),
        (
            {"price": 0.5},
            r"takes Decimal or int, not float\. Give `Decimal\(str\(value\)\)`, or declare a `Double` column",
        ),
        ({"price": Decimal("0.005")}, r"keeps 2 decimals, and this has more\. Widen the column, or round"),
        ({"shop": None}, r"NOT NULL\. Give it a value, or declare a column that may be NULL"),
        ({"day": PLACED_AT}, r"takes dates, not datetime\. Convert it in the projection"),
    ],
)
def test_a_value_that_does_not_fit_its_column_is_refused_with_a_fix(changes: Any, message: str) -> None:
    @projection("daily", key=lambda event: None)
    def daily(row: Daily | None, event: Recorded[Listed]) -> Daily: ...

    row = replace(Daily(date(2030, 7, 1), "abc"), **changes)
    with pytest.raises(RowRefused, match=message):
        RowCodec(daily.table, Daily).normalise(row)


def test_a_wrong_argument_of_projected_is_refused_with_a_fix() -> None:
    async def listed(event: Recorded[Listed], session: AsyncSession) -> None: ...

    projected_tables = projected(by_session(listed), TWO)
    with pytest.raises(UsageError, match=r"'stored' has no column 'nam'\. Did you mean 'name'\? It has item_id, name"):
        projected_tables.rows(Stored, {"nam": "tea"})
    with pytest.raises(UsageError, match=r"has no table 'items'\. Its tables are stored, as_data"):
        projected_tables.rows(Table("items", MetaData()))
    for history in (Listed(name="tea"), [Listed(name="tea")]):
        with pytest.raises(UsageError, match=r"Listed is no recorded event\. Write `projected"):
            projected(by_session(listed), history)  # type: ignore[arg-type]
