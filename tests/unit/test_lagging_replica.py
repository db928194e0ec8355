"""A lagging replica hides nothing: a process waits for its newest state, and reads include stored events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from eventjet.codec.headers import RawRecord
from eventjet.commands.repository import Repositories
from eventjet.errors import StoreUnavailable
from eventjet.examples.transfer.accounts import Account
from eventjet.examples.transfer.app import transfers
from eventjet.examples.transfer.transfers import Stage, Transfer
from eventjet.log.memory import MemoryStore
from eventjet.subscriptions.process_steps import ProcessRunner

ROUNDS = 3
UNTIL = datetime(2100, 1, 1, tzinfo=UTC)


class Lagging(MemoryStore):
    """A store whose histories lack the last event for a number of looks; the leader has it."""

    def __init__(self, looks: int) -> None:
        super().__init__("transfers")
        self.looks = looks

    async def pages(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        page = await self.history(aggregate, aggregate_id, after=after)
        if aggregate == "transfer" and self.looks:
            self.looks -= 1
            page = page[:-1]
        yield page


async def runner_of_transfer(store: MemoryStore) -> ProcessRunner:
    writer = Repositories(transfers, store)
    await writer.of(Account).execute("ada", Account.deposit, Decimal(9))
    await writer.of(Transfer).execute("t", Transfer.request, "t", "ada", "bob", Decimal(4), until=UNTIL)
    ((cls, info),) = transfers.processes.items()
    return ProcessRunner(Repositories(transfers, store), cls, info)


async def test_a_process_waits_for_the_event_that_woke_it() -> None:
    store = Lagging(0)
    runner = await runner_of_transfer(store)
    store.looks = 3
    process_state = await runner.advance("t", position=2)
    assert process_state.state.stage is Stage.ENDED
    assert runner.steps == 2


async def test_without_a_position_a_process_rests_on_an_old_state() -> None:
    """The control: `advance` is not given the position that the state must include."""
    store = Lagging(0)
    runner = await runner_of_transfer(store)
    store.looks = 3
    process_state = await runner.advance("t")
    assert (process_state.version, runner.steps) == (0, 0)


async def test_a_replica_that_stays_behind_fails_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.commands.execute.LAG_PAUSES_S", (0.0, 0.0))
    store = Lagging(0)
    runner = await runner_of_transfer(store)
    store.looks = 1_000
    with pytest.raises(StoreUnavailable, match="lags behind position 2"):
        await runner.advance("t", position=2)


class Follower(MemoryStore):
    """A store whose reads of a history lack the last event, `ROUNDS` times in a row."""

    looks = 0
    may_lag = True

    async def history(
        self, aggregate: str, aggregate_id: str, *, after: int = 0, limit: int | None = None
    ) -> list[RawRecord]:
        page = await super().history(aggregate, aggregate_id, after=after, limit=limit)
        self.looks += 1
        return page if self.looks % (ROUNDS + 1) == 0 else page[:-1]


async def test_a_load_and_a_history_include_events_stored_before() -> None:
    store = Follower("transfers")
    accounts = Repositories(transfers, store).of(Account)
    for number in range(1, 5):
        await accounts.execute("ada", Account.deposit, Decimal(1))
        elsewhere = Repositories(transfers, store).of(Account)
        assert (await elsewhere.load("ada")).balance == number
        assert [event.version for event in await accounts.history("ada")] == list(range(1, number + 1))
        assert [event.version for event in await accounts.history("ada", after=number - 1)] == [number]
        assert [event.version for event in await accounts.history("ada", newest_first=True, limit=1)] == [number]


async def test_a_replica_that_stays_behind_fails_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Follower("transfers")
    accounts = Repositories(transfers, store).of(Account)
    await accounts.execute("ada", Account.deposit, Decimal(1))
    monkeypatch.setattr("tests.unit.test_lagging_replica.ROUNDS", 1_000)
    monkeypatch.setattr("eventjet.commands.history.LAG_PAUSES_S", (0.0, 0.0))
    with pytest.raises(StoreUnavailable, match="the replica that was asked lags behind"):
        await accounts.history("ada")
