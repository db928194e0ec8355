"""Processes on a real server: steps, events they follow, deadlines, and steps that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from eventjet import App, Deadline, Jet, PermanentFailure, Retry, Step, after, aggregate, at, do, event, process
from eventjet.codec.headers import header_block
from eventjet.codec.subjects import timer_stream, timer_subject
from eventjet.commands.repository import open_repositories
from eventjet.dev.nats import NatsServer
from eventjet.domain.quarantined import QUARANTINED
from eventjet.examples.orders.goods import Payment, Shipment, Stock
from eventjet.examples.orders.orders import Order
from eventjet.examples.orders.orders import Stage as OrderStage
from eventjet.jetstream.api import last_message, stream_info
from eventjet.log import timers
from eventjet.log.timers import JetStreamTimers, TimerSet, timers_set
from eventjet.settings import Settings
from eventjet.subscriptions import cursor_control, handlers, process_waking
from eventjet.subscriptions.cursor_control import cursor_at
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.handlers import wake
from eventjet.subscriptions.process_steps import ProcessRunner
from eventjet.subscriptions.status import status
from eventjet.text import utc_text
from tests.integration.reacting import eventually, working
from tests.logs import fresh_name


@event("egg.laid")
class Laid:
    minutes: int
    until: datetime | None = None


@event("egg.boiled")
class Boiled:
    pass


@event("egg.spoiled")
class Spoiled:
    reason: str


@event("pot.used")
class Used:
    egg: str


class PotBroken(Exception):
    """The pot is broken."""


@aggregate("pot")
class Pot:
    used: int = 0

    def use(self, egg: str) -> Used:
        if egg.startswith("hard"):
            raise PotBroken(egg)
        if egg.startswith("no pot"):
            raise PermanentFailure("there is no pot")
        return Used(egg=egg)

    def evolve(self, event: Used) -> Pot:
        return replace(self, used=self.used + 1)


@process("egg", snapshot_every=2)
class Egg:
    """An egg that boils in a pot after a number of minutes, which tests count as seconds."""

    laid: Laid | None = None
    ended: str = ""

    def lay(self, name: str, minutes: int, until: datetime | None = None) -> Laid:
        return Laid(minutes=minutes, until=until)

    def take(self) -> Boiled:
        return Boiled()

    def boil(self) -> Boiled | None:
        return None if self.laid is not None and self.laid.minutes == 99 else Boiled()

    def spoil(self, reason: str) -> Spoiled:
        return Spoiled(reason=reason)

    def step(self) -> Step[Egg, Boiled] | None:
        if self.laid is None or self.ended:
            return None
        if self.laid.minutes == 0:
            return do(Pot, "p", Pot.use, "soft").then(Egg.boil)
        if self.laid.minutes == 99:
            return do(Pot, "p", Pot.use, "never").then(Egg.boil)
        if self.laid.minutes == 77:
            return do(Pot, "p", Pot.use, "hard").then(Egg.boil)
        if self.laid.minutes == 66:
            return do(Pot, "p", Pot.use, "no pot").then(Egg.boil)
        return None

    def deadline(self) -> list[Deadline[Egg, Boiled | Spoiled]]:
        if self.laid is None or self.ended:
            return []
        deadlines: list[Deadline[Egg, Boiled | Spoiled]] = [after(timedelta(seconds=self.laid.minutes), Egg.take)]
        if self.laid.until is not None:
            deadlines.append(at(self.laid.until, Egg.spoil, "too late"))
        return deadlines

    def evolve(self, event: Laid | Boiled | Spoiled) -> Egg:
        match event:
            case Laid():
                return replace(self, laid=event)
            case Boiled():
                return replace(self, ended="boiled")
            case Spoiled(reason=reason):
                return replace(self, ended=reason)


@pytest.fixture
def settings(eventjet_nats: NatsServer) -> Settings:
    return Settings(servers=(eventjet_nats.url,))


@pytest.fixture
def kitchen() -> App:
    return App(fresh_name(), aggregates=[Pot], processes=[Egg])


@pytest.fixture
async def jet(kitchen: App, settings: Settings) -> AsyncGenerator[Jet]:
    async with kitchen.connect(settings) as jet:
        await jet.init()
        yield jet


async def wait_ended(jet: Jet, *ids: str) -> list[str]:
    """Wait until these eggs have ended, and return how."""
    eggs = jet.repository(Egg)
    states = dict.fromkeys(ids, "")

    async def all_ended() -> bool:
        for egg_id in ids:
            states[egg_id] = (await eggs.load(egg_id)).ended
        return all(states.values())

    await eventually(all_ended)
    return [states[egg_id] for egg_id in ids]


async def test_an_order_takes_its_payment_and_shipment_once_although_they_are_handled_twice(settings: Settings) -> None:
    shop = App(fresh_name(), aggregates=[Stock, Payment, Shipment], processes=[Order])
    async with shop.connect(settings) as jet:
        await jet.init()
        orders = jet.repository(Order)
        await jet.repository(Stock).execute("nails", Stock.receive, 19)
        async with working(shop, settings):
            for n in range(3):
                await orders.execute(f"o{n}", Order.place, f"o{n}", "nails", 2, Decimal(9))
            await stages(jet, OrderStage.UNPAID, "o0", "o1", "o2")
            for n in range(2):
                await jet.repository(Payment).execute(f"p{n}", Payment.capture, f"o{n}", Decimal(9))
            await jet.repository(Payment).execute("p2", Payment.decline, "o2", "no funds")
            await stages(jet, OrderStage.ENDED, "o2")
            await stages(jet, OrderStage.UNDER_WAY, "o0", "o1")
            await jet.repository(Shipment).execute("o0", Shipment.deliver)
            await stages(jet, OrderStage.ENDED, "o0")
        # Every event is handled again, without an effect.
        assert jet.client is not None
        history = {n: await orders.history(f"o{n}") for n in range(3)}
        cursors = Cursors(jet.client, jet.name)
        stored = await cursors.read("order")
        await cursors.write(stored, stored.cursor.set_to(stored.cursor.log, 0, ""))
        async with working(shop, settings):
            await eventually(lambda: caught_up(shop, settings))
        assert {n: await orders.history(f"o{n}") for n in range(3)} == history
        assert (await jet.repository(Stock).load("nails")).left == 15


async def stages(jet: Jet, stage: OrderStage, *ids: str) -> None:
    async def are_in_stage() -> bool:
        return all([(await jet.repository(Order).load(order_id)).stage is stage for order_id in ids])

    await eventually(are_in_stage)


async def caught_up(app: App, settings: Settings) -> bool:
    return not (await status(app, settings))[0].lag_events


async def egg_timers(jet: Jet) -> list[TimerSet]:
    """Return the timers that are set."""
    assert jet.client is not None
    return await timers_set(jet.client, jet.name, "egg")


async def test_deadlines_come_due_once_never_early_and_the_earliest_first(
    kitchen: App, jet: Jet, settings: Settings
) -> None:
    eggs = jet.repository(Egg)
    soon = datetime.now(UTC) + timedelta(seconds=1)
    async with working(kitchen, settings):
        await eggs.execute("a", Egg.lay, "a", 1)
        await eggs.execute("b", Egg.lay, "b", 3_600, soon)
        await eggs.execute("c", Egg.lay, "c", 0)
        assert await wait_ended(jet, "a", "b", "c") == ["boiled", "too late", "boiled"]
    first, last = await eggs.history("a")
    assert last.recorded_at - first.recorded_at >= timedelta(seconds=1)
    assert (await eggs.history("b"))[-1].recorded_at >= soon
    assert [len(await eggs.history(egg_id)) for egg_id in ("a", "b", "c")] == [2, 2, 2]
    assert (await jet.repository(Pot).load("p")).used == 1


async def test_a_timer_exists_while_its_process_waits(kitchen: App, jet: Jet, settings: Settings) -> None:
    assert jet.client is not None
    client = jet.client
    eggs = jet.repository(Egg)
    async with working(kitchen, settings):
        await eggs.execute("a", Egg.lay, "a", 3_600)
        (timer,) = await eventually(lambda: egg_timers(jet))
        assert timer.process_id == "a"
        await eggs.execute("a", Egg.take)

        async def is_gone() -> bool:
            return not await egg_timers(jet)

        await eventually(is_gone)
    assert (await client.ask(stream_info(timer_stream(jet.name)))).messages == 0


async def test_a_deadline_beyond_the_servers_calendar_is_set_to_its_last_date(
    kitchen: App, jet: Jet, settings: Settings
) -> None:
    assert jet.client is not None
    eggs = jet.repository(Egg)
    async with working(kitchen, settings):
        await eggs.execute("a", Egg.lay, "a", 10**12)
        pending = await eventually(lambda: egg_timers(jet))
    assert timedelta(days=365 * 99) < pending[0].at - datetime.now(UTC) < timedelta(days=365 * 101)
    assert len(await eggs.history("a")) == 1


async def test_a_deadline_from_before_the_servers_calendar_is_due_at_once(
    kitchen: App, jet: Jet, settings: Settings
) -> None:
    eggs = jet.repository(Egg)
    async with working(kitchen, settings):
        await eggs.execute("delay", Egg.lay, "delay", -6 * 10**10)
        for name, year in (("first", 1), ("early", 1500), ("past", 1971)):
            await eggs.execute(name, Egg.lay, name, 10**6, datetime(year, 1, 1, tzinfo=UTC))
            assert await wait_ended(jet, name) == ["too late"]
        assert await wait_ended(jet, "delay") == ["boiled"]


async def test_lost_timers_are_set_again_by_waking_the_process(kitchen: App, jet: Jet, settings: Settings) -> None:
    """The worker's cursor is past the event, so only the timer wakes the process."""
    assert jet.client is not None
    await jet.repository(Egg).execute("a", Egg.lay, "a", 1)
    cursors = Cursors(jet.client, jet.name)
    cursor = await cursor_at(jet.store, jet.client, declarations_of(kitchen)["egg"], 1)
    await cursor_control.set_position(cursors, cursor)
    async with open_repositories(kitchen, settings) as (repositories, client):
        (process,) = kitchen.processes.items()
        await wake(ProcessRunner(repositories, *process), JetStreamTimers(client, jet.name), "a")
    async with working(kitchen, settings):
        assert await wait_ended(jet, "a") == ["boiled"]


@pytest.mark.parametrize("by", ["the worker", "process sync"])
async def test_a_timer_that_the_server_does_not_fire_is_set_again(
    kitchen: App, jet: Jet, settings: Settings, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """nats-server 2.15.1 leaves such a timer when its stream is scaled at its time: stored, and never fired."""
    assert jet.client is not None
    await jet.repository(Egg).execute("a", Egg.lay, "a", 1)
    await jet.repository(Egg).execute("b", Egg.lay, "b", 3_600)
    cursor = await cursor_at(jet.store, jet.client, declarations_of(kitchen)["egg"], 2)
    await cursor_control.set_position(Cursors(jet.client, jet.name), cursor)
    (laid,) = await jet.repository(Egg).history("a")
    lost = [("Ej-Version", "1"), ("Ej-At", utc_text(laid.recorded_at + timedelta(seconds=1)))]
    later = [("Ej-Version", "1"), ("Ej-At", utc_text(laid.recorded_at + timedelta(seconds=3_600)))]
    for name, headers in (("a", lost), ("b", later)):  # without a schedule
        await jet.client.request(timer_subject(jet.name, "egg", name), b"", header_block(headers))
    monkeypatch.setattr(timers, "_LATE_S", 2.0)
    if by == "the worker":
        monkeypatch.setattr(process_waking, "_LATE_LOOK_S", 0.2)
    else:

        async def sync() -> bool:
            async with open_repositories(kitchen, settings) as (repositories, client):
                (process,) = kitchen.processes.items()
                await wake(ProcessRunner(repositories, *process), JetStreamTimers(client, jet.name), "a")
            return [timer.process_id for timer in await egg_timers(jet)] == ["b"]

        await eventually(sync)
    async with working(kitchen, settings):
        assert await wait_ended(jet, "a") == ["boiled"]
    (timer,) = await egg_timers(jet)
    record = await jet.client.ask(last_message(timer_stream(jet.name), timer_subject(jet.name, "egg", "b")))
    assert timer.process_id == "b"
    assert record is not None
    assert record[0] == 2  # not touched


async def test_a_timer_of_an_older_state_does_not_replace_a_newer_one(jet: Jet) -> None:
    assert jet.client is not None
    now = datetime.now(UTC)
    first, second = JetStreamTimers(jet.client, jet.name), JetStreamTimers(jet.client, jet.name)
    await first.set("egg", "a", 3, now + timedelta(hours=3))
    await second.set("egg", "a", 2, now + timedelta(hours=2))
    await second.cancel("egg", "a", 2)
    (timer,) = await timers_set(jet.client, jet.name, "egg")
    assert timer.at == now + timedelta(hours=3)
    await second.set("egg", "a", 4, now + timedelta(hours=4))
    await first.set("egg", "a", 3, now + timedelta(hours=3))
    await first.cancel("egg", "a", 3)
    (timer,) = await timers_set(jet.client, jet.name, "egg")
    assert timer.at == now + timedelta(hours=4)


async def test_a_failing_step_is_quarantined_and_succeeds_in_a_later_retry(
    kitchen: App, jet: Jet, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert jet.client is not None
    cursors = Cursors(jet.client, jet.name)
    monkeypatch.setattr(handlers, "Retry", lambda: Retry(tries=2, first_s=0.01))
    async with working(kitchen, settings):
        await jet.repository(Egg).execute("a", Egg.lay, "a", 99)
        await jet.repository(Egg).execute("b", Egg.lay, "b", 77)
        await jet.repository(Egg).execute("c", Egg.lay, "c", 66)

        async def all_three() -> bool:
            return len(await cursors.quarantined("egg")) == 3

        await eventually(all_three)
        reasons = {entry.event.aggregate_id: entry.event.reason for entry in await cursors.quarantined("egg")}
        assert "recorded nothing of its own, so it would be done for ever" in reasons["a"]
        tries = {entry.event.aggregate_id: entry.tries for entry in await cursors.quarantined("egg")}
        assert tries == {"a": 1, "b": 2, "c": 1}  # a permanent failure is not tried again
        assert reasons["c"] == "PermanentFailure: there is no pot"
        assert reasons["b"] == "PotBroken: hard"
        monkeypatch.setattr(Pot, "use", lambda self, egg: Used(egg=egg))
        (entry,) = [entry for entry in await cursor_control.listed(cursors, "egg") if entry.aggregate_id == "b"]
        await cursor_control.retry(cursors, "egg", [entry.position])
        assert await wait_ended(jet, "b") == ["boiled"]
    quarantined = [(entry.event.aggregate_id, entry.event.resolution) for entry in await cursors.quarantined("egg")]
    assert quarantined == [("a", QUARANTINED), ("c", QUARANTINED)]
    assert (await jet.repository(Pot).load("p")).used == 1


async def test_concurrent_runners_take_each_step_of_a_process_once(kitchen: App, jet: Jet, settings: Settings) -> None:
    """Two runners take the same steps at once: each step is taken once."""
    eggs = jet.repository(Egg)
    for n in range(10):
        await eggs.execute(f"e{n}", Egg.lay, f"e{n}", 0)
    (process,) = kitchen.processes.items()
    async with (
        open_repositories(kitchen, settings) as (first, _),
        open_repositories(kitchen, settings) as (second, _),
    ):
        runners = [ProcessRunner(first, *process), ProcessRunner(second, *process)]
        await asyncio.gather(*(runner.advance(f"e{n}") for n in range(10) for runner in runners))
        assert sum(runner.steps for runner in runners) == 10
    assert (await jet.repository(Pot).load("p")).used == 10
