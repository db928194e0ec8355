"""`eventjet lake export` writes the rows of read models as of a position, in a single commit."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from sqlalchemy import Column, MetaData, String, Table
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import App, Key, Recorded, SqlProjection, aggregate, event, projection
from eventjet.dev.nats import NatsServer
from eventjet.doctor.examine import check_lake
from eventjet.doctor.report import Installation, Report
from eventjet.domain.personal import Personal
from eventjet.errors import HandlerFailed, LakeFenced, LakeRefused, UsageError
from eventjet.findings import Level
from eventjet.lake import LakeReport, LakeVerification, export, status, sync, verify
from eventjet.lake.store import open_store
from eventjet.rebuild import archive, rebuild
from eventjet.settings import Settings
from eventjet.testing import running
from tests import logs
from tests.forked import Forked
from tests.integration.lake_log import FORMATS, arrow_of
from tests.integration.ledger_log import Ledger
from tests.integration.orders import NAMES, append, expected, history, orders, rows_of
from tests.integration.test_by_state import REF, values
from tests.integration.test_lake_killed import environment
from tests.logs import block

pytestmark = pytest.mark.timeout(900)

BOUND_S = 300.0
KINDS = (
    "order_placed",
    "order_added",
    "order_reassigned",
    "order_noted",
    "order_closed",
    "payment_paid",
    "complaint_filed",
)


@pytest.fixture(params=FORMATS)
def table_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def orders_log(nats: NatsServer, pairs: list[tuple[str, Any]]) -> Ledger:
    """Return a new log with these events."""
    log = Ledger(
        Settings.load({"servers": nats.url}, {}),
        catalog=orders.catalog,
        projections=dict(orders.projections),  # pyright: ignore[reportArgumentType]
    )
    log.create()
    append(log.settings, pairs, log.name)
    return log


async def exported(log: Ledger, url: Path, table_format: str, *names: str, **options: Any) -> LakeReport:
    return await export(log, str(url), log.settings, names or NAMES, table_format=table_format, **options)


async def verified(log: Ledger, url: Path, table_format: str) -> LakeVerification:
    return await verify(log, str(url), log.settings, table_format=table_format)


def lake_rows(url: Path, name: str, table_format: str) -> set[Any]:
    """Return the rows of a table, read without eventjet."""
    rows = arrow_of(url, name, table_format).to_pylist()
    distinct = {tuple(row.values()) for row in rows}
    assert len(distinct) == len(rows)
    return distinct


async def test_exported_rows_equal_a_plain_fold_at_each_position(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    pairs = history(5, 300)
    log = orders_log(nats, pairs)
    for position in (300, 120, 0, 250):
        report = await exported(log, tmp_path, table_format, to=position)
        want = expected(pairs[:position])
        assert (report.position, report.events) == (position, position)
        assert {table.name: table.rows for table in report.tables} == {name: len(want[name]) for name in NAMES}
        for name in NAMES:
            assert lake_rows(tmp_path, name, table_format) == values(want[name]), (position, name)
        assert (await verified(log, tmp_path, table_format)).sound
    lake = await status(log, str(tmp_path), log.settings, table_format=table_format)
    assert {(table.name, table.position, table.behind) for table in lake.tables if table.is_read_model} == {
        (name, 250, 50) for name in NAMES
    }
    assert {table.position for table in lake.tables if not table.is_read_model} == {None}
    if table_format == "delta":
        DeltaTable(tmp_path / "spend").create_checkpoint()
        earlier = DeltaTable(tmp_path / "spend", version=1).to_pyarrow_table().to_pylist()
        assert {tuple(row.values()) for row in earlier} == values(expected(pairs)["spend"])
        assert (await exported(log, tmp_path, table_format, "spend", to=10)).tables[0].created is False


async def test_a_table_without_personal_data_is_exported_with_and_without_the_flag(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = orders_log(nats, history(7, 40))
    await exported(log, tmp_path, table_format, "spend", personal=True)
    await exported(log, tmp_path, table_format, "spend")
    lake = await status(log, str(tmp_path), log.settings, table_format=table_format)
    assert [table.personal for table in lake.tables if table.name == "spend"] == [False]


async def test_syncs_and_exports_share_a_lake(nats: NatsServer, tmp_path: Path, table_format: str) -> None:
    pairs = history(6, 200)
    log = orders_log(nats, pairs)
    url = str(tmp_path)
    await sync(log, url, log.settings, table_format=table_format, to=90)
    await exported(log, tmp_path, table_format, "spend", "dues", to=120)
    await exported(log, tmp_path, table_format, "dues")
    await sync(log, url, log.settings, table_format=table_format)
    outcome = await verified(log, tmp_path, table_format)
    assert outcome.sound
    assert {table.name: (table.position, table.is_read_model) for table in outcome.tables} == {
        **dict.fromkeys(("events", *KINDS), (200, False)), "spend": (120, True), "dues": (200, True)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda row: {**row, "amount": row["amount"] + 1}, "the column amount has another value than the log gives"),
        (lambda row: None, "the row is missing"),
        (lambda row: [row, row], "the row is there twice, or the log gives none"),
    ],
    ids=["changed", "deleted", "repeated"],
)
async def test_verify_names_a_row_that_differs(nats: NatsServer, tmp_path: Path, change: Any, reason: str) -> None:
    pairs = history(6, 200)
    log = orders_log(nats, pairs)
    await exported(log, tmp_path, "delta", "spend")
    first, *others = DeltaTable(tmp_path / "spend").to_pyarrow_table().to_pylist()
    changed = change(first)
    rows = [*(changed if isinstance(changed, list) else filter(None, [changed])), *others]
    write_deltalake(tmp_path / "spend", pa.Table.from_pylist(rows), mode="overwrite")
    outcome = await verified(log, tmp_path, "delta")
    (spend,) = outcome.tables
    assert not outcome.sound
    assert spend.difference is not None
    assert (spend.difference.first, spend.difference.last, spend.difference.rows) == (1, 200, len(rows))
    assert spend.difference.reason.startswith(f"{reason} (key {first['customer']}); if the projection was changed")
    await exported(log, tmp_path, "delta", "spend")
    assert (await verified(log, tmp_path, "delta")).sound


async def test_a_second_export_is_fenced(nats: NatsServer, tmp_path: Path, table_format: str) -> None:
    log = orders_log(nats, history(6, 100))
    await exported(log, tmp_path, table_format, "spend", to=50)
    with open_store(str(tmp_path), table_format, log.name, None) as store:
        slow = store.table("spend")
        assert slow is not None
        rows = slow.read_all()
        await exported(log, tmp_path, table_format, "spend")
        with pytest.raises(LakeFenced, match="another sync or export"):
            slow.append(rows, replace(slow.mark, position=70), replacing=True)
    assert (await verified(log, tmp_path, table_format)).sound


@event("person.met")
class Met:
    name: Personal[str]
    amount: Decimal


@aggregate("person")
class Person:
    amount: Decimal = Decimal(0)

    def evolve(self, event: Met) -> Person:
        return self


@dataclass(frozen=True, slots=True)
class Total:
    person: Key[str]
    amount: Decimal


@projection("totals")
def totals(row: Total | None, event: Recorded[Met]) -> Total:
    return Total(event.aggregate_id, event.data.amount)


@projection("person_met", on_error="quarantine")
def person_met(row: Total | None, event: Recorded[Met]) -> Total:
    raise ValueError(event.data.amount)


by_hand_table = Table("by_hand", MetaData(), Column("name", String, primary_key=True))


by_hand = SqlProjection("by_hand", tables=[by_hand_table])


@by_hand.handler
async def meet(event: Recorded[Met], connection: AsyncConnection) -> None: ...


people = App("people", aggregates=[Person], projections=[totals, person_met, by_hand])


@pytest.mark.parametrize(
    ("names", "personal", "refused", "words"),
    [
        ([], False, UsageError, "Name what to export"),
        (["nobody"], False, UsageError, "nobody"),
        (["by_hand"], True, UsageError, "its handlers write SQL"),
        (["totals"], False, UsageError, "personal data"),
        (["person_met"], True, UsageError, "Rename the projection"),
    ],
)
async def test_an_invalid_export_is_refused_before_anything_is_written(
    tmp_path: Path, names: list[str], personal: bool, refused: type[Exception], words: str
) -> None:
    with pytest.raises(refused, match=words):
        await export(people, str(tmp_path / "lake"), Settings(), names, personal=personal)
    assert not (tmp_path / "lake").exists()


def people_log(nats: NatsServer, declared: App, amount: str) -> Ledger:
    """Return a log of an app of people, with a single event."""
    log = Ledger(
        Settings.load({"servers": nats.url}, {}),
        catalog=declared.catalog,
        projections=dict(declared.projections),  # pyright: ignore[reportArgumentType]
    )
    log.create()
    encoded = declared.catalog.encode(Met(name="Ada", amount=Decimal(amount)))
    logs.append(log.endpoint, log.name, [("person.p-1", block(encoded.type_name, encoded.schema), encoded.body)])
    return log


async def test_a_value_that_does_not_fit_is_reported_without_the_value(nats: NatsServer, tmp_path: Path) -> None:
    log = people_log(nats, App("people", aggregates=[Person], projections=[totals]), "0.12345678901234567890123")
    with pytest.raises(UsageError, match=r"totals has no place .* more digits than decimal\(38,18\)") as refused:
        await exported(log, tmp_path, "delta", "totals", personal=True)
    assert "12345678" not in str(refused.value)


async def test_an_export_stops_at_a_failing_event_also_for_a_quarantining_projection(
    nats: NatsServer, tmp_path: Path
) -> None:
    failing = replace(person_met, name="failing")
    log = people_log(nats, App("people", aggregates=[Person], projections=[failing]), "1")
    with pytest.raises(HandlerFailed, match="failing"):
        await exported(log, tmp_path, "delta", "failing", personal=True)
    assert not lake_rows(tmp_path, "failing", "delta")


async def test_a_table_of_another_kind_with_the_same_name_is_refused(nats: NatsServer, tmp_path: Path) -> None:
    log = orders_log(nats, history(6, 20))
    await exported(log, tmp_path, "delta", "spend")
    (tmp_path / "spend").rename(tmp_path / "order_placed")
    with pytest.raises(LakeRefused, match="it has projection spend"):
        await sync(log, str(tmp_path), log.settings)


async def test_the_doctor_reports_the_lakes_position_and_faults(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = orders_log(nats, history(6, 60))
    settings = replace(log.settings, lake=str(tmp_path / "lake"), lake_format=table_format)

    async def findings() -> list[tuple[str, Level, str]]:
        report = Report("lake")
        installation = Installation(log, settings, (), 60, time.time)
        await asyncio.to_thread(check_lake, installation, report, lambda: ())
        return [(finding.check, finding.level, finding.what) for finding in report.findings]

    ((check, level, text),) = await findings()
    assert (check, level, f"no {table_format} tables" in text) == ("tables", Level.WARNING, True)
    await sync(log, str(tmp_path / "lake"), settings, table_format=table_format, to=40)
    await exported(log, tmp_path / "lake", table_format, "spend")
    position, read_models = await findings()
    assert (position[1], "up to position 40, 20 events behind" in position[2]) == (Level.OK, True)
    assert (read_models[1], "spend as of 60" in read_models[2]) == (Level.OK, True)
    for path in (tmp_path / "lake" / "events").rglob("*.json"):
        path.write_text("no JSON")
    ((check, level, text),) = await findings()
    assert (check, level, "the table events" in text) == ("table", Level.FAULT, True)


@pytest.mark.slow
@pytest.mark.parametrize("table_format", FORMATS)
async def test_a_killed_export_leaves_the_rows_of_one_position(tmp_path: Path, table_format: str) -> None:
    pairs = history(6, 100)
    url = tmp_path / "lake"
    async with running(orders) as jet:
        settings, last = jet.settings, append(jet.settings, pairs)
        for to, step in ((20, None), (40, "lake.read:kill"), (60, "lake.committed:kill"), (last, None)):
            options = ("--format", table_format, "--to", str(to), "--app", "tests.integration.orders:orders")
            process = Forked(
                "eventjet.cli",
                ["lake", "export", str(url), "spend", "dues", *options],
                folder=tmp_path,
                environ=environment(step, EVENTJET_SERVERS=settings.servers[0]),
                out=tmp_path / "out",
                err=tmp_path / "err",
            )
            assert process.wait(BOUND_S) == (-signal.SIGKILL if step else 0), (tmp_path / "err").read_text()
            for name in ("spend", "dues"):
                with open_store(str(url), table_format, "orders", None) as store:
                    table = store.table(name)
                    assert table is not None
                    position = table.mark.position
                assert position in ((20, 60) if step else (to,))
                assert lake_rows(url, name, table_format) == values(expected(pairs[:position])[name])
        assert (await verify(orders, str(url), settings, table_format=table_format)).sound


SPEND = """
with keyed as (
    select position, aggregate_id, amount, (
        select customer from (
            select position, aggregate_id, customer from placed
            union all select position, aggregate_id, customer from reassigned
        ) owners
        where owners.aggregate_id = added.aggregate_id and owners.position <= added.position
        order by owners.position desc limit 1
    ) as customer
    from added
)
select customer, sum(amount)::bigint from keyed where customer is not null group by customer
"""
"""Computes the amounts of `spend` from the tables of events."""


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.usefixtures("spark")
async def test_workers_rebuilds_archives_and_lakes_give_the_same_rows(tmp_path: Path) -> None:
    """`EVENTJET_TEST_ROADS_EVENTS` sets the length of the history."""
    count = int(os.environ.get("EVENTJET_TEST_ROADS_EVENTS", "3000"))
    pairs = history(33, count, ids=max(20, count // 50))
    want = {name: values(rows) for name, rows in expected(pairs).items()}
    async with running(orders, postgres=True) as jet:
        settings, where = jet.settings, jet.settings.database
        last = append(settings, pairs)
        for name in NAMES:
            await jet.caught_up(name, position=last, timeout_s=BOUND_S)
        live = rows_of(where)
        assert {name: live[name] for name in NAMES} == want
        past, url = str(tmp_path / "past"), tmp_path / "lake"
        await archive(REF, past, settings)
        for engine in ("local", "spark"):
            for source in (None, past):
                await rebuild(REF, NAMES, settings, engine=engine, from_archive=source)
                assert rows_of(where) == live, (engine, source)
        for table_format, source in (("delta", None), ("iceberg", past)):
            folder = url / table_format
            await sync(REF, str(folder), settings, table_format=table_format, from_archive=source)
            await export(REF, str(folder), settings, NAMES, table_format=table_format, from_archive=source)
            assert {name: lake_rows(folder, name, table_format) for name in NAMES} == want
            assert (await verify(REF, str(folder), settings, table_format=table_format)).sound
            placed, reassigned, added = (
                arrow_of(folder, f"order_{name}", table_format) for name in ("placed", "reassigned", "added")
            )
            assert (placed.num_rows, reassigned.num_rows, added.num_rows) != (0, 0, 0)
            assert set(duckdb.sql(SPEND).fetchall()) == {row[:2] for row in want["spend"]}
