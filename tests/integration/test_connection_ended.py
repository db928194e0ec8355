"""Connections that the server ends, refuses or delays: their callers get an error, and others do not wait."""

from __future__ import annotations

import asyncio
import gc
import itertools
import socket
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eventjet import App, Imported
from eventjet.dev.nats import NatsServer
from eventjet.dev.server import reserved_port
from eventjet.errors import ConnectionClosed, ConnectionLost, Forbidden, Unauthorized
from eventjet.examples.bank.account import Account, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.jetstream.client import Client, connect
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.tap import REQUESTS_MAX
from eventjet.settings import Settings
from eventjet.testing.store_contract import write
from tests.integration.wire_fake import FakeServer, greet
from tests.logs import fresh_name

USERS = """
accounts { A { jetstream: enabled, users: [
  { user: admin, password: admin }
  { user: deaf, password: deaf, permissions: { subscribe: { deny: "_INBOX.>" } } }
] } }
"""


@pytest.fixture
def app() -> App:
    return App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])


async def test_a_user_that_may_not_receive_answers_is_refused_at_once() -> None:
    with (
        NatsServer(config=USERS) as server,
        pytest.raises(
            Forbidden, match=r"denied _INBOX\.\S+ subscribing there is not permitted\. Set EVENTJET_INBOX_PREFIX"
        ),
    ):
        await connect(Settings(servers=(server.url,), user="deaf", password="deaf", request_timeout_s=60))


async def ask_info(client: Client) -> dict[str, Any]:
    while True:
        with suppress(ConnectionLost):
            return await client.api("INFO")


async def test_a_denied_inbox_after_a_reconnect_is_reported_at_once(tmp_path: Path) -> None:
    with reserved_port() as port:
        hearing = USERS.replace("deny", "allow")
        with NatsServer(tmp_path, port=port, config=hearing) as server:
            client = await connect(Settings(servers=(server.url,), user="deaf", password="deaf", request_timeout_s=600))
        with NatsServer(tmp_path, port=port, config=USERS):
            async with asyncio.timeout(60):
                with pytest.raises(Forbidden, match="Set EVENTJET_INBOX_PREFIX"):
                    await ask_info(client)
            await client.close()


async def test_calls_after_the_block_of_a_connection_report_that_it_is_closed(
    app: App, eventjet_nats: NatsServer, tmp_path: Path
) -> None:
    database = f"sqlite+aiosqlite:///{tmp_path}/db.sqlite"
    async with app.connect(servers=eventjet_nats.url, database=database) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        await accounts.execute("a", Account.open, "ada")

    async def tailed() -> None:
        async for _ in jet.tail():
            pass

    uses: list[Callable[[], Coroutine[Any, Any, object]]] = [
        lambda: accounts.execute("a", Account.deposit, Decimal(1)),
        lambda: accounts.command("c").execute("new", Account.open, "bob"),
        lambda: accounts.load("a"),
        lambda: accounts.history("a"),
        lambda: jet.transact(accounts.decide("a", Account.deposit, Decimal(1))),
        lambda: jet.append_many([Imported(Account, "b", Opened(owner="x"))], source="s"),
        jet.log,
        jet.init,
        tailed,
    ]
    for number, use in enumerate(uses):
        async with asyncio.timeout(60):
            with pytest.raises(
                ConnectionClosed, match=r"is closed: .*within that block alone\. Move the call"
            ) as caught:
                await use()
        assert "server" not in str(caught.value), number


async def test_slow_readers_do_not_block_other_readers(app: App, eventjet_nats: NatsServer) -> None:
    async with app.connect(servers=eventjet_nats.url, request_timeout_s=30) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        for name in "ab":
            await accounts.execute(name, Account.open, owner="Ada")
        tails = [jet.tail() for _ in range(REQUESTS_MAX + 1)]
        async with asyncio.timeout(60):
            for tail in tails:
                await anext(tail)
            assert len(await accounts.history("a")) == 1


async def test_connecting_does_not_wait_for_the_applications_threads(eventjet_nats: NatsServer) -> None:
    release = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(pool)
        busy = loop.run_in_executor(None, release.wait)
        try:
            async with asyncio.timeout(60):
                client = await connect(Settings(servers=(eventjet_nats.url,)))
                await client.close()
            assert not busy.done()
        finally:
            release.set()
            await busy


def test_credentials_that_a_server_refuses_are_tried_on_the_next_server() -> None:
    with NatsServer(config=USERS) as knows, NatsServer(config=USERS.replace("admin", "other")) as does_not:
        endpoint = Endpoint((does_not.url, knows.url), user="admin", password="admin")
        with NatsConnection.open(endpoint, timeout_s=60) as link:
            assert link.peer.endswith(str(knows.port))
        with pytest.raises(Unauthorized):
            NatsConnection.open(Endpoint((does_not.url,), user="admin", password="admin"), timeout_s=60)


async def test_a_cancelled_save_fails_without_a_warning(app: App) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    with NatsServer() as server:
        async with app.connect(servers=server.url, request_timeout_s=60, save_timeout_s=1) as jet:
            await jet.init()
            assert jet.client is not None
            jet.client.timeout_s = 1  # for requests to the paused server
            server.pause()
            saving = asyncio.create_task(jet.store.append([write("a", 0, 0)]))
            for _ in range(5):
                await asyncio.sleep(0)
            saving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await saving
        server.resume()
    gc.collect()
    assert errors == []


async def test_an_error_of_a_listener_does_not_affect_requests() -> None:
    raised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))

    def hear(_: object) -> None:
        raise LookupError

    with NatsServer() as server:
        client = await connect(Settings(servers=(server.url,), request_timeout_s=60))
        await client.serve("news", hear)
        for _ in range(3):
            await client.request("$JS.API.INFO", earlier_messages=[("news", b"x", b"")])
        async with asyncio.timeout(60):
            while not raised:
                await asyncio.sleep(0.01)
        assert isinstance(raised[0]["exception"], LookupError)
        await client.close()


def test_a_connection_closed_while_it_is_opened_leaves_no_socket_open(eventjet_nats: NatsServer) -> None:
    async def close_after(turns: int) -> None:
        client = await connect(Settings(servers=(eventjet_nats.url,), request_timeout_s=60))
        second = client.another("second")
        waiting = asyncio.ensure_future(second.wait_for_room("a test", 60))
        for _ in range(turns):
            await asyncio.sleep(0)
        await second.close()
        await client.close()
        await asyncio.gather(waiting, return_exceptions=True)

    gc.collect()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        for turns in range(40):
            asyncio.run(close_after(turns))
        gc.collect()
    assert [str(warning.message) for warning in warned] == []


async def test_reconnects_to_a_server_that_ends_every_connection_are_delayed() -> None:
    accepted: list[float] = []

    def script(conversation: socket.socket) -> None:
        accepted.append(time.monotonic())
        greet(conversation)
        conversation.close()

    with FakeServer(script) as fake:
        client = Client(fake.endpoint, 60)
        waiting = asyncio.create_task(client.api("INFO"))
        async with asyncio.timeout(60):
            while len(accepted) < 4:
                await asyncio.sleep(0.01)
        await client.close()
        await asyncio.gather(waiting, return_exceptions=True)
    assert all(later - earlier > 0.1 for earlier, later in itertools.pairwise(accepted))
