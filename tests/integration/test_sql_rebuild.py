"""SQL projections are rebuilt in order and verified: they equal the live tables, and are swapped together."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from sqlalchemy import inspect, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded
from eventjet.dev.nats import NatsServer
from eventjet.errors import HandlerFailed, RebuildRefused
from eventjet.rebuild import Progress, RebuildReport, VerifyReport, rebuild, verify
from eventjet.sql.checkpoint import Checkpoint, read
from tests.integration import by_hand
from tests.integration.by_hand import LEDGER, QUICK, bound_with, changed, expected, log_of, table_rows
from tests.integration.ledger_log import Ledger, history
from tests.integration.projecting import BALANCES, Added, Opened, database_with, folded, rows_of
from tests.integration.rebuild_log import remains
from tests.tables import reading


@pytest.fixture
def postgres_log(eventjet_nats: NatsServer, eventjet_database: str) -> Ledger:
    return log_of(eventjet_nats, eventjet_database)


async def rebuild_tables(log: Ledger, *names: str, engine: Any = "local", **options: Any) -> RebuildReport:
    return await rebuild(log, names or ["ledger"], log.settings, engine=engine, **options)


async def verified(log: Ledger) -> VerifyReport:
    return await verify(log, "ledger", log.settings)


def checkpoint(log: Ledger) -> Checkpoint:
    with reading(log.settings.database) as connection:
        stored = read(connection, "ledger", 1)
    assert stored is not None
    return stored


async def test_rebuilt_tables_equal_the_expected_rows_and_a_worker_continues(log: Ledger) -> None:
    last = log.append(history(1_200))
    # Sequential projections do not use Spark, so none is needed here.
    report = await rebuild_tables(log, engine="spark")
    assert (report.position, report.events, report.projections[0].sequential) == (last, 1_200, True)
    rows = expected(log.recorded(last))
    assert table_rows(log.where) == rows
    assert report.rows == sum(map(len, rows.values()))
    assert (checkpoint(log).position, checkpoint(log).state, checkpoint(log).generation) == (last, "active", 2)
    last = log.append(history(300, seed=2))
    async with log.working(options=QUICK):
        await log.caught_up(last, LEDGER)
    assert table_rows(log.where) == expected(log.recorded(last))
    assert remains(log.where) == []


async def test_a_rebuild_keeps_keys_indexes_and_sequences(log: Ledger) -> None:
    log.append(history(300))
    before = describe(log)
    await rebuild_tables(log)
    await rebuild_tables(log)
    assert describe(log) == before
    with pytest.raises(IntegrityError):
        log.execute("insert into accounts select 'other', owner, amount, last_at, notes from accounts")


def describe(log: Ledger) -> Any:
    engine = log.where.sync_engine()
    inspector = inspect(engine)
    tables = sorted(inspector.get_table_names())
    description = {
        table: (
            sorted(inspector.get_indexes(table), key=str),
            sorted(inspector.get_unique_constraints(table), key=str),
            inspector.get_foreign_keys(table),
            inspector.get_pk_constraint(table),
            [{**column, "type": str(column["type"])} for column in inspector.get_columns(table)],
        )
        for table in tables
    }
    engine.dispose()
    return description


async def test_events_recorded_during_a_rebuild_are_in_its_tables(log: Ledger) -> None:
    log.append(history(400))
    lasts: list[int] = []

    def record(step: Progress) -> None:
        if step.phase in ("index", "swap") and len(lasts) < 2:
            lasts.append(log.append([("a-1", Added(amount=Decimal(1)))]))

    await rebuild_tables(log, progress=record)
    assert checkpoint(log).position == lasts[0]
    assert table_rows(log.where) == expected(log.recorded(lasts[0]))


async def test_folds_and_sql_projections_are_rebuilt_in_one_run(log: Ledger) -> None:
    database_with(log.settings.database, BALANCES)
    log.projections = {"ledger": LEDGER, "balances": BALANCES}
    last = log.append(history(500))
    reports: list[Progress] = []
    report = await rebuild_tables(log, "ledger", "balances", progress=reports.append)
    assert [(projection.projection, projection.sequential) for projection in report.projections] == [
        ("ledger", True),
        ("balances", False),
    ]
    assert table_rows(log.where) == expected(log.recorded(last))
    with reading(log.settings.database) as connection:
        assert rows_of(connection, BALANCES) == folded(log.recorded(last))
    assert {"read", "sequential", "swap"} <= {report.phase for report in reports}
    counts = [report.done for report in reports if report.phase == "sequential"]
    assert counts == sorted(counts)
    assert counts[-1] == 500


async def test_a_failing_event_is_named_and_leaves_the_live_tables(log: Ledger) -> None:
    last = log.append(history(50))
    await rebuild_tables(log)
    before = table_rows(log.where), checkpoint(log)
    bad = log.append([("a-1", Added(amount=Decimal(99999999999)))])
    with pytest.raises(HandlerFailed, match=rf"position {bad} of 'a-1'"):
        await rebuild_tables(log)
    assert (table_rows(log.where), checkpoint(log)) == before
    assert table_rows(log.where) == expected(log.recorded(last))
    assert remains(log.where) == []


async def names_its_schema(event: Recorded[Opened], connection: AsyncConnection) -> None:
    await by_hand.opened(event, connection)
    await connection.execute(text("update public.totals set n = n + 100"))


async def writes_elsewhere_by_text(event: Recorded[Opened], connection: AsyncConnection) -> None:
    await by_hand.opened(event, connection)
    await connection.execute(text("insert into strangers values (1)"))


@pytest.mark.parametrize(
    ("handler", "named"), [(names_its_schema, "public.totals"), (writes_elsewhere_by_text, "public.strangers")]
)
async def test_handlers_that_write_outside_the_shadow_are_refused(
    postgres_log: Ledger, handler: Callable[..., Any], named: str
) -> None:
    log = postgres_log
    log.execute("create table strangers (n integer)")
    last = log.append([("a", Opened(owner="ada")), ("b", Opened(owner="bob"))])
    await rebuild_tables(log)
    with pytest.raises(RebuildRefused, match=rf"write to {named}, which it does not declare"):
        await rebuild_tables(changed(log, bound_with(handler, by_hand.added, by_hand.closed)))
    assert table_rows(log.where) == expected(log.recorded(last))
    assert remains(log.where) == []


async def test_rights_are_the_same_after_a_swap(postgres_log: Ledger) -> None:
    log = postgres_log
    log.append(history(20))
    await rebuild_tables(log)
    role = f"writer_{log.name[-8:]}"
    log.execute(f"create role {role}", f"grant select, insert on lines to {role}", "create sequence other")
    log.execute(f"grant usage on sequence lines_id_seq to {role}")
    before = rights(log)
    assert role in before
    await rebuild_tables(log)
    assert rights(log) == before
    log.execute(f"drop owned by {role}", f"drop role {role}")


def rights(log: Ledger) -> str:
    engine = log.where.sync_engine()
    with engine.connect() as connection:
        query = text(
            "select string_agg(relname || relnamespace::regnamespace || relacl::text, ';' order by relname) "
            "from pg_class where relname in ('lines', 'lines_id_seq')"
        )
        granted = str(connection.scalar(query))
    engine.dispose()
    return granted


async def test_verification_finds_no_difference_after_rolled_back_batches(log: Ledger) -> None:
    failures_left = 5

    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        nonlocal failures_left
        await by_hand.added(event, connection)
        if event.position % 20 == 0 and failures_left:
            failures_left -= 1
            # The numbers that this batch took from a sequence are lost.
            raise_transient(connection)

    last = log.append(history(200))
    async with changed(log, bound_with(by_hand.opened, added, by_hand.closed)).working(options=QUICK):
        await log.caught_up(last, LEDGER)
    assert failures_left < 5
    report = await verified(log)
    assert (report.differences, report.position, report.events) == (0, last, 200)
    assert report.rows == sum(map(len, table_rows(log.where).values()))
    assert remains(log.where) == []


def raise_transient(connection: AsyncConnection) -> None:
    cause: Exception = psycopg.errors.SerializationFailure("as if another had been quicker")
    if connection.dialect.name == "sqlite":
        cause = sqlite3.OperationalError("database is locked")
        cause.sqlite_errorcode = 5
    raise DBAPIError("insert", {}, cause)


async def test_rows_altered_added_and_removed_by_hand_are_found(log: Ledger) -> None:
    log.append(history(300))
    await rebuild_tables(log)
    assert (await verified(log)).differences == 0
    before = table_rows(log.where)
    line, account = before["lines"][3], next(row for row in before["accounts"] if row[1] is not None)
    log.execute(
        f"update lines set amount = '9999.00' where position = {line[0]}",
        f"update accounts set owner = null where account_id = '{account[0]}'",
        "insert into totals (name, n) values ('stranger', 1)",
        "delete from totals where name = 'added'",
    )
    report = await verified(log)
    assert report.differences == 4
    examples = {example.key[0]: example for example in report.examples if example.key[0] != "totals"}
    assert (examples["lines"].live["amount"], examples["lines"].expected["amount"]) == (Decimal("9999.00"), line[2])
    assert (examples["accounts"].live["owner"], examples["accounts"].expected["owner"]) == (None, account[1])
    totals = {
        example.key[1]: (example.live, example.expected) for example in report.examples if example.key[0] == "totals"
    }
    assert totals["stranger"] == ({"name": "stranger", "n": 1}, None)
    assert totals["added"] == (None, {"name": "added", "n": dict(before["totals"])["added"]})
    await rebuild_tables(log)
    assert (await verified(log)).differences == 0
    assert table_rows(log.where) == before


async def test_a_cancelled_rebuild_leaves_the_live_tables_and_nothing_else(log: Ledger) -> None:
    log.append(history(300))
    await rebuild_tables(log)
    before = table_rows(log.where), checkpoint(log)
    log.append(history(5_000, seed=2))
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def note(report: Progress) -> None:
        if report.phase == "sequential" and report.done:
            loop.call_soon_threadsafe(begun.set)

    task = asyncio.create_task(rebuild_tables(log, progress=note))
    await asyncio.wait_for(begun.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (table_rows(log.where), checkpoint(log)) == before
    assert remains(log.where) == []


async def test_an_empty_log_gives_empty_tables(log: Ledger) -> None:
    report = await rebuild_tables(log)
    assert (report.events, report.rows) == (0, 0)
    assert table_rows(log.where) == {"accounts": [], "lines": [], "totals": []}
