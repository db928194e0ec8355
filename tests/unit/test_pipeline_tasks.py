"""The tasks of a pipeline turn records into rows of Spark, without personal values unless they are requested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, model_validator
from pyspark.sql.streaming.datasource import ReadMaxRows
from sqlalchemy import JSON, Numeric

from eventjet import App, Key, Personal, Recorded, aggregate, entries, event, projection
from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import RawRecord, header_block
from eventjet.domain.identity import encode_id
from eventjet.errors import HandlerFailed, UsageError
from eventjet.projections.app_ref import AppRef
from eventjet.projections.resolve import ResolvedProjection
from eventjet.rebuild.plan import Route, route_of
from eventjet.spark import shuffle_blocks
from eventjet.spark.columns import STORED, arrow_batch
from eventjet.spark.event_rows import ROW_VALUES, event_tables, personal_fields, row_columns
from eventjet.spark.frames import RecordedTask
from eventjet.spark.pipelines import ReadModelTask, _EventsTask, _needs_hidden_values, declare
from eventjet.spark.shuffle_blocks import PackByKey, PackByState, packing, unpack
from eventjet.spark.source import JetStreamStreamReader, LogOptions, read_columns
from tests import logs
from tests.integration import orders as joined

DAY = date(2026, 11, 27)
ID = UUID(int=7)


class Kind(Enum):
    SMALL = "s"
    LARGE = "l"


@event("order.placed")
class Placed:
    customer: str
    amount: Decimal


@event("order.named")
class Named:
    name: Personal[str]
    city: str


@event("order.upcast", schema=2)
class Upcast:
    city: str


class Address(BaseModel):
    city: str

    @model_validator(mode="before")
    @classmethod
    def of_town(cls, value: Any) -> Any:
        return {"city": value["town"]} if "town" in value else value


@event("order.validated")
class Validated:
    addresses: dict[str, Address | None]


@aggregate("order")
class Order:
    count: int = 0

    def evolve(self, event: Placed | Named) -> Order:
        return self


@dataclass(frozen=True, slots=True)
class Spend:
    customer: Key[str]
    amount: Annotated[Decimal, Numeric(12, 2)]
    orders: int
    rate: float
    kind: Kind
    day: date
    at: datetime
    tags: Annotated[tuple[str, ...], JSON]
    ref: UUID
    raw: bytes
    note: str | None = None


def customer_of(event: Recorded[Placed]) -> str:
    return event.data.customer


@projection("spend", key=customer_of)
def spend(row: Spend | None, event: Recorded[Placed]) -> Spend:
    amount, orders = (row.amount, row.orders) if row else (Decimal(0), 0)
    if event.data.amount < 0:
        raise ValueError("less than nothing")
    return Spend(
        event.data.customer, amount + event.data.amount, orders + 1, 0.5, Kind.LARGE, DAY, event.recorded_at,
        ("b", "a"), ID, b"\0",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    position: Key[int]
    city: str


@entries("lines")
def lines(event: Recorded[Named]) -> Line:
    return Line(event.position, event.data.city)


app = App("shop", aggregates=[Order], projections=[spend, lines])
REF = AppRef.of(app)


def record(position: int, event: Any, entity: str = "o-1") -> RawRecord:
    encoded = app.catalog.encode(event)
    headers = {"Nats-Msg-Id": f"id-{position}", "Ej-Type": encoded.type_name, "Ej-Schema": "1", "Ej-Version": "1"}
    subject = f"shop.order.{entity}".encode()
    return position, 1_795_764_525_722_929_476, subject, header_block(headers.items()), encoded.body


LOG = [
    record(1, Placed(customer="ada", amount=Decimal("1.10"))),
    record(2, Named(name="Ada", city="Ulm"), "o-2"),
    record(3, Placed(customer="ada", amount=Decimal("2.20")), "o-3"),
]


def rows(batches: Any) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def resolved(name: str) -> ResolvedProjection:
    declared_projection = app.projections[name]
    assert isinstance(declared_projection, ResolvedProjection)
    return declared_projection


def test_a_fold_by_key_gives_the_rows_of_its_table_in_the_types_of_spark() -> None:
    assert {name: form.ddl for name, form in row_columns(resolved("spend")).items()} == {
        "customer": "string", "amount": "decimal(12,2)", "orders": "bigint", "rate": "double", "kind": "string",
        "day": "date", "at": "timestamp", "tags": "string", "ref": "string", "raw": "binary", "note": "string",
    }  # fmt: skip
    pack = PackByKey(read_columns, 3, REF, "spend", _values(), None, {})
    blocks = [block for block in pack(iter([arrow_batch(LOG)])) if block.column("records")[0].is_valid]
    assert sum(len(records) for _, records in unpack(iter(blocks))) == 2
    (row,) = rows(ReadModelTask(REF, "spend", Route.BY_KEY, {})(iter(blocks)))
    assert row.pop("at").isoformat() == "2026-11-27T07:28:45.722929+00:00"
    assert row == {
        "customer": "ada", "amount": Decimal("3.30"), "orders": 2, "rate": 0.5, "kind": "LARGE", "day": DAY,
        "tags": '["b","a"]', "ref": str(ID), "raw": b"\0", "note": None,
    }  # fmt: skip


def _values() -> Any:
    return ROW_VALUES


def test_entries_are_made_in_the_reading_task() -> None:
    task = ReadModelTask(REF, "lines", Route.UNSHUFFLED, {}, read_columns)
    assert rows(task(iter([arrow_batch(LOG)]))) == [{"position": 2, "city": "Ulm"}]


@pytest.mark.parametrize("name", joined.NAMES)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 300), partitions=st.integers(1, 5), tasks=st.integers(1, 4))
@settings(max_examples=12, deadline=None)
def test_keys_of_states_give_the_rows_of_a_plain_fold_through_both_shuffles(
    name: str, seed: int, count: int, partitions: int, tasks: int
) -> None:
    pairs = joined.history(seed, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle_blocks, "_WINDOW_EVENTS", 1 + seed % 20)
        patch.setattr(shuffle_blocks, "BLOCK_BYTES", 2_000)
        rows = through_both_shuffles(name, pairs, partitions, tasks)
    expected = joined.expected(pairs)[name].values()
    assert rows == sorted(tuple(getattr(row, field) for field in row.__slots__) for row in expected)


def through_both_shuffles(name: str, pairs: Sequence[Any], partitions: int, tasks: int) -> list[tuple[Any, ...]]:
    """Return the rows that the tasks of a pipeline make, of which the first ones read a part of the log each."""
    versions, log = Counter[str](), list[RawRecord]()
    for position, (entity, data) in enumerate(pairs, 1):
        versions[entity] += 1
        encoded = joined.orders.catalog.encode(data)
        kind = encoded.type_name.partition(".")[0]
        block = logs.block(encoded.type_name, 1, versions[entity])
        log.append((position, 0, f"orders.{kind}.{encode_id(entity)}".encode(), block, encoded.body))

    def shuffled(task: Any, frames: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Run a task on each frame, and return its blocks by partition, as Spark sorts them."""
        blocks = [row for frame in frames for batch in task(iter(frame)) for row in batch.to_pylist()]
        blocks.sort(key=lambda row: row["position"])
        by_partition = [[row for row in blocks if row["partition"] == number] for number in range(partitions)]
        return [[shuffle_blocks._batch(rows)] for rows in by_partition if rows]  # pyright: ignore[reportPrivateUsage]

    resolved, reference = joined.orders.projections[name], AppRef.parse(f"{joined.__name__}:orders")
    assert isinstance(resolved, ResolvedProjection)
    size = -(-len(log) // tasks)
    read = [[arrow_batch(log[start : start + size])] for start in range(0, len(log), size)]
    frames = shuffled(packing(read_columns, partitions, reference, resolved, _values(), None, {}), read)
    if route_of(resolved) is Route.BY_STATE:
        pack = PackByState(partitions, reference, name, _values(), None, {}, with_states=False)
        frames = shuffled(pack, frames)
    task = ReadModelTask(reference, name, route_of(resolved), {}, partitions=partitions)
    return sorted(tuple(row.values()) for frame in frames for row in rows(task(iter(frame))))


def test_an_event_that_a_projection_refuses_fails_its_view_unless_it_is_skipped() -> None:
    log = [record(1, Placed(customer="ada", amount=Decimal(-1)))]
    for skipped, fails in (({}, True), ({1: "a test"}, False)):
        pack = PackByKey(read_columns, 1, REF, "spend", _values(), None, skipped)
        blocks = list(pack(iter([arrow_batch(log)])))
        if fails:
            with pytest.raises(HandlerFailed, match="position 1"):
                rows(ReadModelTask(REF, "spend", Route.BY_KEY, skipped)(iter(blocks)))
        else:
            assert rows(ReadModelTask(REF, "spend", Route.BY_KEY, skipped)(iter(blocks))) == []


def test_personal_data_is_in_no_table_unless_it_is_requested() -> None:
    masked_rows = rows(_EventsTask(REF)(iter([arrow_batch(LOG)])))
    assert [row["body"] is None for row in masked_rows] == [False, True, False]
    assert [row["position"] for row in masked_rows] == [1, 2, 3]
    whole_rows = rows(_EventsTask(None)(iter([arrow_batch(LOG)])))
    assert whole_rows[1]["body"] == LOG[1][4].decode()
    stored = (LOG[1][1], LOG[1][2].decode(), LOG[1][3])
    assert (whole_rows[1]["time_ns"], whole_rows[1]["subject"], whole_rows[1]["headers"]) == stored
    task = RecordedTask(REF, "order.named", 1, left_out=personal_fields(Named))
    (named,) = rows(task(iter([arrow_batch(LOG)])))
    assert named["city"] == "Ulm"
    assert "name" not in named


def test_an_undeclared_field_is_hidden_in_tables_of_an_app_with_personal_fields() -> None:
    older = (*LOG[0][:4], b'{"customer":"ada","amount":"1","email":"ada@example.org"}')
    (row,) = rows(_EventsTask(REF)(iter([arrow_batch([older])])))
    assert row["body"] == '{"customer":"ada","amount":"1","email":"<personal>"}'


@pytest.mark.parametrize(
    ("kind", "is_needed"), [(Placed, False), (Named, True), (Upcast, True), (Validated, True), (joined.Added, False)]
)
def test_an_event_class_that_may_need_hidden_values_is_read_from_the_log(kind: type, is_needed: bool) -> None:
    assert _needs_hidden_values(next(iter(Catalog([kind]).kinds()))) is is_needed


def test_a_checkpoint_of_another_source_is_refused_with_a_fix() -> None:
    stream, of_files = JetStreamStreamReader(LogOptions.parse({"stream": "shop"}), STORED), {"logOffset": 3}
    with pytest.raises(UsageError, match="--full-refresh"):
        stream.partitions(of_files, of_files)
    with pytest.raises(UsageError, match="--full-refresh"):
        stream.latestOffset(of_files, ReadMaxRows(5))


def test_event_types_with_the_same_table_name_get_different_tables() -> None:
    @event("order_named")
    class OrderNamed:
        pass

    @event("events")
    class Events:
        pass

    tables = event_tables(Catalog([Placed, Named, OrderNamed, Events]))
    types = {kind.info.name for kind in tables.values()}
    assert types == {"order.placed", "order.named", "order_named", "events"}
    assert len(tables) == 4
    assert "order_placed" in tables
    assert not {"events", "order_named"} & tables.keys()


def test_declare_is_refused_outside_of_a_pipeline() -> None:
    with pytest.raises(UsageError, match="spark-pipelines run"):
        declare(app)


def test_a_catalog_that_ends_with_the_session_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        """A session that its operator has not configured."""

        class conf:  # noqa: N801 - Spark names it
            @staticmethod
            def get(name: str, default: str) -> str:
                return default

    monkeypatch.setattr("eventjet.spark.pipelines.SparkSession.active", Session)
    with pytest.raises(UsageError, match=r"catalogImplementation hive.*SPARK_CONF_DIR"):
        declare(app)
