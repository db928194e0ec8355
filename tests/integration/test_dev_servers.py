"""Embedded servers keep data and address over restarts, run as a single process, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
import nats.errors
import nats.js.errors
import psycopg
import pytest
from nats.aio.client import Client
from sqlalchemy import create_engine, text

from eventjet.dev import NatsServer, PostgresServer
from eventjet.dev import postgres as wheel
from eventjet.errors import ComponentFailed, ComponentMissing, Unreachable
from tests.nats_cluster import NatsCluster


@asynccontextmanager
async def connection(*urls: str) -> AsyncIterator[Client]:
    client = await nats.connect(list(urls), allow_reconnect=False, connect_timeout=20)
    try:
        yield client
    finally:
        await client.close()


def publish_message(server: Any) -> int:
    """Store a message; return the number of messages in the stream."""

    async def store() -> int:
        async with connection(server.url) as client:
            log = client.jetstream(timeout=30)
            await log.add_stream(name="log", subjects=["log.*"])
            await log.publish("log.a", b"{}")
            return (await log.stream_info("log")).state.messages

    return asyncio.run(store())


def connect(url: str) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(url.replace("+psycopg", ""), autocommit=True)


def insert_row(server: Any) -> int:
    """Add a row; return the number of rows."""
    with connect(server.url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (at timestamptz DEFAULT now())")
        connection.execute("INSERT INTO kept DEFAULT VALUES")
        row = connection.execute("SELECT count(*) FROM kept").fetchone()
    assert row is not None
    assert isinstance(row[0], int)
    return row[0]


@dataclass(frozen=True)
class Kind:
    make: Callable[..., Any]
    """Return a server that is not started, optionally in a folder."""
    store: Callable[[Any], int]
    """Store another message or row, and return their number."""


KINDS = {
    "nats": Kind(NatsServer, publish_message),
    "postgres": Kind(lambda folder=None: PostgresServer(folder, durable=False), insert_row),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer(durable=False) as started:
        yield started


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that other users may enter, unlike `tmp_path`: PostgreSQL needs it when root runs the tests."""
    folder = Path(tempfile.mkdtemp(prefix="eventjet-test-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


def test_a_stopped_or_killed_server_restarts_with_its_data_and_address(kind: Kind) -> None:
    with kind.make() as server:
        url, directory, pid = server.url, server.directory, server.pid
        assert kind.store(server) == 1
        server.stop()
        assert not server.running
        server.start()
        assert kind.store(server) == 2
        server.kill()
        assert not server.running
        server.start()
        assert server.pid != pid
        assert server.url == url
        assert kind.store(server) == 3
        with kind.make() as other:
            assert (other.port != server.port, other.pid != server.pid) == (True, True)
            assert kind.store(other) == 1
    assert not directory.exists()


def test_a_given_folder_is_not_removed_with_the_server(kind: Kind, folder: Path) -> None:
    for count in (1, 2):
        with kind.make(folder / "data") as server:
            assert kind.store(server) == count


def test_the_ports_file_of_a_killed_nats_server_is_replaced(folder: Path) -> None:
    with NatsServer(folder) as server:
        server.kill()
        (old,) = (folder / "ports").iterdir()
        server.start()
        (current,) = (folder / "ports").iterdir()
        assert current != old


def test_a_server_that_was_never_started_has_no_address(kind: Kind) -> None:
    with pytest.raises(Unreachable, match=r"Call `start\(\)` first"):
        _ = kind.make().url


def test_a_missing_wheel_is_named(kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.files", lambda _name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    with pytest.raises(ComponentMissing, match=r'pip install "eventjet\[dev\]"'):
        kind.make().start()


async def test_a_paused_server_does_not_answer_until_it_is_resumed(server: NatsServer) -> None:
    async with connection(server.url) as client:
        server.pause()
        with pytest.raises(nats.errors.TimeoutError):
            await client.request("$JS.API.INFO", timeout=0.5)
        server.resume()
        assert (await client.request("$JS.API.INFO", timeout=10)).data
    server.pause()
    server.stop()
    assert not server.running


async def test_jetstream_can_be_left_off() -> None:
    with NatsServer(jetstream=False) as server:
        async with connection(server.url) as client:
            assert not client._server_info.get("jetstream", False)


async def test_configuration_is_added_to_eventjets_own() -> None:
    with NatsServer(config="authorization { timeout: 30, token: s3cret }") as server:
        stranger = Client()
        with pytest.raises(nats.errors.Error, match="Authorization Violation"):
            await stranger.connect(server.url, allow_reconnect=False, connect_timeout=20)
        # The refused connection still has an open socket.
        await stranger.close()
        async with connection(server.url.replace("//", "//s3cret@")) as client:
            assert client.is_connected


def test_a_server_that_cannot_start_reports_the_reason(server: NatsServer) -> None:
    with pytest.raises(ComponentFailed, match="address already in use"):
        NatsServer(port=server.port).start()


async def publish(client: Client, subject: str) -> int:
    """Store a message and return its position; a server may learn of its peer's stream a moment later."""
    async with asyncio.timeout(30):
        while True:
            try:
                return (await client.jetstream().publish(subject, b"{}", timeout=20)).seq
            except nats.js.errors.NoStreamResponseError:  # nobody listens, so nothing was stored
                await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_cluster_works_without_its_leader_and_recovers() -> None:
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


def shown(url: str, setting: str) -> object:
    with connect(url) as connection:
        row = connection.execute(f"SHOW {setting}").fetchone()  # type: ignore[arg-type]
    assert row is not None
    return row[0]


def test_a_killed_postgres_leaves_no_running_backend(postgres: PostgresServer) -> None:
    with connect(postgres.url) as session:
        backend = session.info.backend_pid
        assert Path(f"/proc/{backend}").exists()
        postgres.kill()
        assert not Path(f"/proc/{backend}").exists()
        with pytest.raises(psycopg.OperationalError):
            session.execute("SELECT 1")
    postgres.start()


def test_an_interrupted_start_is_repeated(folder: Path) -> None:
    unfinished = folder / "data" / "data.new"
    unfinished.mkdir(parents=True)
    (folder / "data").chmod(0o711)
    (unfinished / "PG_VERSION").write_text("18\n")
    with PostgresServer(folder / "data", durable=False) as server:
        assert insert_row(server) == 1
        with pytest.raises(ComponentFailed, match="lock file"):
            PostgresServer(folder / "data", durable=False).start()


def test_postgres_waits_for_the_disk_by_default(folder: Path, postgres: PostgresServer) -> None:
    assert shown(postgres.url, "fsync") == "off"
    with PostgresServer(folder / "data") as durable:
        assert shown(durable.url, "fsync") == "on"


def test_text_and_time_do_not_depend_on_the_machine(postgres: PostgresServer) -> None:
    assert shown(postgres.url, "timezone") == "UTC"
    with connect(postgres.url) as connection:
        row = connection.execute("SELECT array_agg(x ORDER BY x) FROM unnest(array['a', 'B', 'ä']) x").fetchone()
    assert row == (["B", "a", "ä"],)


def test_a_wrong_password_is_refused(postgres: PostgresServer) -> None:
    user, _, password = postgres.url.partition("//")[2].partition("@")[0].partition(":")
    assert (user, len(password)) == ("eventjet", 48)
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        connect(postgres.url.replace(password, "guess"))


def test_sqlalchemy_accepts_the_url_and_a_dropped_database_ends_its_connections(
    postgres: PostgresServer,
) -> None:
    engine = create_engine(postgres.create_database("with spaces/and more"))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT current_database()")).scalar_one() == "with spaces/and more"
        postgres.drop_database("with spaces/and more")
        with pytest.raises(Exception, match=r"terminating|closed"):
            connection.execute(text("SELECT 1"))
    engine.dispose()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it as another user")
def test_as_root_it_runs_as_nobody_even_from_folders_closed_to_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = wheel.postgres_install()
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    shutil.copytree(install, closed / install.parent.name / install.name)
    libraries = f"{install.parent.name}.libs"
    shutil.copytree(install.parent.parent / libraries, closed / libraries)
    monkeypatch.setattr("eventjet.dev.postgres.postgres_install", lambda: closed / install.parent.name / install.name)
    with PostgresServer(durable=False) as server:
        assert insert_row(server) == 1
        assert Path(f"/proc/{server.pid}").stat().st_uid != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it as another user")
def test_as_root_a_folder_closed_to_others_is_refused_with_the_reason(folder: Path) -> None:
    (folder / "closed").mkdir(mode=0o700)
    with pytest.raises(Unreachable, match="may not pass through"):
        PostgresServer(folder / "closed" / "data").start()
