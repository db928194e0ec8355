"""A worker commits the writes of SQL handlers and the checkpoint in one transaction, on both databases."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from dataclasses import replace
from decimal import Decimal

import pytest
from sqlalchemy import inspect
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded
from eventjet.subscriptions import projection_session
from eventjet.subscriptions.supervisor import run_workers
from tests.integration import by_hand
from tests.integration.by_hand import LEDGER, QUICK, bound_with, changed, expected, table_rows
from tests.integration.ledger_log import Ledger, history
from tests.integration.projecting import Added, Noted


async def test_tables_equal_an_independent_computation_when_caught_up_and_while_the_log_grows(log: Ledger) -> None:
    last = log.append(history(600))
    async with log.working():
        await log.caught_up(last, LEDGER)
        assert table_rows(log.where) == expected(log.recorded(last))
        last = log.append(history(200, seed=8))
        await log.caught_up(last, LEDGER)
    assert table_rows(log.where) == expected(log.recorded(last))
    assert (await log.status()).state == "active"


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_batches_of_any_size_give_identical_tables_and_stop_at_the_same_event(log: Ledger, size: int) -> None:
    log.append(history(150, accounts=10))
    bad = log.append([("a-1", Added(amount=Decimal(99999999999)))])
    log.append(history(20))
    async with log.working(options=replace(QUICK, batch_max=size)):
        failed_status = await log.failed()
    before = log.recorded(bad - 1)
    assert table_rows(log.where) == expected(before)
    assert f"position {bad} of 'a-1'" in str(failed_status.reason)
    assert max(event.position for event in before if not isinstance(event.data, Noted)) <= failed_status.position < bad


async def test_a_failing_handler_leaves_earlier_events_and_continues_after_a_correction(log: Ledger) -> None:
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await by_hand.added(event, connection)
        if event.data.amount == Decimal("13.13"):
            raise RuntimeError("the thirteenth")

    log.append([("a-1", Added(amount=Decimal(number))) for number in range(40)])
    bad = log.append([("a-2", Added(amount=Decimal("13.13")))])
    last = log.append([("a-1", Added(amount=Decimal(number))) for number in range(40)])
    async with changed(log, bound_with(by_hand.opened, added, by_hand.closed)).working(options=QUICK):
        stopped = await log.failed()
    assert stopped.position == bad - 1
    assert f"position {bad} of 'a-2': RuntimeError: the thirteenth" in str(stopped.reason)
    assert table_rows(log.where) == expected(log.recorded(bad - 1))
    async with log.working(options=QUICK):
        await log.caught_up(last, LEDGER)
    assert table_rows(log.where) == expected(log.recorded(last))


async def test_two_workers_and_a_lease_shorter_than_a_batch_take_every_event_once(log: Ledger) -> None:
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await by_hand.added(event, connection)
        await asyncio.sleep(0.01)

    slow = changed(log, bound_with(by_hand.opened, added, by_hand.closed))
    last = log.append(history(300))
    options = replace(QUICK, lease_s=0.4, batch_max=50)
    async with slow.working(options=options), slow.working(options=options):
        await log.caught_up(last, LEDGER, timeout_s=100)
    assert table_rows(log.where) == expected(log.recorded(last))


async def test_a_worker_cut_off_within_a_batch_writes_nothing_of_it(log: Ledger) -> None:
    reached = threading.Event()

    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await by_hand.added(event, connection)
        if event.position == 25:
            reached.set()
            await asyncio.sleep(60)

    last = log.append([("a-1", Added(amount=Decimal(1)))] * 50)
    stuck = changed(log, bound_with(by_hand.opened, added, by_hand.closed))
    async with stuck.working(options=replace(QUICK, drain_s=0.1)):
        assert await asyncio.to_thread(reached.wait, 20)
    assert (await log.status()).position < 25
    assert table_rows(log.where) == expected(log.recorded((await log.status()).position))
    async with log.working(options=QUICK):
        await log.caught_up(last, LEDGER)
    assert table_rows(log.where) == expected(log.recorded(last))


async def test_a_stopping_worker_commits_its_transaction_and_begins_no_other(
    log: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection_session, "_FIRST_PART", 1)  # so that one batch takes several transactions
    stop = asyncio.Event()

    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await by_hand.added(event, connection)
        stop.set()

    last = log.append([("a-1", Added(amount=Decimal(1)))] * 50)
    stopping = changed(log, bound_with(by_hand.opened, added, by_hand.closed))
    async with asyncio.timeout(90):
        await run_workers(stopping, stopping.settings, stop=stop, options=QUICK)
    assert ((await log.status()).position, last) == (1, 50)
    assert table_rows(log.where) == expected(log.recorded(1))


async def test_a_table_with_rows_and_no_checkpoint_is_refused(log: Ledger) -> None:
    log.execute("insert into totals (name, n) values ('x', 1)")
    log.append(history(3))
    async with log.working(options=QUICK):
        stopped = await log.failed()
    assert "totals holds rows that no checkpoint knows of" in str(stopped.reason)


async def test_tables_are_created_with_their_keys_and_constraints(log: Ledger) -> None:
    assert [table.name for table in LEDGER.tables] == ["totals", "accounts", "lines"]
    engine = log.where.sync_engine()
    inspector = inspect(engine)
    assert [key["referred_table"] for key in inspector.get_foreign_keys("lines")] == ["accounts"]
    assert [constraint["column_names"] for constraint in inspector.get_unique_constraints("accounts")] == [["owner"]]
    assert "ix_lines_account" in {index["name"] for index in inspector.get_indexes("lines")}
    engine.dispose()


KILL_POINTS = ("worker.before_commit", "worker.rows_written", "worker.after_commit")


@pytest.mark.slow
@pytest.mark.parametrize("name", KILL_POINTS)
@pytest.mark.parametrize("action", ["kill", "raise"])
async def test_a_worker_killed_around_a_commit_takes_every_event_once(log: Ledger, name: str, action: str) -> None:
    last = log.append(history(200))
    program = "tests.integration.sql_worker_process"
    environ = {**os.environ, "EVENTJET_FAILPOINT": f"{name}:{action}:3"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", program, log.settings.servers[0], log.settings.database, log.name, "20", env=environ
    )
    if action == "kill":
        assert await asyncio.wait_for(process.wait(), 30) < 0
        assert (await log.status()).position > 0
        async with log.working(options=QUICK):
            await log.caught_up(last, LEDGER)
    else:
        await log.caught_up(last, LEDGER)
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)
    assert table_rows(log.where) == expected(log.recorded(last))
