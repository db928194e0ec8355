"""An app connects over its own NATS client, or with the options of `nats.connect`, on a real server."""

from __future__ import annotations

import asyncio
import base64
import pickle
import re
import ssl
import threading
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import nats
import nkeys
import pytest
from faststream.nats import NatsBroker
from nats.aio.client import Client as NatsClient

from eventjet import App, served
from eventjet.dev.nats import NatsServer
from eventjet.dev.server import reserved_port
from eventjet.errors import OutcomeUnknown, Refused, StoreUnavailable, Unreachable, UsageError
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from tests.integration.wire_secrets import certificates, tls_config, trust_chain
from tests.logs import fresh_name

BOUND_S = 60.0


def websocket(port: int) -> str:
    return f"websocket {{ listen: 127.0.0.1:{port}, no_tls: true }}"


@pytest.fixture
def app() -> App:
    return App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])


@pytest.fixture
async def nats_client(eventjet_nats: NatsServer) -> AsyncIterator[NatsClient]:
    client = await nats.connect(eventjet_nats.url, inbox_prefix=b"_INBOX")
    yield client
    await client.close()


async def recorded(app: App, **connection: Any) -> int:
    """Open an account and deposit; return the length of its history."""
    async with app.connect(request_timeout_s=BOUND_S, save_timeout_s=BOUND_S, **connection) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        await accounts.execute("a", Account.open, "ada")
        await accounts.execute("a", Account.deposit, Decimal(40))
        assert (await accounts.load("a")).balance == 40
        return len(await accounts.history("a"))


async def test_a_given_client_is_used_and_left_open(app: App, nats_client: NatsClient) -> None:
    heard: list[bytes] = []
    arrived = asyncio.Event()

    async def hear(message: Any) -> None:
        heard.append(message.data)
        arrived.set()

    await nats_client.subscribe("greetings", cb=hear)
    assert await recorded(app, client=nats_client) == 2
    assert (
        await recorded(App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason]), client=nats_client)
        == 2
    )
    assert nats_client.is_connected
    await nats_client.publish("greetings", b"still open")
    async with asyncio.timeout(BOUND_S):
        await arrived.wait()
    assert heard == [b"still open"]
    assert len(nats_client._subs) == 1  # eventjet has left no subscription


async def test_one_connection_is_shared_with_faststream(app: App, eventjet_nats: NatsServer) -> None:
    broker = NatsBroker(eventjet_nats.url)
    asked: asyncio.Queue[str] = asyncio.Queue()

    @broker.subscriber(f"shop.{app.name}.orders")
    async def order(body: str) -> None:
        await asked.put(body)

    async with broker:
        await broker.start()
        connection = broker._connection
        assert isinstance(connection, NatsClient)
        async with app.connect(client=connection) as jet:
            await jet.init()
            accounts = jet.repository(Account)
            await broker.publish("ada", f"shop.{app.name}.orders")
            async with asyncio.timeout(BOUND_S):
                owner = await asked.get()
            done = await accounts.execute("a", Account.open, owner)
            assert (await accounts.load("a")).owner == "ada"
            assert done.version == 1
        await broker.publish("bob", f"shop.{app.name}.orders")
        async with asyncio.timeout(BOUND_S):
            assert await asked.get() == "bob"


async def test_an_unusable_client_is_refused_with_the_reason(app: App, eventjet_nats: NatsServer) -> None:
    async def refused(client: Any, **overrides: Any) -> str:
        with pytest.raises(UsageError) as error:
            async with app.connect(client=client, **overrides):
                pass
        return str(error.value)

    closed = await nats.connect(eventjet_nats.url)
    await closed.close()
    assert "is closed. Give one that is connected" in await refused(closed)
    assert "is not connected" in await refused(NatsClient())
    live = await nats.connect(eventjet_nats.url)
    assert "Leave servers= out, or client=" in await refused(live, servers=eventjet_nats.url)
    await live.close()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        elsewhere = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(nats.connect(eventjet_nats.url), loop))
        assert "is of another loop" in await refused(elsewhere)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(elsewhere.close(), loop))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def test_a_given_client_that_was_closed_is_named_in_the_error(app: App, nats_client: NatsClient) -> None:
    async with app.connect(client=nats_client, save_timeout_s=BOUND_S, request_timeout_s=BOUND_S) as jet:
        await jet.init()
        await jet.repository(Account).execute("a", Account.open, "ada")
    async with app.connect(client=nats_client, save_timeout_s=1, request_timeout_s=BOUND_S) as jet:
        accounts = jet.repository(Account)
        await accounts.load("a")
        await nats_client.close()
        with pytest.raises((OutcomeUnknown, StoreUnavailable), match="that was given is closed"):
            await accounts.execute("a", Account.deposit, Decimal(1))


async def test_a_given_client_that_drains_is_named_in_the_error(app: App, nats_client: NatsClient) -> None:
    last = asyncio.Event()

    async def hear(message: Any) -> None:
        await last.wait()

    await nats_client.subscribe("greetings", cb=hear)
    await nats_client.publish("greetings", b"")
    await nats_client.flush()
    async with app.connect(client=nats_client, save_timeout_s=1, request_timeout_s=BOUND_S) as jet:
        await jet.init()
        draining = asyncio.create_task(nats_client.drain())
        async with asyncio.timeout(BOUND_S):
            while not nats_client.is_draining:
                await asyncio.sleep(0.01)
        with pytest.raises(StoreUnavailable, match="that was given is draining"):
            await jet.repository(Account).execute("a", Account.open, "ada")
        last.set()
        await draining


async def test_a_flush_that_timed_out_does_not_stop_the_reading(app: App, nats_client: NatsClient) -> None:
    async with app.connect(client=nats_client, request_timeout_s=BOUND_S, save_timeout_s=BOUND_S) as jet:
        await jet.init()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await nats_client.flush()
        assert (await jet.repository(Account).execute("a", Account.open, "ada")).version == 1
        await nats_client.flush()


async def test_a_given_client_works_again_after_its_server_restarts(app: App) -> None:
    with NatsServer() as server:
        nats_client = await nats.connect(server.url, reconnect_time_wait=0.1, max_reconnect_attempts=-1)
        async with app.connect(client=nats_client, request_timeout_s=BOUND_S, save_timeout_s=BOUND_S) as jet:
            await jet.init()
            accounts = jet.repository(Account)
            await accounts.execute("a", Account.open, "ada")
            for number in range(1, 4):
                server.kill()
                server.start()
                done = await accounts.execute("a", Account.deposit, Decimal(number))
                assert done.version == number + 1
            assert [recorded.version for recorded in await accounts.history("a")] == [1, 2, 3, 4]
        assert nats_client.is_connected
        await nats_client.close()


async def test_a_service_does_not_answer_into_inboxes_of_the_given_client(app: App, nats_client: NatsClient) -> None:
    async with app.connect(client=nats_client) as jet:
        assert jet.client is not None
        mine = nats_client.new_inbox()
        await nats_client.subscribe(f"{mine}.*")
        assert not jet.client.may_answer(f"{mine}.1".encode())
        assert jet.client.may_answer(b"_INBOX.of.others")


async def test_a_caller_and_its_service_may_share_a_client(nats_client: NatsClient) -> None:
    app = App(
        fresh_name(),
        aggregates=[Account],
        upcasters=[withdrawn_has_a_reason],
        served=[served(Account, Account.open)],
    )
    async with (
        app.connect(client=nats_client, request_timeout_s=BOUND_S) as jet,
        app.client(client=nats_client) as remote,
    ):
        await jet.init()
        async with jet.service():
            done = await remote.repository(Account).execute("a", Account.open, "ada")
            assert done.version == 1


async def test_apps_over_the_same_client_share_its_buffer(
    app: App, nats_client: NatsClient, eventjet_nats: NatsServer
) -> None:
    async with app.connect(client=nats_client) as first, app.connect(client=nats_client) as second:
        assert first.client is not None
        assert second.client is not None
        assert first.client.room is second.client.room


@pytest.mark.parametrize("how", ["settings", "client"])
async def test_a_tls_context_is_used(how: str, app: App, tmp_path: Path) -> None:
    pems = certificates(tmp_path)
    context = ssl.create_default_context(cafile=pems["ca.pem"])
    context.load_cert_chain(pems["client.pem"], pems["client.key"])
    with NatsServer(config=tls_config(pems, f', verify: true, ca_file: "{pems["ca.pem"]}"')) as server:
        with pytest.raises(Unreachable):
            await recorded(app, servers=server.url)
        if how == "settings":
            assert await recorded(app, servers=server.url, tls=context) == 2
            return
        nats_client = await nats.connect(server.url, tls=context)
        assert await recorded(app, client=nats_client) == 2
        await nats_client.close()


@pytest.mark.parametrize("how", ["settings", "client"])
async def test_callbacks_provide_the_jwt_and_the_signature(how: str, app: App, tmp_path: Path) -> None:
    config, good, _ = trust_chain(tmp_path)
    text = good.read_bytes()
    jwt, seed = (match[1] for match in re.finditer(rb"-----BEGIN [A-Z ]+-----\n(.+)\n", text))

    def user_jwt() -> bytes:
        return jwt

    def sign(nonce: str) -> bytes:
        pair: Any = nkeys.from_seed(bytearray(seed))
        return base64.b64encode(pair.sign(nonce.encode()))

    with NatsServer(config=config) as server:
        if how == "settings":
            assert await recorded(app, servers=server.url, user_jwt_cb=user_jwt, signature_cb=sign) == 2
            return
        nats_client = await nats.connect(server.url, user_jwt_cb=user_jwt, signature_cb=sign)
        assert await recorded(app, client=nats_client) == 2
        await nats_client.close()


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")  # nats-py's call of aiohttp
@pytest.mark.parametrize("how", ["settings", "client"])
async def test_websockets_carry_commands_and_histories(how: str, app: App, tmp_path: Path) -> None:
    with reserved_port() as port, NatsServer(config=websocket(port)) as server:
        async with app.connect(servers=server.url) as jet:
            await jet.init()
        url = f"ws://127.0.0.1:{port}"

        async def recorded_over(**connection: Any) -> int:
            async with app.connect(request_timeout_s=BOUND_S, save_timeout_s=BOUND_S, **connection) as jet:
                accounts = jet.repository(Account)
                await accounts.execute("a", Account.open, "ada")
                for _ in range(20):
                    await accounts.execute("a", Account.deposit, Decimal(1))
                return len(await accounts.history("a"))

        if how == "settings":
            assert await recorded_over(servers=url) == 21
            return
        nats_client = await nats.connect(url)
        assert await recorded_over(client=nats_client) == 21
        await nats_client.close()


def test_an_endpoint_with_objects_of_this_process_is_not_pickled() -> None:
    endpoint = Endpoint.of(Settings(tls=ssl.create_default_context()))
    with pytest.raises(UsageError, match="`tls` is an object of this process"):
        pickle.dumps(endpoint)
    plain = Endpoint.of(Settings(user="ada", password="x"))
    assert pickle.loads(pickle.dumps(plain)) == plain


def test_incomplete_or_contradicting_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="Give both"):
        Settings.load({"user_jwt_cb": lambda: b""}, {})
    with pytest.raises(UsageError, match="Give the context or the files"):
        Settings.load({"tls": ssl.create_default_context(), "tls_ca": "ca.pem"}, {})


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")  # nats-py's call of aiohttp
@pytest.mark.parametrize("scheme", ["nats", "ws"])
async def test_an_event_above_the_payload_limit_of_the_user_is_refused_before_it_is_sent(
    scheme: str, app: App, tmp_path: Path
) -> None:
    """The limit of the user comes with the INFO after the login; nats-py uses the INFO before the login."""
    config, good, _ = trust_chain(tmp_path, payload=20_000)
    with reserved_port() as port, NatsServer(config=f"{config}\n{websocket(port)}") as server:
        async with app.connect(servers=server.url, credentials=good) as jet:
            await jet.init()
        url = server.url if scheme == "nats" else f"ws://127.0.0.1:{port}"
        async with app.connect(servers=url, credentials=good) as jet:
            accounts = jet.repository(Account)
            await accounts.execute("a", Account.deposit, Decimal(1))
            with pytest.raises(Refused, match=r"A message of 3\d,\d{3} bytes .* takes 20,000 from this user"):
                await accounts.execute("a", Account.withdraw, Decimal(1), reason="x" * 30_000)
            assert jet.client is not None
            assert jet.client.nats is not None
            assert jet.client.nats.stats["reconnects"] == 0
            assert (await accounts.execute("a", Account.deposit, Decimal(1))).version == 2


async def test_a_too_large_event_leaves_the_given_client_usable(app: App, tmp_path: Path) -> None:
    """nats-py reconnects then, and the limit is known on the next connection."""
    config, good, _ = trust_chain(tmp_path, payload=20_000)
    with NatsServer(config=config) as server:
        again = asyncio.Event()

        async def reconnected() -> None:
            again.set()

        async with app.connect(servers=server.url, credentials=good) as jet:
            await jet.init()
            await jet.repository(Account).execute("a", Account.deposit, Decimal(1))
        nats_client = await nats.connect(server.url, user_credentials=str(good), reconnected_cb=reconnected)
        await nats_client.flush()  # so that nats-py has read the INFO with the limit, which it ignores
        async with app.connect(client=nats_client, request_timeout_s=BOUND_S, save_timeout_s=1) as jet:
            with pytest.raises(OutcomeUnknown):
                await jet.repository(Account).execute("a", Account.withdraw, Decimal(1), reason="x" * 30_000)
        async with asyncio.timeout(BOUND_S):
            await again.wait()
        async with app.connect(client=nats_client, request_timeout_s=BOUND_S, save_timeout_s=BOUND_S) as jet:
            accounts = jet.repository(Account)
            with pytest.raises(Refused, match="takes 20,000 from this user"):
                await accounts.execute("a", Account.withdraw, Decimal(1), reason="x" * 30_000)
            assert (await accounts.execute("a", Account.deposit, Decimal(1))).version == 2
        await nats_client.close()
