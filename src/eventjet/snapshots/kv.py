"""Snapshots in a JetStream key-value bucket (ADR-8): `<app>_snapshots`, history 1, key `<aggregate>.<id>`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from nats.aio.msg import Msg

from eventjet.domain.identity import encode_id
from eventjet.errors import StoreError, StoreUnavailable

VALUE_MAX = 890_000
"""Bytes of one value; larger states are not kept."""


class KeyValueSnapshots:
    """As `SnapshotStore`. Never in the way: what it cannot read in time is not there."""

    def __init__(self, bucket: str, ask: Callable[[str, bytes], Awaitable[Msg]]) -> None:
        """`ask` takes a subject and a body, and raises `StoreError` when no answer comes."""
        self._bucket = bucket
        self._ask = ask
        self._stream = f"KV_{bucket}"

    async def get(self, aggregate: str, aggregate_id: str) -> bytes | None:
        """As `SnapshotStore.get`."""
        subject = self._subject(aggregate, aggregate_id)
        try:
            reply = await self._ask(f"$JS.API.DIRECT.GET.{self._stream}.{subject}", b"")
        except StoreError:
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
            reply = await self._ask(subject, value)
            error = json.loads(reply.data).get("error")
        except (ValueError, AttributeError) as problem:
            raise StoreUnavailable(f"The snapshot {subject}", str(problem) or type(problem).__name__) from None
        if error is not None:
            raise StoreUnavailable(f"The snapshot {subject}", str(error.get("description", error)))

    def _subject(self, aggregate: str, aggregate_id: str) -> str:
        return f"$KV.{self._bucket}.{aggregate}.{encode_id(aggregate_id)}"
