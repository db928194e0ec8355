"""JetStream with three replicas keeps the contract, and answers as the simulator's three replicas do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from eventjet.dev.nats_cluster import NatsCluster
from eventjet.store.jetstream import JetStreamStore
from tests.contracts.store_contract import StoreContract
from tests.simulation.lines import answers_of_both
from tests.simulation.scripts import WRITTEN, Script, drawn
from tests.stores import fresh_jetstream


@pytest.fixture(scope="module")
def cluster() -> Iterator[NatsCluster]:
    with NatsCluster() as cluster:
        yield cluster
        cluster.kill()  # in good order it would take some seconds


class TestClusterStore(StoreContract):
    @pytest.fixture
    async def store(self, cluster: NatsCluster) -> AsyncIterator[JetStreamStore]:
        async with fresh_jetstream(tuple(cluster.urls), replicas=3) as store:
            yield store


@pytest.mark.parametrize("script", [WRITTEN, drawn(5, 200), drawn(6, 200)], ids=["written", "5", "6"])
async def test_the_simulator_answers_as_three_servers_do(cluster: NatsCluster, script: Script) -> None:
    real, simulated = await answers_of_both(cluster.urls[0], 3, script)
    assert simulated == real
