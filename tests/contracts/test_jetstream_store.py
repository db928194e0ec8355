"""JetStream with one replica keeps the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.log.jetstream import JetStreamStore
from eventjet.testing.store_contract import StoreContract
from tests.stores import fresh_jetstream


class TestJetStreamStore(StoreContract):
    @pytest.fixture
    async def store(self, eventjet_nats: NatsServer) -> AsyncIterator[JetStreamStore]:
        async with fresh_jetstream((eventjet_nats.url,)) as store:
            yield store
