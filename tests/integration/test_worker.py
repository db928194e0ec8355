"""A worker keeps read models equal to the fold of the log, on both databases."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eventjet.codec.catalog import Catalog
from eventjet.dev.nats import NatsServer
from eventjet.domain.recorded import Recorded
from eventjet.errors import Unreachable, UsageError
from eventjet.projections.resolve import ResolvedProjection
from eventjet.settings import Settings
from eventjet.sql.checkpoint import Checkpoint, read
from eventjet.subscriptions.context import Session, WorkerOptions
from eventjet.subscriptions.status import status
from tests.integration.ledger_log import Ledger, eventually, history
from tests.integration.projecting import (
    BALANCES,
    MOVEMENTS,
    Added,
    Balance,
    Movement,
    Noted,
    Opened,
    database_with,
    folded,
    rows_of,
)
from tests.logs import block
from tests.tables import reading

QUICK = WorkerOptions(lease_s=1.5, poll_s=0.1)


def rows(ledger: Ledger, resolved: ResolvedProjection = BALANCES) -> list[Any]:
    with reading(ledger.settings.database) as connection:
        return rows_of(connection, resolved)


async def is_failed(ledger: Ledger) -> bool:
    return (await ledger.status()).state == "failed"


async def is_free(ledger: Ledger) -> bool:
    return (await ledger.status()).owner is None


def checkpoint_of(ledger: Ledger) -> Checkpoint:
    with reading(ledger.settings.database) as connection:
        checkpoint = read(connection, "balances", 1)
    assert checkpoint is not None
    return checkpoint


def epoch_of(ledger: Ledger) -> int:
    return checkpoint_of(ledger).epoch


def position_of(ledger: Ledger) -> int:
    return checkpoint_of(ledger).position


async def is_past_epoch(ledger: Ledger, epoch: int) -> bool:
    return await asyncio.to_thread(epoch_of, ledger) > epoch


async def test_rows_equal_the_fold_of_the_log_when_caught_up_and_while_it_grows(ledger: Ledger) -> None:
    last = ledger.append(history(3_000))
    async with ledger.working():
        await ledger.caught_up(last)
        assert rows(ledger) == folded(ledger.recorded(last))
        last = ledger.append(history(500, seed=8))
        await ledger.caught_up(last)
        await ledger.caught_up(last, MOVEMENTS)
    events = ledger.recorded(last)
    assert rows(ledger) == folded(events)
    assert rows(ledger, MOVEMENTS) == [
        Movement(event.position, event.aggregate_id, event.data.amount)
        for event in events
        if isinstance(event.data, Added)
    ]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_batches_of_any_size_give_identical_rows_and_stop_at_the_same_event(ledger: Ledger, size: int) -> None:
    ledger.append(history(150, accounts=10))
    bad = ledger.append([("a-1", Added(amount=Decimal("0.005")))])
    ledger.append(history(20))
    async with ledger.working("balances", options=replace(QUICK, batch_max=size)):
        await eventually(lambda: is_failed(ledger), "the projection to fail")
    work_status = await ledger.status()
    events_before = ledger.recorded(bad - 1)
    assert rows(ledger) == folded(events_before)
    assert (
        max(event.position for event in events_before if not isinstance(event.data, Noted))
        <= work_status.position
        < bad
    )
    assert f"position {bad} of 'a-1': balances.amount cannot hold Decimal" in str(work_status.reason)


async def test_a_failing_event_stops_its_projection_and_no_other(ledger: Ledger) -> None:
    ledger.append([("a-1", Opened(owner="x" * 21))])
    last = ledger.append([("a-1", Added(amount=Decimal(1)))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last, MOVEMENTS)
        await eventually(lambda: is_failed(ledger), "the projection to fail")
    assert [work_status.state for work_status in await status(ledger, ledger.settings)] == ["failed", "active"]


async def test_every_new_worker_tries_a_failed_projection_once(ledger: Ledger) -> None:
    last = ledger.append([("a-1", Opened(owner="x" * 21))])
    mended = replace(BALANCES, declared=replace(BALANCES.declared, fold=lambda row, event: row))  # type: ignore[arg-type]
    newer = Ledger(ledger.settings, ledger.name, projections={"balances": mended})
    options = replace(QUICK, lease_s=30.0)  # so that no slow session loses its lease and takes over again
    async with ledger.working("balances", options=options):
        await eventually(lambda: is_failed(ledger), "the projection to fail")
        epoch = await asyncio.to_thread(epoch_of, ledger)
        async with ledger.working("balances", options=options):
            await eventually(lambda: is_past_epoch(ledger, epoch), "the second worker to try")
            await eventually(lambda: is_failed(ledger), "the projection to fail again")
            await eventually(lambda: is_free(ledger), "the lease to be let go")
            async with newer.working(options=options):
                await ledger.caught_up(last)
                assert await asyncio.to_thread(epoch_of, ledger) <= epoch + 3
    assert (await ledger.status()).reason is None


@pytest.mark.parametrize(
    ("headers", "body", "reason"),
    [
        (block("ledger.added"), b"{", "cannot be decoded"),
        (block("ledger.added"), b'{"amount":1.5}', "cannot be decoded"),
        (block("ledger.stranger"), b"{}", "does not declare"),
        (b"NATS/1.0\r\nNats-Msg-Id: x\r\n\r\n", b"{}", "lacks Ej-Type"),
        (block("ledger.added", Ej_Recorded_At="0001-01-01T00:00:00+23:59"), b"{}", "cannot be decoded"),
        (block("ledger.added", Ej_Command="c")[:-4], b'{"amount":"1"}', "headers do not end"),
    ],
    ids=["bad JSON", "a number for a Decimal", "an unknown type", "no headers", "a time before all", "headers cut off"],
)
async def test_an_event_that_cannot_be_read_stops_the_projection_before_it(
    ledger: Ledger, headers: bytes, body: bytes, reason: str
) -> None:
    ledger.append([("a-1", Opened(owner="ada"))])
    ledger.append_raw([("a-1", headers, body)])
    async with ledger.working("balances", options=QUICK):
        await eventually(lambda: is_failed(ledger), "the projection to fail")
    work_status = await ledger.status()
    assert work_status.position == 1
    assert reason in str(work_status.reason)


async def test_a_projection_waits_for_a_newer_deploy_at_a_newer_schema(ledger: Ledger) -> None:
    ledger.append([("a-1", Opened(owner="ada"))])
    ledger.append_raw([("a-1", block("ledger.added", schema=2), b"{}")])

    async def waits() -> bool:
        return (await ledger.status()).reason is not None

    async with ledger.working("balances", options=replace(QUICK, backoff_s=(0.1, 60.0))):
        await eventually(waits, "a reason")
    work_status = await ledger.status()
    assert work_status.state in ("building", "active")
    assert work_status.owner is None
    assert "schema 2" in str(work_status.reason)


async def test_another_log_than_its_own_stops_a_projection(ledger: Ledger) -> None:
    last = ledger.append(history(20))
    async with ledger.working("balances", options=QUICK):
        await ledger.caught_up(last)
        ledger.delete()
        ledger.create()
        ledger.append(history(50))

        await eventually(lambda: is_failed(ledger), "the projection to fail")
    assert "was made from the log" in str((await ledger.status()).reason)


async def test_an_empty_read_model_may_begin_with_another_log(ledger: Ledger) -> None:
    async with ledger.working("balances", options=QUICK):
        pass
    ledger.delete()
    ledger.create()
    last = ledger.append(history(20))
    async with ledger.working("balances", options=QUICK):
        await ledger.caught_up(last)


async def test_a_new_revision_refuses_the_rows_of_the_old_one(ledger: Ledger) -> None:
    last = ledger.append(history(20))
    async with ledger.working("balances", options=QUICK):
        await ledger.caught_up(last)
        newer = Ledger(ledger.settings, ledger.name, projections={"balances": replace(BALANCES, revision=2)})
        with pytest.raises(Unreachable, match=r"revision 1 holds 'balances'. Run `eventjet init`"):
            async with newer.working(options=QUICK):
                pass
        last = ledger.append(history(20, seed=8))
        await ledger.caught_up(last)
    assert rows(ledger) == folded(ledger.recorded(last))
    is_declared = {
        (work_status.name, work_status.revision): work_status.declared
        for work_status in await status(newer, newer.settings)
    }
    assert is_declared == {("balances", 1): False, ("balances", 2): True, ("movements", 1): False}


@pytest.mark.parametrize(("regrown", "reason"), [(5, "the log ends at position 5"), (30, "the event there is")])
async def test_a_log_restored_from_an_older_backup_stops_the_projection(
    ledger: Ledger, regrown: int, reason: str
) -> None:
    ledger.delete()
    ledger.create("the-same")
    last = ledger.append(history(20))
    async with ledger.working("balances", options=QUICK):
        await ledger.caught_up(last)
    ledger.delete()
    ledger.create("the-same")
    ledger.append(history(regrown))
    async with ledger.working("balances", options=QUICK):
        await eventually(lambda: is_failed(ledger), "the projection to fail")
    assert reason in str((await ledger.status()).reason)


async def test_a_worker_fenced_by_a_rebuild_continues_over_the_new_table(ledger: Ledger) -> None:
    last = ledger.append(history(300))
    async with ledger.working("balances", options=QUICK):
        await ledger.caught_up(last)
        ledger.execute("update eventjet_projection set generation = generation + 1, epoch = epoch + 1, owner = null")
        if ledger.settings.database.startswith("postgresql"):
            # A statement prepared by the old connection would fail now: its plan has another result.
            ledger.execute("alter table balances alter column events type bigint")
        last = ledger.append(history(300, seed=9))
        await ledger.caught_up(last)
    assert rows(ledger) == folded(ledger.recorded(last))
    assert (await ledger.status()).generation == 2


async def test_a_table_with_rows_and_no_checkpoint_is_refused(ledger: Ledger) -> None:
    ledger.execute("insert into balances (account_id, amount, events, last) values ('x', '1.00', 1, 1)")
    ledger.append(history(3))
    async with ledger.working("balances", options=QUICK):
        await eventually(lambda: is_failed(ledger), "the projection to fail")
    assert "holds rows that no checkpoint knows of" in str((await ledger.status()).reason)


async def test_an_error_of_the_database_names_its_event(ledger: Ledger) -> None:
    rule = "create unique index one_owner on balances (owner)"
    ledger.execute(rule)
    ledger.append([(f"a-{number}", Opened(owner=f"o-{number}")) for number in range(100)])
    bad = ledger.append([("a-7", Opened(owner="o-9"))])
    ledger.append([(f"b-{number}", Opened(owner=f"p-{number}")) for number in range(100)])
    async with ledger.working("balances", options=QUICK):
        await eventually(lambda: is_failed(ledger), "the projection to fail")
    work_status = await ledger.status()
    assert f"position {bad} of 'a-7'" in str(work_status.reason)
    assert work_status.position == bad - 1
    assert rows(ledger) == folded(ledger.recorded(bad - 1))


@pytest.mark.parametrize("character", ["\0", "\ud800"])
async def test_a_reason_that_a_database_cannot_store_stops_the_projection_all_the_same(
    ledger: Ledger, character: str
) -> None:
    def fold(row: Balance | None, event: Recorded[Any]) -> Balance | None:
        raise ValueError(f"no {character} here")

    failing = replace(BALANCES, declared=replace(BALANCES.declared, fold=fold))  # type: ignore[arg-type]
    ledger.append([("a-1", Opened(owner="ada"))])
    async with replace(ledger, projections={"balances": failing}).working(options=QUICK):
        await eventually(lambda: is_failed(ledger), "the projection to fail")
    escaped = character.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    assert f"ValueError: no {escaped} here" in str((await ledger.status()).reason)


async def test_status_has_state_position_and_lag(ledger: Ledger) -> None:
    last = ledger.append(history(30))
    new_status = await ledger.status()
    assert (new_status.state, new_status.position, new_status.lag_events, new_status.owner) == ("new", 0, 30, None)
    assert new_status.lag_s is not None
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)

        async def is_active() -> bool:
            return (await ledger.status()).state == "active"

        await eventually(is_active, "the projection to be active")
        active_status = await ledger.status()
        assert (active_status.position, active_status.log_position, active_status.lag_events, active_status.lag_s) == (
            30,
            30,
            0,
            0.0,
        )
        assert active_status.owner is not None
        assert active_status.declared
    assert (await ledger.status()).owner is None


async def test_a_server_that_falls_silent_midway_does_not_make_a_projection_active(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database_with(database, BALANCES, MOVEMENTS)
    write = Session.write

    async def write_slowly(session: Session, *call: Any, **named: Any) -> Any:
        await asyncio.sleep(0.02)
        return await write(session, *call, **named)

    async def is_under_way() -> bool:
        return position_of(ledger) >= 100

    async def is_idle() -> bool:
        before = position_of(ledger)
        await asyncio.sleep(2 * QUICK.lease_s / 3)
        return position_of(ledger) == before

    async def is_active() -> bool:
        return (await ledger.status()).state == "active"

    with NatsServer(sync_interval="1m") as server:
        ledger = Ledger(Settings(servers=(server.url,), database=database))
        ledger.create()
        last = ledger.append(history(5_000))
        monkeypatch.setattr(Session, "write", write_slowly)
        async with ledger.working("balances", options=replace(QUICK, batch_max=20)):
            await eventually(is_under_way, "progress")
            server.pause()
            try:
                await eventually(is_idle, "what had been sent to be written")
                checkpoint = checkpoint_of(ledger)
                assert checkpoint.position < last
                assert checkpoint.state == "building"
            finally:
                server.resume()
            monkeypatch.undo()
            await ledger.caught_up(last)
            await eventually(is_active, "the projection to be active")


async def test_missing_projections_tables_and_servers_are_named(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no 'nope' to work on. It has balances, movements"):
        async with ledger.working("nope"):
            pass
    uninitialised = Ledger(replace(ledger.settings, database=f"sqlite:///{tmp_path}/empty.db"), name=ledger.name)
    with pytest.raises(Unreachable, match=r"empty.db: there is no such file. Name .*, or run `eventjet init`"):
        async with uninitialised.working():
            pass
    with pytest.raises(Unreachable, match=r"empty.db: there is no such file. Name .*, or run `eventjet init`"):
        await uninitialised.caught_up(1)
    with pytest.raises(Unreachable, match=r"empty.db: there is no such file. Name .*, or run `eventjet init`"):
        await status(uninitialised, uninitialised.settings)
    with pytest.raises(Unreachable, match=r"it does not exist. Run `eventjet init`"):
        async with Ledger(ledger.settings).working():
            pass
    unreachable = replace(ledger.settings, database="postgresql://ada:s3cret@127.0.0.1:1/x?password=s3cret")
    with pytest.raises(Unreachable) as raised:
        await status(ledger, unreachable)
    assert "s3cret" not in str(raised.value)
    assert "127.0.0.1" in str(raised.value)


async def test_events_without_a_handler_need_no_declaration(ledger: Ledger) -> None:
    last = ledger.append(history(40))
    ledger.catalog = Catalog([Opened, Added], retired=["ledger.noted", "ledger.closed"])
    ledger.projections = {"movements": MOVEMENTS}
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last, MOVEMENTS)


async def test_a_worker_logs_at_its_start_which_events_it_cannot_read(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.append(history(20))
    ledger.append_raw([("b-1", block("ledger.opened", schema=9), b"{}")])
    async with ledger.working():
        assert "'ledger.opened' schema 9, which this application does not declare" in caplog.text
        assert "so a newer release recorded the event. Deploy that release" in caplog.text
