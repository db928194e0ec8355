"""When the app's events change, tables of a lake are widened, or the change is refused before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pytest
from pydantic import Field

from eventjet import event, upcaster
from eventjet.cli.lake import _sync_blocks
from eventjet.codec.catalog import Catalog
from eventjet.dev.nats import NatsServer
from eventjet.errors import LakeFenced, LakeRefused
from eventjet.lake import status, sync, verify
from eventjet.lake.evolution import changes
from eventjet.lake.store import Mark, Origin, open_store
from eventjet.lake.tables import tables_of
from tests.integration.lake_log import FORMATS, archive_of, arrow_of, lake_log, positions_of
from tests.integration.ledger_log import Ledger

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Place:
    city: str


@dataclass(frozen=True)
class WiderPlace:
    city: str
    country: str | None = None


@event("order.placed")
class Placed:
    total: Annotated[Decimal, Field(max_digits=8, decimal_places=2)]
    place: Place
    prices: list[Annotated[Decimal, Field(max_digits=8, decimal_places=2)]]
    count: int = 1


@event("order.other")
class Other:
    number: int


@event("order.placed")
class WithNote:
    total: Annotated[Decimal, Field(max_digits=8, decimal_places=2)]
    place: Place
    prices: list[Annotated[Decimal, Field(max_digits=8, decimal_places=2)]]
    count: int = 1
    note: str | None = None


@event("order.placed", schema=2)
class WithOrigin:
    total: Annotated[Decimal, Field(max_digits=8, decimal_places=2)]
    place: Place
    prices: list[Annotated[Decimal, Field(max_digits=8, decimal_places=2)]]
    count: int = 1
    origin: str | None = None


@upcaster("order.placed", schema=1)
def from_the_shop(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "origin": "shop"}


@event("order.placed")
class WithDigits:
    total: Annotated[Decimal, Field(max_digits=10, decimal_places=2)]
    place: Place
    prices: list[Annotated[Decimal, Field(max_digits=9, decimal_places=2)]]
    count: int = 1


@event("order.placed")
class WithReason:
    total: Annotated[Decimal, Field(max_digits=8, decimal_places=2)]
    place: Place
    prices: list[Annotated[Decimal, Field(max_digits=8, decimal_places=2)]]
    count: int = 1
    reason: str = "cash"


@event("order.placed")
class WithTextAndPlaces:
    total: Annotated[Decimal, Field(max_digits=10, decimal_places=4)]
    place: WiderPlace
    prices: list[Annotated[Decimal, Field(max_digits=8, decimal_places=2)]]
    count: str | int = 1


@event("order.placed")
class WithoutCount:
    total: Annotated[Decimal, Field(max_digits=8, decimal_places=2)]
    place: Place
    prices: list[Annotated[Decimal, Field(max_digits=8, decimal_places=2)]]


@event("order.rated")
class Rated:
    rate: float
    count: int


CENTS = Decimal("1.25")


def changed(log: Ledger, placed: type) -> Ledger:
    """Return the same log, with an app whose event has another class."""
    return Ledger(log.settings, log.name, Catalog([Other, placed]), {})


def log_before(nats: NatsServer) -> Ledger:
    log = lake_log(nats, catalog=Catalog([Other, Placed]))
    log.append([("a-1", Placed(total=CENTS, place=Place("Faro"), prices=[CENTS])), ("a-2", Other(number=1))])
    return log


@pytest.mark.parametrize("table_format", FORMATS)
async def test_an_optional_field_adds_a_column(nats: NatsServer, tmp_path: Path, table_format: str) -> None:
    log = log_before(nats)
    await sync(log, str(tmp_path), log.settings, table_format=table_format)
    later = changed(log, WithNote)
    # Rows from before the column are verified before and after the column is added.
    assert (await verify(later, str(tmp_path), log.settings, table_format=table_format)).sound
    later.append([("a-1", WithNote(total=CENTS, place=Place("Faro"), prices=[], note="by hand"))])
    report = await sync(later, str(tmp_path), log.settings, table_format=table_format)
    assert [(table.name, table.widened) for table in report.tables] == [
        ("events", False), ("order_other", False), ("order_placed", True)
    ]  # fmt: skip
    rows = arrow_of(tmp_path, "order_placed", table_format).sort_by("position")
    assert rows.column("note").to_pylist() == [None, "by hand"]
    assert (await verify(later, str(tmp_path), log.settings, table_format=table_format)).sound
    again = await sync(later, str(tmp_path), log.settings, table_format=table_format)
    assert not any(table.widened for table in again.tables)


@pytest.mark.parametrize("table_format", FORMATS)
async def test_a_column_is_not_added_when_a_stored_event_has_a_value_for_it(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = log_before(nats)
    await sync(log, str(tmp_path), log.settings, table_format=table_format)
    later, upcast = changed(log, WithNote), Catalog([Other, WithOrigin], [from_the_shop])
    with pytest.raises(LakeRefused, match="origin is new, and the event at position 1 has a value for it"):
        await sync(replace(log, catalog=upcast), str(tmp_path), log.settings, table_format=table_format)
    # An older version of the app reads an event of the newer version without the unknown field.
    later.append([("a-1", WithNote(total=CENTS, place=Place("Faro"), prices=[], note="by hand"))])
    await sync(log, str(tmp_path), log.settings, table_format=table_format)
    with pytest.raises(LakeRefused, match="note is new, and the event at position 3 has a value for it"):
        await sync(later, str(tmp_path), log.settings, table_format=table_format)
    archived = archive_of(log, tmp_path / "archive")
    log.lose_before(3)
    with pytest.raises(LakeRefused, match="the log begins at 3, after rows that lack its value"):
        await sync(later, str(tmp_path), log.settings, table_format=table_format)
    with pytest.raises(LakeRefused, match="the event at position 3 has a value for it"):
        await sync(later, str(tmp_path), log.settings, table_format=table_format, from_archive=archived)


@event("order.placed", schema=2)
class PlacedAgain(Placed):
    pass


@upcaster("order.placed", schema=1)
def with_tax(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "total": str(Decimal(body["total"]) * 2)}


@upcaster("order.placed", schema=1)
def unchanged(body: dict[str, Any]) -> dict[str, Any]:
    return body


@pytest.mark.parametrize("table_format", FORMATS)
async def test_a_sync_stops_when_a_new_schema_gives_stored_rows_other_values(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = log_before(nats)
    await sync(log, str(tmp_path), log.settings, table_format=table_format)
    doubled, same = (
        replace(log, catalog=Catalog([Other, PlacedAgain], [step])) for step in (with_tax, unchanged)
    )  # fmt: skip
    with pytest.raises(
        LakeRefused, match=r"schema 1 .* at schema 2 now, and at position 1 the column total has another"
    ):
        await sync(doubled, str(tmp_path), log.settings, table_format=table_format)
    assert mark_of(log, tmp_path, table_format).schema == 1
    same.append([("a-1", PlacedAgain(total=CENTS, place=Place("Faro"), prices=[]))])
    await sync(same, str(tmp_path), log.settings, table_format=table_format)
    assert arrow_of(tmp_path, "order_placed", table_format).column("total").to_pylist() == [CENTS, CENTS]
    assert mark_of(log, tmp_path, table_format).schema == 2
    assert (await verify(same, str(tmp_path), log.settings, table_format=table_format)).sound
    archived = archive_of(log, tmp_path / "archive")
    log.lose_before(3)
    third = replace(log, catalog=Catalog([Other, PlacedThird], [unchanged, upcaster("order.placed", schema=2)(dict)]))
    with pytest.raises(LakeRefused, match="the log begins at 3, after rows with which it cannot be compared"):
        await sync(third, str(tmp_path), log.settings, table_format=table_format)
    await sync(third, str(tmp_path), log.settings, table_format=table_format, from_archive=archived)
    # The table has no new rows, and is still compared once.
    assert mark_of(log, tmp_path, table_format).schema == 3


@event("order.placed", schema=3)
class PlacedThird(Placed):
    pass


def mark_of(log: Ledger, url: Path, table_format: str) -> Mark:
    with open_store(str(url), table_format, log.name, None) as store:
        table = store.table("order_placed")
        assert table is not None
        return table.mark


@event("order.another", formerly=("order.other",))
class Another:
    number: int


@pytest.mark.parametrize("table_format", FORMATS)
async def test_the_table_of_a_renamed_event_is_reported(nats: NatsServer, tmp_path: Path, table_format: str) -> None:
    log = log_before(nats)
    first = await sync(log, str(tmp_path), log.settings, table_format=table_format)
    assert first.undeclared == ()
    (tmp_path / "notes").mkdir()  # a folder that is no table
    later = replace(log, catalog=Catalog([Another, Placed]))
    report = await sync(later, str(tmp_path), log.settings, table_format=table_format)
    shown = await status(later, str(tmp_path), log.settings, table_format=table_format)
    assert report.undeclared == shown.undeclared == ("order_other",)
    assert positions_of(tmp_path, "order_another", table_format) == [2]
    *_, warning = _sync_blocks(report)
    assert str(warning).startswith(
        "The app declares no event and no projection for order_other, so nothing keeps it up"
    )


async def test_iceberg_widens_a_decimal(nats: NatsServer, tmp_path: Path) -> None:
    log = log_before(nats)
    await sync(log, str(tmp_path), log.settings, table_format="iceberg")
    later, large = changed(log, WithDigits), Decimal("12345678.25")
    later.append([("a-1", WithDigits(total=large, place=Place("Faro"), prices=[Decimal("1234567.25")]))])
    await sync(later, str(tmp_path), log.settings, table_format="iceberg")
    rows = arrow_of(tmp_path, "order_placed", "iceberg").sort_by("position")
    assert rows.column("total").to_pylist() == [CENTS, large]
    assert str(rows.schema.field("total").type) == "decimal128(10, 2)"
    assert (await verify(later, str(tmp_path), log.settings, table_format="iceberg")).sound


def test_a_table_is_not_widened_when_another_writer_was_faster(tmp_path: Path) -> None:
    _, table = tables_of(Catalog([Rated]), personal=False)
    wider = table.schema.append(pa.field("note", pa.string()))
    with open_store(str(tmp_path), "delta", "orders", None) as store:
        slow = store.create(table.name, table.schema, Origin("orders", "log", "order.rated", False), Mark(0, 0, 0))
        quick = store.table(table.name)
        assert quick is not None
        quick.append(table.batch([]), Mark(5, 0, 0))
        with pytest.raises(LakeFenced):
            slow.widen(wider)
        assert "note" not in quick.schema.names


@pytest.mark.parametrize(("kind", "declared"), [(pa.int32(), "int64"), (pa.float32(), "double")])
def test_a_narrower_number_is_refused_since_deltas_merge_keeps_it(tmp_path: Path, kind: Any, declared: str) -> None:
    (table,) = [table for table in tables_of(Catalog([Rated]), personal=False) if table.event is not None]
    name = "rate" if declared == "double" else "count"
    narrow = pa.schema([field.with_type(kind) if field.name == name else field for field in table.schema])
    with open_store(str(tmp_path), "delta", "orders", None) as store:
        stored = store.create(table.name, narrow, Origin("orders", "log", "order.rated", False), Mark(0, 0, 0))
        stored.widen(table.schema)
        assert stored.schema.field(name).type == kind
        _, refusals = changes(table, stored.schema, widens_decimals=False)
    (refusal,) = refusals
    assert refusal == f"the column {name} is {kind}, and the app declares {declared}"


@pytest.mark.parametrize(
    ("table_format", "placed", "messages"),
    [
        (
            "delta",
            WithDigits,
            ["total is decimal(8,2), and the app declares decimal(10,2)", "prices[] is decimal(8,2)"],
        ),
        (
            "iceberg",
            WithTextAndPlaces,
            [
                "total is decimal(8,2), and the app declares decimal(10,4)",
                "place.country (string) is new, inside a column",
                "count is int64, and the app declares string",
            ],
        ),
        ("delta", WithReason, ["the column reason (string) is new, and its default is not None"]),
        ("iceberg", WithoutCount, ["the column count (int64) is in the table, and the app declares none"]),
    ],
)
async def test_other_changes_are_refused_with_the_way_out(
    nats: NatsServer, tmp_path: Path, table_format: str, placed: Any, messages: list[str]
) -> None:
    log = log_before(nats)
    await sync(log, str(tmp_path), log.settings, table_format=table_format)
    later = changed(log, placed)
    later.append([("a-9", Other(number=2))])
    with pytest.raises(LakeRefused) as refused:
        await sync(later, str(tmp_path), log.settings, table_format=table_format)
    assert refused.value.table == "order_placed"
    for expected in [*messages, f"{'delete the folder' if table_format == 'delta' else 'drop the table'} "]:
        assert expected in str(refused.value)
    # Nothing was written, also not to other tables.
    assert positions_of(tmp_path, "events", table_format) == [1, 2]
    with pytest.raises(LakeRefused):
        await verify(later, str(tmp_path), log.settings, table_format=table_format)
