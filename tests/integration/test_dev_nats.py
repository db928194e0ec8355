"""The embedded nats-server keeps its promises: data and port over restarts, one process at a time, no leftovers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client

from eventjet.dev import NatsServer
from eventjet.errors import ComponentFailed, ComponentMissing, Unreachable
from tests.nats_cluster import NatsCluster


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@asynccontextmanager
async def connection(*urls: str) -> AsyncIterator[Client]:
    client = await nats.connect(list(urls), allow_reconnect=False, connect_timeout=20)
    try:
        yield client
    finally:
        await client.close()


async def store(server: NatsServer, subject: str) -> int:
    """Store one message; returns how many the stream holds."""
    async with connection(server.url) as client:
        log = client.jetstream(timeout=30)
        await log.add_stream(name="log", subjects=["log.*"])
        await log.publish(subject, b"{}")
        return (await log.stream_info("log")).state.messages


async def publish(client: Client, subject: str) -> int:
    """Store one message and return its position; a server learns of a stream its peer leads a moment later."""
    async with asyncio.timeout(30):
        while True:
            try:
                return (await client.jetstream().publish(subject, b"{}", timeout=20)).seq
            except nats.js.errors.NoStreamResponseError:  # nobody listens, so nothing was stored
                await asyncio.sleep(0.02)


async def test_a_stop_and_a_start_keep_data_and_port(server: NatsServer) -> None:
    port = server.port
    assert await store(server, "log.a") == 1
    server.stop()
    assert not server.running
    server.start()
    assert server.port == port
    assert await store(server, "log.b") == 2


async def test_a_killed_server_recovers_what_it_acknowledged(server: NatsServer) -> None:
    assert await store(server, "log.a") == 1
    before = server.pid
    server.kill()
    assert not server.running
    server.start()
    assert server.pid != before
    assert await store(server, "log.b") == 2


async def test_a_paused_server_answers_nothing_until_it_is_resumed(server: NatsServer) -> None:
    async with connection(server.url) as client:
        server.pause()
        with pytest.raises(nats.errors.TimeoutError):
            await client.request("$JS.API.INFO", timeout=0.5)
        server.resume()
        assert (await client.request("$JS.API.INFO", timeout=10)).data


def test_a_paused_server_can_be_stopped(server: NatsServer) -> None:
    server.pause()
    server.stop()
    assert not server.running


async def test_a_folder_that_was_given_outlives_the_server(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "data") as first:
        assert await store(first, "log.a") == 1
    with NatsServer(tmp_path / "data") as second:
        assert await store(second, "log.b") == 2


def test_a_temporary_folder_goes_with_the_server() -> None:
    with NatsServer() as server:
        folder = server.directory
        assert folder.is_dir()
    assert not folder.exists()


def test_two_servers_run_at_once_on_ports_of_their_own(server: NatsServer) -> None:
    with NatsServer() as other:
        assert other.port != server.port
        assert other.pid != server.pid


async def test_jetstream_can_be_left_off() -> None:
    with NatsServer(jetstream=False) as server:
        async with connection(server.url) as client:
            assert not client._server_info.get("jetstream", False)


async def test_configuration_is_laid_over_ours() -> None:
    with NatsServer(config="authorization { timeout: 30, token: s3cret }") as server:
        stranger = Client()
        with pytest.raises(nats.errors.Error, match="Authorization Violation"):
            await stranger.connect(server.url, allow_reconnect=False, connect_timeout=20)
        # Refused, it still holds its socket.
        await stranger.close()
        async with connection(server.url.replace("//", "//s3cret@")) as client:
            assert client.is_connected


def test_a_server_that_cannot_start_says_why(server: NatsServer) -> None:
    with pytest.raises(ComponentFailed, match="address already in use"):
        NatsServer(port=server.port).start()


def test_a_server_that_was_never_started_says_so() -> None:
    with pytest.raises(Unreachable, match=r"Call `start\(\)` first"):
        _ = NatsServer().url


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.files", lambda _name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    with pytest.raises(ComponentMissing, match=r'pip install "eventjet\[dev\]"'):
        NatsServer().start()


@pytest.mark.slow
async def test_a_cluster_goes_on_without_its_leader_and_recovers_whole() -> None:
    with NatsCluster() as cluster:
        async with connection(*cluster.urls) as client:
            await client.jetstream(timeout=60).add_stream(name="log", subjects=["log.*"], num_replicas=3)
            assert await publish(client, "log.a") == 1
        leader = cluster.leader()
        assert leader is not None
        leader.kill()
        assert not cluster.running
        cluster.start()
        assert cluster.running
        cluster.kill()
        cluster.start()
        async with connection(*cluster.urls) as client:
            assert await publish(client, "log.b") == 2
        pids = [server.pid for server in cluster.servers]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
