"""`Jet.settled` waits for the outcome of a process, and reports its state after a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from eventjet import App, Deadline, Jet, NotSettled, Step, UsageError, after, aggregate, do, event, process
from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings
from eventjet.subscriptions import cursor_control
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.testing import world
from tests.integration.reacting import PATIENT_S, eventually, working
from tests.logs import fresh_name


@event("slot.taken")
class Taken:
    by: str


@aggregate("slot")
class Slot:
    by: str = ""

    def take(self, by: str) -> Taken | None:
        if by == "nobody":
            raise UsageError("nobody cannot take it")
        return None if self.by else Taken(by=by)

    def evolve(self, event: Taken) -> Slot:
        return replace(self, by=event.by)


@event("wish.made")
class Made:
    by: str
    minutes: float


@event("wish.given")
class Given:
    pass


@event("wish.expired")
class Expired:
    pass


@process("wish")
class Wish:
    """A wish takes the slot, and gives it up without a confirmation in time."""

    by: str = ""
    minutes: float = 0.0
    stage: str = "new"

    def make(self, by: str, minutes: float) -> Made:
        return Made(by=by, minutes=minutes)

    def given(self) -> Given:
        return Given()

    def expired(self) -> Expired:
        return Expired()

    def step(self) -> Step[Wish, Given] | None:
        return do(Slot, "s", Slot.take, self.by).then(Wish.given) if self.stage == "made" else None

    def deadline(self) -> Deadline[Wish, Expired] | None:
        return after(timedelta(minutes=self.minutes), Wish.expired) if self.stage == "given" else None

    def evolve(self, event: Made | Given | Expired) -> Wish:
        match event:
            case Made(by=by, minutes=minutes):
                return replace(self, by=by, minutes=minutes, stage="made")
            case Given():
                return replace(self, stage="given")
            case Expired():
                return replace(self, stage="ended")


@pytest.fixture
def settings(eventjet_nats: NatsServer) -> Settings:
    return Settings(servers=(eventjet_nats.url,), request_timeout_s=30.0)


@pytest.fixture
def clinic() -> App:
    return App(fresh_name(), aggregates=[Slot], processes=[Wish])


@pytest.fixture
async def jet(clinic: App, settings: Settings) -> AsyncGenerator[Jet]:
    async with clinic.connect(settings) as jet:
        await jet.init()
        yield jet


async def test_settled_waits_for_the_end_and_returns_the_state(clinic: App, jet: Jet, settings: Settings) -> None:
    wishes = jet.repository(Wish)
    waiting = asyncio.create_task(jet.settled(Wish, "w", timeout_s=PATIENT_S))  # it has not begun
    async with working(clinic, settings):
        await wishes.execute("w", Wish.make, "ada", 0.01)
        wish = await jet.settled(Wish, "w", until=lambda wish: wish.stage != "made", timeout_s=PATIENT_S)
        assert wish.stage in ("given", "ended")
        ended = await waiting
    assert (ended.by, ended.stage) == ("ada", "ended")
    assert await jet.settled(Wish, "w", timeout_s=0) == ended  # at once, without a worker


async def test_a_process_that_does_not_settle_is_reported_with_its_reason(
    clinic: App, jet: Jet, settings: Settings
) -> None:
    assert jet.client is not None
    wishes, cursors = jet.repository(Wish), Cursors(jet.client, jet.name)

    async def not_settled(process_id: str = "w") -> NotSettled:
        with pytest.raises(NotSettled) as caught:
            await jet.settled(Wish, process_id, timeout_s=0.01)
        return caught.value

    await wishes.execute("w", Wish.make, "ada", 60)
    error = await not_settled()
    assert (error.version, error.last_event) == (1, "wish.made")
    assert error.reason.startswith("no worker runs processes of this type")
    await cursor_control.pause(cursors, ["wish"])
    assert (await not_settled()).reason.startswith("processes of this type are paused")
    await cursor_control.resume(cursors, ["wish"])
    async with working(clinic, settings):
        await jet.settled(Wish, "w", until=lambda wish: wish.stage == "given", timeout_s=PATIENT_S)
        error = await not_settled()
        assert (error.version, error.last_event) == (2, "wish.given")
        assert error.reason.startswith("it waits for its deadline, expired, at 2")
        assert "has not begun" in str(await not_settled("other"))
        await wishes.execute("n", Wish.make, "nobody", 60)
        await eventually(lambda: cursors.quarantined("wish"))
        assert "is quarantined (nobody cannot take it)" in (await not_settled("n")).reason
    with pytest.raises(UsageError, match="Slot is not a process"):
        await jet.settled(Slot, "s")  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]


async def test_settled_works_in_memory_with_a_world(clinic: App) -> None:
    async with world(clinic, now=datetime(2030, 1, 1, tzinfo=UTC)) as test_world:
        await test_world.jet.repository(Wish).execute("w", Wish.make, "ada", 60)
        waits = "has not settled: it waits for its deadline, expired, at 2030-01-01T01:00:00Z"
        with pytest.raises(NotSettled, match=waits):
            await test_world.jet.settled(Wish, "w", timeout_s=5)
        await test_world.pass_time(timedelta(hours=1))
        assert (await test_world.jet.settled(Wish, "w")).stage == "ended"
    async with clinic.in_memory() as jet:
        await jet.repository(Wish).execute("w", Wish.make, "ada", 60)
        with pytest.raises(NotSettled, match=r"slot 's'|Slot 's': take; .* run in `eventjet.testing.world`"):
            await jet.settled(Wish, "w")
