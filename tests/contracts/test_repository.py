"""The repository keeps its promises over the memory store and over JetStream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.examples.bank.account import Account, Deposited
from eventjet.log.jetstream import JetStreamStore
from eventjet.log.memory import MemoryStore
from tests.contracts.history_contract import HistoryContract
from tests.contracts.repeated_contract import RepeatedContract
from tests.contracts.repository_contract import Counted, RepositoryContract, repository
from tests.simulation.store import SimulatedStore
from tests.stores import fresh_jetstream


class TestRepositoryInMemory(RepositoryContract, RepeatedContract, HistoryContract):
    @pytest.fixture
    def app(self) -> str:
        return "bank"

    @pytest.fixture
    def store(self, app: str) -> MemoryStore:
        return MemoryStore(app)


class TestRepositoryOnJetStream(RepositoryContract, RepeatedContract, HistoryContract):
    @pytest.fixture
    async def store(self, eventjet_nats: NatsServer) -> AsyncIterator[JetStreamStore]:
        async with fresh_jetstream((eventjet_nats.url,)) as store:
            yield store

    @pytest.fixture
    def app(self, store: JetStreamStore) -> str:
        return store.app

    async def test_a_decision_uses_the_event_of_a_refusal_without_a_read(self, app: str, store: JetStreamStore) -> None:
        await lose_races(app, store)


async def test_a_simulated_refusal_has_the_event_too() -> None:
    await lose_races("bank", SimulatedStore("bank"))


async def lose_races(app: str, store: JetStreamStore) -> None:
    """Lose races: one against one event is decided again on that event, one against two of them on a read."""
    counted: Any = Counted(store)
    for rivals, reads in ((1, 0), (2, 1)):
        here, there = repository(app, counted), repository(app, store)
        name = f"told-{rivals}"
        await here.execute(name, Account.deposit, Decimal(1))
        for number in range(rivals):
            await there.command(f"theirs-{number}").execute(name, Account.deposit, Decimal(10))
        counted.pages_read = counted.lost = 0
        balances: list[Decimal] = []

        def deposit(account: Account, balances: list[Decimal] = balances) -> Deposited:
            balances.append(account.balance)
            return account.deposit(Decimal(100))

        committed = await here.execute(name, deposit)
        assert (counted.lost, counted.pages_read) == (1, reads)
        assert balances == [Decimal(1), Decimal(1 + 10 * rivals)]
        assert (committed.version, committed.state.balance) == (2 + rivals, Decimal(101 + 10 * rivals))
        again = await here.command("theirs-0").execute(name, Account.deposit, Decimal(10))
        assert again.version == 2
        assert await here.load(name) == await there.load(name) == committed.state
