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
        found = read(connection, "balances", 1)
    assert found is not None
    return found


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
        Movement(one.position, one.aggregate_id, one.data.amount) for one in events if isinstance(one.data, Added)
    ]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_batches_of_any_size_give_identical_rows_and_stop_at_the_same_event(ledger: Ledger, size: int) -> None:
    ledger.append(history(150, accounts=10))
    bad = ledger.append([("a-1", Added(amount=Decimal("0.005")))])
    ledger.append(history(20))
    async with ledger.working("balances", options=replace(QUICK, batch_max=size)):
        await eventually(lambda: is_failed(ledger), "the projection to fail")
    found = await ledger.status()
    before = ledger.recorded(bad - 1)
    assert rows(ledger) == folded(before)
    assert max(one.position for one in before if not isinstance(one.data, Noted)) <= found.position < bad
    assert f"position {bad} of 'a-1': balances.amount cannot hold Decimal" in str(found.reason)


async def test_a_fault_stops_one_projection_and_the_other_goes_on(ledger: Ledger) -> None:
    ledger.append([("a-1", Opened(owner="x" * 21))])
    last = ledger.append([("a-1", Added(amount=Decimal(1)))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last, MOVEMENTS)
        await eventually(lambda: is_failed(ledger), "the projection to fail")
    assert [one.state for one in await status(ledger, ledger.settings)] == ["failed", "active"]


async def test_a_stopped_projection_is_tried_by_every_worker_once(ledger: Ledger) -> None:
    last = ledger.append([("a-1", Opened(owner="x" * 21))])
    mended = replace(BALANCES, declared=replace(BALANCES.declared, fold=lambda row, event: row))  # type: ignore[arg-type]
    newer = Ledger(ledger.settings, ledger.name, projections={"balances": mended})
    async with ledger.working("balances", options=QUICK):
        await eventually(lambda: is_failed(ledger), "the projection to fail")
        epoch = await asyncio.to_thread(epoch_of, ledger)
        async with ledger.working("balances", options=QUICK):
            await eventually(lambda: is_past_epoch(ledger, epoch), "the second worker to try")
            await eventually(lambda: is_failed(ledger), "the projection to fail again")
            await eventually(lambda: is_free(ledger), "the lease to be let go")
            async with newer.working(options=replace(QUICK, lease_s=30.0)):
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
    found = await ledger.status()
    assert found.position == 1
    assert reason in str(found.reason)


async def test_a_newer_schema_is_left_to_a_newer_deploy(ledger: Ledger) -> None:
    ledger.append([("a-1", Opened(owner="ada"))])
    ledger.append_raw([("a-1", block("ledger.added", schema=2), b"{}")])

    async def waits() -> bool:
        return (await ledger.status()).reason is not None

    async with ledger.working("balances", options=replace(QUICK, backoff_s=(0.1, 60.0))):
        await eventually(waits, "a reason")
    found = await ledger.status()
    assert found.state in ("building", "active")
    assert found.owner is None
    assert "schema 2" in str(found.reason)


async def test_a_log_that_is_not_the_one_it_was_made_from_stops_the_projection(ledger: Ledger) -> None:
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


async def test_a_new_revision_does_not_build_upon_the_old_ones_rows(ledger: Ledger) -> None:
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
    shown = {(one.name, one.revision): one.declared for one in await status(newer, newer.settings)}
    assert shown == {("balances", 1): False, ("balances", 2): True, ("movements", 1): False}


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


async def test_a_worker_that_a_rebuild_deposed_goes_on_by_itself_over_the_new_table(ledger: Ledger) -> None:
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


async def test_a_table_that_already_holds_rows_is_not_built_upon(ledger: Ledger) -> None:
    ledger.execute("insert into balances (account_id, amount, events, last) values ('x', '1.00', 1, 1)")
    ledger.append(history(3))
    async with ledger.working("balances", options=QUICK):
        await eventually(lambda: is_failed(ledger), "the projection to fail")
    assert "holds rows that no checkpoint knows of" in str((await ledger.status()).reason)


async def test_a_complaint_of_the_database_names_its_event(ledger: Ledger) -> None:
    rule = "create unique index one_owner on balances (owner)"
    ledger.execute(rule)
    ledger.append([(f"a-{number}", Opened(owner=f"o-{number}")) for number in range(100)])
    bad = ledger.append([("a-7", Opened(owner="o-9"))])
    ledger.append([(f"b-{number}", Opened(owner=f"p-{number}")) for number in range(100)])
    async with ledger.working("balances", options=QUICK):
        await eventually(lambda: is_failed(ledger), "the projection to fail")
    found = await ledger.status()
    assert f"position {bad} of 'a-7'" in str(found.reason)
    assert found.position == bad - 1
    assert rows(ledger) == folded(ledger.recorded(bad - 1))


async def test_status_tells_state_position_and_lag(ledger: Ledger) -> None:
    last = ledger.append(history(30))
    before = await ledger.status()
    assert (before.state, before.position, before.lag_events, before.owner) == ("new", 0, 30, None)
    assert before.lag_s is not None
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)

        async def is_active() -> bool:
            return (await ledger.status()).state == "active"

        await eventually(is_active, "the projection to be active")
        now = await ledger.status()
        assert (now.position, now.log_position, now.lag_events, now.lag_s) == (30, 30, 0, 0.0)
        assert now.owner is not None
        assert now.declared
    assert (await ledger.status()).owner is None


async def test_a_server_that_falls_silent_midway_does_not_make_a_projection_active(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database_with(database, BALANCES, MOVEMENTS)
    write = Session.write

    async def slowly(session: Session, *call: Any, **named: Any) -> Any:
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
        monkeypatch.setattr(Session, "write", slowly)
        async with ledger.working("balances", options=replace(QUICK, batch_max=20)):
            await eventually(is_under_way, "progress")
            server.pause()
            try:
                await eventually(is_idle, "what had been sent to be written")
                found = checkpoint_of(ledger)
                assert found.position < last
                assert found.state == "building"
            finally:
                server.resume()
            monkeypatch.undo()
            await ledger.caught_up(last)
            await eventually(is_active, "the projection to be active")


async def test_what_is_missing_is_said_in_one_paragraph(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no 'nope' to work on. It has balances, movements"):
        async with ledger.working("nope"):
            pass
    other = Ledger(replace(ledger.settings, database=f"sqlite:///{tmp_path}/empty.db"), name=ledger.name)
    with pytest.raises(Unreachable, match=r"eventjet's tables are not in it. Run `eventjet init`"):
        async with other.working():
            pass
    with pytest.raises(Unreachable, match=r"eventjet's tables are not in it. Run `eventjet init`"):
        await other.caught_up(1)
    with pytest.raises(Unreachable, match=r"eventjet's tables are not in it. Run `eventjet init`"):
        await status(other, other.settings)
    with pytest.raises(Unreachable, match=r"it does not exist. Run `eventjet init`"):
        async with Ledger(ledger.settings).working():
            pass
    gone = replace(ledger.settings, database="postgresql://ada:s3cret@127.0.0.1:1/x?password=s3cret")
    with pytest.raises(Unreachable) as raised:
        await status(ledger, gone)
    assert "s3cret" not in str(raised.value)
    assert "127.0.0.1" in str(raised.value)


async def test_an_unread_catalog_is_not_needed_for_events_nobody_takes(ledger: Ledger) -> None:
    last = ledger.append(history(40))
    ledger.catalog = Catalog([Opened, Added], retired=["ledger.noted", "ledger.closed"])
    ledger.projections = {"movements": MOVEMENTS}
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last, MOVEMENTS)


async def test_a_worker_says_at_its_start_what_this_release_cannot_read(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.append(history(20))
    ledger.append_raw([("b-1", block("ledger.opened", schema=9), b"{}")])
    async with ledger.working():
        assert "'ledger.opened' schema 9, which this application does not declare" in caplog.text
        assert "so a newer release recorded the event. Deploy that release" in caplog.text
