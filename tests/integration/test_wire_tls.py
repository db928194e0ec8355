"""A client that requires TLS sends no credentials to a server whose offer of TLS was removed."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from eventjet.cli.main import main
from eventjet.errors import EventjetError
from eventjet.jetstream.client import connect
from eventjet.jetstream.connection import NatsConnection
from eventjet.jetstream.reader import read_range
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from eventjet.spark.source import LogOptions
from tests.integration.wire_fake import INFO, FakeServer
from tests.integration.wire_secrets import certificates

CANARY = "c4nary"
APP = "eventjet.examples.bank.app:bank"


@dataclass
class Stripped:
    """A server whose offer of TLS was removed; `received` has the bytes of its clients."""

    fake: FakeServer | None = None
    received: bytearray = field(default_factory=bytearray)
    connections: int = 0

    def talk(self, conversation: socket.socket) -> None:
        self.connections += 1
        conversation.sendall(INFO.replace(b"}", b',"nonce":"abc"}') + b"PONG\r\n")
        while data := conversation.recv(65_536):
            self.received += data

    @property
    def port(self) -> str:
        assert self.fake is not None
        return self.fake.url.rpartition(":")[2]


@pytest.fixture
def stripped() -> Iterator[Stripped]:
    server = Stripped()
    with FakeServer(server.talk) as server.fake:
        yield server


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return certificates(tmp_path_factory.mktemp("pems"))


WAYS_TO_ASK: dict[str, Callable[[str, dict[str, Path]], dict[str, Any]]] = {
    "tls://": lambda port, _: {"servers": f"tls://127.0.0.1:{port}"},
    "a CA": lambda port, pems: {"servers": f"nats://127.0.0.1:{port}", "tls_ca": pems["ca.pem"]},
    "a certificate": lambda port, pems: {
        "servers": f"nats://127.0.0.1:{port}",
        "tls_cert": pems["client.pem"],
        "tls_key": pems["client.key"],
    },
    "one of two": lambda port, _: {"servers": f"nats://127.0.0.1:{port},tls://127.0.0.1:1"},
}


def by_connection(settings: Settings) -> None:
    NatsConnection.open(Endpoint.of(settings))


def by_discovery(settings: Settings) -> None:
    """Connect to the stripped server as a discovered one, while the configured server is unreachable."""
    named = Endpoint.of(settings)
    port = named.servers[0].rpartition(":")[2]
    unreachable = replace(named, servers=tuple(url.replace(port, "1") for url in named.servers))
    NatsConnection.open(unreachable.with_discovered([f"127.0.0.1:{port}"]))


def by_client(settings: Settings) -> None:
    asyncio.run(connect(settings))


def by_spark_source(settings: Settings) -> None:
    options = {"stream": "bank", "servers": ",".join(settings.servers)}
    options |= {} if settings.tls_ca is None else {"tlsCa": str(settings.tls_ca)}
    if settings.tls_cert is not None:
        options |= {"tlsCert": str(settings.tls_cert), "tlsKey": str(settings.tls_key)}
    list(read_range(LogOptions.parse(options).endpoint(), "bank", 1, 2))


def by_command(_: Settings) -> None:
    assert main(["init", "--app", APP]) == 3


WAYS_IN = (by_connection, by_discovery, by_client, by_spark_source, by_command)


@pytest.mark.parametrize("way_in", WAYS_IN)
@pytest.mark.parametrize("way_to_ask", WAYS_TO_ASK)
def test_no_credentials_go_to_a_server_that_offers_no_tls(
    stripped: Stripped,
    pems: dict[str, Path],
    way_in: Callable[[Settings], None],
    way_to_ask: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = WAYS_TO_ASK[way_to_ask](stripped.port, pems)
    for name, value in {**options, "user": "ada", "password": CANARY}.items():
        monkeypatch.setenv(f"EVENTJET_{name.upper()}", str(value))
    with suppress(EventjetError):
        way_in(Settings.load())
    assert stripped.connections, "nobody came, so nothing was tried"
    assert bytes(stripped.received) == b""


def test_without_tls_the_same_server_receives_the_password(stripped: Stripped) -> None:
    settings = Settings.load({"servers": f"nats://127.0.0.1:{stripped.port}", "user": "ada", "password": CANARY}, {})
    until = time.monotonic() + 60.0
    with NatsConnection.open(Endpoint.of(settings)):
        while CANARY.encode() not in stripped.received:
            assert time.monotonic() < until
            time.sleep(0.01)
