"""A tail of the log ends at its bounds, with and without following, in memory and on a server."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import pytest

from eventjet import App, Jet, aggregate
from eventjet.dev.nats import NatsServer
from eventjet.errors import UsageError
from eventjet.examples.bank.account import Account, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.jetstream.client import connect
from eventjet.log.jetstream import JetStreamStore
from eventjet.log.topology import declare
from eventjet.settings import Settings
from tests.logs import fresh_name

EVENTS = 7


@aggregate("account")
class Shut:
    """An account of which only openings are declared."""

    def evolve(self, event: Opened) -> Shut:
        return self


PATIENT_S = 60.0


@pytest.fixture(params=["memory", "jetstream"])
async def jet(request: pytest.FixtureRequest) -> AsyncIterator[Jet]:
    app = App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])
    if request.param == "memory":
        async with app.in_memory() as jet:
            yield jet
        return
    server: NatsServer = request.getfixturevalue("eventjet_nats")
    async with app.connect(servers=server.url) as jet:
        await jet.init()
        yield jet


async def deposit(jet: Jet, times: int) -> None:
    for _ in range(times):
        await jet.repository(Account).execute("a", Account.deposit, Decimal(1))


async def positions(jet: Jet, **bounds: Any) -> list[int]:
    async with asyncio.timeout(PATIENT_S):
        return [event.position async for event in jet.tail(**bounds)]


@pytest.mark.parametrize("follow", [False, True])
async def test_a_tail_ends_after_a_position_or_a_number_of_events(jet: Jet, follow: bool) -> None:
    await deposit(jet, EVENTS)
    all_positions = list(range(1, EVENTS + 1))
    assert await positions(jet, until=EVENTS, follow=follow) == all_positions
    assert await positions(jet, until=3, follow=follow) == [1, 2, 3]
    assert await positions(jet, position=3, until=3, follow=follow) == [3]
    assert await positions(jet, position=4, until=3, follow=follow) == []
    assert await positions(jet, until=0, follow=follow) == []
    assert await positions(jet, limit=EVENTS, follow=follow) == all_positions
    assert await positions(jet, limit=2, follow=follow) == [1, 2]
    assert await positions(jet, position=5, limit=2, follow=follow) == [5, 6]
    assert await positions(jet, position=5, limit=9, until=6, follow=follow) == [5, 6]
    assert await positions(jet, deliver="last", limit=1, follow=follow) == [EVENTS]
    assert await positions(jet, limit=0, follow=follow) == []


async def test_a_tail_without_following_ends_with_the_log_at_the_latest(jet: Jet) -> None:
    await deposit(jet, EVENTS)
    assert await positions(jet, position=6, limit=9) == await positions(jet, position=6, until=99) == [6, 7]
    assert await positions(jet, position=EVENTS + 1, limit=1) == []


async def test_a_following_tail_waits_for_its_last_event(jet: Jet) -> None:
    await deposit(jet, 2)
    by_limit = asyncio.create_task(positions(jet, limit=4, follow=True))
    by_position = asyncio.create_task(positions(jet, deliver="new", until=5, follow=True))
    await asyncio.wait({by_limit, by_position}, timeout=0.05)
    assert not by_limit.done()
    await deposit(jet, 2)
    assert await by_limit == [1, 2, 3, 4]
    await deposit(jet, 2)
    assert (await by_position)[-1] == 5


async def test_skipped_events_do_not_count_for_the_limit() -> None:
    name = fresh_name()
    async with App(name, aggregates=[Account], upcasters=[withdrawn_has_a_reason]).in_memory() as jet:
        await jet.repository(Account).execute("a", Account.open, "ada")
        await deposit(jet, 30)
        await jet.repository(Account).execute("b", Account.open, "bob")
        await deposit(jet, 3)
        store = jet.store
        only_opened = App(name, aggregates=[Shut], retired_events=["account.deposited"])
        async with only_opened.in_memory() as opened_jet:
            opened_jet.store = store
            assert [event.aggregate_id async for event in opened_jet.tail(limit=2)] == ["a", "b"]
            assert [event.aggregate_id async for event in opened_jet.tail(limit=3)] == ["a", "b"]


@pytest.mark.parametrize("bounds", [{"until": "3"}, {"limit": -1}, {"limit": 1.5}])
async def test_an_invalid_bound_of_a_tail_is_refused(jet: Jet, bounds: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="whole number"):
        await positions(jet, **bounds)


async def test_concurrent_reads_of_the_end_of_the_log_share_a_request() -> None:
    with NatsServer() as server:
        client = await connect(Settings(servers=(server.url,)))
        name = fresh_name()
        await declare(client, name, 1)
        store = JetStreamStore(name, client, save_timeout_s=PATIENT_S)
        assert await store.stream.end(PATIENT_S) == 0
        before = messages_to(server)
        assert await asyncio.gather(*(store.stream.end(0) for _ in range(50))) == [0] * 50
        assert messages_to(server) - before == 1
        assert await asyncio.gather(*(store.stream.end(PATIENT_S) for _ in range(50))) == [0] * 50
        assert messages_to(server) - before == 1
        await store.settle()
        await client.close()


def messages_to(server: NatsServer) -> int:
    with urllib.request.urlopen(f"{server.monitor_url}/varz", timeout=30) as answer:
        return json.load(answer)["in_msgs"]
