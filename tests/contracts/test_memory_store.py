"""The memory store keeps the contract: it is its executable specification."""

from __future__ import annotations

import pytest

from eventjet.log.memory import MemoryStore
from eventjet.testing.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore("shop")
