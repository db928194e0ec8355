"""A worker whose events are folded by several processes keeps what one keeps, on both databases."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from eventjet.jetstream.client import connect
from eventjet.log.skip_markers import record_skip_marker
from eventjet.observability import logs
from eventjet.sql.locations import create_tables
from eventjet.subscriptions.context import WorkerOptions
from tests.among import SEVERAL
from tests.integration import divided
from tests.integration.divided import NEXT, OPTIONS, OWNERS, Stage, stage_of
from tests.integration.ledger_log import Ledger, eventually
from tests.integration.projecting import BALANCES, CATALOG, MOVEMENTS, Added, Movement, Opened, folded
from tests.integration.quarantined import PARKING, expected, mixed, state_of
from tests.logs import block, fresh_name


@pytest.fixture(autouse=True, params=SEVERAL)
def several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here is run with each number of fold processes."""
    monkeypatch.setattr("tests.integration.test_divided_worker.OPTIONS", replace(OPTIONS, processes=request.param))


@pytest.fixture
def stage(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with stage_of(ledger, "plain", monkeypatch) as found:
        yield found


def lines(events: list[Any]) -> list[Movement]:
    return [Movement(one.position, one.aggregate_id, one.data.amount) for one in events if isinstance(one.data, Added)]


@pytest.mark.parametrize("more", [0, pytest.param(2, marks=pytest.mark.slow)])
async def test_rows_equal_the_fold_of_the_log_and_at_its_end_it_goes_on_alone(stage: Stage, more: int) -> None:
    processes = OPTIONS.processes + more
    stage.fill()
    async with stage.ledger.working("balances", options=replace(OPTIONS, processes=processes)):
        with stage.growing():
            await stage.divided()
            pids = await asyncio.to_thread(stage.fold_processes)
            assert len(pids) in (0, processes)  # at the end of the log they may be gone
            await stage.moves_on()
        await stage.ledger.caught_up(stage.last)
        await stage.alone()
        assert stage.rows() == folded(stage.ledger.recorded(stage.last))
        times = len(stage.divisions)
        with stage.growing():
            await stage.divided(times + 1)
            await stage.moves_on()
        await stage.ledger.caught_up(stage.last)
        await stage.alone()
    assert stage.rows() == folded(stage.ledger.recorded(stage.last))
    assert stage.positions == sorted(stage.positions)
    assert stage.events(logs.FOLDED_ALONE) == []
    assert {one["processes"] for one in stage.divisions} == {processes}
    assert stage.checkpoint().epoch == 1


@pytest.mark.slow
async def test_entries_are_divided_too(stage: Stage) -> None:
    stage.fill()
    async with stage.ledger.working("movements", options=OPTIONS):
        with stage.growing(MOVEMENTS):
            await stage.divided()
            await stage.moves_on(MOVEMENTS)
        await stage.ledger.caught_up(stage.last, MOVEMENTS)
    assert stage.rows(MOVEMENTS) == lines(stage.ledger.recorded(stage.last))
    assert {one["name"] for one in stage.divisions} == {"movements"}


@pytest.mark.slow
async def test_one_projection_at_a_time_has_the_processes_and_while_the_log_grows_they_take_turns(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventjet.subscriptions.among.TURN_S", 0.2)
    stage.fill()

    async def each_had_two_turns() -> bool:
        assert len(await asyncio.to_thread(stage.fold_processes)) <= OPTIONS.processes
        names = [one["name"] for one in stage.divisions]
        return min(names.count("balances"), names.count("movements")) >= 2

    async with stage.ledger.working(options=OPTIONS):
        with stage.growing():
            await eventually(each_had_two_turns, "two turns of each")
        for resolved in (BALANCES, MOVEMENTS):
            await stage.ledger.caught_up(stage.last, resolved)
    events = stage.ledger.recorded(stage.last)
    assert stage.rows() == folded(events)
    assert stage.rows(MOVEMENTS) == lines(events)
    assert stage.checkpoint().epoch == stage.checkpoint("movements").epoch == 1


async def test_a_projection_of_another_key_stays_in_one_process_and_says_so(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stage_of(ledger, "owners", monkeypatch) as stage:
        create_tables(ledger.where.sync_engine(), [OWNERS])
        stage.fill()
        async with stage.ledger.working(options=OPTIONS):
            await stage.ledger.caught_up(stage.last, OWNERS)
        opened = [one.data.owner for one in stage.ledger.recorded(stage.last) if isinstance(one.data, Opened)]
        assert {row.owner: row.accounts for row in stage.rows(OWNERS)} == {one: opened.count(one) for one in opened}
        assert stage.divisions == []
        (said,) = stage.events(logs.NOT_DIVIDED)
        assert said == {"name": "owners", "reason": "its key is not the aggregate's id"}


async def test_a_code_file_that_was_changed_has_it_go_on_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    name = fresh_name("deployed")
    (tmp_path / f"{name}.py").write_text("OLD = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(name)
    async with stage.ledger.working("balances", options=OPTIONS):
        (tmp_path / f"{name}.py").write_text("OLD = False\n")
        stage.fill(2_000)
        with stage.growing():

            async def says_so() -> bool:
                return bool(stage.events(logs.FOLDED_ALONE))

            await eventually(says_so, "that it goes on alone")
        await stage.ledger.caught_up(stage.last)
    assert stage.rows() == folded(stage.ledger.recorded(stage.last))
    assert stage.divisions == []
    assert f"{name}.py is another file than" in stage.events(logs.FOLDED_ALONE)[0]["reason"]
    assert len(stage.events(logs.FOLDED_ALONE)) == 1


@pytest.mark.parametrize(
    ("which", "ending"),
    [
        pytest.param(1, signal.SIGKILL, id="a forked one, killed"),
        pytest.param(0, signal.SIGKILL, id="the first, killed", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, id="a forked one, stopped", marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, id="the first, stopped", marks=pytest.mark.slow),
    ],
)
async def test_a_fold_process_that_is_lost_ends_the_term_and_nothing_else(
    stage: Stage, ending: signal.Signals, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ending == signal.SIGSTOP:
        monkeypatch.setattr("eventjet.subscriptions.among.BOUND_S", 3.0)
        monkeypatch.setattr("eventjet.parallel.processes._BEGIN", 1)
    stage.fill()
    async with stage.ledger.working("balances", options=OPTIONS):
        with stage.growing():
            await stage.divided()
            await strike(stage, ending, which)
            await eventually(lambda: is_past_epoch(stage, 1), "another term")
            await stage.divided(2)
            await stage.moves_on()
        await stage.ledger.caught_up(stage.last)
    assert stage.rows() == folded(stage.ledger.recorded(stage.last))
    assert any("A fold process" in str(one["reason"]) for one in stage.events(logs.TRYING_AGAIN))
    assert stage.positions == sorted(stage.positions)


async def strike(stage: Stage, ending: signal.Signals, which: int) -> None:
    """Send the signal to one of those that fold now."""
    for _ in range(1_000):
        pids = await asyncio.to_thread(stage.fold_processes)
        if len(pids) > which and len(stage.divisions) > 0:
            os.kill(pids[which], ending)
            return
        await asyncio.sleep(0.02)
    raise AssertionError("no fold process was seen")


async def is_past_epoch(stage: Stage, epoch: int) -> bool:
    return (await asyncio.to_thread(stage.checkpoint)).epoch > epoch


async def test_another_worker_takes_the_lease_and_nothing_of_the_divided_one_lands_after(stage: Stage) -> None:
    stage.fill()
    async with stage.ledger.working("balances", options=OPTIONS):
        with stage.growing():
            await stage.divided()
            await stage.moves_on()
            before = stage.ledger.execute(
                "update eventjet_projection set epoch = epoch + 1, owner = 'host:1:other', lease_until = 4102444800 "
                "where name = 'balances'",
                "select epoch, position from eventjet_projection where name = 'balances'",
            )[0]
            await eventually(lambda: says_fenced(stage), "the worker to be fenced")
            # It stands by from here on, whatever it has folded ahead.
            await stage.alone()
            now = stage.checkpoint()
            assert (now.epoch, now.position) == tuple(before)
            assert stage.rows() == folded(stage.ledger.recorded(now.position))
            stage.ledger.execute("update eventjet_projection set lease_until = 0 where name = 'balances'")
            await stage.moves_on()
        await stage.ledger.caught_up(stage.last)
    assert stage.rows() == folded(stage.ledger.recorded(stage.last))


async def says_fenced(stage: Stage) -> bool:
    return bool(stage.events(logs.FENCED))


async def test_an_event_that_a_handler_refuses_stops_it_there_as_one_process_stops(stage: Stage) -> None:
    stage.fill()
    async with stage.ledger.working("balances", options=OPTIONS):
        with stage.growing():
            await stage.divided()
        bad = stage.ledger.append([("a-1", Added(amount=Decimal("0.005")))])
        stage.fill(seed=9)
        found = await stage.ledger.failed()
    assert f"position {bad} of 'a-1': balances.amount cannot hold Decimal" in str(found.reason)
    assert found.position < bad
    assert stage.rows() == folded(stage.ledger.recorded(bad - 1))
    await stage.alone()


@pytest.mark.slow
async def test_an_event_that_only_a_newer_deploy_knows_is_left_to_it(stage: Stage) -> None:
    stage.fill()
    async with stage.ledger.working("balances", options=replace(OPTIONS, backoff_s=(0.1, 60.0))):
        with stage.growing():
            await stage.divided()
        bad = stage.ledger.append_raw([("a-1", block("ledger.added", schema=2), b"{}")])
        stage.fill(seed=9)

        async def waits() -> bool:
            return (await stage.ledger.status()).reason is not None

        await eventually(waits, "a reason")
        found = await stage.ledger.status()
    assert found.state in ("building", "active")
    assert found.position < bad
    assert stage.rows() == folded(stage.ledger.recorded(bad - 1))


@pytest.mark.slow
async def test_a_record_that_was_declared_void_meanwhile_is_passed_over(stage: Stage) -> None:
    stage.fill()
    async with stage.ledger.working("balances", options=OPTIONS):
        with stage.growing():
            await stage.divided()
        # The fold processes know of no void, and meet the record before its void.
        bad = stage.ledger.append_raw([("a-1", block("ledger.added"), b"{")])
        client = await connect(stage.ledger.settings)
        try:
            assert await record_skip_marker(client, stage.ledger.name, bad, "garbage")
        finally:
            await client.close()
        stage.fill(seed=9)
        with stage.growing():
            await stage.moves_on()
        await stage.ledger.caught_up(stage.last)
    knowing = replace(stage.ledger, catalog=CATALOG.of_log({bad: "garbage"}))
    assert stage.rows() == folded(knowing.recorded(stage.last))
    assert stage.checkpoint().state != "failed"


@pytest.mark.slow
async def test_a_row_that_the_database_refuses_stops_it_at_its_event(stage: Stage) -> None:
    stage.ledger.execute("create unique index one_owner on balances (owner) where owner = 'twice'")
    stage.fill(200)
    async with stage.ledger.working("balances", options=OPTIONS):
        with stage.growing():
            await stage.divided()
        stage.ledger.append([("t-1", Opened(owner="twice"))])
        bad = stage.ledger.append([("t-2", Opened(owner="twice"))])
        stage.fill(seed=9)
        found = await stage.ledger.failed()
    assert f"position {bad} of 't-2'" in str(found.reason)
    assert stage.rows() == folded(stage.ledger.recorded(bad - 1))


@pytest.mark.slow
async def test_what_is_parked_and_blocked_is_what_one_process_parks(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stage_of(ledger, "parking", monkeypatch) as stage:
        stage.last = stage.ledger.append_raw(mixed(400))
        async with stage.ledger.working("balances", options=OPTIONS):
            with stage.growing():
                await stage.divided()
            stage.last = stage.ledger.append_raw(mixed(600, seed=6))
            await stage.ledger.caught_up(stage.last)
            await stage.alone()
        rows, kept = state_of(stage.ledger)
        by_hand, parked = expected(stage.ledger, stage.last)
        assert rows == by_hand
        assert {one.position: one.resolution for one in kept} == parked
        assert sum(one.resolution == "parked" for one in kept) > 10
        stage.ledger.execute("delete from balances", "delete from eventjet_quarantine")
        stage.ledger.execute("update eventjet_projection set position = 0, event_id = '', state = 'building'")
        async with stage.ledger.working("balances", options=WorkerOptions(lease_s=2.0, poll_s=0.1)):
            await stage.ledger.caught_up(stage.last)
        assert state_of(stage.ledger) == (rows, kept)


@pytest.mark.slow
async def test_a_revision_is_built_beside_by_several_processes_and_takes_over(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.fill()
    async with stage.ledger.working("balances"):
        await stage.ledger.caught_up(stage.last)
    with stage_of(stage.ledger, "next", monkeypatch) as newer:
        create_tables(newer.ledger.where.sync_engine(), [NEXT, MOVEMENTS])
        newer.last = stage.last
        async with newer.ledger.working("balances", options=OPTIONS):
            with newer.growing(NEXT):
                await newer.divided()
                await newer.moves_on(NEXT)
            await eventually(lambda: is_in_place(newer), "the revision to take over")
            await newer.ledger.caught_up(newer.last, NEXT)
        assert newer.rows(NEXT) == folded(newer.ledger.recorded(newer.last))


async def is_in_place(stage: Stage) -> bool:
    found = await asyncio.to_thread(stage.checkpoint, "balances", 2)
    return (found.state, found.location) == ("active", "")


def test_the_app_of_a_fold_process_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert divided.app is None
    assert {resolved.is_divisible for resolved in (BALANCES, MOVEMENTS, PARKING, NEXT)} == {True}
    assert not OWNERS.is_divisible
