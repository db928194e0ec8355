"""JetStream with three replicas keeps the contract, and answers as the simulator's three replicas do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from eventjet.codec.headers import MSG_ID, RawRecord, header
from eventjet.dev.nats import NatsServer
from eventjet.errors import ConcurrencyConflict, StoreUnavailable
from eventjet.examples.bank.account import Account
from eventjet.jetstream.client import connect
from eventjet.log.jetstream import JetStreamStore
from eventjet.settings import Settings
from eventjet.testing.store_contract import StoreContract, new, write
from tests.contracts.repository_contract import repository
from tests.nats_cluster import NatsCluster
from tests.simulation.lines import answers_of_both
from tests.simulation.scripts import WRITTEN, Script, drawn
from tests.stores import fresh_jetstream

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[NatsCluster]:
    with NatsCluster() as cluster:
        yield cluster
        cluster.kill()  # a clean end would take some seconds


class TestClusterStore(StoreContract):
    @pytest.fixture
    async def store(self, cluster: NatsCluster) -> AsyncIterator[JetStreamStore]:
        """A store through the server that leads the stream: a read of another may lag behind what was just written."""
        async with fresh_jetstream(tuple(cluster.urls), replicas=3) as any_store:
            leader = await leader_of(cluster, any_store)
            async with opened(leader.url, any_store.app) as store:
                yield store


@pytest.mark.parametrize("script", [WRITTEN, drawn(5, 200), drawn(6, 200)], ids=["written", "5", "6"])
async def test_the_simulator_answers_as_three_servers_do(cluster: NatsCluster, script: Script) -> None:
    real, simulated = await answers_of_both(cluster.urls[0], 3, script)
    assert simulated == real


@asynccontextmanager
async def opened(url: str, app: str, request_timeout_s: float = 4.0) -> AsyncGenerator[JetStreamStore]:
    """A store on an existing stream, through one server."""
    settings = Settings(servers=(url,))
    client = await connect(settings)
    client.timeout_s = request_timeout_s
    store = JetStreamStore(app, client, save_timeout_s=60.0)
    try:
        yield store
    finally:
        await store.settle()
        await client.close()


async def leader_of(cluster: NatsCluster, store: JetStreamStore) -> NatsServer:
    """Return the server that leads the stream."""
    name = (await store._client.api(f"STREAM.INFO.{store.app}"))["cluster"]["leader"]
    return cluster.named(name)


class Writer:
    """The only writer of an aggregate: an answer that reports a conflict is wrong."""

    def __init__(self, store: JetStreamStore, name: str, answers: dict[str, int | None]) -> None:
        self._store = store
        self._name = name
        self._said = answers
        self._position = self._version = 0

    async def save(self, times: int) -> None:
        """Save one event after the other, and record the answer to each: its position, or None for a conflict."""
        for _ in range(times):
            event = new()
            self._said[event.event_id] = None
            try:
                self._position = await self._store.append([write(self._name, self._position, self._version, event)])
            except ConcurrencyConflict:
                return
            self._version += 1
            self._said[event.event_id] = self._position


async def whole_log(store: JetStreamStore) -> dict[str | None, int]:
    """Return positions by event id, from a replica that has caught up."""
    async with asyncio.timeout(60):
        while True:
            with suppress(StoreUnavailable):
                positions = {header(record[3], MSG_ID): record[0] async for record in store.records()}
                if len(positions) == (await store.state()).last:
                    return positions
            await asyncio.sleep(0.1)


async def test_every_save_gets_a_true_answer_when_a_deposed_leader_wakes(cluster: NatsCluster) -> None:
    async with fresh_jetstream((cluster.urls[0],), replicas=3) as any_store:
        leader = await leader_of(cluster, any_store)
        other = next(server for server in cluster.servers if server is not leader)
        async with opened(other.url, any_store.app, request_timeout_s=2.0) as store:
            answers: dict[str, int | None] = {}
            writers = [Writer(store, f"w{number}", answers) for number in range(20)]
            await asyncio.gather(*(writer.save(1) for writer in writers))
            leader.pause()
            try:
                # The first waits for the election; all of it is unknown to the old leader.
                await asyncio.gather(*(writer.save(2) for writer in writers))
            finally:
                leader.resume()
            await asyncio.gather(*(writer.save(20) for writer in writers))
            positions = await whole_log(store)
    assert {event_id: positions.get(event_id) for event_id in answers} == answers
    assert len(answers) == len(positions) == 23 * 20


async def test_reads_through_a_follower_include_earlier_saves(cluster: NatsCluster) -> None:
    """A follower hears of an event a moment after its writer, and the server next to the client answers."""
    async with fresh_jetstream((cluster.urls[0],), replicas=3) as any_store:
        leader = await leader_of(cluster, any_store)
        urls = [server.url for server in cluster.servers if server is not leader]
        async with opened(urls[0], any_store.app) as store, opened(urls[1], any_store.app) as another:
            accounts = repository(any_store.app, store)
            for number in range(200):
                account_id = f"a-{number}"
                done = await accounts.execute(account_id, Account.open, "ada")
                (recorded,) = await accounts.history(account_id)
                assert (recorded.position, recorded.version) == (done.position, 1)
                assert [record[0] async for record in another.records(start=number + 1)] == [done.position]
                assert (await repository(any_store.app, another).load(account_id)).owner == "ada"


async def history_of(store: JetStreamStore, thing: str) -> list[RawRecord]:
    """Return the history once the replica that answers has an event of it: it may lag behind the others."""
    while not (records := await store.history("thing", thing)):
        await asyncio.sleep(0.05)
    return records


async def test_reads_wait_out_the_election_of_a_leader(cluster: NatsCluster) -> None:
    async with fresh_jetstream((cluster.urls[0],), replicas=3) as any_store:
        leader = await leader_of(cluster, any_store)
        other = next(server for server in cluster.servers if server is not leader)
        async with opened(other.url, any_store.app, request_timeout_s=1.0) as store:
            position = await store.append([write("a", 0, 0)])
            leader.kill()
            try:
                last, tail, (record,), state = await asyncio.gather(
                    store.last("thing", "a"), store.tail("thing", "a"), history_of(store, "a"), store.state()
                )
            finally:
                leader.start()
                cluster.wait_ready()
    assert last == record[0] == state.last == position
    assert tail is not None
    assert tail[0] == position
