"""A stalled loop is not taken for a silent server, and a silent server still ends requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from decimal import Decimal

import pytest

from eventjet import App, Imported
from eventjet.dev.nats import NatsServer
from eventjet.errors import StoreUnavailable
from eventjet.examples.bank.account import Account, Deposited, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.jetstream.client import Client
from eventjet.log.jetstream import PageReader
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.tap import REQUESTS_MAX
from eventjet.settings import Settings
from tests.logs import append, block, create, fresh_name
from tests.stores import retry_for

TIMEOUT_S = 0.5
STILL_S = 3.0
"""Many times the timeout."""
PATIENT_S = 60.0
LARGE = 60_000
"""The size of a body: a page of such bodies takes more than one read of the socket."""


def endpoint_of(server: NatsServer) -> Endpoint:
    return Endpoint.of(Settings(servers=(server.url,)))


@pytest.fixture
async def client(nats: NatsServer) -> AsyncIterator[Client]:
    client = Client(endpoint_of(nats), TIMEOUT_S)
    await client.connect()
    yield client
    await client.close()


async def test_a_request_that_was_not_sent_yet_is_not_late(client: Client) -> None:
    request = asyncio.create_task(client.api("INFO"))
    await asyncio.sleep(0)  # the request is written, and sent at the end of this turn of the loop
    time.sleep(STILL_S)
    assert "streams" in await request


async def test_an_answer_that_came_while_the_loop_stalled_is_received(client: Client) -> None:
    for _ in range(3):
        request = asyncio.create_task(client.api("INFO"))
        for _ in range(3):
            await asyncio.sleep(0)  # it is sent
        time.sleep(STILL_S)
        assert "streams" in await request


async def test_all_received_data_is_read_before_a_request_is_late(nats: NatsServer) -> None:
    name, events = fresh_name(), 20
    create(endpoint_of(nats), name, allow_direct=True)
    body = b'"%b"' % (b"x" * LARGE)
    append(endpoint_of(nats), name, [("account.a", block(), body) for _ in range(events)])
    reader = Client(endpoint_of(nats), TIMEOUT_S)
    reads = PageReader(name, reader, retry_for(0))

    async def length() -> int:
        return sum([len(page) async for page in reads.pages(f"{name}.account.a", 1)])

    assert await length() == events  # over a connection that is there
    requests = [asyncio.create_task(length()) for _ in range(REQUESTS_MAX)]
    for _ in range(10):
        await asyncio.sleep(0)
    time.sleep(STILL_S)
    assert await asyncio.gather(*requests) == [events] * REQUESTS_MAX
    await reader.close()


async def test_a_silent_server_ends_a_request_of_a_stalled_loop() -> None:
    with NatsServer() as server:
        client = Client(endpoint_of(server), TIMEOUT_S)
        await client.connect()
        server.pause()
        request = asyncio.create_task(client.api("INFO"))
        await asyncio.sleep(0)
        time.sleep(STILL_S)
        async with asyncio.timeout(PATIENT_S):
            with pytest.raises(StoreUnavailable, match=r"no answer within 0\.5 s"):
                await request
        await client.close()


async def test_a_silent_server_ends_a_request_of_a_loop_that_is_always_late() -> None:
    """Every check of the deadline is late; a request gets back the lost time, and no more."""
    with NatsServer() as server:
        client = Client(endpoint_of(server), TIMEOUT_S)
        await client.connect()
        server.pause()
        request = asyncio.create_task(client.api("INFO"))
        for _ in range(round(PATIENT_S / 0.3)):
            await asyncio.sleep(0.1)
            if request.done():
                break
            time.sleep(0.2)
        assert request.done()
        with pytest.raises(StoreUnavailable, match=r"no answer within 0\.5 s"):
            await request
        await client.close()


async def test_other_messages_do_not_keep_a_late_request_alive(nats: NatsServer) -> None:
    client = Client(endpoint_of(nats), TIMEOUT_S)
    await client.connect()
    received = 0

    def hear(_: object) -> None:
        nonlocal received
        received += 1

    subject = fresh_name("silent")
    await client.serve(f"{subject}.others", hear)
    # This subject has a subscriber that does not answer.
    await client.serve(f"{subject}.never", lambda _: None)
    request = asyncio.create_task(client.request(f"{subject}.never"))
    async with asyncio.timeout(PATIENT_S):
        while not request.done():
            client.publish(f"{subject}.others", b"x" * 1_000)
            await asyncio.sleep(0)
    assert received
    with pytest.raises(StoreUnavailable, match=r"no answer within 0\.5 s"):
        await request
    await client.close()


async def test_an_import_succeeds_in_a_loop_that_stalls_at_every_turn(nats: NatsServer) -> None:
    app = App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])
    events = [
        Imported(Account, f"a-{number}", event)
        for number in range(20)
        for event in (Opened(owner="ada"), Deposited(amount=Decimal(1)))
    ]
    async with app.connect(servers=nats.url) as jet:
        await jet.init()
    async with app.connect(servers=nats.url, request_timeout_s=TIMEOUT_S, save_timeout_s=TIMEOUT_S) as jet:
        await jet.repository(Account).history("a-0")  # over a connection that takes some twenty turns of the loop

        async def stand_still() -> None:
            while True:
                await asyncio.sleep(0)
                time.sleep(0.3)

        disturbing = asyncio.create_task(stand_still())
        async with asyncio.timeout(PATIENT_S):
            report = await jet.append_many(events, source="x")
        disturbing.cancel()
        assert report.stored == len(events)
        assert (await jet.log()).last == len(events)
