"""Statements of SQL by hand that cross together: the same rows, errors and answers as one by one."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import delete, func, insert, select, text, update
from sqlalchemy import event as sa_event
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from eventjet import Recorded
from eventjet.dev.nats import NatsServer
from eventjet.errors import CheckpointFenced
from eventjet.rebuild import rebuild
from eventjet.sql import checkpoint
from eventjet.writers.batch import Batch
from eventjet.writers.sql_writer import SqlWriter
from tests.integration import by_hand
from tests.integration.by_hand import (
    QUICK,
    accounts_table,
    bound_with,
    changed,
    found,
    lines_table,
    totals_table,
)
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import Added, Closed, Noted, Opened

INSERT_LINE = insert(lines_table)
"""Made once, given its values as parameters."""


async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
    """Only writes."""
    values: dict[str, Any] = {"amount": Decimal(0), "last_at": event.recorded_at, "notes": []}
    await connection.execute(
        insert(accounts_table).values(account_id=event.aggregate_id, owner=event.data.owner, **values)
    )


async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
    """Only writes, in three ways."""
    own = accounts_table.c.account_id == event.aggregate_id
    line = {"position": event.position, "account_id": event.aggregate_id, "amount": event.data.amount}
    await connection.execute(INSERT_LINE, line)
    await connection.execute(update(accounts_table).where(own).values(last_at=event.recorded_at))
    await connection.execute(text("update totals set n = n + 1 where name = :name"), {"name": "added"})


async def closed(event: Recorded[Closed], connection: AsyncConnection) -> None:
    """Only writes."""
    await connection.execute(delete(lines_table).where(lines_table.c.account_id == event.aggregate_id))
    await connection.execute(delete(accounts_table).where(accounts_table.c.account_id == event.aggregate_id))


WRITING = bound_with(opened, added, closed)


async def caught_up(log: Ledger, resolved: Any, last: int, **options: Any) -> None:
    async with changed(log, resolved).working(options=replace(QUICK, **options)):
        await log.caught_up(last, resolved)


def rows(log: Ledger) -> Any:
    return found(log.where)


def written(events: list[Recorded[Any]]) -> Any:
    """What the handlers that only write must come to."""
    accounts: dict[str, tuple[Any, ...]] = {}
    lines: list[tuple[int, str, Decimal]] = []
    for one in events:
        own = one.aggregate_id
        match one.data:
            case Opened(owner=owner):
                accounts[own] = (own, owner, Decimal(0), one.recorded_at, [])
            case Added(amount=amount):
                lines.append((one.position, own, amount))
                accounts[own] = (*accounts[own][:3], one.recorded_at, [])
            case Closed():
                lines = [line for line in lines if line[1] != own]
                accounts.pop(own, None)
            case _:
                pass
    return {"accounts": sorted(accounts.values()), "lines": lines, "totals": []}


def writes(accounts: int, times: int) -> list[tuple[str, Any]]:
    """Opened, added to in turns, and every third one closed and opened again."""
    log: list[tuple[str, Any]] = [(f"a-{number}", Opened(owner=f"o-{number}")) for number in range(accounts)]
    for turn in range(times):
        for number in range(accounts):
            log.append((f"a-{number}", Added(amount=Decimal(turn * accounts + number))))
            if number % 3 == 0 and turn % 4 == 3:
                log += [(f"a-{number}", Closed()), (f"a-{number}", Opened(owner=f"o-{number}"))]
    return log


@pytest.mark.parametrize("size", [1, 7, 16_000])
async def test_handlers_that_only_write_come_to_the_same_rows_in_batches_of_any_size(log: Ledger, size: int) -> None:
    last = log.append(writes(20, 12))
    await caught_up(log, WRITING, last, batch_max=size)
    assert rows(log) == written(log.recorded(last))


async def test_a_rebuild_comes_to_what_the_worker_and_a_plain_loop_come_to(log: Ledger) -> None:
    last = log.append(writes(20, 12))
    await caught_up(log, WRITING, last)
    lived = rows(log)
    await rebuild(changed(log, WRITING), ["ledger"], log.settings, engine="local")
    assert rows(log) == lived == written(log.recorded(last))


async def test_statements_that_only_write_are_not_executed_one_by_one(log: Ledger) -> None:
    executed: list[str] = []

    async def added_and_looked(event: Recorded[Added], connection: AsyncConnection) -> None:
        sync = connection.sync_connection
        assert sync is not None
        if not sa_event.contains(sync, "after_cursor_execute", note):
            sa_event.listen(sync, "after_cursor_execute", note)
        await added(event, connection)

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        executed.append(statement)

    last = log.append(writes(1, 50))
    resolved = bound_with(opened, added_and_looked, closed)
    await caught_up(log, resolved, last)
    assert rows(log) == written(log.recorded(last))
    own = [one for one in executed if "lines" in one or "accounts" in one or "totals" in one]
    assert own == []


async def test_what_reads_sees_all_that_was_written_before_it(log: Ledger) -> None:
    """Through every road that there is to the database."""
    seen: list[list[int]] = []
    count = select(func.count()).select_from(lines_table)

    async def looks(event: Recorded[Added], connection: AsyncConnection) -> None:
        async def line(number: int) -> None:
            values = {"position": event.position * 100 + number, "account_id": "a-0", "amount": event.data.amount}
            await connection.execute(insert(lines_table).values(values))

        own: list[int] = []
        await line(0)
        own.append((await connection.execute(count)).scalar_one())
        await line(1)
        own.append(await connection.scalar(count) or 0)
        await line(2)
        own.append((await connection.scalars(count)).one())
        await line(3)
        own.append((await connection.exec_driver_sql("select count(*) from lines")).scalar_one())
        await line(4)
        own.append(await connection.run_sync(lambda sync: sync.scalar(count)) or 0)
        await line(5)
        async with AsyncSession(bind=connection, join_transaction_mode="create_savepoint") as session:
            own.append(await session.scalar(count) or 0)
        await line(6)
        async with connection.begin_nested():
            await line(7)
            own.append(await connection.scalar(count) or 0)
        await line(8)
        async with connection.stream(count) as result:
            own.append((await result.scalars().all())[0])
        await line(9)
        raw = (await connection.get_raw_connection()).driver_connection
        assert raw is not None
        cursor = await raw.execute("select count(*) from lines")
        own.append((await cursor.fetchone())[0])
        seen.append(own)

    last = log.append([("a-0", Opened(owner="ada")), *[("a-0", Added(amount=Decimal(1)))] * 3])
    await caught_up(log, bound_with(opened, looks, closed), last)
    steps = [1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert seen[-3:] == [[done * 10 + step for step in steps] for done in range(3)]


async def test_rows_affected_and_rows_returned_are_true(log: Ledger) -> None:
    asked: list[Any] = []

    async def asks(event: Recorded[Added], connection: AsyncConnection) -> None:
        position = event.position
        values = {"position": position, "account_id": "a-0", "amount": event.data.amount}
        made = await connection.execute(insert(lines_table).values(**values))
        assert made.inserted_primary_key is not None
        own = lines_table.c.position == position
        changed_row = await connection.execute(update(lines_table).where(own).values(amount=Decimal(position)))
        missed = await connection.execute(delete(lines_table).where(lines_table.c.position == -1))
        again = update(lines_table).where(own).values(amount=lines_table.c.amount).returning(lines_table.c.position)
        returned = (await connection.execute(again)).scalar_one()
        by_text = await connection.execute(text("update lines set account_id = account_id"))
        asked.append((changed_row.rowcount, missed.rowcount, returned, by_text.rowcount))
        numbers.append(made.inserted_primary_key[0])

    numbers: list[int] = []
    last = log.append([("a-0", Opened(owner="ada")), *[("a-0", Added(amount=Decimal(1)))] * 30])
    await caught_up(log, bound_with(opened, asks, closed), last)
    assert asked[-30:] == [(1, 0, position, position - 1) for position in range(2, 32)]
    ids = [row[0] for row in log.execute("select id from lines order by position")]
    assert numbers[-30:] == ids


async def test_a_result_asked_for_late_and_only_sometimes_is_true_and_nothing_is_written_twice(log: Ledger) -> None:
    """Each of them has the batch run again, from where its statements are known to be asked about."""

    async def sometimes(event: Recorded[Added], connection: AsyncConnection) -> None:
        await connection.execute(update(totals_table).values(n=totals_table.c.n + 1))
        done = await connection.execute(delete(lines_table).where(lines_table.c.position == event.position))
        values = {"position": event.position, "account_id": "a-0", "amount": event.data.amount}
        made = await connection.execute(insert(lines_table).values(**values))
        if event.position == 20:
            assert done.rowcount == 0
        if event.position == 40:
            try:
                assert made.inserted_primary_key is not None
            except AssertionError:
                raise
            except Exception:  # noqa: BLE001 - whatever it is, a handler may pass it over
                pass

    async def counts(event: Recorded[Opened], connection: AsyncConnection) -> None:
        await opened(event, connection)
        await connection.execute(insert(totals_table).values(name="x", n=0))

    last = log.append([("a-0", Opened(owner="ada")), *[("a-0", Added(amount=Decimal(1)))] * 60])
    await caught_up(log, bound_with(counts, sometimes, closed), last)
    assert rows(log)["totals"] == [("x", 60)]
    assert [row[0] for row in rows(log)["lines"]] == list(range(2, 62))


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


async def test_statements_of_very_different_kinds_keep_their_order(log: Ledger) -> None:
    async def mixed(event: Recorded[Added], connection: AsyncConnection) -> None:
        own = event.position
        line = {"position": own, "account_id": "a-0", "amount": Decimal(own)}
        await connection.execute(INSERT_LINE, [line, line | {"position": -own}])
        await connection.execute(delete(lines_table).where(lines_table.c.position.in_([-own, -own - 1])))
        await connection.execute(text("create temporary table scratch (n integer)"))
        await connection.execute(text("insert into scratch (n) values (:n)"), {"n": own})
        await connection.execute(text("update totals set n = n + 1 where n = (select max(n) from scratch) - 1"))
        await connection.execute(text("drop table scratch"))
        await connection.execute(
            insert(totals_table).from_select(["name", "n"], select(lines_table.c.account_id + str(own), 1).limit(1))
        )
        await connection.execute(update(totals_table).where(totals_table.c.name == f"a-0{own}").values(n=own))

    last = log.append([("a-0", Opened(owner="ada")), *[("a-0", Added(amount=Decimal(1)))] * 20])
    await caught_up(log, bound_with(opened, mixed, closed), last)
    assert [(row[0], row[2]) for row in rows(log)["lines"]] == [(own, Decimal(own)) for own in range(2, 22)]
    assert rows(log)["totals"] == sorted((f"a-0{own}", 21) for own in range(2, 22))


async def test_statements_of_thousands_of_parameters_cross_by_themselves(log: Ledger) -> None:
    async def many(event: Recorded[Added], connection: AsyncConnection) -> None:
        await added(event, connection)
        made = [{"name": f"{event.position}-{number}", "n": number} for number in range(int(event.data.amount))]
        await connection.execute(insert(totals_table).values(made))

    log.append([("a-1", Opened(owner="ada")), ("a-1", Added(amount=Decimal(10))), ("a-1", Added(amount=Decimal(900)))])
    last = log.append([("a-1", Added(amount=Decimal(1200)))])
    await caught_up(log, bound_with(opened, many, closed), last)
    assert len(rows(log)["totals"]) == 2_110


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


async def test_a_value_changed_after_it_was_given_is_written_as_it_was(log: Ledger) -> None:
    async def grows(event: Recorded[Opened], connection: AsyncConnection) -> None:
        notes = [1]
        values: dict[str, Any] = {"amount": Decimal(0), "last_at": event.recorded_at, "notes": notes}
        row = {"account_id": event.aggregate_id, "owner": event.aggregate_id, **values}
        await connection.execute(insert(accounts_table), row)
        notes.append(2)
        row |= {"account_id": f"{event.aggregate_id}-again", "owner": None}
        await connection.execute(insert(accounts_table), row)
        notes.clear()
        row.clear()

    last = log.append([(f"a-{number}", Opened(owner="ada")) for number in range(3)])
    await caught_up(log, bound_with(grows, added, closed), last)
    assert [(row[0], row[4]) for row in rows(log)["accounts"]] == [
        (f"a-{number}{more}", notes) for number in range(3) for more, notes in (("", [1]), ("-again", [1, 2]))
    ]


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
