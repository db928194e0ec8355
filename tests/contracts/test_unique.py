"""Unique values are kept over the memory store and over JetStream alike."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.store.jetstream import JetStreamStore
from eventjet.store.memory import MemoryStore
from tests.contracts.unique_contract import UniqueContract
from tests.stores import fresh_jetstream


class TestUniqueInMemory(UniqueContract):
    @pytest.fixture
    def app(self) -> str:
        return "bank"

    @pytest.fixture
    def store(self, app: str) -> MemoryStore:
        return MemoryStore(app)


class TestUniqueOnJetStream(UniqueContract):
    @pytest.fixture
    async def store(self, eventjet_nats: NatsServer) -> AsyncIterator[JetStreamStore]:
        async with fresh_jetstream((eventjet_nats.url,)) as store:
            yield store

    @pytest.fixture
    def app(self, store: JetStreamStore) -> str:
        return store.app
