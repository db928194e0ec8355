"""Reading, reconnecting and being refused, over every way of proving who we are, and in the newer form of replies."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.request import urlopen

import pytest

from eventjet.dev import NatsServer
from eventjet.errors import StoreUnavailable, Unauthorized, Unreachable
from eventjet.jetstream.reader import DurablePull, read_range
from eventjet.nats.endpoint import Endpoint
from tests.integration.wire_log import FORM_2, assert_form_2, make_log, overhearing, positions
from tests.integration.wire_secrets import certificates, tls_config, trust_chain, user_key

KINDS = ("tls", "mtls", "password", "token", "nkey", "creds")
LARGE = 26
"""Events of nearly a megabyte: more than is on its way to a reader at any time."""
QUICK = {"timeout_s": 5.0, "patience_s": 20.0, "heartbeat_s": 0.25}
SECRET = "c4nary-s3cret"


@dataclass(frozen=True)
class Way:
    """One way of proving who we are."""

    config: str
    """The server's."""
    proof: Endpoint
    """Whose servers are still to be named."""
    wrong: Endpoint
    refused: type[Exception] = Unauthorized
    """With the wrong proof; a server that we do not trust is not let in by us."""


@dataclass(frozen=True)
class Place:
    """A server of one way, and a log on it."""

    way: Way
    server: NatsServer
    directory: Path
    log: str

    @property
    def endpoint(self) -> Endpoint:
        return replace(self.way.proof, servers=(self.server.url,))

    @property
    def wrong(self) -> Endpoint:
        return replace(self.way.wrong, servers=(self.server.url,))


NOWHERE = Endpoint(("nats://127.0.0.1:1",))


def way_of(kind: str, folder: Path) -> Way:
    if kind in ("tls", "mtls"):
        pems = certificates(folder)
        trusting = replace(NOWHERE, tls_ca=pems["ca.pem"])
        if kind == "tls":
            return Way(tls_config(pems), trusting, replace(NOWHERE, tls_ca=pems["other.pem"]), Unreachable)
        config = tls_config(pems, f', ca_file: "{pems["ca.pem"]}", verify: true')
        known = replace(trusting, tls_cert=pems["client.pem"], tls_key=pems["client.key"])
        return Way(config, known, replace(trusting, tls_cert=pems["other.pem"], tls_key=pems["other.key"]))
    if kind == "password":
        known = replace(NOWHERE, user="ada", password=SECRET)
        return Way(
            f"authorization {{ timeout: 30, user: ada, password: {SECRET} }}", known, replace(known, password="wrong")
        )
    if kind == "token":
        known = replace(NOWHERE, token=SECRET)
        return Way(f"authorization {{ timeout: 30, token: {SECRET} }}", known, replace(known, token="wrong"))
    if kind == "nkey":
        key, stranger = user_key(), user_key()
        (folder / "ada.nk").write_text(key.seed)
        (folder / "eve.nk").write_text(stranger.seed)
        config = f"authorization {{ timeout: 30, users: [{{ nkey: {key.public} }}] }}"
        return Way(config, replace(NOWHERE, nkey=folder / "ada.nk"), replace(NOWHERE, nkey=folder / "eve.nk"))
    config, good, bad = trust_chain(folder)
    return Way(config, replace(NOWHERE, credentials=good), replace(NOWHERE, credentials=bad))


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    way = way_of(request.param, tmp_path_factory.mktemp(request.param))
    directory = tmp_path_factory.mktemp("nats")
    with NatsServer(directory, sync_interval="1m", config=f"{way.config}\n{FORM_2}") as server:
        endpoint = replace(way.proof, servers=(server.url,))
        bodies = (b"%d" % number + b"x" * 900_000 for number in range(1, LARGE + 1))
        yield Place(way, server, directory, make_log(endpoint, bodies))


def test_a_range_comes_whole_in_order_and_by_replies_of_form_2(place: Place) -> None:
    name = make_log(place.endpoint, (b"%d" % number for number in range(1, 1_001)))
    with overhearing(place.endpoint, name) as heard:
        batches = list(read_range(place.endpoint, name, 11, 913, batch=300))
        assert positions(batches) == list(range(11, 913))
        assert [len(batch) for batch in batches] == [300, 300, 300, 2]
        assert all(record[4] == b"%d" % record[0] for batch in batches for record in batch)
        # An overlapped pull may have asked for more than the range.
        replies = heard()
        assert_form_2(replies, max(902, len(replies)))


def test_a_workers_durable_reads_by_replies_of_form_2(place: Place) -> None:
    name = make_log(place.endpoint, [b"{}"] * 500)
    with overhearing(place.endpoint, name) as heard:
        read: list[int] = []
        with DurablePull(place.endpoint, name, "p_balances", position=100) as pull:
            while len(read) < 400:
                read += positions([pull.next_batch()])
            assert pull.pending == 0
        assert read == list(range(101, 501))
        assert_form_2(heard(), 400)


def test_a_read_goes_on_after_its_server_was_killed(place: Place) -> None:
    reading = read_range(place.endpoint, place.log, 1, LARGE + 1, batch=1, **QUICK)
    seen = positions([next(reading)])
    place.server.kill()
    place.server.start()
    seen += positions(reading)
    assert seen == list(range(1, LARGE + 1))
    with urlopen(f"{place.server.monitor_url}/varz", timeout=5) as answer:
        assert json.load(answer)["total_connections"] >= 1


def test_a_wrong_proof_is_refused_at_once_and_not_tried_again(place: Place) -> None:
    patient = {"timeout_s": 60.0, "patience_s": 120.0}
    started = time.monotonic()
    with pytest.raises(place.way.refused) as raised:
        next(read_range(place.wrong, place.log, 1, 2, **patient))
    with pytest.raises(place.way.refused):
        DurablePull(place.wrong, place.log, "p", position=0, timeout_s=60.0)
    assert time.monotonic() - started < 30.0
    assert SECRET not in str(raised.value)


def test_a_server_that_does_not_answer_is_not_called_a_refusal(place: Place) -> None:
    impatient = {**QUICK, "timeout_s": 0.5}
    place.server.pause()
    try:
        with pytest.raises(Unreachable, match="gave no answer in time"):
            next(read_range(place.endpoint, place.log, 1, 2, **impatient))
        with pytest.raises(Unreachable, match="gave no answer in time"):
            next(read_range(place.wrong, place.log, 1, 2, **impatient))
    finally:
        place.server.resume()


def test_a_proof_that_is_taken_back_during_a_read_ends_it_at_once(place: Place) -> None:
    if place.way.proof.tls_ca is None:
        config = "authorization { timeout: 30, token: another }"
    else:
        config = f"{place.way.config}\nauthorization {{ timeout: 30, token: another }}"
    reading = read_range(place.endpoint, place.log, 1, LARGE + 1, batch=1, **QUICK)
    next(reading)
    place.server.stop()
    try:
        with NatsServer(place.directory, port=place.server.port, config=config):
            started = time.monotonic()
            with pytest.raises(Unauthorized, match="Authorization Violation"):
                positions(reading)
            assert time.monotonic() - started < QUICK["patience_s"]
    finally:
        place.server.start()


def test_a_server_that_stays_away_during_a_read_ends_it_as_an_outage(place: Place) -> None:
    options = {**QUICK, "patience_s": 4.0}
    reading = read_range(place.endpoint, place.log, 1, LARGE + 1, batch=1, **options)
    next(reading)
    place.server.stop()
    try:
        with pytest.raises(StoreUnavailable, match=f"Reading {place.log} from position"):
            positions(reading)
    finally:
        place.server.start()
