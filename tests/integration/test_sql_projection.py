"""SQL by hand, live: handlers and checkpoint in one transaction, on both databases."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import insert, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded
from eventjet.dev.nats import NatsServer
from eventjet.projections.database import Database
from eventjet.projections.sql import BoundSql
from eventjet.settings import Settings
from eventjet.workers.status import ProjectionStatus, status
from eventjet.workers.workplace import WorkerOptions
from tests.integration import by_hand
from tests.integration.by_hand import (
    LEDGER,
    accounts_table,
    bound_with,
    expected,
    found,
    kinds_table,
    lines_table,
    totals_table,
)
from tests.integration.ledger_log import Ledger, eventually, history
from tests.integration.projecting import Added, Noted, Opened, made

QUICK = WorkerOptions(lease_s=1.5, poll_s=0.1)


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each kind."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("eventjet_database"))
    return f"sqlite:///{tmp_path}/read.db"


@pytest.fixture
def log(eventjet_nats: NatsServer, database: str) -> Ledger:
    made(database, LEDGER)
    found = Ledger(Settings(servers=(eventjet_nats.url,), database=database), projections={"ledger": LEDGER})
    found.create()
    return found


def where(log: Ledger) -> Database:
    return Database(log.settings.database)


def changed(log: Ledger, bound: BoundSql) -> Ledger:
    """The same log, with other handlers."""
    return Ledger(log.settings, log.name, projections={"ledger": bound})


def execute(log: Ledger, *statements: str) -> None:
    engine = where(log).sync_engine()
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


async def state(log: Ledger) -> ProjectionStatus:
    return next(one for one in await status(log, log.settings) if one.name == "ledger")


async def failed(log: Ledger) -> ProjectionStatus:
    async def is_failed() -> bool:
        return (await state(log)).state == "failed"

    await eventually(is_failed, "the projection to fail")
    return await state(log)


async def test_tables_equal_an_independent_computation_when_caught_up_and_while_the_log_grows(log: Ledger) -> None:
    last = log.append(history(600))
    async with log.working():
        await log.caught_up(last, LEDGER)
        assert found(where(log)) == expected(log.recorded(last))
        last = log.append(history(200, seed=8))
        await log.caught_up(last, LEDGER)
    assert found(where(log)) == expected(log.recorded(last))
    assert (await state(log)).state == "active"


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_batches_of_any_size_give_identical_tables_and_stop_at_the_same_event(log: Ledger, size: int) -> None:
    log.append(history(150, accounts=10))
    bad = log.append([("a-1", Added(amount=Decimal(99999999999)))])
    log.append(history(20))
    async with log.working(options=replace(QUICK, batch_max=size)):
        found_state = await failed(log)
    before = log.recorded(bad - 1)
    assert found(where(log)) == expected(before)
    assert f"position {bad} of 'a-1'" in str(found_state.reason)
    assert max(one.position for one in before if not isinstance(one.data, Noted)) <= found_state.position < bad


async def test_a_handler_that_fails_leaves_what_precedes_its_event_and_goes_on_once_mended(log: Ledger) -> None:
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await by_hand.added(event, connection)
        if event.data.amount == Decimal("13.13"):
            raise RuntimeError("the thirteenth")

    log.append([("a-1", Added(amount=Decimal(number))) for number in range(40)])
    bad = log.append([("a-2", Added(amount=Decimal("13.13")))])
    last = log.append([("a-1", Added(amount=Decimal(number))) for number in range(40)])
    async with changed(log, bound_with(by_hand.opened, added, by_hand.closed)).working(options=QUICK):
        stopped = await failed(log)
    assert stopped.position == bad - 1
    assert f"position {bad} of 'a-2': RuntimeError: the thirteenth" in str(stopped.reason)
    assert found(where(log)) == expected(log.recorded(bad - 1))
    async with log.working(options=QUICK):
        await log.caught_up(last, LEDGER)
    assert found(where(log)) == expected(log.recorded(last))


async def commits(event: Recorded[Added], connection: AsyncConnection) -> None:
    await by_hand.added(event, connection)
    await connection.commit()


async def commits_and_hides_it(event: Recorded[Added], connection: AsyncConnection) -> None:
    await by_hand.added(event, connection)
    try:
        await connection.commit()
    except Exception:
        pass


async def rolls_back(event: Recorded[Added], connection: AsyncConnection) -> None:
    await by_hand.added(event, connection)
    await connection.rollback()


async def rolls_back_and_goes_on(event: Recorded[Added], connection: AsyncConnection) -> None:
    try:
        await connection.rollback()
    except Exception:
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
    ("handler", "said"),
    [
        (commits, "commits must not commit"),
        (commits_and_hides_it, "must not commit"),
        (rolls_back, "rolls_back must not roll back"),
        (rolls_back_and_goes_on, "must not roll back"),
        (commits_in_text, "must not execute COMMIT"),
        (commits_behind_a_semicolon, "must not execute COMMIT"),
        (commits_underneath, "must not commit"),
        (closes, "must not roll back"),
        (leaves_a_savepoint, "left a savepoint open"),
        (begins, "already"),
        (writes_elsewhere, "must not write to 'kinds'"),
    ],
)
async def test_a_handler_may_not_end_the_transaction_it_is_given(
    log: Ledger, handler: Callable[..., Any], said: str
) -> None:
    log.append([(f"a-{number}", Opened(owner=f"o-{number}")) for number in range(5)])
    bad = log.append([("a-1", Added(amount=Decimal(1)))])
    log.append([("a-2", Added(amount=Decimal(1)))])
    async with changed(log, bound_with(by_hand.opened, handler, by_hand.closed)).working(options=QUICK):
        stopped = await failed(log)
    assert said in str(stopped.reason), stopped.reason
    assert f"position {bad} of 'a-1'" in str(stopped.reason)
    assert stopped.position == bad - 1
    assert found(where(log)) == expected(log.recorded(bad - 1))


async def test_a_transaction_ended_underneath_stops_the_projection_and_says_that_it_may_be_half_written(
    log: Ledger,
) -> None:
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await by_hand.added(event, connection)
        await (await connection.get_raw_connection()).driver_connection.commit()  # type: ignore[union-attr]

    log.append([("a-1", Added(amount=Decimal(1)))] * 3)
    async with changed(log, bound_with(by_hand.opened, added, by_hand.closed)).working(options=QUICK):
        stopped = await failed(log)
    assert "may hold half of a batch" in str(stopped.reason)
    assert "eventjet rebuild ledger" in str(stopped.reason)


async def test_savepoints_of_a_handler_may_fail_and_be_passed_over(log: Ledger) -> None:
    async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
        try:
            async with connection.begin_nested():
                await by_hand.opened(event, connection)
        except IntegrityError:
            await by_hand._count(connection, "refused")

    last = log.append([("a", Opened(owner="ada")), ("b", Opened(owner="ada")), ("c", Opened(owner="carl"))])
    async with changed(log, bound_with(opened, by_hand.added, by_hand.closed)).working(options=QUICK):
        await log.caught_up(last, LEDGER)
    rows = found(where(log))
    assert [row[0] for row in rows["accounts"]] == ["a", "c"]
    assert rows["totals"] == [("opened", 2), ("refused", 1)]


async def test_a_handler_that_goes_on_after_an_error_without_a_savepoint_is_named(log: Ledger) -> None:
    async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
        try:
            await by_hand.opened(event, connection)
        except IntegrityError:
            pass

    log.append([("a", Opened(owner="ada")), ("b", Opened(owner="ada")), ("c", Opened(owner="carl"))])
    async with changed(log, bound_with(opened, by_hand.added, by_hand.closed)).working(options=QUICK):
        if log.settings.database.startswith("sqlite"):
            # There a statement that fails undoes itself alone, and the transaction goes on.
            await log.caught_up(3, LEDGER)
            return
        stopped = await failed(log)
    assert stopped.position == 1
    assert "begin_nested" in str(stopped.reason)
    assert found(where(log)) == expected(log.recorded(1))


@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_fault_of_the_connection_is_tried_again_whatever_the_handler_makes_of_it(
    log: Ledger, wrapped: bool
) -> None:
    left = 3

    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        nonlocal left
        await by_hand.added(event, connection)
        if not left or event.position < 20:
            return
        left -= 1
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
    assert left == 0
    assert found(where(log)) == expected(log.recorded(last))


async def test_a_constraint_checked_at_commit_is_bisected_to_its_event(log: Ledger) -> None:
    if not log.settings.database.startswith("postgresql"):
        pytest.skip("SQLite checks its constraints at once, unless foreign keys are deferred")
    execute(log, "alter table lines add constraint positive check (amount > 0) not valid")
    execute(
        log,
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
        stopped = await failed(log)
    assert f"position {bad} of 'a-2'" in str(stopped.reason)
    assert stopped.position == bad - 1
    assert found(where(log)) == expected(log.recorded(bad - 1))


async def test_foreign_keys_are_enforced_on_both_databases(log: Ledger) -> None:
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        values = {"position": event.position, "account_id": "nobody", "amount": event.data.amount}
        await connection.execute(insert(lines_table).values(**values))

    log.append([("a-1", Added(amount=Decimal(1)))])
    async with changed(log, bound_with(by_hand.opened, added, by_hand.closed)).working(options=QUICK):
        stopped = await failed(log)
    assert "IntegrityError" in str(stopped.reason) or "ForeignKeyViolation" in str(stopped.reason)


async def test_two_workers_and_a_lease_shorter_than_a_batch_take_every_event_once(log: Ledger) -> None:
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await by_hand.added(event, connection)
        await asyncio.sleep(0.01)

    slow = changed(log, bound_with(by_hand.opened, added, by_hand.closed))
    last = log.append(history(300))
    options = replace(QUICK, lease_s=0.2, batch_max=50)
    async with slow.working(options=options), slow.working(options=options):
        await log.caught_up(last, LEDGER, timeout_s=60)
    assert found(where(log)) == expected(log.recorded(last))


async def test_a_worker_cut_off_in_the_midst_of_a_batch_leaves_nothing_of_it(log: Ledger) -> None:
    reached = asyncio.Event()

    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await by_hand.added(event, connection)
        if event.position == 25:
            reached.set()
            await asyncio.sleep(60)

    last = log.append([("a-1", Added(amount=Decimal(1)))] * 50)
    stuck = changed(log, bound_with(by_hand.opened, added, by_hand.closed))
    async with stuck.working(options=replace(QUICK, drain_s=0.1)):
        await asyncio.wait_for(reached.wait(), 20)
    assert (await state(log)).position < 25
    assert found(where(log)) == expected(log.recorded((await state(log)).position))
    async with log.working(options=QUICK):
        await log.caught_up(last, LEDGER)
    assert found(where(log)) == expected(log.recorded(last))


async def test_values_of_every_kind_come_back_equal_through_the_declared_table(
    eventjet_nats: NatsServer, database: str
) -> None:
    values: dict[str, Any] = {
        "money": Decimal("1234567890123456.7891"),
        "any": Decimal("0.10"),
        "at": datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=timezone(timedelta(hours=2))),
        "wall": datetime(2026, 3, 1, 12, 30, 15, 123456),
        "day": date(2026, 3, 1),
        "doc": {"b": [1, 2.5, None], "a": "ü"},
        "id": UUID(int=7),
        "raw": b"\0\xff",
        "flag": True,
    }

    async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
        own: dict[str, Any] = {"position": event.position, "seen": event.recorded_at}
        await connection.execute(insert(kinds_table).values(**own, **values))
        row = (await connection.execute(select(kinds_table).where(kinds_table.c.position == event.position))).one()
        assert row._asdict() == own | values
        await connection.execute(insert(kinds_table).values(position=-event.position, seen=event.recorded_at))

    bound = bound_with(opened, tables=[kinds_table])
    made(database, bound)
    log = Ledger(Settings(servers=(eventjet_nats.url,), database=database), projections={"ledger": bound})
    log.create()
    last = log.append([("a", Opened(owner="ada"))] * 2)
    async with log.working(options=QUICK):
        await log.caught_up(last, bound)
    rows = found(where(log), tables=[kinds_table])["kinds"]
    assert len(rows) == 4
    nothing = (None,) * (len(values) - 1)  # `found` leaves ids out
    seen = {one.position: one.recorded_at for one in log.recorded(last)}
    kept = tuple(value for name, value in values.items() if name != "id")
    assert rows == [
        *[(-position, *nothing, seen[position]) for position in (2, 1)],
        *[(position, *kept, seen[position]) for position in (1, 2)],
    ]
    assert rows[2][3].utcoffset() == timedelta(0)


@pytest.mark.parametrize(
    ("column", "value"),
    [("money", Decimal("0.00005")), ("money", Decimal("1e20")), ("at", datetime(2026, 1, 1))],
)
async def test_a_value_that_sqlite_would_not_keep_exactly_is_refused(
    eventjet_nats: NatsServer, tmp_path: Path, column: str, value: Any
) -> None:
    async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
        own = {"position": event.position, "seen": event.recorded_at}
        await connection.execute(insert(kinds_table).values(**own, **{column: value}))

    bound = bound_with(opened, tables=[kinds_table])
    database = f"sqlite:///{tmp_path}/read.db"
    made(database, bound)
    log = Ledger(Settings(servers=(eventjet_nats.url,), database=database), projections={"ledger": bound})
    log.create()
    log.append([("a", Opened(owner="ada"))])
    async with log.working(options=QUICK):
        stopped = await failed(log)
    assert "position 1 of 'a': ValueError" in str(stopped.reason)


async def test_sums_that_sqlite_makes_of_text_are_refused_and_never_rounded(
    eventjet_nats: NatsServer, tmp_path: Path
) -> None:
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        own = accounts_table.c.account_id == event.aggregate_id
        by = accounts_table.c.amount + event.data.amount
        done = await connection.execute(update(accounts_table).where(own).values(amount=by))
        assert done.rowcount == 1

    database = f"sqlite:///{tmp_path}/read.db"
    made(database, LEDGER)
    bound = bound_with(by_hand.opened, added)
    log = Ledger(Settings(servers=(eventjet_nats.url,), database=database), projections={"ledger": bound})
    log.create()
    amounts = [Decimal("0.11"), Decimal("0.22"), Decimal("0.07")]
    log.append([("a", Opened(owner="ada")), *[("a", Added(amount=amount)) for amount in amounts]])
    async with log.working(options=QUICK):
        stopped = await failed(log)
    assert "position 4 of 'a': IntegrityError: CHECK constraint failed" in str(stopped.reason)
    assert found(where(log))["accounts"][0][2] == Decimal("0.33")


async def test_a_table_that_already_holds_rows_is_not_built_upon(log: Ledger) -> None:
    execute(log, "insert into totals (name, n) values ('x', 1)")
    log.append(history(3))
    async with log.working(options=QUICK):
        stopped = await failed(log)
    assert "totals holds rows that no checkpoint knows of" in str(stopped.reason)


async def test_tables_are_made_with_their_keys_and_constraints(log: Ledger) -> None:
    assert [table.name for table in LEDGER.tables] == ["totals", "accounts", "lines"]
    engine = where(log).sync_engine()
    from sqlalchemy import inspect

    there = inspect(engine)
    assert [key["referred_table"] for key in there.get_foreign_keys("lines")] == ["accounts"]
    assert [one["column_names"] for one in there.get_unique_constraints("accounts")] == [["owner"]]
    assert "ix_lines_account" in {one["name"] for one in there.get_indexes("lines")}
    engine.dispose()


KILL_POINTS = ("worker.before_commit", "worker.rows_written", "worker.after_commit")


@pytest.mark.parametrize("name", KILL_POINTS)
@pytest.mark.parametrize("action", ["kill", "raise"])
async def test_a_worker_killed_around_a_commit_takes_every_event_once(log: Ledger, name: str, action: str) -> None:
    last = log.append(history(200))
    program = "tests.integration.sql_worker_process"
    environ = {**os.environ, "EVENTJET_FAILPOINT": f"{name}:{action}:3"}
    import sys

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", program, log.settings.servers[0], log.settings.database, log.name, "20", env=environ
    )
    if action == "kill":
        assert await asyncio.wait_for(process.wait(), 30) < 0
        assert (await state(log)).position > 0
        async with log.working(options=QUICK):
            await log.caught_up(last, LEDGER)
    else:
        await log.caught_up(last, LEDGER)
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)
    assert found(where(log)) == expected(log.recorded(last))
