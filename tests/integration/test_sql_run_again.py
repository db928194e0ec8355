"""Errors, lost connections and handlers that run again, where statements of SQL by hand cross together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import func, insert, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded
from eventjet.dev.nats import NatsServer
from eventjet.errors import CheckpointFenced
from eventjet.sql import checkpoint
from eventjet.writers.batch import Batch
from eventjet.writers.sql_writer import SqlWriter
from tests.integration import by_hand
from tests.integration.by_hand import (
    QUICK,
    bound_with,
    changed,
    lines_table,
    totals_table,
)
from tests.integration.by_hand_writing import (
    INSERT_LINE,
    WRITING,
    added,
    caught_up,
    closed,
    opened,
    rows,
    writes,
    written,
)
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import Added, Noted, Opened


async def test_an_error_within_what_crosses_together_names_its_event(log: Ledger) -> None:
    good = writes(5, 10)
    log.append(good)
    bad = log.append([("a-9", Opened(owner="o-1"))])  # whose owner has an account
    log.append([("a-1", Added(amount=Decimal(1)))] * 100)
    async with changed(log, WRITING).working(options=QUICK):
        stopped = await log.failed()
    assert f"position {bad} of 'a-9'" in str(stopped.reason)
    assert "IntegrityError" in str(stopped.reason) or "UniqueViolation" in str(stopped.reason)
    assert stopped.position == bad - 1
    assert rows(log) == written(log.recorded(bad - 1))


async def test_the_first_of_two_errors_is_told_when_the_later_one_is_met_first(log: Ledger) -> None:
    async def raises(event: Recorded[Added], connection: AsyncConnection) -> None:
        if event.data.amount == 7:
            raise RuntimeError("met at once")
        await added(event, connection)

    log.append([("a-1", Opened(owner="ada")), ("a-1", Added(amount=Decimal(1)))])
    bad = log.append([("a-2", Opened(owner="ada"))])
    log.append([("a-1", Added(amount=Decimal(7)))])
    async with changed(log, bound_with(opened, raises, closed)).working(options=QUICK):
        stopped = await log.failed()
    assert f"position {bad} of 'a-2'" in str(stopped.reason)
    assert stopped.position == bad - 1


async def one_row(connection: AsyncConnection, rows: list[dict[str, Any]]) -> None:
    await connection.execute(INSERT_LINE, rows[0])


async def many_rows(connection: AsyncConnection, rows: list[dict[str, Any]]) -> None:
    await connection.execute(INSERT_LINE, rows)


async def by_sync_code(connection: AsyncConnection, rows: list[dict[str, Any]]) -> None:
    await connection.run_sync(lambda sync: sync.execute(INSERT_LINE, rows[0]))


async def a_question(connection: AsyncConnection, rows: list[dict[str, Any]]) -> None:
    await connection.scalar(select(func.count()).select_from(lines_table))


@pytest.mark.parametrize("statement", [one_row, many_rows, by_sync_code, a_question])
@pytest.mark.parametrize("is_first_bad", [True, False])
async def test_a_handler_that_goes_on_after_its_own_timeout_loses_nothing(
    log: Ledger, statement: Callable[..., Awaitable[None]], is_first_bad: bool
) -> None:
    async def impatient(event: Recorded[Added], connection: AsyncConnection) -> None:
        line = {"account_id": event.aggregate_id, "amount": event.data.amount}
        await asyncio.sleep(0.06)  # so long the database has heard nothing: what waits is sent with the next one
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await statement(connection, [line | {"position": -number} for number in range(1_000)])

    log.append([("a-1", Opened(owner="ada"))])
    bad = log.append([("a-2", Opened(owner="ada" if is_first_bad else "bob"))])
    log.append([("a-3", Opened(owner="cy"))])
    last = log.append([("a-3", Added(amount=Decimal(1)))])
    async with changed(log, bound_with(opened, impatient, closed)).working(options=QUICK):
        stopped = await log.failed()
    named = (bad, "a-2") if is_first_bad else (last, "a-3")
    assert f"position {named[0]} of '{named[1]}'" in str(stopped.reason)
    assert ("cut a statement off" in str(stopped.reason)) != is_first_bad
    assert stopped.position == named[0] - 1
    assert rows(log) == written(log.recorded(named[0] - 1))


async def test_a_handler_that_catches_an_error_in_a_savepoint_catches_it_as_before(log: Ledger) -> None:
    async def careful(event: Recorded[Opened], connection: AsyncConnection) -> None:
        await connection.execute(update(totals_table).values(n=totals_table.c.n + 1))
        try:
            async with connection.begin_nested():
                await opened(event, connection)
        except IntegrityError:
            await connection.execute(insert(totals_table).values(name=event.aggregate_id, n=0))

    last = log.append([(f"a-{number}", Opened(owner=f"o-{number % 10}")) for number in range(40)])
    await caught_up(log, bound_with(careful, added, closed), last)
    assert [row[0] for row in rows(log)["accounts"]] == [f"a-{number}" for number in range(10)]
    assert rows(log)["totals"] == sorted((f"a-{number}", 39 - number) for number in range(10, 40))


async def test_a_deposed_worker_writes_nothing(log: Ledger) -> None:
    last = log.append(writes(3, 3))
    events = [one for one in log.recorded(last) if not isinstance(one.data, Noted)]
    batch = Batch(0, last, events[-1].event_id, events)
    engine = log.where.engine()
    try:
        async with engine.connect() as connection:
            await connection.run_sync(checkpoint.ensure, "ledger", 1)
            held = await connection.run_sync(checkpoint.read, "ledger", 1)
            await connection.commit()
            assert held is not None
            with pytest.raises(CheckpointFenced):
                async with connection.begin():
                    await SqlWriter(WRITING, lease_s=30).write(connection, replace(held, epoch=held.epoch + 1), batch)
    finally:
        await engine.dispose()
    assert rows(log) == written([])


async def test_a_connection_lost_over_what_waits_is_tried_again(
    eventjet_nats: NatsServer, eventjet_database: str
) -> None:
    log = by_hand.log_of(eventjet_nats, eventjet_database)
    left = 3

    async def cut(event: Recorded[Added], connection: AsyncConnection) -> None:
        nonlocal left
        await added(event, connection)
        if left and event.position > 20:
            left -= 1
            own = await connection.scalar(text("select pg_backend_pid()"))
            await added(replace(event, position=-event.position), connection)
            log.execute(f"select pg_terminate_backend({own}, 20000)")

    last = log.append(writes(5, 20))
    await caught_up(log, bound_with(opened, cut, closed), last)
    assert left == 0
    assert rows(log) == written(log.recorded(last))


async def test_a_worker_stopped_while_statements_wait_leaves_nothing_of_them(log: Ledger) -> None:
    reached = threading.Event()

    async def stuck(event: Recorded[Added], connection: AsyncConnection) -> None:
        await added(event, connection)
        if event.position == 25:
            reached.set()
            await asyncio.sleep(60)

    last = log.append([("a-1", Opened(owner="ada")), *[("a-1", Added(amount=Decimal(1)))] * 49])
    async with changed(log, bound_with(opened, stuck, closed)).working(options=replace(QUICK, drain_s=0.1)):
        assert await asyncio.to_thread(reached.wait, 60)
    assert (await log.status()).position < 25
    await caught_up(log, WRITING, last)
    assert rows(log) == written(log.recorded(last))


async def test_a_long_batch_lets_others_run(log: Ledger) -> None:
    """Handlers that never wait for the database would hold up everything else in their process."""
    turns = 0
    between: list[int] = []

    async def added_and_told(event: Recorded[Added], connection: AsyncConnection) -> None:
        nonlocal turns
        if not between:
            asyncio.get_running_loop().call_soon(turn)
        between.append(turns)
        await added(event, connection)

    def turn() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(turn)

    last = log.append([("a-1", Opened(owner="ada")), *[("a-1", Added(amount=Decimal(1)))] * 900])
    await caught_up(log, bound_with(opened, added_and_told, closed), last)
    longest = max(between.count(one) for one in set(between))
    assert longest <= 200


@pytest.mark.parametrize("how", ["returning", "raw", "sync"])
async def test_nothing_that_was_executed_at_once_stays_when_the_handlers_run_again(log: Ledger, how: str) -> None:
    """Not even what came before anything was kept, or after an answer was asked for in vain."""

    async def at_once(connection: AsyncConnection, position: int) -> None:
        statement = f"insert into lines (position, account_id, amount) values ({position}, 'a-0', '1.00')"
        if how == "returning":
            assert (await connection.execute(text(f"{statement} returning position"))).scalar_one() == position
        elif how == "raw":
            raw: Any = (await connection.get_raw_connection()).driver_connection
            await raw.execute(statement)
        else:
            await connection.run_sync(lambda sync: sync.exec_driver_sql(statement))

    async def asks(event: Recorded[Added], connection: AsyncConnection) -> None:
        if event.position % 2:
            await at_once(connection, event.position)
        counted = await connection.execute(update(totals_table).values(n=totals_table.c.n + 1))
        try:
            assert counted.rowcount == 1
        except Exception:  # noqa: BLE001 - whatever it is, a handler may pass it over
            pass
        if not event.position % 2:
            await at_once(connection, event.position)

    log.execute("insert into accounts values ('a-0', 'ada', '0.00', '2026-01-01 00:00:00+00:00', '[]')")
    log.execute("insert into totals (name, n) values ('x', 0)")
    # What is there already belongs to a checkpoint.
    engine = log.where.engine()
    async with engine.begin() as connection:
        await connection.run_sync(checkpoint.ensure, "ledger", 1)
    last = log.append([("a-0", Added(amount=Decimal(1)))] * 20)
    events = log.recorded(last)
    resolved = bound_with(opened, asks, closed)
    writer = SqlWriter(resolved, lease_s=30)
    async with engine.connect() as connection:
        held = await connection.run_sync(checkpoint.read, "ledger", 1)
        await connection.commit()
        assert held is not None
        for start in (0, 10):
            part = events[start : start + 10]
            async with connection.begin():
                await writer.write(connection, held, Batch(start, part[-1].position, part[-1].event_id, part))
    await engine.dispose()
    assert rows(log)["totals"] == [("x", 20)]
    assert [row[0] for row in rows(log)["lines"]] == list(range(1, 21))


async def test_an_error_of_what_waits_that_a_read_meets_names_its_own_event(log: Ledger) -> None:
    async def looks(event: Recorded[Added], connection: AsyncConnection) -> None:
        await connection.scalar(select(func.count()).select_from(lines_table))
        await added(event, connection)

    log.append([("a-1", Opened(owner="ada")), ("a-1", Added(amount=Decimal(1)))])
    bad = log.append([("a-2", Opened(owner="ada"))])
    log.append([("a-1", Added(amount=Decimal(1)))] * 5)
    async with changed(log, bound_with(opened, looks, closed)).working(options=QUICK):
        stopped = await log.failed()
    assert f"position {bad} of 'a-2'" in str(stopped.reason)
    assert stopped.position == bad - 1
    assert rows(log) == written(log.recorded(bad - 1))
