"""Forbidden actions of a handler are refused before they take effect, and told apart from database errors."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded
from tests.integration import by_hand
from tests.integration.by_hand import (
    LEDGER,
    QUICK,
    bound_with,
    changed,
    expected,
    kinds_table,
    lines_table,
    table_rows,
    totals_table,
)
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import Added, Opened


async def commits(event: Recorded[Added], connection: AsyncConnection) -> None:
    await by_hand.added(event, connection)
    await connection.commit()


async def commits_and_hides_it(event: Recorded[Added], connection: AsyncConnection) -> None:
    await by_hand.added(event, connection)
    try:
        await connection.commit()
    except Exception:  # noqa: BLE001 - this is what is tried here
        pass


async def rolls_back(event: Recorded[Added], connection: AsyncConnection) -> None:
    await by_hand.added(event, connection)
    await connection.rollback()


async def rolls_back_and_goes_on(event: Recorded[Added], connection: AsyncConnection) -> None:
    try:
        await connection.rollback()
    except Exception:  # noqa: BLE001 - this is what is tried here
        pass
    await by_hand.added(event, connection)


async def commits_in_text(event: Recorded[Added], connection: AsyncConnection) -> None:
    await by_hand.added(event, connection)
    await connection.execute(text("  Commit"))


async def commits_behind_a_semicolon(event: Recorded[Added], connection: AsyncConnection) -> None:
    await by_hand.added(event, connection)
    await connection.exec_driver_sql("select 1; commit")


async def commits_underneath(event: Recorded[Added], connection: AsyncConnection) -> None:
    await by_hand.added(event, connection)
    await connection.run_sync(lambda sync: sync.commit())


async def closes(event: Recorded[Added], connection: AsyncConnection) -> None:
    await by_hand.added(event, connection)
    await connection.close()


async def leaves_a_savepoint(event: Recorded[Added], connection: AsyncConnection) -> None:
    await connection.begin_nested()
    await by_hand.added(event, connection)


async def begins(event: Recorded[Added], connection: AsyncConnection) -> None:
    await by_hand.added(event, connection)
    await connection.begin()


async def writes_elsewhere(event: Recorded[Added], connection: AsyncConnection) -> None:
    await by_hand.added(event, connection)
    await connection.execute(insert(kinds_table).values(position=event.position, seen=event.recorded_at))


@pytest.mark.parametrize(
    ("handler", "problem"),
    [
        (commits, "commits must not call connection.commit()"),
        (commits_and_hides_it, "must not call connection.commit()"),
        (rolls_back, "rolls_back must not call connection.rollback()"),
        (rolls_back_and_goes_on, "must not call connection.rollback()"),
        (commits_in_text, "must not execute COMMIT"),
        (commits_behind_a_semicolon, "must not execute COMMIT"),
        (commits_underneath, "must not call connection.commit()"),
        (closes, "must not call connection.close()"),
        (leaves_a_savepoint, "left a savepoint open"),
        (begins, "must not call connection.begin()"),
        (writes_elsewhere, "must not write to 'kinds'"),
    ],
)
async def test_a_handler_may_not_end_the_transaction_it_is_given(
    log: Ledger, handler: Callable[..., Any], problem: str
) -> None:
    log.append([(f"a-{number}", Opened(owner=f"o-{number}")) for number in range(5)])
    bad = log.append([("a-1", Added(amount=Decimal(1)))])
    log.append([("a-2", Added(amount=Decimal(1)))])
    async with changed(log, bound_with(by_hand.opened, handler, by_hand.closed)).working(options=QUICK):
        stopped = await log.failed()
    assert problem in str(stopped.reason), stopped.reason
    assert f"position {bad} of 'a-1'" in str(stopped.reason)
    assert stopped.position == bad - 1
    assert table_rows(log.where) == expected(log.recorded(bad - 1))


async def test_a_transaction_ended_by_the_driver_stops_the_projection_as_half_written(
    log: Ledger,
) -> None:
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await by_hand.added(event, connection)
        await (await connection.get_raw_connection()).driver_connection.commit()  # type: ignore[union-attr]

    log.append([("a-1", Added(amount=Decimal(1)))] * 3)
    async with changed(log, bound_with(by_hand.opened, added, by_hand.closed)).working(options=QUICK):
        stopped = await log.failed()
    assert "may hold half of a batch" in str(stopped.reason)
    assert "eventjet rebuild ledger" in str(stopped.reason)


async def test_savepoints_of_a_handler_may_fail(log: Ledger) -> None:
    async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
        try:
            async with connection.begin_nested():
                await by_hand.opened(event, connection)
        except IntegrityError:
            await by_hand._count(connection, "refused")

    last = log.append([("a", Opened(owner="ada")), ("b", Opened(owner="ada")), ("c", Opened(owner="carl"))])
    async with changed(log, bound_with(opened, by_hand.added, by_hand.closed)).working(options=QUICK):
        await log.caught_up(last, LEDGER)
    rows = table_rows(log.where)
    assert [row[0] for row in rows["accounts"]] == ["a", "c"]
    assert rows["totals"] == [("opened", 2), ("refused", 1)]


async def test_a_handler_that_ignores_an_error_without_a_savepoint_is_stopped(log: Ledger) -> None:
    async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
        try:
            await by_hand.opened(event, connection)
        except IntegrityError:
            pass

    log.append([("a", Opened(owner="ada")), ("b", Opened(owner="ada")), ("c", Opened(owner="carl"))])
    async with changed(log, bound_with(opened, by_hand.added, by_hand.closed)).working(options=QUICK):
        if log.settings.database.startswith("sqlite"):
            # On SQLite a failed statement undoes only itself, and the transaction continues.
            await log.caught_up(3, LEDGER)
            return
        stopped = await log.failed()
    assert stopped.position == 1
    assert "begin_nested" in str(stopped.reason)
    assert table_rows(log.where) == expected(log.recorded(1))


@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_connection_error_is_tried_again_even_if_the_handler_wraps_it(log: Ledger, wrapped: bool) -> None:
    faults_left = 3

    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        nonlocal faults_left
        await by_hand.added(event, connection)
        if not faults_left or event.position < 20:
            return
        faults_left -= 1
        try:
            if connection.dialect.name == "sqlite":
                await connection.exec_driver_sql("pragma max_page_count = 1")
                await connection.execute(insert(totals_table).values(name="x" * 1_000_000, n=1))
            else:
                await connection.execute(text("select pg_terminate_backend(pg_backend_pid())"))
        except OperationalError as error:
            if wrapped:
                raise ValueError("as the application calls it") from error
            raise

    last = log.append([("a-1", Added(amount=Decimal(1)))] * 50)
    async with changed(log, bound_with(by_hand.opened, added, by_hand.closed)).working(options=QUICK):
        await log.caught_up(last, LEDGER)
    assert faults_left == 0
    assert table_rows(log.where) == expected(log.recorded(last))


async def test_a_violation_of_a_deferred_constraint_is_bisected_to_its_event(log: Ledger) -> None:
    if not log.settings.database.startswith("postgresql"):
        pytest.skip("SQLite checks its constraints at once, unless foreign keys are deferred")
    log.execute("alter table lines add constraint positive check (amount > 0) not valid")
    log.execute(
        "alter table lines drop constraint positive",
        "create function positive() returns trigger language plpgsql as "
        "$$ begin if new.amount < 0 then raise check_violation; end if; return null; end $$",
        "create constraint trigger positive after insert on lines deferrable initially deferred "
        "for each row execute function positive()",
    )
    log.append([("a-1", Added(amount=Decimal(1)))] * 30)
    bad = log.append([("a-2", Added(amount=Decimal(-1)))])
    log.append([("a-1", Added(amount=Decimal(1)))] * 30)
    async with log.working(options=QUICK):
        stopped = await log.failed()
    assert f"position {bad} of 'a-2'" in str(stopped.reason)
    assert stopped.position == bad - 1
    assert table_rows(log.where) == expected(log.recorded(bad - 1))


async def test_foreign_keys_are_enforced_on_both_databases(log: Ledger) -> None:
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        values = {"position": event.position, "account_id": "nobody", "amount": event.data.amount}
        await connection.execute(insert(lines_table).values(**values))

    log.append([("a-1", Added(amount=Decimal(1)))])
    async with changed(log, bound_with(by_hand.opened, added, by_hand.closed)).working(options=QUICK):
        stopped = await log.failed()
    assert "IntegrityError" in str(stopped.reason) or "ForeignKeyViolation" in str(stopped.reason)
