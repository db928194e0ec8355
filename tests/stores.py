"""Stores of their own for tests: each gets a stream that no other test has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from eventjet.codec.headers import header_block
from eventjet.errors import StoreUnavailable
from eventjet.jetstream.client import Client, connect
from eventjet.log.jetstream import JetStreamStore, RetryPolicy
from eventjet.log.topology import declare
from eventjet.settings import Settings
from tests.logs import fresh_name


def retry_for(timeout_s: float) -> Callable[[], RetryPolicy]:
    """Return a policy that retries reads outside a store for this long."""

    async def exists() -> None: ...

    return lambda: RetryPolicy(timeout_s, exists)


async def declared(client: Client, name: str, replicas: int) -> None:
    """Wait until a stream of this name exists and its servers know of it; a cluster may need an election for that."""
    async with asyncio.timeout(90):
        while True:
            try:
                await declare(client, name, replicas)
                # An impossible event: it is refused as soon as a server listens.
                impossible = header_block([("Nats-Expected-Last-Sequence", "999999")])
                await client.request(f"{name}.probe.a", b"", impossible)
                return
            except StoreUnavailable:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def fresh_jetstream(
    servers: tuple[str, ...], *, replicas: int = 1, save_timeout_s: float = 20.0
) -> AsyncGenerator[JetStreamStore]:
    """Open a store on a new stream, and close it afterwards."""
    settings = Settings(servers=servers, replicas=replicas, request_timeout_s=30.0)
    client = await connect(settings)
    name = fresh_name()
    await declared(client, name, replicas)
    store = JetStreamStore(name, client, save_timeout_s=save_timeout_s)
    try:
        yield store
    finally:
        await store.settle()
        await client.close()
