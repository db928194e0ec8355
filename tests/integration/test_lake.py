"""`eventjet lake` writes each event once, with the app's types, and refuses what it cannot write."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import duckdb
import polars
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog

from eventjet import event
from eventjet.codec.catalog import Catalog
from eventjet.dev.nats import NatsServer
from eventjet.errors import LakeFenced, LakeRefused, UndecodableEvent, UnknownEvent, UsageError
from eventjet.jetstream.reader import read_range
from eventjet.lake import LakeReport, LakeVerification, status, sync, verify
from eventjet.lake.store import Mark, Store, open_store
from eventjet.lake.syncing import check_same_log, record_reader
from eventjet.lake.tables import EVENTS, RowReader, tables_of
from eventjet.rebuild.job import Job, in_job
from eventjet.runtime import run_async
from eventjet.settings import Settings
from eventjet.spark.event_rows import stored_row
from eventjet.spark.session import Started
from tests.integration.lake_log import (
    CATALOG,
    FORMATS,
    Known,
    Paid,
    Placed,
    archive_of,
    arrow_of,
    fill,
    iceberg_of,
    lake_log,
    positions_of,
)
from tests.integration.ledger_log import Ledger
from tests.logs import block

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Twins:
    a: int
    A: int


@event("order.twins")
class WithTwins:
    twins: Twins
    rate: float = 0


@event("order.long")
class Long:
    after: timedelta


@pytest.fixture(params=FORMATS)
def table_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def synced(log: Ledger, url: Path, table_format: str, **options: Any) -> LakeReport:
    return await sync(log, str(url), log.settings, table_format=table_format, **options)


async def verified(log: Ledger, url: Path, table_format: str, **options: Any) -> LakeVerification:
    return await verify(log, str(url), log.settings, table_format=table_format, **options)


async def test_each_event_is_in_its_tables_once_with_the_values_of_the_log(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = lake_log(nats, 60)
    first = await synced(log, tmp_path, table_format, to=37, batch_events=10, personal=True)
    assert (first.position, first.events) == (37, 37)
    assert all(table.created and table.position == 37 for table in first.tables)
    second = await synced(log, tmp_path, table_format, personal=True)
    assert (second.position, second.events) == (60, 23)
    again = await synced(log, tmp_path, table_format, personal=True)
    assert (again.events, {table.rows for table in again.tables}) == (0, {0})

    events = log.recorded(60)
    assert positions_of(tmp_path, EVENTS, table_format) == list(range(1, 61))
    placed = [event for event in events if isinstance(event.data, Placed)]
    rows = arrow_of(tmp_path, "order_placed", table_format).sort_by("position").to_pylist()
    for recorded, row in zip(placed, rows, strict=True):
        data = recorded.data
        assert (row["position"], row["version"], row["event_id"]) == (
            recorded.position,
            recorded.version,
            recorded.event_id,
        )
        assert (row["recorded_at"], row["aggregate_id"]) == (recorded.recorded_at, recorded.aggregate_id)
        assert (row["total"], row["at"], row["kind"]) == (data.total, data.at, data.kind.value)
        assert [(line["article"], line["price"], line["tags"]) for line in row["lines"]] == [
            (line.article, line.price, line.tags) for line in data.lines
        ]
        assert (row["due"], row["note"], row["customer"]) == (data.due, data.note, str(data.customer))
        assert row["after"] == data.after // timedelta(microseconds=1)
        assert dict(row["limits"]) == data.limits
        assert row["pauses"] == [pause // timedelta(microseconds=1) for pause in data.pauses]
        blob = data.document
        assert (row["document"] or {}).get("digest") == (None if blob is None else blob.digest)
    schema = {field.name: str(field.type) for field in arrow_of(tmp_path, "order_placed", table_format).schema}
    assert (schema["total"], schema["at"]) == ("decimal128(12, 2)", "timestamp[us, tz=UTC]")
    outcome = await verified(log, tmp_path, table_format, range_events=7)
    assert outcome.sound
    assert [table.rows for table in outcome.tables] == [
        60, *(sum(isinstance(event.data, kind) for event in events) for kind in (Placed, Paid, Known))
    ]  # fmt: skip


async def test_rows_of_the_events_table_do_not_depend_on_other_tables(nats: NatsServer) -> None:
    log = lake_log(nats, 50)
    log.append_raw(
        [
            ("a-1", block("order.paid", 1, Ej_Correlation="c", Ej_Meta_Channel="web"), b'{"amount": "1.50"}'),
            ("a-2", block("never.declared"), b"\xff"),
        ]
    )
    records = [record for batch in read_range(log.endpoint, log.name, 1, 53) for record in batch]
    tables = tables_of(CATALOG, personal=True)
    reader = RowReader(CATALOG, tables, personal=True)
    beside = reader.rows(records, {table.name: 0 for table in tables})[EVENTS]
    alone = reader.rows(records, {EVENTS: 0})[EVENTS]
    assert beside == alone == [stored_row(record) for record in records]


async def test_older_schemas_are_upcast_and_undeclared_records_are_in_the_events_table(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = lake_log(nats)
    log.append_raw(
        [
            ("a-1", block("order.paid", 1), b'{"amount": "1.50"}'),
            ("a-1", block("order.paid", 2), b'{"amount": "2.50", "by": "ada"}'),
            ("a-2", block("never.declared"), b'{"x": 1}'),
            ("a-3", block("never.declared"), b"\xff"),
        ]
    )
    await synced(log, tmp_path, table_format, personal=True)
    paid = arrow_of(tmp_path, "order_paid", table_format).sort_by("position").to_pylist()
    assert [(row["amount"], row["by"]) for row in paid] == [(Decimal("1.5"), "somebody"), (Decimal("2.5"), "ada")]
    events = arrow_of(tmp_path, EVENTS, table_format).sort_by("position").to_pylist()
    assert [(row["type"], row["schema"], row["body"]) for row in events] == [
        ("order.paid", 1, '{"amount": "1.50"}'),
        ("order.paid", 2, '{"amount": "2.50", "by": "ada"}'),
        ("never.declared", 1, '{"x": 1}'),
        ("never.declared", 1, None),
    ]
    assert (await verified(log, tmp_path, table_format)).sound


async def test_an_empty_log_makes_empty_tables(nats: NatsServer, tmp_path: Path, table_format: str) -> None:
    log, url = lake_log(nats), tmp_path / "a lake, é"
    report = await synced(log, url, table_format)
    assert {(table.position, table.created) for table in report.tables} == {(0, True)}
    assert (await verified(log, url, table_format)).sound
    fill(log, 3)
    assert (await synced(log, url, table_format)).position == 3
    assert positions_of(url, EVENTS, table_format) == [1, 2, 3]


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (("a-1", block("order.paid", 3), b"{}"), UnknownEvent),
        (("a-1", block("order.paid", 2), b"{}"), UndecodableEvent),
    ],
)
async def test_a_sync_stops_before_an_unreadable_event(
    nats: NatsServer, tmp_path: Path, record: tuple[str, bytes, bytes], error: type[Exception]
) -> None:
    log = lake_log(nats, 10)
    log.append_raw([record])
    with pytest.raises(error, match="11"):
        await synced(log, tmp_path, "delta", batch_events=5)
    assert (await synced(log, tmp_path, "delta", to=10)).position == 10


async def test_values_and_fields_that_do_not_fit_a_table_are_refused_with_the_reason(
    nats: NatsServer, tmp_path: Path
) -> None:
    log = lake_log(nats, catalog=Catalog([WithTwins, Long]))
    log.append_raw([("a-1", block("order.twins"), b'{"twins": {"a": 1, "A": 2}}')])
    with pytest.raises(LakeRefused, match=r"differ by case alone.* or use `--format iceberg`"):
        await synced(log, tmp_path / "delta", "delta")
    await synced(log, tmp_path / "iceberg", "iceberg")
    (row,) = arrow_of(tmp_path / "iceberg", "order_twins", "iceberg").to_pylist()
    assert (row["twins"], row["rate"]) == ({"a": 1, "A": 2}, 0.0)
    log.append([("a-2", Long(after=timedelta.max))])
    with pytest.raises(UsageError, match=r"after of the event at position 2 .* do not fit into 64 bits"):
        await synced(log, tmp_path / "iceberg", "iceberg")


async def test_personal_fields_are_omitted_by_default(nats: NatsServer, tmp_path: Path, table_format: str) -> None:
    log = lake_log(nats)
    log.append([("a-1", Known(email="ada@example.org", country="PT")), ("a-2", Paid(amount=Decimal(1), by="ada"))])
    await synced(log, tmp_path, table_format)
    (known,) = arrow_of(tmp_path, "customer_known", table_format).to_pylist()
    assert "email" not in known
    assert known["country"] == "PT"
    bodies = arrow_of(tmp_path, EVENTS, table_format).sort_by("position").column("body").to_pylist()
    assert bodies == [None, '{"amount":"1","by":"ada"}']
    assert b"ada@example" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*.parquet"))
    assert (await verified(log, tmp_path, table_format)).sound
    with pytest.raises(LakeRefused, match="does not have the personal fields") as refused:
        await synced(log, tmp_path, table_format, personal=True)
    assert "run `eventjet lake sync` again" in str(refused.value)


async def test_unknown_fields_are_hidden_in_events_with_personal_fields(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = lake_log(nats)
    older, strange = (
        b'{"amount":"2.50","email":"ada@example.org"}',
        b'{"amount":"1","by":"","email":"ada@example.org"}',
    )
    bodies = [(1, older), (2, strange), (2, b'{"amount":"1","by":""}')]
    log.append_raw(
        [("a-1", block("order.paid", schema, Ej_Version=str(n)), body) for n, (schema, body) in enumerate(bodies, 1)]
    )
    await synced(log, tmp_path, table_format)
    assert arrow_of(tmp_path, EVENTS, table_format).sort_by("position").column("body").to_pylist() == [
        '{"amount":"2.50","email":"<personal>"}',
        '{"amount":"1","by":"","email":"<personal>"}',
        '{"amount":"1","by":""}',
    ]
    assert arrow_of(tmp_path, "order_paid", table_format).num_rows == 3
    assert b"ada@example" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*.parquet"))
    assert (await verified(log, tmp_path, table_format)).sound


async def recreated_log(nats: NatsServer, url: Path, table_format: str, events: int) -> Ledger:
    """Sync 20 events of a log, recreate the log with the same identity and other events, and return it."""
    log = Ledger(Settings.load({"servers": nats.url}, {}), catalog=CATALOG, projections={})
    identity = str(uuid4())
    log.create(identity)
    fill(log, 20)
    await synced(log, url, table_format)
    log.delete()
    log.create(identity)
    fill(log, events)
    return log


async def test_tables_of_another_log_are_refused(nats: NatsServer, tmp_path: Path, table_format: str) -> None:
    log = lake_log(nats, 20)
    await synced(log, tmp_path, table_format, to=15)
    other = Ledger(log.settings, log.name, CATALOG, {})

    log.delete()
    other.create()
    fill(other, 20)
    with pytest.raises(LakeRefused, match="it is of the log"):
        await synced(other, tmp_path, table_format)
    assert positions_of(tmp_path, EVENTS, table_format) == list(range(1, 16))


async def test_a_lake_continues_with_a_promoted_mirror_up_to_the_mirrors_end(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = lake_log(nats, 20)
    await synced(log, tmp_path, table_format, to=15)
    log.promote(20)
    for _ in range(2):  # at the second sync the table is already beyond the mirror's end
        fill(log, 5)
        await synced(log, tmp_path, table_format)
    assert positions_of(tmp_path, EVENTS, table_format) == list(range(1, 31))


async def test_a_lake_beyond_the_end_of_a_promoted_mirror_is_refused(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = await recreated_log(nats, tmp_path, table_format, 15)
    log.promote(15)
    with pytest.raises(LakeRefused, match="where its mirror ended when it was promoted"):
        await synced(log, tmp_path, table_format)
    fill(log, 10)
    with pytest.raises(LakeRefused, match="their pasts differ"):
        await synced(log, tmp_path, table_format)


async def test_the_same_log_with_another_past_or_a_lost_end_is_refused(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = await recreated_log(nats, tmp_path, table_format, 19)
    with pytest.raises(LakeRefused, match="has lost its end"):
        await synced(log, tmp_path, table_format)
    with pytest.raises(LakeRefused, match="has lost its end"):
        await status(log, str(tmp_path), log.settings, table_format=table_format)
    fill(log, 6)
    with pytest.raises(LakeRefused, match="their pasts differ"):
        await synced(log, tmp_path, table_format)


async def test_a_table_that_advances_during_a_check_is_accepted(nats: NatsServer, tmp_path: Path) -> None:
    log = lake_log(nats, 5)
    await synced(log, tmp_path, "delta")
    log.promote(5)

    def look(job: Job) -> None:
        fill(log, 5)
        run_async(synced(log, tmp_path, "delta"))
        with open_store(str(tmp_path), "delta", log.name, None) as store:
            table = store.table(EVENTS)
        assert table is not None
        assert (table.mark.position, job.log.last) == (10, 5)
        check_same_log(job, record_reader(job), table, tables_of(CATALOG, personal=False)[0], str(tmp_path))

    await in_job(log, log.settings, "local", look)


async def test_a_log_that_begins_after_the_tables_end_needs_an_archive(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = lake_log(nats, 30)
    late, whole = tmp_path / "late", tmp_path / "whole"
    await synced(log, late, table_format, to=10)
    await synced(log, whole, table_format)
    archived = archive_of(log, tmp_path / "archive")
    log.lose_before(20)
    with pytest.raises(LakeRefused, match="the events between are gone") as refused:
        await synced(log, late, table_format)
    assert "`--from-archive`" in str(refused.value)
    assert positions_of(late, EVENTS, table_format) == list(range(1, 11))
    (events, *_) = (await verified(log, whole, table_format)).tables
    assert events.difference is not None
    assert (events.difference.first, events.difference.last, events.difference.rows) == (1, 19, 19)
    assert "`--from-archive`" in events.difference.reason
    for url in (late, whole):
        await synced(log, url, table_format, from_archive=archived)
        assert positions_of(url, EVENTS, table_format) == list(range(1, 31))
        assert (await verified(log, url, table_format, from_archive=archived)).sound


async def test_a_second_writer_is_fenced_and_repeats_nothing(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = lake_log(nats, 40)
    await synced(log, tmp_path, table_format, to=10)
    with open_store(str(tmp_path), table_format, log.name, None) as store:
        fence(store)


def fence(store: Store) -> None:
    schema = tables_of(CATALOG, personal=False)[0].schema
    row = schema.empty_table().to_pylist()
    row.append({"position": 11, "type": "order.paid"})
    rows = pa.Table.from_pylist(row, schema=schema)
    for winning, losing in ((rows, rows), (rows, schema.empty_table()), (schema.empty_table(), rows)):
        first, second = (store.table(EVENTS) for _ in range(2))
        assert first is not None
        assert second is not None
        mark = Mark(first.mark.position + 1, 1, 11)
        count = first.row_count
        first.append(winning, mark)
        with pytest.raises(LakeFenced) as fenced:
            second.append(losing, mark)
        assert fenced.value.position == mark.position - 1
        now = store.table(EVENTS)
        assert now is not None
        assert (now.mark, now.row_count) == (mark, count + winning.num_rows)


async def test_concurrent_syncs_neither_lose_nor_repeat_events(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = lake_log(nats, 400)
    tries = [synced(log, tmp_path, table_format, batch_events=100) for _ in range(3)]
    outcomes = await asyncio.gather(*tries, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes if not isinstance(outcome, LakeReport | LakeFenced)] == []
    await synced(log, tmp_path, table_format)
    assert positions_of(tmp_path, EVENTS, table_format) == list(range(1, 401))
    assert (await verified(log, tmp_path, table_format)).sound


async def test_a_stopped_sync_has_advanced_tables_without_rows_too(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = lake_log(nats)
    log.append([(f"a-{number}", Paid(amount=Decimal(number), by="ada")) for number in range(60)])
    log.append_raw([("a-1", block("order.paid", 2), b"{}")])
    with pytest.raises(UndecodableEvent):
        await synced(log, tmp_path, table_format, batch_events=2)
    lake = await status(log, str(tmp_path), log.settings, table_format=table_format)
    positions = {table.name: table.position or 0 for table in lake.tables}
    assert positions.pop("order_paid") == positions.pop(EVENTS) == 60
    assert min(positions.values()) > 60 - 2 * 12


async def test_a_commit_has_at_most_the_events_of_a_batch(nats: NatsServer, tmp_path: Path) -> None:
    log = lake_log(nats)
    log.append_raw((f"a-{number}", block("never.declared"), b"{}") for number in range(4_500))
    await synced(log, tmp_path, "delta", batch_events=3_000)
    table = DeltaTable(tmp_path / EVENTS)
    counts = pa.table(table.get_add_actions(flatten=True)).column("num_records").to_pylist()
    assert (max(counts), sum(counts)) == (3_000, 4_500)


async def test_without_a_position_in_the_commit_both_delta_appends_succeed(tmp_path: Path) -> None:
    """The control test shows what the fence prevents."""
    rows = pa.table({"position": [1]})
    write_deltalake(tmp_path, pa.table({"position": pa.array([], pa.int64())}))
    first, second = DeltaTable(tmp_path), DeltaTable(tmp_path)
    write_deltalake(first, rows, mode="append", commit_properties=CommitProperties({"position": "1"}))
    write_deltalake(second, rows, mode="append", commit_properties=CommitProperties({"position": "1"}))
    assert DeltaTable(tmp_path).to_pyarrow_table().column("position").to_pylist() == [1, 1]


def test_pyiceberg_alone_lets_both_appends_succeed(tmp_path: Path) -> None:
    """The control test: PyIceberg's own retry drops the assertion about the snapshot."""
    rows = pa.table({"position": [1]})
    catalog = load_catalog(
        "eventjet", type="sql", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}"
    )
    catalog.create_namespace("bank")
    catalog.create_table("bank.events", rows.schema)
    first, second = (catalog.load_table("bank.events") for _ in range(2))
    first.append(rows, snapshot_properties={"position": "1"})
    second.append(rows, snapshot_properties={"position": "1"})
    assert catalog.load_table("bank.events").scan().to_arrow().column("position").to_pylist() == [1, 1]
    catalog.close()


async def test_the_position_survives_foreign_and_expired_snapshots(nats: NatsServer, tmp_path: Path) -> None:
    log = lake_log(nats, 40)
    await synced(log, tmp_path, "iceberg", to=30, batch_events=10)
    with open_store(str(tmp_path), "iceberg", log.name, None) as store:
        table = store.table(EVENTS)
        assert table is not None
        others = iceberg_of(tmp_path, EVENTS)
        others.append(table.schema.empty_table())
        table.append(table.schema.empty_table(), Mark(31, 0, 30))
    for _ in range(2):
        others.refresh()
        others.append(others.schema().as_arrow().empty_table())
    others.refresh()
    others.maintenance.expire_snapshots().older_than(datetime.now(UTC)).commit()
    others.catalog.close()  # the append has opened a new connection
    with open_store(str(tmp_path), "iceberg", log.name, None) as store:
        table = store.table(EVENTS)
        assert table is not None
        assert (table.mark, table.row_count) == (Mark(31, 0, 30), 30)


async def test_a_compaction_between_commits_does_not_fence_the_writer(nats: NatsServer, tmp_path: Path) -> None:
    log = lake_log(nats, 40)
    await synced(log, tmp_path, "delta", to=30, batch_events=5)
    with open_store(str(tmp_path), "delta", log.name, None) as store:
        table = store.table(EVENTS)
    assert table is not None
    others = DeltaTable(tmp_path / EVENTS)
    assert others.optimize.compact()["numFilesRemoved"] > 1
    others.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    others.create_checkpoint()
    others.cleanup_metadata()
    table.append(table.schema.empty_table(), Mark(31, 0, 30))
    assert table.mark.position == 31


async def test_a_restored_older_version_is_noticed(nats: NatsServer, tmp_path: Path, table_format: str) -> None:
    log = lake_log(nats, 20)
    await synced(log, tmp_path, table_format, to=10)
    await synced(log, tmp_path, table_format, to=15)
    if table_format == "delta":
        DeltaTable(tmp_path / EVENTS).restore(1)
        with pytest.raises(LakeRefused, match="an older version was restored"):
            await synced(log, tmp_path, table_format)
        return
    table = iceberg_of(tmp_path, EVENTS)
    earlier = table.current_snapshot().parent_snapshot_id
    table.manage_snapshots().rollback_to_snapshot(earlier).commit()
    table.catalog.close()  # the rollback has opened a new connection
    await synced(log, tmp_path, table_format)
    assert positions_of(tmp_path, EVENTS, table_format) == list(range(1, 21))


async def test_a_table_with_a_missing_file_is_refused_with_advice(nats: NatsServer, tmp_path: Path) -> None:
    log = lake_log(nats, 5)
    await synced(log, tmp_path, "iceberg")
    for manifest in (tmp_path / EVENTS).rglob("*.avro"):
        manifest.unlink()
    for call in (status, sync, verify):
        with pytest.raises(LakeRefused, match="Look at the storage"):
            await call(log, str(tmp_path), log.settings, table_format="iceberg")


async def test_a_copied_iceberg_lake_is_refused_and_a_linked_one_accepted(nats: NatsServer, tmp_path: Path) -> None:
    log = lake_log(nats, 5)
    url, copied, linked = (tmp_path / name for name in ("lake", "copied", "linked"))
    await synced(log, url, "iceberg", to=3)
    shutil.copytree(url, copied)
    linked.symlink_to(url)
    with pytest.raises(LakeRefused, match=f"Name {url}, or move it back"):
        await synced(log, copied, "iceberg")
    assert (await synced(log, linked, "iceberg")).position == 5
    assert (await synced(log, url / ".." / "lake", "iceberg")).events == 0


async def test_verify_names_the_first_range_that_differs(nats: NatsServer, tmp_path: Path) -> None:
    log = lake_log(nats, 60)
    await synced(log, tmp_path, "delta", batch_events=15)
    sound = tmp_path / EVENTS
    original = tmp_path / "kept"
    shutil.copytree(sound, original)

    async def damage_report(**options: Any) -> tuple[int, int, int, int, int, str]:
        outcome = await verified(log, tmp_path, "delta", range_events=20)
        assert not outcome.sound
        differing = [table for table in outcome.tables if table.difference is not None]
        assert [table.name for table in differing] == [EVENTS]
        difference = differing[0].difference
        assert difference is not None
        shutil.rmtree(sound)
        shutil.copytree(original, sound)
        return (
            difference.first, difference.last, difference.expected, difference.rows, difference.position,
            difference.reason,
        )  # fmt: skip

    DeltaTable(sound).delete("position = 33 or position = 50")
    assert await damage_report() == (21, 40, 20, 19, 33, "the row is missing")
    row = DeltaTable(sound).to_pyarrow_table(filters=[("position", "=", 7)])
    write_deltalake(sound, row, mode="append")
    assert await damage_report() == (1, 20, 20, 21, 7, "the row is there twice, or the log gives none")
    DeltaTable(sound).update({"actor": "'eve'"}, predicate="position = 60")
    assert await damage_report() == (41, 60, 20, 20, 60, "the column actor has another value than the log gives")
    beyond = row.set_column(0, "position", pa.array([99], pa.int64()))
    write_deltalake(sound, beyond, mode="append")
    *_, position, reason = await damage_report()
    assert position == 61
    assert "61 rows in all" in reason


async def test_verify_without_tables_names_the_command_that_makes_them(nats: NatsServer, tmp_path: Path) -> None:
    log = lake_log(nats, 1)
    with pytest.raises(LakeRefused, match="`eventjet lake sync` makes it"):
        await verified(log, tmp_path, "delta")


async def test_status_reports_the_position_of_each_table(nats: NatsServer, tmp_path: Path, table_format: str) -> None:
    log = lake_log(nats, 30)
    before = await status(log, str(tmp_path), log.settings, table_format=table_format)
    assert [(table.position, table.behind) for table in before.tables] == [(None, 30)] * 4
    await synced(log, tmp_path, table_format, to=20)
    lake = await status(log, str(tmp_path), log.settings, table_format=table_format)
    events = log.recorded(30)
    whole = lake.tables[0]
    assert (whole.name, whole.event_type, whole.position, whole.behind, whole.rows) == (EVENTS, None, 20, 10, 20)
    assert whole.recorded_at == events[19].recorded_at
    assert lake.last == 30


async def test_other_programs_read_the_tables(
    nats: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table_format: str
) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")  # or another package, about which Polars would warn
    log = lake_log(nats, 60)
    await synced(log, tmp_path, table_format, batch_events=20)
    database = duckdb.connect()
    database.register("placed", arrow_of(tmp_path, "order_placed", table_format))
    query = 'select count(*), sum(total), max("at"), count(distinct kind) from placed'
    count, total, latest, kinds = database.execute(query).fetchall()[0]
    expected = [event.data for event in log.recorded(60) if isinstance(event.data, Placed)]
    assert (count, total) == (len(expected), sum(data.total for data in expected))
    assert (latest, kinds) == (max(data.at for data in expected), 2)
    if table_format == "delta":
        frame = polars.read_delta(str(tmp_path / "order_placed"))
    else:
        frame = polars.scan_iceberg(iceberg_of(tmp_path, "order_placed")).collect()
    assert frame.height == len(expected)
    assert frame["total"].sum() == total


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("", {}, "cannot name the lake"),
        ("s3://key:secret@bucket/lake", {}, "may not hold a password"),
        ("50%", {}, "Name another folder"),
        ("lake", {"table_format": "hudi"}, "Use delta or iceberg"),
        ("lake", {"catalog": "prod"}, "--format iceberg"),
        ("s3://bucket/lake", {"table_format": "iceberg"}, "need a catalog"),
        ("lake", {"to": 11}, "ends at position 10"),
        ("lake", {"batch_events": 0}, "1 or more"),
    ],
)
async def test_invalid_options_are_refused_before_anything_is_written(
    nats: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    options: dict[str, Any],
    words: str,
) -> None:
    log = lake_log(nats, 10)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        await sync(log, url, log.settings, **options)
    assert list(tmp_path.iterdir()) == []


async def test_a_foreign_table_or_another_format_is_refused(
    nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    log = lake_log(nats, 10)
    await synced(log, tmp_path / "lake", table_format)
    (other,) = set(FORMATS) - {table_format}
    with pytest.raises(LakeRefused, match="another format"):
        await synced(log, tmp_path / "lake", other)
    write_deltalake(tmp_path / EVENTS, pa.table({"position": [1]}))
    with pytest.raises(LakeRefused, match="eventjet did not make it"):
        await synced(log, tmp_path, "delta")


def test_events_with_similar_names_get_different_tables() -> None:
    @event("a.b")
    class One:
        x: int

    @event("a-b")
    class Two:
        x: int

    @event("Events")
    class Three:
        x: int

    names = [table.name for table in tables_of(Catalog([One, Two, Three, Known]), personal=True)]
    assert names[0] == EVENTS
    assert names[4] == "customer_known"
    assert len(set(names)) == 5
    assert all(name.startswith(start) for name, start in zip(names[1:4], ("a_b_", "a_b_", "events_"), strict=True))


async def test_spark_reads_the_files_of_a_table(nats: NatsServer, spark: Started, tmp_path: Path) -> None:
    log = lake_log(nats, 60)
    await synced(log, tmp_path, "delta", batch_events=20)
    files = DeltaTable(tmp_path / "order_placed").file_uris()
    await synced(log, tmp_path / "iceberg", "iceberg", batch_events=20)
    scan = iceberg_of(tmp_path / "iceberg", "order_placed").scan()
    expected = sorted(event.data.at for event in log.recorded(60) if isinstance(event.data, Placed))
    for paths in (files, [task.file.file_path for task in scan.plan_files()]):
        frame: Any = spark.spark.read.parquet(*paths)
        assert dict(frame.dtypes)["total"] == "decimal(12,2)"
        assert sorted(row["at"].astimezone(UTC) for row in frame.select("at").collect()) == expected
