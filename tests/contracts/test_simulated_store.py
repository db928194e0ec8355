"""The simulator's JetStream keeps the contract under the product's own driver, and answers as a real server does."""

from __future__ import annotations

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.testing.store_contract import StoreContract
from tests.simulation.lines import answers_of_both
from tests.simulation.scripts import AFTER_A_WHILE, FORGOTTEN_S, WRITTEN, Script, drawn
from tests.simulation.store import SimulatedStore


class TestSimulatedStore(StoreContract):
    @pytest.fixture(params=[1, 3], ids=["one replica", "three replicas"])
    def store(self, request: pytest.FixtureRequest) -> SimulatedStore:
        return SimulatedStore("shop", replicas=request.param)


@pytest.mark.parametrize("script", [WRITTEN, *(drawn(seed, 200) for seed in range(3))], ids=["written", *"012"])
async def test_the_simulator_answers_as_one_server_does(eventjet_nats: NatsServer, script: Script) -> None:
    real, simulated = await answers_of_both(eventjet_nats.url, 1, script)
    assert simulated == real


@pytest.mark.slow
async def test_server_and_simulator_forget_an_open_batch(eventjet_nats: NatsServer) -> None:
    script = [step for step in WRITTEN if "open" in step[0]]
    assert len(script) == 3
    real, simulated = await answers_of_both(eventjet_nats.url, 1, script, afterwards=AFTER_A_WHILE, after_s=FORGOTTEN_S)
    assert simulated == real
