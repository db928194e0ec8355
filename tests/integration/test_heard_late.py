"""A process handles each event once, also an event that failed first and is retried after later events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import pytest

from eventjet import App, Jet, Recorded, Refused, Retry, aggregate, event, listens, process
from eventjet.commands.repository import open_repositories
from eventjet.dev.nats import NatsServer
from eventjet.domain.quarantined import BLOCKED, QUARANTINED
from eventjet.errors import CursorFenced
from eventjet.settings import Settings
from eventjet.subscriptions import cursor_control, handlers
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.process_steps import ProcessRunner
from tests.integration.reacting import eventually, working
from tests.logs import fresh_name


@event("till.paid")
class PaidIn:
    to: str
    amount: int


@aggregate("till")
class Till:
    def pay(self, to: str, amount: int) -> PaidIn:
        return PaidIn(to=to, amount=amount)

    def evolve(self, event: PaidIn) -> Till:
        return self


@event("purse.got")
class Got:
    amount: int


class _Faults:
    """Which amounts fail now: in the correlation, or for a while in the handler."""

    of_correlation: frozenset[int] = frozenset()
    passing: frozenset[int] = frozenset()


DEAR = 100
"""An amount that a purse takes only if it is not empty."""


def purse_of(event: Recorded[PaidIn]) -> str:
    if event.data.amount in _Faults.of_correlation:
        raise KeyError(event.data.to)
    return event.data.to


@process("purse", snapshot_every=2)
class Purse:
    amounts: tuple[int, ...] = ()

    @listens(purse_of)
    def receive(self, event: Recorded[PaidIn]) -> Got | None:
        if event.data.amount in _Faults.passing:
            raise OSError("the till is out of reach")
        if event.data.amount >= DEAR and not self.amounts:
            return None
        return Got(amount=event.data.amount)

    def step(self) -> None:
        return None

    def evolve(self, event: Got) -> Purse:
        return replace(self, amounts=(*self.amounts, event.amount))


@pytest.fixture
def settings(eventjet_nats: NatsServer) -> Settings:
    return Settings.load({"servers": eventjet_nats.url, "database": "sqlite:///none.db"}, environ={})


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> App:
    monkeypatch.setattr(_Faults, "of_correlation", frozenset())
    monkeypatch.setattr(_Faults, "passing", frozenset())
    monkeypatch.setattr(handlers, "Retry", lambda: Retry(tries=1, first_s=0.01, most_s=0.05))
    return App(fresh_name(), aggregates=[Till], processes=[Purse])


@pytest.fixture
async def jet(shop: App, settings: Settings) -> AsyncGenerator[Jet]:
    async with shop.connect(settings) as jet:
        await jet.init()
        yield jet


def cursors_of(jet: Jet) -> Cursors:
    assert jet.client is not None
    return Cursors(jet.client, jet.name)


async def pay(jet: Jet, till: str, amount: int) -> int:
    return (await jet.repository(Till).execute(till, Till.pay, "p", amount)).position


async def amounts(jet: Jet) -> list[int]:
    return sorted((await jet.repository(Purse).load("p")).amounts)


async def wait_for_quarantine(jet: Jet, condition: Callable[[dict[int, str]], bool]) -> None:
    """Wait until the condition holds for the resolutions of the open entries, by position."""

    async def holds() -> bool:
        entries = await cursors_of(jet).quarantined("purse")
        return condition({entry.position: entry.event.resolution for entry in entries})

    await eventually(holds)


async def wait_for_heard(jet: Jet, *wanted: int) -> None:
    async def holds() -> bool:
        return await amounts(jet) == sorted(wanted)

    await eventually(holds)


async def test_a_retried_event_is_handled_though_later_events_were_handled(
    shop: App, jet: Jet, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Faults, "of_correlation", frozenset({1}))
    async with working(shop, settings):
        first, second = await pay(jet, "a", 1), await pay(jet, "a", 2)
        await pay(jet, "b", 3)
        await wait_for_heard(jet, 3)
        await wait_for_quarantine(jet, lambda entries: entries == {first: QUARANTINED, second: BLOCKED})
        monkeypatch.setattr(_Faults, "of_correlation", frozenset())
        await cursor_control.retry(cursors_of(jet), "purse", [first])
        await wait_for_quarantine(jet, lambda entries: not entries)
        await pay(jet, "b", 4)
        await wait_for_heard(jet, 1, 2, 3, 4)
        # A second retry, as after a crash before the cursor was written, does not handle the event again.
        (entry,) = await cursors_of(jet).quarantined("purse", resolved=True)

        async def retry_again() -> bool:
            stored = await cursors_of(jet).read("purse")
            try:
                await cursors_of(jet).write(stored, stored.cursor.decided(), [entry.resolved("retry")])
            except CursorFenced:  # the worker wrote in between
                return False
            return True

        await eventually(retry_again)
        await wait_for_quarantine(jet, lambda entries: not entries)
        await pay(jet, "b", 5)
        await wait_for_heard(jet, 1, 2, 3, 4, 5)


async def pay_and_quarantine(jet: Jet, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pay 1, whose correlation fails from now on; return its position once it is quarantined."""
    monkeypatch.setattr(_Faults, "of_correlation", frozenset({1}))
    position = await pay(jet, "a", 1)
    await wait_for_quarantine(jet, lambda entries: entries == {position: QUARANTINED})
    return position


async def test_a_correlation_that_fails_again_does_not_block_other_events(
    shop: App, jet: Jet, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(shop, settings):
        first = await pay_and_quarantine(jet, monkeypatch)
        await cursor_control.retry(cursors_of(jet), "purse", [first])
        await pay(jet, "b", 2)
        await wait_for_heard(jet, 2)
        await wait_for_quarantine(jet, lambda entries: entries == {first: QUARANTINED})


async def test_events_during_a_retry_are_handled_after_the_retried_event(
    shop: App, jet: Jet, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(shop, settings):
        first = await pay_and_quarantine(jet, monkeypatch)
        monkeypatch.setattr(_Faults, "passing", frozenset({1}))
        monkeypatch.setattr(_Faults, "of_correlation", frozenset())
        await cursor_control.retry(cursors_of(jet), "purse", [first])
        second = await pay(jet, "a", 2)
        await wait_for_quarantine(jet, lambda entries: entries.get(second) == BLOCKED)
        monkeypatch.setattr(_Faults, "passing", frozenset())
        await wait_for_quarantine(jet, lambda entries: not entries)
        await wait_for_heard(jet, 1, 2)


async def test_command_ids_of_handled_events_are_reserved(shop: App, jet: Jet, settings: Settings) -> None:
    with pytest.raises(Refused, match=r"'purse\.heard\.7'.*notes under such ids"):
        jet.repository(Purse).command("purse.heard.7")
    jet.repository(Till).command("purse.heard.7")
    async with working(shop, settings):
        await pay(jet, "a", 1)
        await wait_for_heard(jet, 1)


async def test_a_repeated_event_is_handled_with_the_newest_state_not_the_remembered_one(
    shop: App, jet: Jet, settings: Settings
) -> None:
    """A worker gets its cursor back from another worker, and reads the last events again."""
    ((cls, info),) = shop.processes.items()
    for amount in (DEAR, 1):
        await pay(jet, "a", amount)
    events = [recorded async for recorded in jet.tail()]
    (listener,) = info.listeners
    async with (
        open_repositories(shop, settings) as (repositories, _),
        open_repositories(shop, settings) as (other_repositories, _),
    ):
        first, second = ProcessRunner(repositories, cls, info), ProcessRunner(other_repositories, cls, info)
        await first.hear("p", listener, events[0])  # the purse takes nothing, and the worker remembers the empty purse
        for recorded in events:
            await second.hear("p", listener, recorded)
        for recorded in events:
            await first.hear("p", listener, recorded)
    assert await amounts(jet) == [1]
