"""Every kind of credentials opens a link, and wrong credentials are distinguished from an unreachable server."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from eventjet.codec.headers import RawRecord
from eventjet.dev import NatsServer
from eventjet.errors import Forbidden, Unauthorized, Unreachable, UsageError
from eventjet.jetstream.api import message_at
from eventjet.jetstream.client import connect
from eventjet.jetstream.connection import NatsConnection
from eventjet.jetstream.reader import DurablePull, read_range
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from tests.integration.wire_fake import FakeServer, read_until
from tests.integration.wire_log import make_log, positions
from tests.integration.wire_secrets import certificates, tls_config, trust_chain, user_key

CANARY = "c4nary-s3cret"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return certificates(tmp_path_factory.mktemp("pems"))


def assert_works(endpoint: Endpoint) -> None:
    """Assert that a log can be written and read over the endpoint."""
    name = make_log(endpoint, [b"{}"] * 3)
    assert positions(read_range(endpoint, name, 1, 4)) == [1, 2, 3]


def assert_refused(endpoint: Endpoint) -> str:
    """Assert that the server refuses at once, and return the message, which has no secret."""
    started = time.monotonic()
    with pytest.raises(Unauthorized) as raised:
        NatsConnection.open(endpoint, timeout_s=60.0)
    assert time.monotonic() - started < 30.0
    assert isinstance(raised.value, Forbidden)
    assert CANARY not in str(raised.value)
    return str(raised.value)


def test_user_and_password() -> None:
    config = f"authorization {{ timeout: 30, user: ada, password: {CANARY} }}"
    with NatsServer(config=config) as server:
        assert_works(Endpoint((server.url,), user="ada", password=CANARY))
        assert_works(Endpoint((server.url.replace("//", f"//ada:{CANARY}@"),)))
        assert "Authorization Violation" in assert_refused(Endpoint((server.url,), user="ada", password="x" + CANARY))
        assert_refused(Endpoint((server.url,), user="eve", password=CANARY))
        assert_refused(Endpoint((server.url,)))


def test_a_refusal_is_reported_although_all_other_servers_are_unreachable() -> None:
    with NatsServer(config="authorization { timeout: 30, token: t }") as strict, NatsServer() as away:
        away.stop()
        assert_refused(Endpoint((away.url, strict.url)))
        assert_refused(Endpoint((strict.url, away.url)))


def test_token() -> None:
    with NatsServer(config=f"authorization {{ timeout: 30, token: {CANARY} }}") as server:
        assert_works(Endpoint((server.url,), token=CANARY))
        assert_works(Endpoint((server.url.replace("//", f"//{CANARY}@"),)))
        assert_refused(Endpoint((server.url,), token=CANARY[1:]))


def test_nkey(tmp_path: Path) -> None:
    known, unknown = user_key(), user_key()
    seed = tmp_path / "ada.nk"
    seed.write_text(f"# the key of ada\n{known.seed}\n")
    stranger = tmp_path / "eve.nk"
    stranger.write_text(unknown.seed)
    with NatsServer(config=f"authorization {{ timeout: 30, users: [{{ nkey: {known.public} }}] }}") as server:
        assert_works(Endpoint((server.url,), nkey=seed))
        assert_refused(Endpoint((server.url,), nkey=stranger))
        assert_refused(Endpoint((server.url,)))


def test_credentials_file(tmp_path: Path) -> None:
    config, good, stranger = trust_chain(tmp_path)
    with NatsServer(config=config) as server:
        assert_works(Endpoint((server.url,), credentials=good))
        assert_refused(Endpoint((server.url,), credentials=stranger))
        assert_refused(Endpoint((server.url,)))


def test_files_that_cannot_be_used_are_named_without_their_content(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text(f"{CANARY}\nSU{'A' * 30}\n")
    with NatsServer() as server:
        for endpoint in (
            Endpoint((server.url,), nkey=tmp_path / "absent"),
            Endpoint((server.url,), nkey=broken),
            Endpoint((server.url,), credentials=broken),
            Endpoint((server.url,), credentials=tmp_path),
            Endpoint((server.url,), tls_ca=broken),
            Endpoint((server.url,), tls_ca=tmp_path / "absent", tls_first=True),
        ):
            with pytest.raises((UsageError, Unreachable)) as raised:
                NatsConnection.open(endpoint)
            assert CANARY not in str(raised.value)
            assert "AAAA" not in str(raised.value)


def test_tls(pems: dict[str, Path]) -> None:
    with NatsServer(config=tls_config(pems)) as server:
        endpoint = Endpoint((server.url,), tls_ca=pems["ca.pem"])
        assert_works(endpoint)
        assert_works(Endpoint((server.url.replace("nats:", "tls:"),), tls_ca=pems["ca.pem"]))
        for untrusting in (Endpoint((server.url,)), Endpoint((server.url,), tls_ca=pems["other.pem"])):
            with pytest.raises(Unreachable, match="certificate that is not trusted"):
                NatsConnection.open(untrusting)


def test_tls_with_a_large_body_and_a_wait_without_any(pems: dict[str, Path]) -> None:
    with NatsServer(config=tls_config(pems)) as server:
        endpoint = Endpoint((server.url,), tls_ca=pems["ca.pem"])
        name = make_log(endpoint, [b"x" * 900_000] * 3)
        assert [len(body) for batch in read_range(endpoint, name, 1, 4) for *_, body in batch] == [900_000] * 3
        with NatsConnection.open(endpoint) as link:
            assert link.receive(0.0) == []
            assert link.receive(0.1) == []
            record = link.ask(message_at(name, 2))
            assert record is not None
            assert len(record[4]) == 900_000


def test_tls_before_the_greeting(pems: dict[str, Path]) -> None:
    with NatsServer(config=tls_config(pems, ", handshake_first: true")) as server:
        assert_works(Endpoint((server.url,), tls_ca=pems["ca.pem"], tls_first=True))
        with pytest.raises(Unreachable, match="gave no answer in time"):
            NatsConnection.open(Endpoint((server.url,), tls_ca=pems["ca.pem"]), timeout_s=0.5)


def test_client_certificates(pems: dict[str, Path]) -> None:
    config = tls_config(pems, f', ca_file: "{pems["ca.pem"]}", verify: true')
    with NatsServer(config=config) as server:
        endpoint = Endpoint(
            (server.url,), tls_ca=pems["ca.pem"], tls_cert=pems["client.pem"], tls_key=pems["client.key"]
        )
        assert_works(endpoint)
        assert "a client without certificate" in assert_refused(replace(endpoint, tls_cert=None, tls_key=None))
        stranger = replace(endpoint, tls_cert=pems["other.pem"], tls_key=pems["other.key"])
        assert "other.pem" in assert_refused(stranger)


def test_credentials_never_travel_in_the_clear_when_tls_was_asked_for(pems: dict[str, Path]) -> None:
    with NatsServer(config=f"authorization {{ timeout: 30, token: {CANARY} }}") as plain:
        for endpoint in (
            Endpoint((plain.url.replace("nats:", "tls:"),), token=CANARY),
            Endpoint((plain.url,), token=CANARY, tls_ca=pems["ca.pem"]),
        ):
            with pytest.raises(Unreachable, match="does not offer TLS"):
                NatsConnection.open(endpoint)


def test_an_error_about_a_server_names_the_setting_it_comes_from(pems: dict[str, Path], tmp_path: Path) -> None:
    def remedy_for(*servers: str, mirror: str | None = None, **options: Any) -> str:
        settings = Settings.load(
            {"servers": servers or "nats://127.0.0.1:1", "read_from": mirror, **options}, environ={}
        )
        with pytest.raises((Unauthorized, Unreachable, UsageError)) as raised:
            NatsConnection.open(Endpoint.of(settings.for_reads()))
        with pytest.raises((Unreachable, UsageError)) as connecting:
            asyncio.run(connect(settings.for_reads()))
        for words in raised.value, connecting.value:
            assert CANARY not in str(words)
        remedies = {getattr(error, "remedy", str(error)) for error in (raised.value, connecting.value)}
        assert len(remedies) == 1
        return remedies.pop()

    nobody, named, mirror = "nats://127.0.0.1:1", "--servers or EVENTJET_SERVERS", "EVENTJET_READ_FROM"
    assert remedy_for(nobody).startswith(f"Start it, or set {named} to where it is")
    assert remedy_for(mirror=nobody).startswith("Start it, or set EVENTJET_READ_FROM to where the mirror is")
    assert "EVENTJET_SERVERS" in remedy_for(nobody, mirror="west")  # the domain alone is the mirror's
    with NatsServer(config=f"authorization {{ timeout: 30, user: ada, password: {CANARY} }}") as strict:
        own = {"user": "ada", "password": "x" + CANARY}
        assert remedy_for(strict.url).startswith("Set EVENTJET_CREDENTIALS")
        assert (
            remedy_for(strict.url, **own) == "The login is from EVENTJET_USER and EVENTJET_PASSWORD. Correct it there."
        )
        assert remedy_for(mirror=strict.url, token="t").endswith("belongs in the URLs of EVENTJET_READ_FROM.")
        url = strict.url.replace("//", "//ada:wrong@")
        for remedy, setting in (remedy_for(url), named), (remedy_for(mirror=url, **own), mirror):
            assert remedy == f"Correct the user or token in the URLs of {setting}."
        assert remedy_for(strict.url, tls_ca=pems["ca.pem"]).startswith("TLS is demanded by EVENTJET_TLS_CA.")
        assert "by tls:// in EVENTJET_READ_FROM." in remedy_for(mirror=strict.url.replace("nats:", "tls:"))
    with NatsServer(config=tls_config(pems)) as trusted_by_few:
        assert f"in EVENTJET_TLS_CA, and in {named} a name" in remedy_for(trusted_by_few.url)
        assert "and in EVENTJET_READ_FROM a name" in remedy_for(mirror=trusted_by_few.url, tls_ca=pems["other.pem"])
    (tmp_path / "wrong").write_text("no key")
    for setting in ("credentials", "nkey", "tls_ca"):
        options: Any = {setting: tmp_path / "wrong"}
        assert f"EVENTJET_{setting.upper()}" in remedy_for(mirror=nobody, **options)


def test_a_password_is_not_sent_before_the_handshake(pems: dict[str, Path]) -> None:
    received: list[bytes] = []

    def script(conversation: socket.socket) -> None:
        info = b'INFO {"headers":true,"tls_required":true}\r\n'
        conversation.sendall(info + b"PONG\r\n")
        received.append(conversation.recv(65_536))
        conversation.sendall(info + b"PONG\r\n")
        received.append(read_until(conversation, b"never"))

    with FakeServer(script) as fake, pytest.raises(Unreachable):
        NatsConnection.open(replace(fake.endpoint, token=CANARY, tls_ca=pems["ca.pem"]), timeout_s=20.0)
    assert received
    assert not any(CANARY.encode() in data for data in received)


def test_credentials_that_expire_end_the_link_as_a_refusal(tmp_path: Path) -> None:
    config, good, _ = trust_chain(tmp_path, expires_in_s=10)
    with (
        NatsServer(config=config) as server,
        NatsConnection.open(Endpoint((server.url,), credentials=good)) as link,
    ):
        with pytest.raises(Unauthorized, match="Expired"):
            link.receive(60.0)
        assert not link.usable


LARGE = 26
"""The number of events of nearly a megabyte: more than are under way to a reader at any time."""


@dataclass(frozen=True)
class Place:
    """A server that requires credentials, an endpoint with the right and one with wrong ones, and a log."""

    config: str
    server: NatsServer
    endpoint: Endpoint
    wrong: Endpoint
    log: str


@pytest.fixture(scope="module", params=["certificate", "creds"])
def place(
    request: pytest.FixtureRequest, pems: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("nats")
    if request.param == "creds":
        config, good, bad = trust_chain(directory)
        proof, wrong = {"credentials": good}, {"credentials": bad}
    else:
        config = tls_config(pems, f', ca_file: "{pems["ca.pem"]}", verify: true')
        proof = {"tls_ca": pems["ca.pem"], "tls_cert": pems["client.pem"], "tls_key": pems["client.key"]}
        wrong = {"tls_ca": pems["ca.pem"], "tls_cert": pems["other.pem"], "tls_key": pems["other.key"]}
    with NatsServer(directory / "data", sync_interval="1m", config=config) as server:
        endpoint = Endpoint((server.url,), **proof)
        bodies = (b"%d" % number + b"x" * 900_000 for number in range(1, LARGE + 1))
        yield Place(config, server, endpoint, Endpoint((server.url,), **wrong), make_log(endpoint, bodies))


def reading_of(place: Place) -> Iterator[list[RawRecord]]:
    """Return a read of the place's log that has begun and is far from its end."""
    reading = read_range(
        place.endpoint, place.log, 1, LARGE + 1, batch=1, timeout_s=5.0, patience_s=20.0, heartbeat_s=0.25
    )
    assert positions([next(reading)]) == [1]
    return reading


def test_a_read_authenticates_again_after_its_server_was_killed(place: Place) -> None:
    reading = reading_of(place)
    place.server.kill()
    place.server.start()
    assert positions(reading) == list(range(2, LARGE + 1))


def test_wrong_credentials_are_refused_at_once_and_not_tried_again(place: Place) -> None:
    started = time.monotonic()
    with pytest.raises(Unauthorized):
        next(read_range(place.wrong, place.log, 1, 2, timeout_s=60.0, patience_s=120.0))
    with pytest.raises(Unauthorized):
        DurablePull(place.wrong, place.log, "p", position=0, timeout_s=60.0)
    assert time.monotonic() - started < 30.0


def test_a_silent_server_is_not_reported_as_a_refusal(place: Place) -> None:
    place.server.pause()
    try:
        for endpoint in (place.endpoint, place.wrong):
            with pytest.raises(Unreachable, match="gave no answer in time"):
                next(read_range(endpoint, place.log, 1, 2, timeout_s=0.5))
    finally:
        place.server.resume()


def test_credentials_revoked_during_a_read_end_it_at_once(place: Place) -> None:
    asks_more = "authorization { timeout: 30, token: another }"
    config = asks_more if place.endpoint.tls_ca is None else f"{place.config}\n{asks_more}"
    reading = reading_of(place)
    place.server.stop()
    try:
        with NatsServer(place.server.directory, port=place.server.port, config=config):
            started = time.monotonic()
            with pytest.raises(Unauthorized, match="Authorization Violation"):
                positions(reading)
            assert time.monotonic() - started < 20.0
    finally:
        place.server.start()
