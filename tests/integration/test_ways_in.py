"""The client of an application connects and reconnects over several servers, TLS, WebSockets, IPv6 and new keys."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import socket
import ssl
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest

from eventjet.dev.nats import NatsServer
from eventjet.dev.server import reserved_port
from eventjet.jetstream.client import Client, connect
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.tap import Tap
from eventjet.settings import Settings
from tests.integration.wire_fake import INFO
from tests.integration.wire_secrets import certificates, tls_config, trust_chain, user_key

PATIENT_S = 60.0


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return certificates(tmp_path_factory.mktemp("pems"))


@asynccontextmanager
async def proxied(
    server: str,
    *,
    host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    greeting: Callable[[bytes], bytes] = bytes,
) -> AsyncGenerator[int]:
    """Yield the port of a proxy for a server, which may end TLS and change the server's greeting."""
    tasks: set[asyncio.Task[Any]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(server)
        try:
            their_reader, their_writer = await asyncio.open_connection(url.hostname, url.port)
        except OSError:
            writer.close()
            return
        if greeting is not bytes:
            writer.write(greeting(await their_reader.readline()))
        for pumping in (pump(reader, their_writer), pump(their_reader, writer)):
            tasks.add(asyncio.create_task(pumping))

    listening = await asyncio.start_server(accept, host, 0, ssl=tls)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_disconnected(client: Client) -> None:
    """Wait until the client has noticed the loss of its server."""
    async with asyncio.timeout(PATIENT_S):
        while client.nats is not None and client.nats.is_connected:
            await asyncio.sleep(0.01)


async def test_servers_that_end_every_login_do_not_block_the_next_server(
    eventjet_nats: NatsServer,
) -> None:
    async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        writer.close()

    async with AsyncExitStack() as stack:
        ports: list[int] = []
        for _ in range(3):
            bad = await stack.enter_async_context(await asyncio.start_server(end, "127.0.0.1", 0))
            ports.append(bad.sockets[0].getsockname()[1])
        urls = [*(f"nats://127.0.0.1:{port}" for port in ports), eventjet_nats.url]
        for _ in range(5):  # nats-py shuffles them
            client = await connect(Settings(servers=tuple(urls)))
            assert client.nats is not None
            assert {url.netloc for url in client.nats.servers} == {urlsplit(url).netloc for url in urls}
            await client.close()


async def test_a_server_with_an_ipv6_address_is_connected_to(eventjet_nats: NatsServer) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    async with proxied(eventjet_nats.url, host="::1") as port:
        url = f"nats://[::1]:{port}"
        # The first server ends every connection, so that the client must use the second one.
        async with proxied("nats://127.0.0.1:1") as ends:
            for _ in range(3):
                client = await connect(Settings(servers=(f"nats://127.0.0.1:{ends}", url)))
                await client.close()
        nats_client = await nats.connect(url)
        client = await connect(Settings(), nats_client)
        assert client.endpoint.servers == (url,)
        await client.close()
        await nats_client.close()


async def test_a_key_changed_during_an_outage_is_read_again(tmp_path: Path) -> None:
    seed = tmp_path / "ada.nk"
    keys = [user_key(), user_key()]
    with reserved_port() as port:
        configs = [f"authorization {{ timeout: 30, users: [{{ nkey: {key.public} }}] }}" for key in keys]
        seed.write_text(f"# The key of ada\n{keys[0].seed}\n")
        with NatsServer(port=port, config=configs[0]) as server:
            client = await connect(Settings(servers=(server.url,), nkey=seed, request_timeout_s=PATIENT_S))
        await wait_disconnected(client)
        seed.write_text(keys[1].seed)
        with NatsServer(port=port, config=configs[1]):
            assert "streams" in await client.api("INFO")
            await client.close()


async def test_certificates_changed_during_an_outage_are_read_again(pems: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    new_pems = certificates(tmp_path / "later")
    ca, cert, key = tmp_path / "ca.pem", tmp_path / "client.pem", tmp_path / "client.key"

    def config(pem_files: dict[str, Path]) -> str:
        for path in (ca, cert, key):
            shutil.copy(pem_files[path.name], path)
        return tls_config(pem_files, f', verify: true, ca_file: "{pem_files["ca.pem"]}"')

    with reserved_port() as port:
        with NatsServer(port=port, config=config(pems)) as server:
            settings: dict[str, Any] = {"servers": (server.url,), "tls_ca": ca, "tls_cert": cert, "tls_key": key}
            client = await connect(Settings(**settings, request_timeout_s=PATIENT_S))
        await wait_disconnected(client)
        with NatsServer(port=port, config=config(new_pems)):
            assert "streams" in await client.api("INFO")
            await client.close()


async def test_unreadable_credentials_do_not_end_reconnecting(tmp_path: Path) -> None:
    config, good, _ = trust_chain(tmp_path)
    text = good.read_text()
    with NatsServer(config=config) as server:
        client = await connect(Settings(servers=(server.url,), credentials=good, request_timeout_s=PATIENT_S))
        assert client.nats is not None
        failed: list[Exception] = []
        Tap.of(client.nats).watchers[0].on_error = failed.append
        good.write_text("")
        server.kill()
        server.start()
        async with asyncio.timeout(PATIENT_S):
            while not any("no user JWT" in str(error) for error in failed):
                await asyncio.sleep(0.01)
        good.write_text(text)
        assert "streams" in await client.api("INFO")
        await client.close()


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")  # nats-py's call of aiohttp
async def test_a_websocket_client_ignores_tcp_urls_of_its_cluster() -> None:
    def config(own: int, other: int, web: int) -> str:
        return (
            f"server_name: n{own}\ncluster {{ name: c, listen: 127.0.0.1:{own}, routes: [nats://127.0.0.1:{other}] }}\n"
            f"websocket {{ listen: 127.0.0.1:{web}, no_tls: true }}"
        )

    with (
        reserved_port() as first_port,
        reserved_port() as second_port,
        reserved_port() as web,
        reserved_port() as other_web,
        NatsServer(jetstream=False, config=config(first_port, second_port, web)),
        NatsServer(jetstream=False, config=config(second_port, first_port, other_web)),
    ):
        url = f"ws://127.0.0.1:{web}"
        client = Client(Endpoint((url,)), PATIENT_S)
        await client.connect()
        assert client.nats is not None
        async with asyncio.timeout(PATIENT_S):
            while len(client.info.get("connect_urls", ())) < 2:
                await client.nats.force_reconnect()
                await asyncio.sleep(0.05)
        assert {server.geturl() for server in client.nats.servers} == {url}
        await client.close()


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")
async def test_a_websocket_behind_a_tls_proxy_is_connected_to(pems: dict[str, Path]) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pems["server.pem"], pems["server.key"])
    with reserved_port() as web, NatsServer(config=f"websocket {{ listen: 127.0.0.1:{web}, no_tls: true }}"):
        async with proxied(f"ws://127.0.0.1:{web}", tls=context) as port:
            trust = ssl.create_default_context(cafile=pems["ca.pem"])
            client = await connect(Settings(servers=(f"wss://127.0.0.1:{port}",), tls=trust))
            await client.close()


async def test_server_names_sent_before_tls_are_not_trusted(
    pems: dict[str, Path],
) -> None:
    def greeting(line: bytes) -> bytes:
        info = json.loads(line.removeprefix(b"INFO ")) | {"connect_urls": ["elsewhere.example:4222"]}
        return b"INFO " + json.dumps(info).encode() + b"\r\n"

    with NatsServer(config=tls_config(pems)) as server:
        async with proxied(server.url, greeting=greeting) as port:
            trust = ssl.create_default_context(cafile=pems["ca.pem"])
            client = await connect(Settings(servers=(f"tls://127.0.0.1:{port}",), tls=trust))
            assert client.nats is not None
            pool: list[Any] = client.nats._server_pool
            assert {entry.tls_name or entry.uri.hostname for entry in pool} == {"127.0.0.1"}
            await client.close()


async def test_a_closed_nats_py_client_is_garbage_collected(eventjet_nats: NatsServer) -> None:
    nats_client = await nats.connect(eventjet_nats.url)
    client = await connect(Settings(), nats_client)
    references = weakref.ref(nats_client), weakref.ref(Tap.of(nats_client)), weakref.ref(client)
    await client.close()
    await nats_client.close()
    del nats_client, client
    async with asyncio.timeout(PATIENT_S):
        while any(reference() is not None for reference in references):
            await asyncio.sleep(0.05)
            gc.collect()


async def test_cancelled_connecting_leaves_no_connection() -> None:
    has_pinged, is_closed = asyncio.Event(), asyncio.Event()

    async def say_nothing_more(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        await reader.readuntil(b"PING\r\n")
        has_pinged.set()
        assert await reader.read() == b""
        is_closed.set()
        writer.close()

    async with await asyncio.start_server(say_nothing_more, "127.0.0.1", 0) as silent:
        url = f"nats://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        connecting = asyncio.create_task(connect(Settings(servers=(url,))))
        async with asyncio.timeout(PATIENT_S):
            await has_pinged.wait()
            connecting.cancel()
            await is_closed.wait()
        with pytest.raises(asyncio.CancelledError):
            await connecting
