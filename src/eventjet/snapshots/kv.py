"""Snapshots in a JetStream key-value bucket (ADR-8): `<app>_snapshots`, history 1, key `<aggregate>.<id>`."""

from __future__ import annotations

import json

from nats.aio.client import Client
from nats.errors import Error as NatsError

from eventjet.domain.identity import encode_id
from eventjet.errors import StoreUnavailable

VALUE_MAX = 890_000
"""Bytes of one value; larger states are not kept."""


class KeyValueSnapshots:
    """As `SnapshotStore`. Never in the way: what it cannot read in time is not there."""

    def __init__(self, bucket: str, client: Client, *, timeout_s: float) -> None:
        self._bucket = bucket
        self._client = client
        self._timeout_s = timeout_s
        self._stream = f"KV_{bucket}"

    async def get(self, aggregate: str, aggregate_id: str) -> bytes | None:
        """As `SnapshotStore.get`."""
        subject = self._subject(aggregate, aggregate_id)
        try:
            reply = await self._client.request(
                f"$JS.API.DIRECT.GET.{self._stream}.{subject}", b"", timeout=self._timeout_s
            )
        except (TimeoutError, NatsError, OSError):
            return None
        headers = reply.headers or {}
        if "Status" in headers or headers.get("KV-Operation") in ("DEL", "PURGE"):
            return None
        return reply.data

    async def put(self, aggregate: str, aggregate_id: str, value: bytes) -> None:
        """As `SnapshotStore.put`; a value beyond 890,000 bytes is not kept."""
        if len(value) > VALUE_MAX:
            return
        subject = self._subject(aggregate, aggregate_id)
        try:
            reply = await self._client.request(subject, value, timeout=self._timeout_s)
            error = json.loads(reply.data).get("error")
        except (TimeoutError, NatsError, OSError, ValueError) as problem:
            raise StoreUnavailable(f"The snapshot {subject}", str(problem) or type(problem).__name__) from None
        if error is not None:
            raise StoreUnavailable(f"The snapshot {subject}", str(error.get("description", error)))

    def _subject(self, aggregate: str, aggregate_id: str) -> str:
        return f"$KV.{self._bucket}.{aggregate}.{encode_id(aggregate_id)}"
