"""Snapshots in a JetStream key-value bucket (ADR-8): `<app>_snapshots`, history 1, key `<aggregate>.<encoded id>`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from eventjet.codec.envelope import EXPECTED, RawRecord, header_block
from eventjet.codec.subjects import entity_key
from eventjet.errors import ApiRefused, StoreError
from eventjet.nats.api import IN_PROCESS, WRONG_SEQUENCE, Request, answer_in, direct_last, last_message
from eventjet.nats.client import Client
from eventjet.nats.protocol import Frame

VALUE_MAX = 890_000
"""Bytes of one value; larger states are not kept."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is asked of a key-value bucket; an entry's position is its sequence in the bucket's stream."""

    name: str

    def entry(self, key: str) -> Request[RawRecord | None]:
        """What is at a key; may lag behind the leader on a replica."""
        return direct_last(f"KV_{self.name}", self._subject(key))

    def entry_from_leader(self, key: str) -> Request[RawRecord | None]:
        """What is at a key."""
        return last_message(f"KV_{self.name}", self._subject(key))

    def write(self, key: str, value: bytes, expected: int | None = None) -> Request[bool]:
        """Replace what is at a key; False when it is no longer the entry at position `expected` (0 for none)."""
        headers = b"" if expected is None else header_block([(EXPECTED, str(expected))])
        return Request(f"The snapshot {key}", self._subject(key), value, partial(_written, key), headers)

    def _subject(self, key: str) -> str:
        return f"$KV.{self.name}.{key}"


def _written(key: str, frame: Frame) -> bool:
    try:
        answer_in(frame, f"The snapshot {key}")
    except ApiRefused as refusal:
        if refusal.err_code in (WRONG_SEQUENCE, IN_PROCESS):
            return False
        raise
    return True


class KeyValueSnapshots:
    """As `SnapshotStore`. Never in the way: what it cannot read in time is not there."""

    def __init__(self, bucket: str, client: Client) -> None:
        self._bucket = Bucket(bucket)
        self._client = client

    async def get(self, aggregate: str, aggregate_id: str) -> bytes | None:
        """As `SnapshotStore.get`."""
        try:
            entry = await self._client.ask(self._bucket.entry(entity_key(aggregate, aggregate_id)))
        except StoreError:
            return None
        return None if entry is None else entry[4]

    async def put(self, aggregate: str, aggregate_id: str, value: bytes) -> None:
        """As `SnapshotStore.put`; a value beyond `VALUE_MAX` bytes is not kept."""
        if len(value) <= VALUE_MAX:
            await self._client.ask(self._bucket.write(entity_key(aggregate, aggregate_id), value))
