"""Snapshots in memory, for tests."""

from __future__ import annotations


class MemorySnapshots:
    """As `SnapshotStore`."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], bytes] = {}

    async def get(self, aggregate: str, aggregate_id: str) -> bytes | None:
        """As `SnapshotStore.get`."""
        return self.values.get((aggregate, aggregate_id))

    async def put(self, aggregate: str, aggregate_id: str, value: bytes) -> None:
        """As `SnapshotStore.put`."""
        self.values[(aggregate, aggregate_id)] = value
