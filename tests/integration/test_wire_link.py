"""A link tells faults apart, answers pings, wakes, and never waits without a bound."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from operator import methodcaller

import pytest

from eventjet.dev import NatsServer
from eventjet.errors import (
    ApiRefused,
    ConnectionClosed,
    ConnectionLost,
    Forbidden,
    NoResponders,
    Refused,
    StoreUnavailable,
    Unreachable,
    UsageError,
)
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from tests.integration.wire_fake import INFO, FakeServer, greet, read_until
from tests.integration.wire_log import flush


def test_messages_that_arrive_before_an_answer_are_kept(endpoint: Endpoint) -> None:
    with NatsConnection.open(endpoint) as link, NatsConnection.open(endpoint) as other:
        sid = link.subscribe("greetings.*")
        echo_sid = other.subscribe("echo")
        flush(link)
        flush(other)

        def echo() -> None:
            frame = other.receive(5.0)[0]
            other.publish("greetings.ada", b"hello", headers=b"NATS/1.0\r\nA: b\r\n\r\n")
            other.publish(frame[2].decode(), frame[4])
            assert frame[0] == echo_sid

        thread = threading.Thread(target=echo)
        thread.start()
        assert link.request("echo", b"body")[4] == b"body"
        thread.join()
        assert link.receive(20.0) == [(sid, b"greetings.ada", b"", b"NATS/1.0\r\nA: b\r\n\r\n", b"hello")]


def test_messages_in_one_packet_with_an_answer_are_kept() -> None:
    def script(conversation: socket.socket) -> None:
        greet(conversation)
        request = read_until(conversation, b" 0\r\n\r\n")
        answer_to = request.rpartition(b"PUB echo ")[2].split()[0]
        conversation.sendall(b"MSG a 2 1\r\nx\r\nMSG %s 1 2\r\nok\r\nMSG a 2 1\r\ny\r\n" % answer_to)

    with FakeServer(script) as fake, NatsConnection.open(fake.endpoint) as link:
        sid = link.subscribe("a")
        assert link.request("echo", timeout_s=20.0)[4] == b"ok"
        assert [(frame[0], frame[4]) for frame in link.receive(20.0)] == [(sid, b"x"), (sid, b"y")]


def test_a_request_without_a_responder_fails_at_once(endpoint: Endpoint) -> None:
    with NatsConnection.open(endpoint) as link:
        started = time.monotonic()
        with pytest.raises(NoResponders, match="nobody listens"):
            link.request("no.one", timeout_s=60.0)
        assert time.monotonic() - started < 30.0


def test_a_listener_that_does_not_answer_is_a_timeout(endpoint: Endpoint) -> None:
    with NatsConnection.open(endpoint) as link, NatsConnection.open(endpoint) as mute:
        mute.subscribe("mute")
        flush(mute)
        with pytest.raises(StoreUnavailable, match=r"mute had no answer: no answer within 0.2 s") as raised:
            link.request("mute", timeout_s=0.2)
        assert type(raised.value) is StoreUnavailable


def test_an_error_of_the_api_carries_its_code(endpoint: Endpoint) -> None:
    with NatsConnection.open(endpoint) as link:
        with pytest.raises(ApiRefused, match="stream not found") as raised:
            link.api("STREAM.INFO.nothing")
        assert (raised.value.code, raised.value.err_code) == (404, 10059)
        assert link.api("INFO")["limits"]


def test_a_refused_connection_fails_over_to_the_next_server_or_is_reported(endpoint: Endpoint) -> None:
    with NatsConnection.open(Endpoint(("nats://127.0.0.1:1", *endpoint.servers))) as link:
        assert link.usable
    with pytest.raises(Unreachable, match=r"127.0.0.1:1 refused the connection.*EVENTJET_SERVERS") as raised:
        NatsConnection.open(Endpoint(("nats://127.0.0.1:1",)))
    assert raised.value.component == "NATS"


def test_a_name_that_does_not_resolve_is_named() -> None:
    with pytest.raises(Unreachable, match=r"nowhere\.invalid:4222 is a name that does not resolve"):
        NatsConnection.open(Endpoint(("nats://nowhere.invalid",)))


def test_a_silent_server_does_not_use_up_the_timeout_of_the_next(endpoint: Endpoint) -> None:
    with FakeServer(lambda conversation: None) as mute:
        with NatsConnection.open(Endpoint((mute.url, *endpoint.servers)), timeout_s=10.0) as link:
            assert f"nats://{link.peer}" in endpoint.servers
        started = time.monotonic()
        with pytest.raises(Unreachable, match="gave no answer in time"):
            NatsConnection.open(mute.endpoint, timeout_s=0.3)
        assert time.monotonic() - started < 20.0


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak NATS"),
        (b"INFO {}\r\n", "does not know headers"),
        (b"INFO nonsense\r\n", "does not speak NATS"),
        (b"-ERR 'maximum connections exceeded'\r\n", "maximum connections exceeded"),
    ],
)
def test_an_invalid_greeting_is_reported(greeting: bytes, reason: str) -> None:
    script = methodcaller("sendall", greeting)
    with FakeServer(script) as fake, pytest.raises(Unreachable, match=reason):
        NatsConnection.open(fake.endpoint, timeout_s=20.0)


def test_a_message_above_the_servers_limit_is_refused_before_it_is_sent(endpoint: Endpoint) -> None:
    with NatsConnection.open(endpoint) as link:
        with pytest.raises(Refused, match="the server takes"):
            link.publish("a", b"x" * 1024 * 1024, headers=b"NATS/1.0\r\n\r\n")
        with pytest.raises(UsageError, match="NATS subject"):
            link.request("a b")
        assert link.usable


def test_a_violation_of_permissions_is_not_a_timeout() -> None:
    allowed = '{publish: ["ok.>", "ok"], subscribe: ">"}'
    users = f"authorization {{ timeout: 30, users: [{{user: ada, password: x, permissions: {allowed}}}] }}"
    with (
        NatsServer(config=users) as strict,
        NatsConnection.open(Endpoint((strict.url,), user="ada", password="x")) as link,
    ):
        started = time.monotonic()
        with pytest.raises(Forbidden, match=r"denied \$JS.API.STREAM.INFO.bank: publishing there is not permitted"):
            link.api("STREAM.INFO.bank", timeout_s=60.0)
        assert time.monotonic() - started < 30.0
        with pytest.raises(NoResponders):
            link.request("ok.then")


def test_pings_are_answered() -> None:
    config = 'ping_interval: "1s"\nping_max: 4'
    with NatsServer(config=config) as impatient, NatsConnection.open(Endpoint((impatient.url,))) as link:
        assert link.receive(7.0) == []
        link.subscribe("still.here")
        link.publish("still.here")
        assert link.receive(20.0)


def test_a_server_that_stops_answering_is_lost_after_two_pings() -> None:
    with NatsServer() as server, NatsConnection.open(Endpoint((server.url,)), ping_interval_s=4.0) as link:
        assert link.receive(5.0) == []
        server.pause()
        started = time.monotonic()
        try:
            with pytest.raises(ConnectionLost, match="silent"):
                link.receive(60.0)
        finally:
            server.resume()
        assert time.monotonic() - started < 40.0
        assert not link.usable


def test_a_server_that_dies_is_lost_at_once() -> None:
    with NatsServer() as server, NatsConnection.open(Endpoint((server.url,))) as link:
        server.kill()
        started = time.monotonic()
        with pytest.raises(ConnectionLost):
            link.receive(30.0)
        assert time.monotonic() - started < 10.0


@pytest.mark.parametrize(
    ("error_line", "kind", "text"),
    [
        (b"-ERR 'Stale Connection'\r\n", ConnectionLost, "Stale Connection"),
        (b"-ERR 'User Authentication Expired'\r\n", Forbidden, "Expired"),
        (b"-ERR 'Permissions Violation for Subscription to \"a.b\"'\r\n", Forbidden, "denied a.b: subscribing"),
        (b"GARBAGE\r\n", ConnectionLost, "no frame of the protocol"),
    ],
)
def test_the_last_error_of_a_server_is_reported(error_line: bytes, kind: type[Exception], text: str) -> None:
    def script(conversation: socket.socket) -> None:
        greet(conversation)
        read_until(conversation, b"SUB")
        conversation.sendall(error_line)

    with FakeServer(script) as fake, NatsConnection.open(fake.endpoint) as link:
        link.subscribe("a")
        with pytest.raises(kind, match=text):
            link.receive(20.0)


@pytest.mark.parametrize(
    "operation", [lambda link: link.receive(20.0), lambda link: link.request("a")], ids=["receive", "request"]
)
def test_an_error_in_one_packet_with_the_greeting_is_reported(
    operation: Callable[[NatsConnection], object],
) -> None:
    def script(conversation: socket.socket) -> None:
        conversation.sendall(INFO)
        read_until(conversation, b"PING\r\n")
        conversation.sendall(b"PONG\r\nPING\r\n-ERR 'Stale Connection'\r\n")
        read_until(conversation, b"never")

    with FakeServer(script) as fake, NatsConnection.open(fake.endpoint) as link:
        with pytest.raises(ConnectionLost, match="Stale Connection"):
            operation(link)
        assert not link.usable


def test_messages_before_an_error_are_kept() -> None:
    def script(conversation: socket.socket) -> None:
        greet(conversation)
        read_until(conversation, b"SUB")
        conversation.sendall(b"MSG a 2 1\r\nx\r\n-ERR 'Permissions Violation for Publish to \"b\"'\r\n")

    with FakeServer(script) as fake, NatsConnection.open(fake.endpoint) as link:
        link.subscribe("a")
        with pytest.raises(Forbidden, match="denied b"):
            link.receive(5.0)
        assert link.receive(5.0) == [(b"2", b"a", b"", b"", b"x")]


def test_another_thread_ends_a_wait_at_once(endpoint: Endpoint) -> None:
    link = NatsConnection.open(endpoint)
    link.subscribe("nothing")
    timer = threading.Timer(0.2, link.close)
    started = time.monotonic()
    timer.start()
    with pytest.raises(ConnectionClosed):
        link.receive(30.0)
    assert time.monotonic() - started < 10.0
    timer.join()
    with pytest.raises(ConnectionClosed):
        link.publish("a")
    with pytest.raises(ConnectionClosed):
        link.receive(0.0)
    link.close()
    link.close()


def test_a_late_answer_is_not_taken_for_the_next_one(endpoint: Endpoint) -> None:
    with NatsConnection.open(endpoint) as link, NatsConnection.open(endpoint) as slow:
        slow.subscribe("slow")
        flush(slow)
        with pytest.raises(StoreUnavailable):
            link.request("slow", b"first", timeout_s=0.1)
        late = slow.receive(20.0)[0]
        slow.publish(late[2].decode(), b"late")
        answerer = threading.Thread(target=lambda: slow.publish(slow.receive(20.0)[0][2].decode(), b"second"))
        answerer.start()
        assert link.request("slow", b"second", timeout_s=20.0)[4] == b"second"
        answerer.join()


def test_disabled_jetstream_is_reported() -> None:
    with (
        NatsServer(jetstream=False) as plain,
        NatsConnection.open(Endpoint((plain.url,))) as link,
        pytest.raises(NoResponders, match="JetStream itself is missing"),
    ):
        link.api("INFO")


def test_the_inbox_has_the_configured_prefix(nats: NatsServer) -> None:
    with NatsConnection.open(Endpoint((nats.url,), inbox_prefix="_INBOX_ada")) as link:
        assert link.inbox.startswith("_INBOX_ada.")
