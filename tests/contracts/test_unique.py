"""Unique values are kept in memory, over the simulated stream and over JetStream alike."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.log.jetstream import JetStreamStore
from eventjet.log.memory import MemoryStore
from tests.contracts.unique_contract import UniqueContract
from tests.simulation.store import SimulatedStore
from tests.stores import fresh_jetstream


class TestUniqueInMemory(UniqueContract):
    @pytest.fixture
    def app(self) -> str:
        return "bank"

    @pytest.fixture
    def store(self, app: str) -> MemoryStore:
        return MemoryStore(app)


class TestUniqueOnTheSimulatedStream(UniqueContract):
    @pytest.fixture
    def app(self) -> str:
        return "bank"

    @pytest.fixture
    def store(self, app: str) -> SimulatedStore:
        return SimulatedStore(app, replicas=3)


class TestUniqueOnJetStream(UniqueContract):
    @pytest.fixture
    async def store(self, eventjet_nats: NatsServer) -> AsyncIterator[JetStreamStore]:
        async with fresh_jetstream((eventjet_nats.url,)) as store:
            yield store

    @pytest.fixture
    def app(self, store: JetStreamStore) -> str:
        return store.app
