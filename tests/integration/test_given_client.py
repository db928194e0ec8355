"""An application's own connection, and what `nats.connect` takes: each on a real server."""

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

PATIENT_S = 60.0


def websocket(port: int) -> str:
    return f"websocket {{ listen: 127.0.0.1:{port}, no_tls: true }}"


@pytest.fixture
def app() -> App:
    return App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])


@pytest.fixture
async def given(eventjet_nats: NatsServer) -> AsyncIterator[NatsClient]:
    client = await nats.connect(eventjet_nats.url, inbox_prefix=b"_INBOX")
    yield client
    await client.close()


async def recorded(app: App, **connection: Any) -> int:
    """Open an account, deposit and read the history; its length."""
    async with app.connect(request_timeout_s=PATIENT_S, save_timeout_s=PATIENT_S, **connection) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        await accounts.execute("a", Account.open, "ada")
        await accounts.execute("a", Account.deposit, Decimal(40))
        assert (await accounts.load("a")).balance == 40
        return len(await accounts.history("a"))


async def test_a_given_client_is_used_and_left_open(app: App, given: NatsClient) -> None:
    heard: list[bytes] = []
    arrived = asyncio.Event()

    async def hear(message: Any) -> None:
        heard.append(message.data)
        arrived.set()

    await given.subscribe("greetings", cb=hear)
    assert await recorded(app, client=given) == 2
    assert (
        await recorded(App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason]), client=given) == 2
    )
    assert given.is_connected
    await given.publish("greetings", b"still open")
    async with asyncio.timeout(PATIENT_S):
        await arrived.wait()
    assert heard == [b"still open"]
    assert len(given._subs) == 1  # nothing of eventjet's is left on it


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
            async with asyncio.timeout(PATIENT_S):
                owner = await asked.get()
            done = await accounts.execute("a", Account.open, owner)
            assert (await accounts.load("a")).owner == "ada"
            assert done.version == 1
        await broker.publish("bob", f"shop.{app.name}.orders")
        async with asyncio.timeout(PATIENT_S):
            assert await asked.get() == "bob"


async def test_a_client_that_cannot_be_used_is_refused_in_words(app: App, eventjet_nats: NatsServer) -> None:
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


async def test_a_given_client_that_is_closed_meanwhile_is_said(app: App, given: NatsClient) -> None:
    async with app.connect(client=given, save_timeout_s=PATIENT_S, request_timeout_s=PATIENT_S) as jet:
        await jet.init()
        await jet.repository(Account).execute("a", Account.open, "ada")
    async with app.connect(client=given, save_timeout_s=1, request_timeout_s=PATIENT_S) as jet:
        accounts = jet.repository(Account)
        await accounts.load("a")
        await given.close()
        with pytest.raises((OutcomeUnknown, StoreUnavailable), match="that was given is closed"):
            await accounts.execute("a", Account.deposit, Decimal(1))


async def test_a_given_client_that_drains_is_said(app: App, given: NatsClient) -> None:
    last = asyncio.Event()

    async def hear(message: Any) -> None:
        await last.wait()

    await given.subscribe("greetings", cb=hear)
    await given.publish("greetings", b"")
    await given.flush()
    async with app.connect(client=given, save_timeout_s=1, request_timeout_s=PATIENT_S) as jet:
        await jet.init()
        draining = asyncio.create_task(given.drain())
        async with asyncio.timeout(PATIENT_S):
            while not given.is_draining:
                await asyncio.sleep(0.01)
        with pytest.raises(StoreUnavailable, match="that was given is draining"):
            await jet.repository(Account).execute("a", Account.open, "ada")
        last.set()
        await draining


async def test_an_answer_that_whoever_asked_has_given_up_ends_nobodys_reading(app: App, given: NatsClient) -> None:
    async with app.connect(client=given, request_timeout_s=PATIENT_S, save_timeout_s=PATIENT_S) as jet:
        await jet.init()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await given.flush()
        assert (await jet.repository(Account).execute("a", Account.open, "ada")).version == 1
        await given.flush()


async def test_a_given_client_goes_on_after_its_server_was_away(app: App) -> None:
    with NatsServer() as server:
        given = await nats.connect(server.url, reconnect_time_wait=0.1, max_reconnect_attempts=-1)
        async with app.connect(client=given, request_timeout_s=PATIENT_S, save_timeout_s=PATIENT_S) as jet:
            await jet.init()
            accounts = jet.repository(Account)
            await accounts.execute("a", Account.open, "ada")
            for number in range(1, 4):
                server.kill()
                server.start()
                done = await accounts.execute("a", Account.deposit, Decimal(number))
                assert done.version == number + 1
            assert [each.version for each in await accounts.history("a")] == [1, 2, 3, 4]
        assert given.is_connected
        await given.close()


async def test_no_service_answers_into_the_inboxes_of_the_given_client(app: App, given: NatsClient) -> None:
    async with app.connect(client=given) as jet:
        assert jet.client is not None
        mine = given.new_inbox()
        await given.subscribe(f"{mine}.*")
        assert not jet.client.may_answer(f"{mine}.1".encode())
        assert jet.client.may_answer(b"_INBOX.of.others")


async def test_a_caller_and_the_service_that_it_asks_may_share_one_client(given: NatsClient) -> None:
    app = App(
        fresh_name(),
        aggregates=[Account],
        upcasters=[withdrawn_has_a_reason],
        served=[served(Account, Account.open)],
    )
    async with app.connect(client=given, request_timeout_s=PATIENT_S) as jet, app.client(client=given) as remote:
        await jet.init()
        async with jet.service():
            done = await remote.repository(Account).execute("a", Account.open, "ada")
            assert done.version == 1


async def test_all_that_is_read_over_one_client_shares_what_the_server_keeps_for_it(
    app: App, given: NatsClient, eventjet_nats: NatsServer
) -> None:
    async with app.connect(client=given) as one, app.connect(client=given) as two:
        assert one.client is not None
        assert two.client is not None
        assert one.client.room is two.client.room


@pytest.mark.parametrize("how", ["settings", "client"])
async def test_a_context_of_tls_is_taken(how: str, app: App, tmp_path: Path) -> None:
    pems = certificates(tmp_path)
    context = ssl.create_default_context(cafile=pems["ca.pem"])
    context.load_cert_chain(pems["client.pem"], pems["client.key"])
    with NatsServer(config=tls_config(pems, f', verify: true, ca_file: "{pems["ca.pem"]}"')) as server:
        with pytest.raises(Unreachable):
            await recorded(app, servers=server.url)
        if how == "settings":
            assert await recorded(app, servers=server.url, tls=context) == 2
            return
        given = await nats.connect(server.url, tls=context)
        assert await recorded(app, client=given) == 2
        await given.close()


@pytest.mark.parametrize("how", ["settings", "client"])
async def test_callbacks_give_the_jwt_and_sign(how: str, app: App, tmp_path: Path) -> None:
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
        given = await nats.connect(server.url, user_jwt_cb=user_jwt, signature_cb=sign)
        assert await recorded(app, client=given) == 2
        await given.close()


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")  # nats-py's call of aiohttp
@pytest.mark.parametrize("how", ["settings", "client"])
async def test_websockets_carry_commands_and_histories(how: str, app: App, tmp_path: Path) -> None:
    with reserved_port() as port, NatsServer(config=websocket(port)) as server:
        async with app.connect(servers=server.url) as jet:
            await jet.init()
        url = f"ws://127.0.0.1:{port}"

        async def recorded_over(**connection: Any) -> int:
            async with app.connect(request_timeout_s=PATIENT_S, save_timeout_s=PATIENT_S, **connection) as jet:
                accounts = jet.repository(Account)
                await accounts.execute("a", Account.open, "ada")
                for _ in range(20):
                    await accounts.execute("a", Account.deposit, Decimal(1))
                return len(await accounts.history("a"))

        if how == "settings":
            assert await recorded_over(servers=url) == 21
            return
        given = await nats.connect(url)
        assert await recorded_over(client=given) == 21
        await given.close()


def test_an_endpoint_of_objects_is_not_given_to_another_process() -> None:
    endpoint = Endpoint.of(Settings(tls=ssl.create_default_context()))
    with pytest.raises(UsageError, match="`tls` is an object of this process"):
        pickle.dumps(endpoint)
    plain = Endpoint.of(Settings(user="ada", password="x"))
    assert pickle.loads(pickle.dumps(plain)) == plain


def test_settings_of_one_kind_are_given_together() -> None:
    with pytest.raises(UsageError, match="Give both"):
        Settings.load({"user_jwt_cb": lambda: b""}, {})
    with pytest.raises(UsageError, match="Give the context or the files"):
        Settings.load({"tls": ssl.create_default_context(), "tls_ca": "ca.pem"}, {})


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")  # nats-py's call of aiohttp
@pytest.mark.parametrize("scheme", ["nats", "ws"])
async def test_an_event_larger_than_what_the_account_may_send_is_refused_before_it_is_sent(
    scheme: str, app: App, tmp_path: Path
) -> None:
    """The limit of the user comes with the INFO after the login; nats-py goes by the one before."""
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


async def test_what_is_too_large_for_the_user_of_a_given_client_leaves_it_open(app: App, tmp_path: Path) -> None:
    """nats-py closes itself for good then. Over the next connection the limit is known."""
    config, good, _ = trust_chain(tmp_path, payload=20_000)
    with NatsServer(config=config) as server:
        again = asyncio.Event()

        async def reconnected() -> None:
            again.set()

        async with app.connect(servers=server.url, credentials=good) as jet:
            await jet.init()
            await jet.repository(Account).execute("a", Account.deposit, Decimal(1))
        given = await nats.connect(server.url, user_credentials=str(good), reconnected_cb=reconnected)
        await given.flush()  # so that nats-py has read the INFO with the limit, and passed it over
        async with app.connect(client=given, request_timeout_s=PATIENT_S, save_timeout_s=1) as jet:
            with pytest.raises(OutcomeUnknown):
                await jet.repository(Account).execute("a", Account.withdraw, Decimal(1), reason="x" * 30_000)
        async with asyncio.timeout(PATIENT_S):
            await again.wait()
        async with app.connect(client=given, request_timeout_s=PATIENT_S, save_timeout_s=PATIENT_S) as jet:
            accounts = jet.repository(Account)
            with pytest.raises(Refused, match="takes 20,000 from this user"):
                await accounts.execute("a", Account.withdraw, Decimal(1), reason="x" * 30_000)
            assert (await accounts.execute("a", Account.deposit, Decimal(1))).version == 2
        await given.close()
