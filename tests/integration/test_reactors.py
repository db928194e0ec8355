"""Reactors on a real server: every event at least once, in order for each aggregate, commands once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import pytest

from eventjet import App, Imported, Jet, PermanentFailure, Retry
from eventjet.codec.subjects import cursor_bucket
from eventjet.dev.nats import NatsServer
from eventjet.domain.quarantined import QUARANTINED, Quarantined
from eventjet.errors import CursorMissing, UnexpectedExit, UsageError
from eventjet.jetstream.api import stream_info
from eventjet.nats.protocol import Frame
from eventjet.settings import Settings
from eventjet.subscriptions import cursor_control
from eventjet.subscriptions.cursor_control import cursor_at, move_cursors
from eventjet.subscriptions.cursor_store import CHANGES_MAX, Cursors, QuarantinedEntry
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.status import status
from eventjet.subscriptions.supervisor import run_workers
from eventjet.subscriptions.work_status import WorkStatus
from tests.integration.reacting import (
    PATIENT_S,
    QUICK,
    Bell,
    Rung,
    Tower,
    Town,
    app_of,
    counted,
    eventually,
    until,
    working,
)

TENANT: ContextVar[str] = ContextVar("TENANT")


@pytest.fixture
def settings(eventjet_nats: NatsServer) -> Settings:
    return Settings(servers=(eventjet_nats.url,), database="postgresql://nobody@127.0.0.1:1/nothing")


@pytest.fixture
def town() -> Town:
    return Town()


@pytest.fixture
def app(town: Town) -> App:
    return app_of(town)


@pytest.fixture
async def jet(app: App, settings: Settings) -> AsyncGenerator[Jet]:
    async with app.connect(settings) as jet:
        await jet.init()
        yield jet


async def ring(jet: Jet, bell: str, *numbers: int) -> None:
    for n in numbers:
        await jet.repository(Bell).execute(bell, Bell.ring, n)


async def cursor_status(app: App, settings: Settings) -> WorkStatus:
    (work_status,) = await status(app, settings)
    return work_status


def cursors_of(jet: Jet) -> Cursors:
    assert jet.client is not None
    return Cursors(jet.client, jet.name)


async def test_every_event_leads_to_its_command_once_and_a_worker_needs_no_database(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    async def caught_up() -> bool:
        return (await cursor_status(app, settings)).lag_events == 0

    async with working(app, settings):
        for n in range(40):
            await ring(jet, f"b{n % 4}", n)
        await jet.repository(Bell).execute("b0", Bell.polish)  # the reactor does not take it
        await until(lambda: len(town.keys) == 40)
        await eventually(caught_up)  # also past the event that the reactor does not take
    assert all(town.order(f"b{k}") == list(range(k, 40, 4)) for k in range(4))
    assert sorted(n for _, n in await counted(jet)) == list(range(40))
    work_status = await cursor_status(app, settings)
    assert (work_status.kind, work_status.state, work_status.lag_events, work_status.owner) == (
        "reactor",
        "active",
        0,
        None,
    )


@pytest.mark.parametrize(
    ("start", "position", "handled"), [("new", 2, [3]), ("beginning", 0, [1, 2, 3]), (1, 1, [2, 3])]
)
async def test_a_reactor_begins_at_its_declared_start(
    settings: Settings, town: Town, start: Any, position: int, handled: list[int]
) -> None:
    app = app_of(town, start=start)
    async with replace_reactors(app).connect(settings) as old_jet:
        await old_jet.init()
        await ring(old_jet, "b", 1, 2)
    async with app.connect(settings) as jet:
        assert (await jet.init()).cursors == (("echo", position),)
        assert (await jet.init()).cursors == ()
        await ring(jet, "b", 3)
        async with working(app, settings):
            await until(lambda: 3 in town.order("b"))
    assert town.order("b") == handled


def replace_reactors(app: App) -> App:
    """Return the same app without its reactors, as it was deployed before."""
    return App(app.name, aggregates=list(app.aggregates))


async def test_a_worker_without_a_cursor_fails_with_advice(town: Town, settings: Settings) -> None:
    app = app_of(town)
    async with replace_reactors(app).connect(settings) as jet:
        await jet.init()
    with pytest.raises(CursorMissing, match="Run `eventjet init` once"):
        await run_workers(app, settings, stop=asyncio.Event(), options=QUICK)
    with pytest.raises(UsageError, match=r"has no 'eco' to work on\. Did you mean 'echo'\? It has echo\."):
        await run_workers(app, settings, ["eco"], stop=asyncio.Event(), options=QUICK)
    (work_status,) = await status(app, settings)
    assert work_status.reason == "it has no cursor: run `eventjet init`"


async def test_deps_that_cannot_be_opened_are_refused(app: App, jet: Jet, settings: Settings) -> None:
    app.deps = Town  # type: ignore[assignment,return-value]
    with pytest.raises(UsageError, match="gave a Town, which nothing can open and close"):
        await run_workers(app, settings, stop=asyncio.Event(), options=QUICK)


async def test_a_worker_stops_while_its_deps_are_being_opened_again(app: App, jet: Jet, settings: Settings) -> None:
    tries = 0

    @asynccontextmanager
    async def hang_at_the_second_try() -> AsyncGenerator[Any]:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ConnectionRefusedError("nobody at the gate")
        await asyncio.Event().wait()
        yield

    app.deps = hang_at_the_second_try
    async with asyncio.timeout(PATIENT_S), working(app, settings):
        await until(lambda: tries == 2)


@pytest.mark.parametrize(
    ("deps_s", "reason"), [(PATIENT_S, "they are not open yet"), (0.5, "that took longer than 0.5 s")]
)
async def test_deps_that_hang_while_opening_are_the_reason_of_waiting_reactors(
    app: App,
    jet: Jet,
    settings: Settings,
    town: Town,
    deps_s: float,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reason is reported while the try goes on, and when it is given up."""
    opens = asyncio.Event()

    @asynccontextmanager
    async def hang() -> AsyncGenerator[Town]:
        await opens.wait()
        yield town

    async def says_why() -> bool:
        return reason in str((await cursor_status(app, settings)).reason)

    app.deps = hang
    caplog.set_level(logging.WARNING, "eventjet")
    async with working(app, settings, replace(QUICK, lease_s=0.5, deps_s=deps_s)):
        await ring(jet, "b", 1)
        await eventually(says_why)
        assert reason in caplog.text
        opens.set()
        await until(lambda: town.heard != [])


@pytest.mark.parametrize(
    "heeds",
    [
        pytest.param(True, id="until it is cancelled"),
        pytest.param(False, id="whatever is cancelled", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("where", ["deps", "handler"])
async def test_deps_or_handlers_that_hang_while_ending_are_logged_and_do_not_delay_a_stop(
    app: App, jet: Jet, settings: Settings, town: Town, where: str, heeds: bool, caplog: pytest.LogCaptureFixture
) -> None:
    may_end = asyncio.Event()

    async def hang() -> None:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                if heeds:
                    raise

    class Gate(asyncio.Event):
        async def wait(self) -> bool:  # type: ignore[override]
            try:
                return await super().wait() if where == "deps" else await asyncio.Event().wait()
            finally:
                await hang()

    @asynccontextmanager
    async def open_deps() -> AsyncGenerator[Town]:
        try:
            yield town
        finally:
            await (hang() if where == "deps" else asyncio.sleep(0))

    app.deps = open_deps
    if where == "handler":
        town.gate = Gate()
    caplog.set_level(logging.WARNING, "eventjet")
    async with working(app, settings, replace(QUICK, drain_s=0.4)):
        await ring(jet, "b", 1)
        await until(lambda: "b" in town.begun)
    may_end.set()
    log_events = {
        (getattr(record, "event", ""), record.__dict__.get("fields", {}).get("name")) for record in caplog.records
    }
    if where == "deps":
        assert log_events == {("eventjet.given_up", f"the deps of the app {app.name!r}")}
    else:
        ends = set() if heeds else {("eventjet.given_up", "echo")}
        assert log_events == {("eventjet.handler_cut_off", "echo"), ("eventjet.cut_off", "echo"), *ends}


async def test_a_usage_error_of_the_deps_keeps_reactors_waiting_and_ends_no_worker(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    is_set = False

    @asynccontextmanager
    async def need_an_address() -> AsyncGenerator[Town]:
        if not is_set:
            raise UsageError("the address of the mail server is not set")
        yield town

    async def says_why() -> bool:
        return "the address of the mail server is not set" in str((await cursor_status(app, settings)).reason)

    app.deps = need_an_address
    async with working(app, settings):
        await ring(jet, "b", 1)
        await eventually(says_why)
        is_set = True
        await until(lambda: town.heard != [])


async def test_context_variables_that_the_deps_set_are_set_for_handlers(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    tenants: list[str] = []

    @asynccontextmanager
    async def set_tenant() -> AsyncGenerator[Town]:
        TENANT.set("shop")
        yield town

    def note_tenant(bell: str, n: int, attempt: int) -> None:
        tenants.append(TENANT.get("nobody"))

    app.deps, town.fails = set_tenant, note_tenant
    async with working(app, settings):
        await ring(jet, "b", 1)
        await until(lambda: tenants == ["shop"])
    assert TENANT.get("nobody") == "nobody"


async def test_a_stopping_worker_finishes_the_running_try_and_begins_no_other(
    jet: Jet, settings: Settings, town: Town
) -> None:
    """The worker begins no other try of the failing event, and none of the next one."""
    app = app_of(town, name=jet.name, retry=Retry(tries=5, first_s=0.01))
    town.fails = lambda bell, n, attempt: ValueError("again")
    town.gate.clear()
    await ring(jet, "b", 1, 2)
    stop = asyncio.Event()
    worker = asyncio.ensure_future(run_workers(app, settings, stop=stop, options=QUICK))
    await until(lambda: "b" in town.begun)
    stop.set()
    town.gate.set()
    await asyncio.wait_for(worker, PATIENT_S)
    assert [(n, attempt) for _, n, _, attempt in town.heard] == [(1, 1)]
    assert (await cursors_of(jet).read("echo")).cursor.position == 0


async def test_a_stopping_worker_does_not_wait_for_the_next_try(
    jet: Jet, settings: Settings, town: Town, caplog: pytest.LogCaptureFixture
) -> None:
    app = app_of(town, name=jet.name, retry=Retry(tries=5, first_s=60.0, most_s=60.0))
    town.fails = lambda bell, n, attempt: ValueError("again")
    caplog.set_level(logging.WARNING, "eventjet")
    async with working(app, settings):
        await ring(jet, "b", 1)
        await until(lambda: town.heard != [])
    assert [attempt for *_, attempt in town.heard] == [1]
    assert not {record.__dict__.get("event") for record in caplog.records} & {
        "eventjet.handler_cut_off",
        "eventjet.cut_off",
    }


async def test_a_handler_that_fails_is_tried_again_under_the_same_key(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    town.fails = lambda bell, n, attempt: ValueError("once") if attempt == 1 else None
    async with working(app, settings):
        await ring(jet, "b", 1, 2)
        await until(lambda: ("b", 2, 2) in {(bell, n, attempt) for bell, n, _, attempt in town.heard})
    tried = dict.fromkeys((n, attempt) for _, n, _, attempt in town.heard)
    assert list(tried) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert len(town.keys) == 2
    assert await counted(jet) == [("b", 1), ("b", 2)]


async def test_a_failing_event_is_quarantined_with_those_behind_it_and_retried_in_order(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    town.fails = lambda bell, n, attempt: ValueError(f"poison {n}") if (bell, n) == ("bad", 2) else None
    cursors = cursors_of(jet)
    async with working(app, settings):
        await ring(jet, "bad", 1, 2, 3, 4)
        await ring(jet, "good", 1, 2)
        await until(lambda: len(town.order("good")) == 2)
        await wait_quarantined(cursors, 3)
        (entry,) = await cursor_control.listed(cursors, "echo")
        assert (entry.aggregate_id, entry.blocked, entry.resolution) == ("bad", 2, "quarantined")
        assert entry.reason == "ValueError: poison 2"
        details = await cursor_control.shown(cursors, "echo", entry.position)
        assert details is not None
        assert "ValueError: poison 2" in details.traceback
        assert (await cursor_status(app, settings)).quarantined == 1
        with pytest.raises(UsageError, match="it may wait behind another one"):
            await cursor_control.retry(cursors, "echo", [entry.position + 1])
        # The retry fails, and the event is quarantined again.
        await cursor_control.retry(cursors, "echo", [entry.position])
        await wait_outcome(cursors, entry.position, "quarantined")
        town.fails = lambda bell, n, attempt: None
        await cursor_control.retry(cursors, "echo", None)
        await wait_outcome(cursors, entry.position, "retried")
        await wait_quarantined(cursors, 0)
        await ring(jet, "bad", 5)
        await until(lambda: town.order("bad") == [1, 2, 3, 4, 5])
    assert [n for bell, n in await counted(jet) if bell == "bad"] == [1, 2, 3, 4, 5]


async def test_a_dropped_event_is_skipped_and_the_events_it_blocked_are_handled(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    town.fails = lambda bell, n, attempt: ValueError("poison") if n == 1 else None
    cursors = cursors_of(jet)
    async with working(app, settings):
        await ring(jet, "b", 1, 2, 3)
        await wait_quarantined(cursors, 3)
        (entry,) = await cursor_control.listed(cursors, "echo")
        await cursor_control.drop(cursors, "echo", [entry.position])
        await wait_quarantined(cursors, 0)
    assert await counted(jet) == [("b", 2), ("b", 3)]
    (entry,) = await cursor_control.listed(cursors, "echo", resolved=True)
    assert entry.resolution == "dropped"
    assert entry.resolved_at is not None


async def test_a_quarantined_event_blocks_its_aggregate_for_the_next_worker_too(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    town.fails = lambda bell, n, attempt: ValueError("poison") if n == 1 else None
    cursors = cursors_of(jet)
    async with working(app, settings):
        await ring(jet, "b", 1)
        await wait_quarantined(cursors, 1)
    handled = len(town.heard)
    async with working(app, settings):
        await ring(jet, "b", 2)
        await wait_quarantined(cursors, 2)
    assert len(town.heard) == handled
    await cursor_control.retry(cursors, "echo", None)
    town.fails = lambda bell, n, attempt: None
    async with working(app, settings):
        await wait_quarantined(cursors, 0)
    assert await counted(jet) == [("b", 1), ("b", 2)]


async def test_an_outage_of_another_service_quarantines_nothing(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    town.fails = lambda bell, n, attempt: ConnectionError("down") if attempt < 6 else None
    async with working(app, settings):
        await ring(jet, "b", 1)
        await until(lambda: any(attempt == 6 for *_, attempt in town.heard))
    assert await cursors_of(jet).quarantined("echo", resolved=True) == []
    assert await counted(jet) == [("b", 1)]


async def test_temporary_failures_delay_no_event_of_another_aggregate(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    town.fails = lambda bell, n, attempt: None if bell == "free" else ConnectionRefusedError("the mail server is away")
    async with working(app, settings):
        for bell in (*(f"b-{n}" for n in range(40)), "free"):
            await jet.repository(Bell).execute(bell, Bell.ring, 1)
        await eventually(lambda: counted(jet))
        assert await counted(jet) == [("free", 1)]
        town.fails = lambda bell, n, attempt: None

        async def all_counted() -> bool:
            return len(await counted(jet)) == 41

        await eventually(all_counted)


async def test_a_handler_that_hangs_is_cut_off_and_counts_as_a_failed_try(settings: Settings, town: Town) -> None:
    app = app_of(town, retry=Retry(tries=2, first_s=0.01, timeout_s=0.1))
    town.gate.clear()
    async with app.connect(settings) as jet:
        await jet.init()
        async with working(app, settings):
            await ring(jet, "b", 1)
            (entry,) = await wait_quarantined(cursors_of(jet), 1)
    assert (entry.tries, entry.event.reason) == (2, "TimeoutError")


async def test_a_permanent_failure_is_quarantined_after_its_first_try(settings: Settings, town: Town) -> None:
    app = app_of(town, retry=Retry(tries=50, first_s=0.01, never=(LookupError,), passing=(KeyError,)))
    errors = {"a": PermanentFailure("no address"), "b": KeyError("gone"), "c": ValueError("once more")}
    town.fails = lambda bell, n, attempt: None if (bell, attempt) == ("c", 2) else errors[bell]
    async with app.connect(settings) as jet:
        await jet.init()
        async with working(app, settings):
            for bell in errors:
                await ring(jet, bell, 1)
            entries = await wait_quarantined(cursors_of(jet), 2)
            await eventually(lambda: counted(jet))
    assert [(entry.tries, entry.event.reason) for entry in entries] == [
        (1, "PermanentFailure: no address"),
        (1, "KeyError: 'gone'"),
    ]
    assert town.order("c") == [1]


async def test_a_reactor_with_on_error_stop_stays_failed_until_another_worker_starts(
    settings: Settings, town: Town
) -> None:
    app = app_of(town, on_error="stop")
    town.fails = lambda bell, n, attempt: ValueError("poison") if n == 2 else None
    async with app.connect(settings) as jet:
        await jet.init()
        cursors = cursors_of(jet)
        async with working(app, settings):
            await ring(jet, "b", 1, 2, 3)
            await wait_state(cursors, "failed")
            work_status = await cursor_status(app, settings)
            assert work_status.reason is not None
            assert "could not take the event at position" in work_status.reason
            assert "ValueError: poison" in work_status.reason
        town.fails = lambda bell, n, attempt: None
        async with working(app, settings):
            await until(lambda: 3 in town.order("b"))
        assert await counted(jet) == [("b", 1), ("b", 2), ("b", 3)]


async def test_a_repeated_command_is_recognised_after_more_than_a_thousand_others(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    """An aggregate with snapshots knows its newest 1,024 commands; a reaction's is searched back to its cause."""
    async with working(app, settings):
        await ring(jet, "b", 1)
        await until(lambda: town.order("b") == [1])
    towers = jet.repository(Tower)
    for n in range(1_100):
        await towers.command(f"other-{n}").execute("all", Tower.count, "other", n)
    cursors = cursors_of(jet)
    await cursor_control.set_position(cursors, await cursor_at(jet.store, jet.client, declarations_of(app)["echo"], 0))
    handled_before = len(town.heard)
    async with working(app, settings):
        await until(lambda: len(town.heard) > handled_before)
    recorded = await counted(jet)
    assert recorded.count(("b", 1)) == 1
    assert len(recorded) == 1_101


async def test_imported_events_are_not_handled(app: App, jet: Jet, settings: Settings, town: Town) -> None:
    async with working(app, settings):
        await jet.append_many([Imported(Bell, "old", Rung(n=n)) for n in range(20)], source="elsewhere")
        await ring(jet, "old", 20)
        await until(lambda: bool(town.heard))
    assert town.order("old") == [20]


async def test_a_paused_reactor_handles_no_event_until_it_is_resumed(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    cursors = cursors_of(jet)
    async with working(app, settings):
        await ring(jet, "b", 1)
        await until(lambda: town.order("b") == [1])
        (paused,) = await cursor_control.pause(cursors, ["echo"])
        assert (paused.state, paused.changed) == ("paused", True)
        (second,) = await cursor_control.pause(cursors, ["echo"])
        assert not second.changed
        await ring(jet, "b", 2)
        async with working(app, settings):  # no worker handles it
            pass
        assert (await cursor_status(app, settings)).state == "paused"
        await cursor_control.resume(cursors, ["echo"])
        await until(lambda: 2 in town.order("b"))
    with pytest.raises(UsageError, match="Nothing to resume"):
        await cursor_control.resume(cursors, ["echo"])


async def test_older_code_stands_by(settings: Settings, town: Town) -> None:
    new_app = app_of(town, revision=2)
    async with new_app.connect(settings) as jet:
        await jet.init()
        async with working(new_app, settings):
            await ring(jet, "b", 1)
            await until(lambda: town.order("b") == [1])
        old_app = app_of(town, revision=1)
        old_app.name = new_app.name
        async with working(old_app, settings):
            await ring(jet, "b", 2)
            stored = await cursors_of(jet).read("echo")
            assert (stored.cursor.owner, stored.cursor.revision) == (None, 2)
        async with working(new_app, settings):
            await until(lambda: town.order("b") == [1, 2])


async def test_a_worker_takes_over_from_a_silent_worker(app: App, jet: Jet, settings: Settings, town: Town) -> None:
    cursors = cursors_of(jet)
    stored = await cursors.read("echo")
    await cursors.write(stored, stored.cursor.taken("a dead process", 1))
    async with working(app, settings):
        await ring(jet, "b", 1)
        await until(lambda: town.order("b") == [1])


async def test_a_recreated_log_is_refused_and_no_event_is_handled_twice(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    assert jet.client is not None
    town.fails = lambda bell, n, attempt: ValueError("poison") if (bell, n) == ("a", 1) else None
    async with working(app, settings):
        await ring(jet, "b", 1, 2)
        await ring(jet, "a", 1)
        await until(lambda: town.order("b") == [1, 2])
        (entry,) = await wait_quarantined(cursors_of(jet), 1)
    config = (await jet.client.ask(stream_info(app.name))).config
    await jet.client.api(f"STREAM.DELETE.{app.name}")
    await jet.client.api(
        f"STREAM.CREATE.{app.name}", config | {"metadata": {**config["metadata"], "eventjet.log": "another"}}
    )
    async with app.connect(settings) as new_jet:
        await ring(new_jet, "b", 7, 8)
        async with working(app, settings):
            await wait_state(cursors_of(new_jet), "failed")
        work_status = await cursor_status(app, settings)
        assert work_status.state == "failed"
        assert work_status.reason is not None
        assert "is another. It cannot go on: bring the right log back" in work_status.reason
        assert town.order("b") == [1, 2]
        reactor = declarations_of(app)["echo"]
        target = await cursor_at(new_jet.store, new_jet.client, reactor, 1)
        assert await move_cursors(cursors_of(new_jet), new_jet.client, [reactor], target, new_jet.store.at) == [
            entry.position
        ]
        async with working(app, settings):
            await until(lambda: town.order("b") == [1, 2, 8])


async def test_a_cursor_keeps_one_message_in_its_bucket(app: App, jet: Jet, settings: Settings, town: Town) -> None:
    assert jet.client is not None
    async with working(app, settings):
        await ring(jet, "b", *range(20))
        await until(lambda: len(town.keys) == 20)
    state = await jet.client.ask(stream_info(f"KV_{cursor_bucket(app.name)}"))
    assert state.messages == 1


# Waiting for conditions.


async def wait_quarantined(cursors: Cursors, count: int) -> list[Any]:
    async def entries_of_the_count() -> list[list[Any]]:
        entries = await cursors.quarantined("echo")
        return [entries] if len(entries) == count else []

    return (await eventually(entries_of_the_count))[0]


async def wait_outcome(cursors: Cursors, position: int, resolution: str) -> None:
    async def has_resolution() -> bool:
        (outcome,) = await cursor_control.outcomes(cursors, "echo", [position])
        return outcome.resolution == resolution

    await eventually(has_resolution)


async def wait_state(cursors: Cursors, state: str) -> None:
    async def has_state() -> bool:
        return (await cursors.read("echo")).cursor.state == state

    await eventually(has_state)


async def test_a_worker_that_takes_over_reads_a_large_quarantine_in_a_few_requests(
    jet: Jet, app: App, town: Town, settings: Settings
) -> None:
    await ring(jet, "b-1", 1)
    cursors, total = cursors_of(jet), 3_000
    stored = await cursors.read("echo")
    for start in range(0, total, CHANGES_MAX):
        entries = [
            QuarantinedEntry(
                Quarantined(1_000 + n, "bell", f"b-{n}", "", "bell.rung", QUARANTINED, "no"),
                tries=1,
                log=stored.cursor.log,
            )
            for n in range(start, min(start + CHANGES_MAX, total))
        ]
        await cursors.write(stored, stored.cursor, entries)
    requests: list[Frame] = []
    assert jet.client is not None
    await jet.client.serve("$JS.API.STREAM.MSG.GET.*", requests.append)  # from the leader, one each
    await jet.client.serve("$JS.API.DIRECT.GET.*", requests.append)
    assert len(await cursors.quarantined("echo")) == total
    async with working(app, settings):
        await until(lambda: town.order("b-1") == [1])
    assert (await cursor_status(app, settings)).quarantined == total
    assert 0 < len(requests) < 200


def _cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


EXITS: dict[str, Any] = {
    "cancelled": asyncio.CancelledError,
    "closed": GeneratorExit,
    "exit": lambda: SystemExit(1),
    "typed": KeyboardInterrupt,
    "several": lambda: BaseExceptionGroup("several", [asyncio.CancelledError()]),
    "itself": _cancel_this_task,
}


async def test_a_base_exception_of_a_handler_is_a_failed_try(
    jet: Jet, app: App, town: Town, settings: Settings
) -> None:
    town.fails = lambda bell, n, attempt: EXITS[bell]() if bell in EXITS else None
    for bell in EXITS:
        await ring(jet, bell, 1, 2)
    await ring(jet, "sound", 1)
    async with working(app, settings):
        await until(lambda: town.order("sound") == [1])

        async def are_quarantined() -> bool:
            return len(await cursors_of(jet).quarantined("echo")) == 2 * len(EXITS)

        await eventually(are_quarantined)
    tries = [(bell, attempt) for bell, _, _, attempt in town.heard if bell in EXITS]
    assert sorted(tries) == sorted((bell, attempt) for bell in EXITS for attempt in (1, 2))
    events = [
        entry.event for entry in await cursors_of(jet).quarantined("echo") if entry.event.resolution == QUARANTINED
    ]
    assert len(events) == len(EXITS)
    assert all("not an `Exception`" in event.reason for event in events)


async def test_a_worker_ends_with_an_error_when_a_task_ends_unexpectedly(
    jet: Jet, app: App, town: Town, settings: Settings
) -> None:
    async def work() -> None:
        async with working(app, settings):
            (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "echo"]
            task.cancel()
            await asyncio.wait({task})

    with pytest.raises(UnexpectedExit, match="'echo'"):
        await work()
    await ring(jet, "b-1", 1)
    async with working(app, settings):
        await until(lambda: town.order("b-1") == [1])
