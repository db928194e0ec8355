"""SQL handlers of batches write the same rows as handlers of single events, and take each event once."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import func, insert, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded
from eventjet.dev.nats import NatsServer
from eventjet.errors import CheckpointFenced
from eventjet.rebuild import rebuild, verify
from eventjet.sql import checkpoint
from eventjet.sql.database import BULK
from eventjet.writers.batch import Batch
from eventjet.writers.sql_writer import SqlWriter
from tests.integration import by_hand
from tests.integration.by_hand import QUICK, bound_with, changed, lines_table, totals_table
from tests.integration.by_hand_writing import (
    INSERT_LINE,
    WRITING,
    added,
    added_all,
    caught_up,
    closed,
    opened,
    rows,
    writes,
    written,
)
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import Added, Noted, Opened

POSTGRES_MAX = 65_535
"""Parameters of one statement."""


@pytest.mark.parametrize("size", [1, 7, 16_000])
async def test_batches_of_any_size_come_to_the_same_rows_as_a_plain_loop(log: Ledger, size: int) -> None:
    last = log.append(writes(20, 12))
    await caught_up(log, WRITING, last, batch_max=size)
    assert rows(log) == written(log.recorded(last))


async def test_a_rebuild_and_a_verification_equal_the_worker(log: Ledger) -> None:
    last = log.append(writes(20, 12))
    await caught_up(log, WRITING, last)
    live_rows = rows(log)
    await verify(changed(log, WRITING), "ledger", log.settings)
    await rebuild(changed(log, WRITING), ["ledger"], log.settings, engine="local")
    assert rows(log) == live_rows == written(log.recorded(last))


async def test_a_batch_ends_at_the_next_event_of_another_handler(log: Ledger) -> None:
    calls: list[list[int]] = []

    async def first(events: Sequence[Recorded[Opened]], connection: AsyncConnection) -> None:
        calls.append([event.position for event in events])

    async def then(events: Sequence[Recorded[Added]], connection: AsyncConnection) -> None:
        calls.append([event.position for event in events])

    opening, adding = Opened(owner="ada"), Added(amount=Decimal(1))
    last = log.append([("a-1", data) for data in (opening, opening, adding, Noted(text=""), adding, opening, adding)])
    await _write(log, bound_with(first, then, closed), last)
    assert calls == [[1, 2], [3, 5], [6], [7]]


async def test_the_failing_event_of_a_batch_is_named_and_earlier_events_are_written(log: Ledger) -> None:
    async def picky(events: Sequence[Recorded[Added]], connection: AsyncConnection) -> None:
        await added_all(events, connection)
        if any(event.data.amount == 7 for event in events):
            raise RuntimeError("seven")

    log.append([("a-1", Opened(owner="ada")), *[("a-1", Added(amount=Decimal(1)))] * 20])
    bad = log.append([("a-1", Added(amount=Decimal(7)))])
    log.append([("a-1", Added(amount=Decimal(1)))] * 20)
    async with changed(log, bound_with(opened, picky, closed)).working(options=QUICK):
        stopped = await log.failed()
    assert f"position {bad} of 'a-1'" in str(stopped.reason)
    assert stopped.position == bad - 1
    assert rows(log) == written(log.recorded(bad - 1))


async def test_a_row_that_the_database_refuses_names_its_event(log: Ledger) -> None:
    async def opened_all(events: Sequence[Recorded[Opened]], connection: AsyncConnection) -> None:
        for event in events:
            await opened(event, connection)

    log.append([(f"a-{number}", Opened(owner=f"o-{number}")) for number in range(5)])
    bad = log.append([("a-9", Opened(owner="o-1"))])  # whose owner has an account
    log.append([("a-10", Opened(owner="o-10"))])
    async with changed(log, bound_with(opened_all, added_all, closed)).working(options=QUICK):
        stopped = await log.failed()
    assert f"position {bad} of 'a-9'" in str(stopped.reason)
    assert rows(log) == written(log.recorded(bad - 1))


async def test_a_batch_that_succeeds_only_event_by_event_is_logged_and_written_once(
    log: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    async def alone(events: Sequence[Recorded[Added]], connection: AsyncConnection) -> None:
        await added_all(events, connection)
        if len(events) > 1:
            await connection.begin_nested()
            raise RuntimeError("too many at once")

    last = log.append([("a-1", Opened(owner="ada")), *[("a-1", Added(amount=Decimal(1)))] * 20])
    with caplog.at_level(logging.WARNING):
        await _write(log, bound_with(opened, alone, closed), last)
    assert rows(log) == written(log.recorded(last))
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "eventjet.event_by_event"]
    assert record.__dict__["fields"]["count"] == 21


async def test_a_batch_that_ignores_a_database_error_is_stopped_at_its_event(log: Ledger) -> None:
    async def hides(events: Sequence[Recorded[Added]], connection: AsyncConnection) -> None:
        await added_all(events, connection)
        for event in events:
            if event.data.amount == 7:
                with suppress(DBAPIError):
                    await connection.execute(insert(totals_table).values(name=None, n=0))

    log.append([("a-1", Opened(owner="ada")), ("a-1", Added(amount=Decimal(1)))])
    bad = log.append([("a-1", Added(amount=Decimal(7)))])
    last = log.append([("a-1", Added(amount=Decimal(1)))])
    resolved = bound_with(opened, hides, closed)
    if log.where.dialect.is_concurrent:
        async with changed(log, resolved).working(options=QUICK):
            stopped = await log.failed()
        assert f"position {bad} of 'a-1'" in str(stopped.reason)
        assert "went on after an error" in str(stopped.reason)
        last = bad - 1
    else:
        await caught_up(log, resolved, last)
    assert rows(log) == written(log.recorded(last))


async def test_a_batch_handler_may_not_end_the_transaction(log: Ledger) -> None:
    async def commits(events: Sequence[Recorded[Added]], connection: AsyncConnection) -> None:
        await added_all(events, connection)
        await connection.commit()

    last = log.append([("a-1", Opened(owner="ada"))])
    log.append([("a-1", Added(amount=Decimal(1)))] * 3)
    async with changed(log, bound_with(opened, commits, closed)).working(options=QUICK):
        stopped = await log.failed()
    assert "must not call connection.commit()" in str(stopped.reason)
    assert rows(log) == written(log.recorded(last))


async def one_row(connection: AsyncConnection, rows: list[dict[str, Any]]) -> None:
    await connection.execute(INSERT_LINE, rows[0])


async def many_rows(connection: AsyncConnection, rows: list[dict[str, Any]]) -> None:
    await connection.execute(INSERT_LINE, rows)


async def by_sync_code(connection: AsyncConnection, rows: list[dict[str, Any]]) -> None:
    await connection.run_sync(lambda sync: sync.execute(INSERT_LINE, rows[0]))


async def a_question(connection: AsyncConnection, rows: list[dict[str, Any]]) -> None:
    await connection.scalar(select(func.count()).select_from(lines_table))


@pytest.mark.parametrize("statement", [one_row, many_rows, by_sync_code, a_question])
async def test_a_handler_that_ignores_its_own_timeout_is_stopped_at_its_event(
    log: Ledger, statement: Callable[..., Awaitable[None]]
) -> None:
    async def impatient(event: Recorded[Added], connection: AsyncConnection) -> None:
        line = {"account_id": event.aggregate_id, "amount": event.data.amount}
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await statement(connection, [line | {"position": -number} for number in range(1_000)])

    log.append([("a-1", Opened(owner="ada"))])
    last = log.append([("a-1", Added(amount=Decimal(1)))])
    async with changed(log, bound_with(opened, impatient, closed)).working(options=QUICK):
        stopped = await log.failed()
    assert f"position {last} of 'a-1'" in str(stopped.reason)
    assert "cut a statement off" in str(stopped.reason)
    assert rows(log) == written(log.recorded(last - 1))


async def test_a_batch_of_a_worker_that_lost_its_lease_is_not_written(log: Ledger) -> None:
    last = log.append(writes(3, 3))
    with pytest.raises(CheckpointFenced):
        await _write(log, WRITING, last, epochs_missed=1)
    assert rows(log) == written([])


async def test_a_batch_is_tried_again_after_a_lost_connection(
    eventjet_nats: NatsServer, eventjet_database: str
) -> None:
    log = by_hand.log_of(eventjet_nats, eventjet_database)
    cuts_left = 3

    async def cut(events: Sequence[Recorded[Added]], connection: AsyncConnection) -> None:
        nonlocal cuts_left
        await added_all(events, connection)
        if cuts_left and events[-1].position > 20:
            cuts_left -= 1
            own = await connection.scalar(text("select pg_backend_pid()"))
            log.execute(f"select pg_terminate_backend({own}, 20000)")
            await added(replace(events[0], position=-1), connection)

    last = log.append(writes(5, 20))
    await caught_up(log, bound_with(opened, cut, closed), last)
    assert cuts_left == 0
    assert rows(log) == written(log.recorded(last))


async def test_a_statement_with_too_many_parameters_stops_the_projection(log: Ledger) -> None:
    is_postgres = log.where.dialect.is_concurrent
    with closing(sqlite3.connect(":memory:")) as memory:
        count = (POSTGRES_MAX if is_postgres else memory.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)) + 1
    statement = f"delete from totals where n in ({', '.join(['%s' if is_postgres else '?'] * count)})"

    async def too_many(event: Recorded[Added], connection: AsyncConnection) -> None:
        await added(event, connection)
        if event.data.amount:
            await connection.exec_driver_sql(statement, tuple(range(count)))

    log.append([("a-0", Opened(owner="ada")), *[("a-0", Added(amount=Decimal(0)))] * 3])
    bad = log.append([("a-0", Added(amount=Decimal(1)))])
    log.append([("a-0", Added(amount=Decimal(0)))])
    async with changed(log, bound_with(opened, too_many, closed)).working(options=QUICK):
        stopped = await log.failed()
    assert stopped.position == bad - 1
    assert f"position {bad} of 'a-0'" in str(stopped.reason)
    assert rows(log) == written(log.recorded(bad - 1))


async def _write(log: Ledger, resolved: Any, last: int, epochs_missed: int = 0) -> None:
    """Write the log up to a position as one batch."""
    events = [event for event in log.recorded(last) if not isinstance(event.data, Noted)]
    engine = log.where.engine(limits=BULK)  # the test does not try again after a pause of the machine
    try:
        async with engine.connect() as connection:
            await connection.run_sync(checkpoint.ensure, "ledger", 1)
            lease = await connection.run_sync(checkpoint.read, "ledger", 1)
            await connection.commit()
            assert lease is not None
            lease = replace(lease, epoch=lease.epoch + epochs_missed)
            async with connection.begin():
                batch = Batch(0, last, events[-1].event_id, events)
                await SqlWriter(resolved, lease_s=30).write(connection, lease, batch)
    finally:
        await engine.dispose()
