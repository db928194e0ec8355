"""A connection to a real server: wrong files, missing permissions, restarts, and closing under waiting readers."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import pytest

from eventjet import App, Imported
from eventjet.codec.catalog import EncodedEvent
from eventjet.dev.nats import NatsServer
from eventjet.domain.identity import new_event_id
from eventjet.errors import (
    ConnectionClosed,
    ConnectionLost,
    EventjetError,
    OutcomeUnknown,
    StoreUnavailable,
    Unreachable,
)
from eventjet.examples.bank.account import Account, Deposited
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.jetstream.client import Client, connect
from eventjet.log.jetstream import JetStreamStore, PageReader
from eventjet.log.store import Append, NewEvent
from eventjet.log.topology import declare
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from tests.logs import fresh_name
from tests.stores import retry_for

EVENTS = 300


@pytest.fixture
def app() -> App:
    return App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])


def deposits() -> list[Imported]:
    return [Imported(Account, "long", Deposited(amount=Decimal(1))) for _ in range(EVENTS)]


def _connections(server: NatsServer) -> set[str]:
    """Return the names of the server's clients."""
    with urllib.request.urlopen(f"{server.monitor_url}/connz", timeout=10) as answer:
        return {connection.get("name", "") for connection in json.load(answer)["connections"]}


async def test_a_long_history_is_read_after_the_server_was_restarted(app: App) -> None:
    with NatsServer() as server:
        async with app.connect(servers=server.url) as jet:
            await jet.init()
            await jet.append_many(deposits(), source="x")
            accounts = jet.repository(Account)
            await asyncio.gather(*(accounts.history("long") for _ in range(4)))
            server.stop()
            server.start()
            async with asyncio.timeout(30):
                while True:
                    with suppress(StoreUnavailable):
                        await jet.log()
                        break
                    await asyncio.sleep(0.05)
            for _ in range(4):
                assert len(await accounts.history("long")) == EVENTS


async def test_readers_that_wait_at_the_end_get_an_error_when_the_connection_closes(
    app: App, eventjet_nats: NatsServer
) -> None:
    async with app.connect(servers=eventjet_nats.url) as jet:
        await jet.init()
        await jet.append_many(deposits(), source="x")
    endpoint = Endpoint.of(Settings(servers=(eventjet_nats.url,)))
    reader = Client(endpoint, 4)
    reads = PageReader(app.name, reader, retry_for(0))

    async def count() -> int:
        return sum([len(page) async for page in reads.pages(f"{app.name}.account.long", 1)])

    readers = [asyncio.create_task(count()) for _ in range(12)]
    await asyncio.sleep(0)
    await reader.close()
    async with asyncio.timeout(30):
        ends = await asyncio.gather(*readers, return_exceptions=True)
    assert {end if isinstance(end, int) else type(end) for end in ends} <= {EVENTS, ConnectionClosed}
    assert any(isinstance(end, ConnectionClosed) for end in ends)
    with pytest.raises(ConnectionClosed):
        await count()


async def test_a_history_that_is_not_read_to_its_end_leaves_no_connection(app: App, eventjet_nats: NatsServer) -> None:
    async with app.connect(servers=eventjet_nats.url) as jet:
        await jet.init()
        await jet.append_many(deposits(), source="x")
        for _ in range(8):
            pages: AsyncIterator[object] = jet.store.pages("account", "long")
            async for _ in pages:
                break
        assert len(await jet.repository(Account).history("long")) == EVENTS
        assert "eventjet histories" in _connections(eventjet_nats)
    deadline = time.monotonic() + 30
    while "eventjet histories" in _connections(eventjet_nats):
        assert time.monotonic() < deadline, "a connection for histories outlived its owner"
        await asyncio.sleep(0.01)


async def test_saves_and_reads_time_out_on_a_blocked_connection(app: App) -> None:
    with NatsServer() as server:
        client = await connect(Settings(servers=(server.url,), request_timeout_s=60))
        await declare(client, app.name, 1)
        store = JetStreamStore(app.name, client, save_timeout_s=1)
        server.pause()
        client.timeout_s = 1
        assert client.nats is not None
        while client.nats.pending_data_size <= 1 << 20:
            client.publish("elsewhere", bytes(800_000))
            await asyncio.sleep(0.001)
        save = [Append("thing", "a", 0, 0, (NewEvent(new_event_id(), EncodedEvent("happened", 1, b"{}")),))]
        async with asyncio.timeout(60):
            with pytest.raises(OutcomeUnknown, match="takes nothing"):
                await store.append(save)
            with pytest.raises(StoreUnavailable, match="takes nothing"):
                await store.last("thing", "a")
        server.resume()
        client.timeout_s = 60
        assert await JetStreamStore(app.name, client, save_timeout_s=60).resolve(save) == 1
        await client.close()


async def test_requests_and_subscriptions_continue_after_a_reconnect() -> None:
    with NatsServer() as server:
        client = await connect(Settings(servers=(server.url,), request_timeout_s=60))
        heard: list[bytes] = []
        lost: list[None] = []
        client.on_lost.append(lambda: lost.append(None))
        await client.serve("news.>", lambda frame: heard.append(frame[4]))
        for number in range(1, 4):
            server.kill()
            server.start()
            with suppress(StoreUnavailable):  # the request was under way when the connection was lost
                await client.api("INFO")
            await client.api("INFO")
            assert len(lost) == number
            news = b"%d" % number
            async with asyncio.timeout(60):
                while heard[-1:] != [news]:
                    with suppress(StoreUnavailable):  # the subject has no responder
                        await client.request("news.today", news, timeout_s=1)
        await client.close()
        await client.close()
        with pytest.raises(ConnectionClosed):
            await client.api("INFO")


async def test_a_server_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.nats.client.LoopClient.ping_interval_s", 0.2)
    with NatsServer() as server:
        client = await connect(Settings(servers=(server.url,), request_timeout_s=60))
        assert client.nats is not None
        async with asyncio.timeout(60):
            while client.nats._pongs_received < 5:
                await asyncio.sleep(0.05)
        await client.api("INFO")  # a silent server that answers pings is not given up
        assert client.nats.stats["reconnects"] == 0
        server.pause()
        with pytest.raises(ConnectionLost, match="silent"):
            await client.api("INFO")
        server.resume()
        await client.api("INFO")
        await client.close()


@pytest.mark.slow
async def test_a_frozen_server_is_left_after_the_first_late_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(subject: str, timeout_s: float) -> str:
        with pytest.raises(StoreUnavailable) as error:
            await client.request(subject, timeout_s=timeout_s)
        return str(error.value)

    monkeypatch.setattr("eventjet.nats.client.LoopClient.ping_interval_s", 600.0)
    with NatsServer() as server:
        client = await connect(Settings(servers=(server.url,), request_timeout_s=60))
        assert client.nats is not None
        await client.serve("nobody.answers", lambda _: None)
        assert "no answer" in await late("nobody.answers", 1)
        await client.api("INFO")  # the server answers, so the client stays connected
        assert client.nats.stats["reconnects"] == 0
        server.pause()
        async with asyncio.timeout(120):
            while "silent" not in await late("$JS.API.INFO", 2):
                assert client.nats.is_connected
        server.resume()
        await client.api("INFO")
        await client.close()


async def test_a_user_that_may_not_read_snapshots_does_not_wait_for_them(app: App) -> None:
    read = ["$JS.API.INFO", f"$JS.API.DIRECT.GET.{app.name}", f"$JS.API.DIRECT.GET.{app.name}.>"]
    allowed = ", ".join(f'"{subject}"' for subject in [*read, f"$JS.API.STREAM.MSG.GET.{app.name}", f"{app.name}.>"])
    config = (
        'authorization { timeout: 30, users = [ {user: "all", password: "x"}, '
        f'{{user: "some", password: "x", permissions: {{ publish: {{ allow: [{allowed}] }}, '
        'subscribe: { allow: ["_INBOX.>"] } } } ] }'
    )
    with NatsServer(config=config) as server:
        async with app.connect(servers=server.url, user="all", password="x") as jet:
            await jet.init()
            await jet.repository(Account).execute("a", Account.open, "ada")
        settings = {"servers": server.url, "user": "some", "password": "x", "request_timeout_s": 60}
        async with app.connect(**settings) as jet, asyncio.timeout(30):
            assert (await jet.repository(Account).load("a")).owner == "ada"


async def test_a_server_of_small_messages_is_refused_at_once(app: App) -> None:
    with NatsServer(config="max_payload: 64KB") as server, pytest.raises(Unreachable, match="max_payload"):
        async with app.connect(servers=server.url):
            pass


@pytest.mark.parametrize("name", ["credentials", "nkey", "tls_ca", "tls_cert"])
async def test_a_credentials_file_without_a_key_is_named_without_its_content(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("SUAcanary\n")
    with pytest.raises(EventjetError, match=str(file)) as caught:
        await connect(Settings.load({"servers": "nats://127.0.0.1:1", name: str(file)}, {}))
    assert "canary" not in str(caught.value)


async def test_init_does_not_change_a_foreign_stream(app: App, eventjet_nats: NatsServer) -> None:
    async with app.connect(servers=eventjet_nats.url) as jet:
        assert jet.client is not None
        await jet.client.api(f"STREAM.CREATE.{app.name}", {"name": app.name, "subjects": [f"{app.name}.*.*"]})
        with pytest.raises(Unreachable, match="no log identity"):
            await jet.init()
        names = (await jet.client.api("STREAM.NAMES"))["streams"]
        assert f"KV_{app.name}_snapshots" not in names
