"""Statements of SQL by hand that cross together: the same rows and answers as one by one."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import delete, func, insert, select, text, update
from sqlalchemy import event as sa_event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from eventjet import Recorded
from eventjet.rebuild import rebuild
from tests.integration.by_hand import (
    accounts_table,
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
from tests.integration.projecting import Added, Opened


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
