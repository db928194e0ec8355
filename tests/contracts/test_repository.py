"""The repository keeps its promises over the memory store and over JetStream."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.store.jetstream import JetStreamStore
from eventjet.store.memory import MemoryStore
from tests.contracts.history_contract import HistoryContract
from tests.contracts.repeated_contract import RepeatedContract
from tests.contracts.repository_contract import RepositoryContract
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
