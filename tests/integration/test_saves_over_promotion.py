"""A save begins on the log, and its connection leads to the promoted mirror afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

import pytest

from eventjet import Jet
from eventjet.codec.catalog import EncodedEvent
from eventjet.domain.identity import new_event_id
from eventjet.errors import LogReplaced, OutcomeUnknown
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.log.jetstream import JetStreamStore
from eventjet.log.store import Append, NewEvent
from eventjet.operations import mirrors, promotion
from eventjet.settings import Settings
from tests.faults.proxy import PASS, Fate, NatsProxy, Publish
from tests.integration.reacting import eventually
from tests.two_regions import Regions, two_regions


@dataclass
class Moving:
    """An app that reaches the log in the east over a proxy, and a complete mirror in the west."""

    regions: Regions
    proxy: NatsProxy
    jet: Jet
    settings: Settings
    end: int
    """Last position of log and mirror."""

    async def deposit(self, jet: Jet | None = None) -> int:
        result = await (jet or self.jet).repository(Account).execute("a-1", Account.deposit, Decimal(1))
        return result.position

    def lose_next_save(self, *steps: Callable[[], Awaitable[object]], is_stored: bool = False) -> None:
        """End the connection with the next save, before or after it is stored, and then run the steps."""

        async def begin() -> None:
            # The connection ends with the server, and with it what the proxy still does for it.
            self.steps = asyncio.ensure_future(_all_of(steps))
            await asyncio.shield(self.steps)

        def choose(publish: Publish) -> Fate:
            if not publish.subject.startswith("bank.account."):
                return PASS
            self.proxy.choose = lambda _: PASS
            return Fate(answer="cut", then=begin) if is_stored else Fate("cut", first=begin)

        self.proxy.choose = choose

    async def promote(self) -> None:
        """Kill the east, promote the west, and let the proxy lead there."""
        self.regions.east.kill()
        promoted = await asyncio.to_thread(promotion.promote, bank, self.settings, log_is_gone=True)
        assert promoted.end == self.end
        self.proxy.server_url = self.regions.west.url

    async def promote_without(self, count: int) -> None:
        """Promote a mirror that lacks events at its end, and record as many others in their place."""
        self.regions.west.start()
        await self.promote()
        async with bank.connect(self.settings.for_reads()) as jet:
            for number in range(count):
                assert await self.deposit(jet) == self.end + number + 1

    async def position_and_balance_in_the_west(self) -> tuple[int, Decimal]:
        """Return the last position of the log in the west, and the balance there."""
        async with bank.connect(self.settings.for_reads()) as jet:
            account = await jet.repository(Account).load("a-1")
            return (await jet.log()).last, account.balance


@asynccontextmanager
async def moving(folder: Path) -> AsyncGenerator[Moving]:
    with two_regions(folder, bank.name) as regions:
        settings = regions.settings(folder)
        async with NatsProxy(regions.east.url) as proxy:
            over_proxy = replace(settings.for_log(), servers=(proxy.url,))
            async with bank.connect(over_proxy) as jet:
                await jet.init()
                await asyncio.to_thread(mirrors.create, bank.name, settings, 1)
                accounts = jet.repository(Account)
                await accounts.execute("a-1", Account.open, "ada")
                scene = Moving(regions, proxy, jet, settings, 0)
                for _ in range(4):
                    scene.end = await scene.deposit()
                await eventually(lambda: mirror_has(settings, scene.end))
                yield scene


async def mirror_has(settings: Settings, position: int) -> bool:
    return (await asyncio.to_thread(mirrors.status, bank.name, settings)).last >= position


async def _all_of(steps: Sequence[Callable[[], Awaitable[object]]]) -> None:
    for step in steps:
        await step()


async def test_a_save_is_sent_to_the_promoted_log_that_has_its_history(tmp_path: Path) -> None:
    async with moving(tmp_path) as scene:
        scene.lose_next_save(scene.promote)
        assert await scene.deposit() == scene.end + 1
        assert await scene.position_and_balance_in_the_west() == (scene.end + 1, 5)
        assert await scene.deposit() == scene.end + 2  # the connection knows its log again


async def test_a_save_that_the_mirror_had_received_is_not_stored_twice(tmp_path: Path) -> None:
    async with moving(tmp_path) as scene:
        scene.end += 1
        scene.lose_next_save(
            lambda: eventually(lambda: mirror_has(scene.settings, scene.end)), scene.promote, is_stored=True
        )
        assert await scene.deposit() == scene.end
        assert await scene.position_and_balance_in_the_west() == (scene.end, 5)


async def test_a_save_is_not_sent_to_a_promoted_log_without_its_history(tmp_path: Path) -> None:
    async with moving(tmp_path) as scene:
        scene.regions.west.kill()
        assert await scene.deposit() == scene.end + 1
        scene.lose_next_save(lambda: scene.promote_without(1))
        with pytest.raises(
            LogReplaced, match=rf"events up to position {scene.end} only.*has not stored it.*decide again"
        ):
            await scene.deposit()
        assert await scene.position_and_balance_in_the_west() == (scene.end + 1, 5)
        assert await scene.deposit() == scene.end + 2


async def test_a_save_sent_to_a_replaced_log_is_reported_with_its_position(tmp_path: Path) -> None:
    async with moving(tmp_path) as scene:
        scene.regions.west.kill()
        expected = await scene.deposit()
        await scene.promote_without(1)
        store, client = scene.jet.store, scene.jet.client
        assert isinstance(store, JetStreamStore)
        assert client is not None
        await client.wait_for_room("bank", 60.0)
        new = NewEvent(new_event_id(), EncodedEvent("account.deposited", 1, b'{"amount":"1"}'))
        with pytest.raises(LogReplaced, match=rf"has stored it, up to position {expected + 1}") as caught:
            await store.append([Append("account", "a-1", expected, 6, (new,))])
        assert caught.value.position == expected + 1


@pytest.mark.parametrize("lacking", [0, 1])
async def test_an_unknown_outcome_is_resolved_on_the_log_that_has_its_history(tmp_path: Path, lacking: int) -> None:
    async with moving(tmp_path) as scene:
        scene.regions.west.kill()
        for _ in range(lacking):
            await scene.deposit()
        async with bank.connect(
            replace(scene.settings.for_log(), servers=(scene.proxy.url,), save_timeout_s=5.0)
        ) as jet:
            await jet.repository(Account).load("a-1")
            scene.proxy.choose = lambda publish: Fate("lose" if publish.subject.startswith("bank.account.") else "pass")
            with pytest.raises(OutcomeUnknown) as caught:
                await scene.deposit(jet)
            scene.proxy.choose = lambda _: PASS
        await scene.promote_without(lacking)
        async with bank.connect(scene.settings.for_reads()) as jet:
            if lacking:
                with pytest.raises(LogReplaced, match="has not stored it"):
                    await jet.resolve(caught.value)
            else:
                assert await jet.resolve(caught.value) == scene.end + 1
        assert (await scene.position_and_balance_in_the_west())[0] == scene.end + 1
