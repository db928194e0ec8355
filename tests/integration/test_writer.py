"""A writer commits the rows and the checkpoint of a batch in one transaction, on both databases."""

from __future__ import annotations

import enum
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Double,
    Engine,
    Enum,
    LargeBinary,
    MetaData,
    Numeric,
    SmallInteger,
    String,
    Table,
    Text,
    Uuid,
    event,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import DataError, IntegrityError, OperationalError

from eventjet.domain.recorded import Recorded
from eventjet.errors import CheckpointFenced, HandlerFailed
from eventjet.projections.projection import projection
from eventjet.projections.resolve import ResolvedProjection, resolve
from eventjet.projections.row_codec import RowCodec
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.database import dialect_of
from eventjet.writers.batch import Batch, Parts
from eventjet.writers.fold_writer import FoldWriter
from tests.integration.projecting import (
    BALANCES,
    CATALOG,
    MOVEMENTS,
    Added,
    Closed,
    Movement,
    Opened,
    database_with,
    folded,
    on,
    rows_of,
)


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    tables_database = database_with(database, BALANCES, MOVEMENTS, KINDS)
    engine = tables_database.sync_engine()
    yield engine
    engine.dispose()


def take_lease(engine: Engine, resolved: ResolvedProjection, owner: str = "w-1") -> Checkpoint:
    with engine.begin() as connection:
        checkpoint.ensure(connection, resolved.name, resolved.revision)
        lease = checkpoint.take(connection, resolved.name, resolved.revision, owner, ttl_s=30)
    assert lease is not None
    return lease


def write(engine: Engine, resolved: ResolvedProjection, lease: Checkpoint, batch: Batch) -> None:
    with engine.begin() as connection:
        FoldWriter(resolved, dialect_of(engine), lease_s=30).write(connection, lease, batch)


def batches(events: list[Recorded[Any]], size: int) -> Iterator[Batch]:
    after = 0
    for start in range(0, len(events), size):
        part = events[start : start + size]
        yield Batch(after, part[-1].position, part[-1].event_id, part)
        after = part[-1].position


HISTORY = [
    on(position, data, aggregate_id)
    for position, (aggregate_id, data) in enumerate(
        [
            (
                f"a-{number % 7}",
                [Opened(owner=f"o-{number}"), Added(amount=Decimal(number) / 4), Closed()][number % 13 % 3],
            )
            for number in range(200)
        ],
        1,
    )
]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_batches_of_any_size_give_the_rows_of_the_fold(engine: Engine, size: int) -> None:
    lease = take_lease(engine, BALANCES)
    for batch in batches(HISTORY, size):
        write(engine, BALANCES, lease, batch)
    with engine.connect() as connection:
        assert rows_of(connection, BALANCES) == folded(HISTORY)
        stored = checkpoint.read(connection, "balances", 1)
    assert stored is not None
    assert (stored.position, stored.event_id) == (200, "id-200")


def test_the_position_advances_over_events_without_a_handler(engine: Engine) -> None:
    lease = take_lease(engine, BALANCES)
    write(engine, BALANCES, lease, Batch(0, 9, "id-9", []))
    with engine.connect() as connection:
        stored = checkpoint.read(connection, "balances", 1)
    assert stored is not None
    assert stored.position == 9


def test_a_worker_that_lost_its_lease_writes_nothing(engine: Engine) -> None:
    zombie = take_lease(engine, BALANCES)
    with engine.begin() as connection:
        checkpoint.release(connection, zombie)
    take_lease(engine, BALANCES, "w-2")
    with pytest.raises(CheckpointFenced, match="w-2 holds it in epoch 2, this was 1"):
        write(engine, BALANCES, zombie, Batch(0, 1, "id-1", [on(1, Opened(owner="ada"))]))
    with engine.connect() as connection:
        assert rows_of(connection, BALANCES) == []


@pytest.mark.parametrize("after", [0, 2])
def test_a_batch_that_repeats_or_skips_is_fenced(engine: Engine, after: int) -> None:
    lease = take_lease(engine, BALANCES)
    write(engine, BALANCES, lease, Batch(0, 1, "id-1", [on(1, Opened(owner="ada"))]))
    with pytest.raises(CheckpointFenced, match="is at position 1 and the batch starts after"):
        write(engine, BALANCES, lease, Batch(after, after + 1, "x", [on(after + 1, Closed())]))


def test_a_handler_error_leaves_neither_rows_nor_position(engine: Engine) -> None:
    lease = take_lease(engine, BALANCES)
    bad = [on(1, Opened(owner="ada")), on(2, Added(amount=Decimal("0.005")), "a-2")]
    with pytest.raises(HandlerFailed, match=r"position 2 of 'a-2'.*balances\.amount"):
        write(engine, BALANCES, lease, Batch(0, 2, "id-2", bad))
    with engine.connect() as connection:
        assert rows_of(connection, BALANCES) == []
        stored = checkpoint.read(connection, "balances", 1)
    assert stored is not None
    assert stored.position == 0


def test_entries_are_appended_once(engine: Engine) -> None:
    lease = take_lease(engine, MOVEMENTS)
    events = [on(1, Added(amount=Decimal(1))), on(4, Added(amount=Decimal(2)), "a-2")]
    write(engine, MOVEMENTS, lease, Batch(0, 5, "id-5", events))
    with engine.connect() as connection:
        assert rows_of(connection, MOVEMENTS) == [Movement(1, "a-1", Decimal(1)), Movement(4, "a-2", Decimal(2))]
    with engine.begin() as connection:
        connection.exec_driver_sql("update eventjet_projection set position = 0")
    with pytest.raises(IntegrityError):
        write(engine, MOVEMENTS, lease, Batch(0, 5, "id-5", events))


BATCH = Batch(0, 9, "id-9", [on(2, Closed()), on(5, Closed()), on(7, Closed())])
VALUE_ERROR = DataError("insert", None, sqlite3.DataError("out of range"))


def commit(batch: Batch, committed: list[tuple[int, int]], refuse: int = 0, fail: HandlerFailed | None = None) -> None:
    """Add the committed parts of a batch to a list; the database refuses the event at one position."""
    parts = Parts("balances", batch)
    for part in parts:
        positions = {event.position for event in part.events}
        if fail is not None and fail.position in positions:
            parts.failed(part, fail)
        elif refuse in positions:
            parts.refused(part, VALUE_ERROR)
        else:
            committed.append((part.after, part.last))


def test_parts_are_halved_until_the_event_that_the_database_refuses_is_alone() -> None:
    committed: list[tuple[int, int]] = []
    with pytest.raises(HandlerFailed, match=r"position 7.*out of range") as raised:
        commit(BATCH, committed, refuse=7)
    assert raised.value.__cause__ is VALUE_ERROR
    assert committed == [(0, 2), (2, 5)]


def test_events_before_a_failing_event_are_committed_first() -> None:
    failure = HandlerFailed("balances", 7, "a-1", "it is bad")
    committed: list[tuple[int, int]] = []
    with pytest.raises(HandlerFailed, match="it is bad"):
        commit(BATCH, committed, fail=failure)
    assert committed == [(0, 5)]
    with pytest.raises(HandlerFailed, match="position 5"):
        commit(BATCH, committed, refuse=5, fail=failure)


def test_errors_that_are_not_about_data_are_raised_unchanged() -> None:
    parts = Parts("balances", BATCH)
    fault = OperationalError("insert", None, sqlite3.OperationalError("disk I/O error"))
    with pytest.raises(OperationalError):
        parts.refused(next(iter(parts)), fault)
    with pytest.raises(DataError):
        parts.refused(Batch(0, 9, "id-9", []), VALUE_ERROR)


def test_a_batch_can_be_cut() -> None:
    batch = Batch(0, 9, "id-9", [on(2, Closed()), on(5, Closed()), on(7, Closed())])
    assert batch.before(2) is None
    assert batch.before(7) == Batch(0, 5, "id-5", batch.events[:2])
    assert batch.cut(1) == (Batch(0, 2, "id-2", batch.events[:1]), Batch(2, 9, "id-9", batch.events[1:]))
    assert batch.cut(3) == (batch, None)


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


@dataclass(frozen=True)
class Kinds:
    name: str
    day: date
    reference: UUID
    number: int
    text: str | None = None
    small: int | None = None
    big: int | None = None
    money: Decimal | None = None
    exact: Decimal | None = None
    real: float | None = None
    flag: bool | None = None
    at: datetime | None = None
    wall: datetime | None = None
    body: Any = None
    bodyb: Any = None
    data: bytes | None = None
    colour: Colour | None = None
    label: str | None = None


KINDS_TABLE = Table(
    'odd "kinds" 100%',
    MetaData(),
    Column("name", String, primary_key=True),
    Column("day", Date, primary_key=True),
    Column("reference", Uuid, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column('te"x%t', Text, key="text"),
    Column("small", SmallInteger),
    Column("big", BigInteger),
    Column("money", Numeric(12, 2)),
    Column("exact", Numeric),
    Column("real", Double),
    Column("flag", Boolean),
    Column("at", DateTime(timezone=True)),
    Column("wall", DateTime),
    Column("body", JSON),
    Column("bodyb", JSON().with_variant(JSONB(), "postgresql")),
    Column("data", LargeBinary),
    Column("colour", Enum(Colour)),
    Column("label", Enum("red", 'b"l\\ue', native_enum=False)),
)
ODD = 'a "quoted", {braced} \\ back\tslash\n é 🎉 NULL \\N'
DAY = date(2026, 1, 2)
VALUES: list[Kinds] = [
    Kinds("none", DAY, UUID(int=1), -(2**63)),
    Kinds(
        ODD, date.min, UUID(int=2**128 - 1), 2**63 - 1, ODD, -(2**15), 2**63 - 1, Decimal("9999999999.99"),
        Decimal("-0.000000000000000000000000000123456789"), float("inf"), True, datetime(1, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23), {"a": [1, None, "x\"y", {"b": 1.5}], "ä": "\\"}, {"b": 1, "a": 1e300},  # noqa: DTZ001
        bytes(range(256)), Colour.RED, 'b"l\\ue',
    ),
    Kinds(
        "", date.max, UUID(int=0), 0, "", 0, 0, Decimal(-1), Decimal("1E+40"), 5e-324, False,
        datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=timezone(timedelta(hours=2))), datetime(2026, 1, 1), "12", 12, b"",  # noqa: DTZ001
        Colour.BLUE, "red",
    ),
    Kinds("null", DAY, UUID(int=1), 7, "NULL", body=[], bodyb="\\", data=b"\\x00", real=-0.0),
]  # fmt: skip


@dataclass(frozen=True)
class Line:
    name: str
    day: date
    reference: UUID
    number: int


def key(event: Recorded[Opened]) -> tuple[str, date, UUID, int]:
    row = VALUES[int(event.data.owner)]
    return row.name, row.day, row.reference, row.number


@projection("kinds", table=KINDS_TABLE, key=key)
def kinds(row: Kinds | None, event: Recorded[Opened]) -> Kinds | None:
    SEEN.append(row)
    return VALUES[int(event.data.owner)] if event.position < 100 else None


KINDS = resolve(kinds, CATALOG)
SEEN: list[Kinds | None] = []


def test_values_of_every_type_are_read_back_as_normalised(engine: Engine) -> None:
    normalise = RowCodec(KINDS_TABLE, Kinds).normalise
    expected = [repr(normalise(row)) for row in VALUES]
    lease = take_lease(engine, KINDS)
    events = [on(position, Opened(owner=str(position - 1))) for position in range(1, len(VALUES) + 1)]
    write(engine, KINDS, lease, Batch(0, 4, "id-4", events))
    repeated = [on(event.position + 4, event.data) for event in events]
    SEEN.clear()
    write(engine, KINDS, lease, Batch(4, 8, "id-8", repeated))
    assert [repr(row) for row in SEEN] == expected
    with engine.connect() as connection:
        assert {repr(normalise(row)) for row in rows_of(connection, KINDS)} == set(expected)
    last = [on(event.position + 100, event.data) for event in events]
    write(engine, KINDS, lease, Batch(8, 104, "id-104", last))
    with engine.connect() as connection:
        assert rows_of(connection, KINDS) == []


def test_a_batch_takes_one_select_and_one_upsert(engine: Engine) -> None:
    statements: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def note(_c: Any, _u: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    write(engine, BALANCES, take_lease(engine, BALANCES), Batch(0, 3, "id-3", HISTORY[:3]))
    assert sum("insert into" in statement.lower() and "balances" in statement for statement in statements) == 1
    assert (
        sum(statement.lstrip().lower().startswith("select") and "balances" in statement for statement in statements)
        == 1
    )
