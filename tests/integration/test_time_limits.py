"""The time limit of a command begins with its call; waiting for its turn, reading and saving share it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import pytest

from eventjet import App, Jet
from eventjet.codec.catalog import EncodedEvent
from eventjet.commands.execute import Conflict, retry
from eventjet.dev.nats import NatsServer
from eventjet.domain.identity import new_event_id
from eventjet.errors import ConcurrencyConflict, StoreUnavailable
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.log.jetstream import JetStreamStore
from eventjet.log.store import Append, NewEvent, command_deadline
from tests.contracts.unique_contract import User
from tests.logs import fresh_name
from tests.stores import fresh_jetstream

CALLERS = 8
SHORT_S = 0.2
LONG_S = 3_600.0
"""A limit longer than any test: a command that ends before the test's bound ended for another reason."""
BOUND_S = 120.0


@pytest.fixture
def app() -> App:
    return App(fresh_name(), aggregates=[Account, User], upcasters=[withdrawn_has_a_reason])


@pytest.fixture
async def jet(app: App, eventjet_nats: NatsServer) -> AsyncIterator[Jet]:
    async with app.connect(servers=eventjet_nats.url, save_timeout_s=LONG_S) as jet:
        await jet.init()
        yield jet


@pytest.fixture
async def store(eventjet_nats: NatsServer) -> AsyncIterator[JetStreamStore]:
    async with fresh_jetstream((eventjet_nats.url,), save_timeout_s=LONG_S) as store:
        yield store


@contextmanager
def deadline_in(seconds: float) -> Iterator[None]:
    """Set the deadline of the current command within the block."""
    command_deadline.set(time.monotonic() + seconds)
    yield
    command_deadline.set(float("inf"))


async def test_commands_waiting_for_their_turn_send_nothing_and_end_with_the_limit(jet: Jet) -> None:
    accounts, members = jet.repository(Account), jet.repository(User)
    for name in ("a", "b"):
        await accounts.execute(name, Account.open, name)
    await members.execute("m", User.call, "ada@example.org")
    last = (await jet.log()).last
    calls: list[Any] = [accounts.execute("a", Account.deposit, Decimal(1)) for _ in range(CALLERS)]
    calls.append(accounts.command("c-1").execute("a", Account.deposit, Decimal(1)))
    calls.append(members.execute("m", User.call, "bob@example.org"))
    pairs = (("a", "b"), ("b", "a"))
    calls += [jet.transact(*(accounts.decide(name, Account.deposit, Decimal(1)) for name in pair)) for pair in pairs]
    async with accounts.executor.cache.lock("a")[0], members.executor.cache.lock("m")[0]:
        jet.store.save_timeout_s = SHORT_S
        async with asyncio.timeout(BOUND_S):
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        jet.store.save_timeout_s = LONG_S
    assert {type(outcome) for outcome in outcomes} == {StoreUnavailable}
    assert all("nothing of it was sent" in str(outcome) for outcome in outcomes)
    assert (await jet.log()).last == last
    assert (await accounts.execute("a", Account.deposit, Decimal(1))).state.balance == 1  # nobody keeps a turn


def test_threads_waiting_for_their_turn_end_with_the_limit(app: App, eventjet_nats: NatsServer) -> None:
    with app.connect_blocking(servers=eventjet_nats.url, save_timeout_s=LONG_S) as jet:
        jet.init()
        accounts = jet.repository(Account)
        accounts.execute("a", Account.open, "ada")

        async def take_turn(jet: Jet) -> asyncio.Lock:
            lock, _ = jet.repository(Account).executor.cache.lock("a")
            await lock.acquire()
            jet.store.save_timeout_s = SHORT_S
            return lock

        async def end_turn(jet: Jet) -> None:
            lock.release()
            jet.store.save_timeout_s = LONG_S

        lock = jet._portal.call(take_turn)
        with ThreadPoolExecutor(CALLERS) as threads:
            calls = [threads.submit(accounts.execute, "a", Account.deposit, Decimal(1)) for _ in range(CALLERS)]
            errors = [call.exception(BOUND_S) for call in calls]
        jet._portal.call(end_turn)
        assert {type(error) for error in errors} == {StoreUnavailable}
        assert accounts.execute("a", Account.deposit, Decimal(1)).version == 2


async def test_reads_of_a_command_end_with_it_while_the_server_is_silent() -> None:
    with NatsServer() as server:
        async with fresh_jetstream((server.url,), save_timeout_s=LONG_S) as store:
            assert await store.confirm()
            store._client.timeout_s = store._reader.timeout_s = LONG_S
            server.pause()
            try:
                async with asyncio.timeout(BOUND_S):
                    for read in (store.newest, store.tail, store.history):
                        with deadline_in(SHORT_S), pytest.raises(StoreUnavailable):
                            await read("thing", "a")
                    store.stream._looked_at = 0.0
                    with deadline_in(SHORT_S):
                        assert not await store.confirm()
            finally:
                server.resume()


async def test_a_save_after_the_end_of_its_command_is_not_sent(store: JetStreamStore) -> None:
    new = NewEvent(new_event_id(), EncodedEvent("thing.happened", 1, b"1"))
    with deadline_in(0.0), pytest.raises(StoreUnavailable, match="nothing was sent"):
        await store.append([Append("thing", "a", 0, 0, (new,))])
    assert (await store.state()).last == 0


async def test_a_conflict_after_the_limit_is_not_retried() -> None:
    async def lose(_: int) -> Conflict:
        return Conflict("bank.account.a", 1)

    with pytest.raises(ConcurrencyConflict) as raised:
        await retry(lose, timeout_s=0.0)
    assert raised.value.races == 1
