"""What eventjet changes in a client of nats-py: each test fails without its part of `eventjet.nats.tap`."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any, cast
from urllib.parse import urlparse, urlsplit

import nats
import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.client import Srv
from nats.errors import NoRespondersError

from eventjet.dev.nats import NatsServer
from eventjet.errors import ConnectionLost, StoreUnavailable, UsageError
from eventjet.jetstream.client import Client, connect
from eventjet.log.topology import declare
from eventjet.nats.client import given_endpoint
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import Frame, nobody_listens
from eventjet.nats.tap import Tap, send
from eventjet.settings import Settings
from tests.logs import fresh_name

PATIENT_S = 60.0


async def published(server: NatsServer, raw: bytes) -> None:
    """Send bytes of the protocol over a connection of its own; the server has dealt with them afterwards."""
    url = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(b'CONNECT {"verbose": false, "headers": true}\r\n' + raw + b"PING\r\n")
    while (await reader.readline()) != b"PONG\r\n":
        pass
    writer.close()
    await writer.wait_closed()


@pytest.fixture
async def given(eventjet_nats: NatsServer) -> AsyncIterator[NatsClient]:
    client = await nats.connect(eventjet_nats.url)
    yield client
    await client.close()


async def over(given: NatsClient) -> Client:
    client = Client(given_endpoint(given, Settings()), PATIENT_S, given)
    await client.connect()
    return client


async def test_a_header_that_is_called_status_is_no_status(eventjet_nats: NatsServer) -> None:
    client = await connect(Settings(servers=(eventjet_nats.url,), request_timeout_s=PATIENT_S))
    heard: asyncio.Queue[Frame] = asyncio.Queue()
    subject = fresh_name()
    await client.serve(subject, heard.put_nowait)
    await client.api("INFO")
    block = b"NATS/1.0\r\nStatus: 503\r\nA:b\r\n\r\n"
    await published(eventjet_nats, b"HPUB %b %d %d\r\n%b\r\n" % (subject.encode(), len(block), len(block), block))
    async with asyncio.timeout(PATIENT_S):
        frame = await heard.get()
    assert frame[3] == block
    assert not nobody_listens(frame)
    await client.close()


async def test_bytes_that_are_no_text_end_nobodys_reading(eventjet_nats: NatsServer, given: NatsClient) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    subject = fresh_name()

    async def hear(message: Any) -> None:
        heard.put_nowait(message.data)

    await given.subscribe(f"{subject}.>", cb=hear)
    client = await over(given)
    ours: asyncio.Queue[Frame] = asyncio.Queue()
    await client.serve(f"{subject}.>", ours.put_nowait)
    await client.api("INFO")
    name = subject.encode()
    await published(
        eventjet_nats, b"PUB %b.a\xff 1\r\nx\r\nPUB %b.b _INBOX.\xff 1\r\ny\r\nPUB %b.c 1\r\nz\r\n" % ((name,) * 3)
    )
    async with asyncio.timeout(PATIENT_S):
        while await heard.get() != b"z":
            pass
        assert [(await ours.get())[4] for _ in range(3)] == [b"x", b"y", b"z"]
    assert "streams" in await client.api("INFO")
    await client.close()


async def test_what_waits_for_a_lost_connection_is_not_sent_over_the_next() -> None:
    with NatsServer() as server:
        client = await connect(Settings(servers=(server.url,), request_timeout_s=PATIENT_S))
        name = fresh_name()
        await declare(client, name, 1)
        assert client.nats is not None
        server.pause()
        # Until the socket takes no more: then nats-py keeps what comes.
        while client.nats.pending_data_size == 0:
            client.publish("elsewhere", bytes(800_000))
            await asyncio.sleep(0.001)
        batch = b"NATS/1.0\r\nNats-Batch-Id: 1\r\nNats-Batch-Sequence: %d\r\n%b\r\n"
        before = [(f"{name}.thing.b", b"late", batch % (1, b""))]
        last = batch % (2, b"Nats-Batch-Commit: 1\r\n")
        waiting = [
            asyncio.create_task(client.request(f"{name}.thing.a", b"late", stream=name)),
            asyncio.create_task(client.request(f"{name}.thing.c", b"late", last, earlier_messages=before, stream=name)),
        ]
        await asyncio.sleep(0)
        assert sum(b"late" in command for command in client.nats._pending) == 3
        server.kill()
        for each in waiting:
            with pytest.raises(ConnectionLost):
                await each
        assert not any(b"late" in command for command in client.nats._pending)
        server.start()
        while True:
            with suppress(StoreUnavailable):
                state = (await client.api(f"STREAM.INFO.{name}"))["state"]
                break
        assert state["messages"] == 0
        await client.close()


async def test_a_server_that_reads_nothing_is_left_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.nats.client.LoopClient.ping_interval_s", 0.5)
    with NatsServer() as frozen, NatsServer() as other:
        client = await connect(Settings(servers=(frozen.url,), request_timeout_s=PATIENT_S))
        assert client.nats is not None
        client.nats._server_pool.append(Srv(urlparse(other.url)))
        frozen.pause()
        while client.nats.pending_data_size == 0:
            client.publish("elsewhere", bytes(800_000))
            await asyncio.sleep(0.001)
        async with asyncio.timeout(PATIENT_S):
            while True:
                with suppress(StoreUnavailable):
                    await client.api("INFO")
                    break
        assert client.nats.connected_url is not None
        assert client.nats.connected_url.port == other.port
        async with asyncio.timeout(PATIENT_S):
            await client.close()


async def test_closing_waits_for_no_server_that_reads_nothing() -> None:
    with NatsServer() as server:
        client = await connect(Settings(servers=(server.url,), request_timeout_s=PATIENT_S))
        assert client.nats is not None
        server.pause()
        while client.nats.pending_data_size == 0:
            client.publish("elsewhere", bytes(800_000))
            await asyncio.sleep(0.001)
        async with asyncio.timeout(PATIENT_S):
            await client.close()


async def test_a_given_clients_own_callbacks_are_called_as_before(eventjet_nats: NatsServer) -> None:
    said: list[str] = []

    async def note(error: Exception) -> None:
        said.append(str(error))

    config = (
        'authorization { timeout: 30, users = [ {user: "ada", password: "x", '
        'permissions: { publish: { deny: ["No.>"] } } } ] }'
    )
    with NatsServer(config=config) as server:
        given = await nats.connect(server.url, user="ada", password="x", error_cb=note)
        client = await over(given)
        denied: list[str] = []
        client.on_denied.append(lambda fault: denied.append(fault.subject))
        await given.publish("No.entry", b"")
        await client.api("INFO")
        assert denied == ["No.entry"]
        async with asyncio.timeout(PATIENT_S):
            while not any("no.entry" in text for text in said):
                await asyncio.sleep(0.01)
        await client.close()
        await given.publish("No.more", b"")
        await given.flush()
        assert denied == ["No.entry"]
        await given.close()


async def test_what_could_not_be_unsubscribed_in_time_is_not_subscribed_to_anew() -> None:
    with NatsServer() as server:
        again = asyncio.Event()

        async def reconnected() -> None:
            again.set()

        given = await nats.connect(
            server.url, reconnect_time_wait=0.1, max_reconnect_attempts=-1, reconnected_cb=reconnected
        )
        client = await over(given)
        served = await client.serve("work", lambda frame: None, "workers")
        await client.api("INFO")
        server.pause()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.unsubscribe([served])
        server.kill()
        server.start()
        async with asyncio.timeout(PATIENT_S):
            await again.wait()
        with pytest.raises(NoRespondersError):
            await given.request("work", b"", timeout=PATIENT_S)
        await client.close()
        await given.close()


async def test_another_nats_py_is_refused_by_name(given: NatsClient) -> None:
    unlike = NatsClient()
    del unlike._flush_queue
    with pytest.raises(UsageError, match=r"nats-py 2\.\d+\.\d+ has no _flush_queue"):
        Tap.of(unlike)
    unlike = NatsClient()
    del cast("Any", unlike)._ps.needed
    with pytest.raises(UsageError, match=r"nats-py 2\.\d+\.\d+ has no _ps.needed"):
        Tap.of(unlike)
    assert Tap.of(given) is Tap.of(given)


async def test_messages_go_together_in_one_turn_of_the_loop(given: NatsClient) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    subject = fresh_name()

    async def hear(message: Any) -> None:
        heard.put_nowait(message.data)

    await given.subscribe(subject, cb=hear)
    for number in range(100):
        send(given, subject, b"%d" % number, b"NATS/1.0\r\nA: b\r\n\r\n")
    async with asyncio.timeout(PATIENT_S):
        assert [await heard.get() for _ in range(100)] == [b"%d" % number for number in range(100)]


FRAMES = b"HMSG a 1 reply 17 22\r\nNATS/1.0\r\nA:b\r\n\r\nhello\r\nMSG a 1 5\r\nagain\r\n"


@pytest.mark.parametrize("cut", range(len(FRAMES)))
async def test_a_client_is_given_in_the_middle_of_a_message(cut: int) -> None:
    has_begun, is_given, is_over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"version": "2.15.1", "max_payload": 1000000, "headers": true}\r\n')
        while not (line := await reader.readline()).startswith(b"SUB"):
            writer.write(b"PONG\r\n" * (line == b"PING\r\n"))
        writer.write(b"PING\r\n" + FRAMES[:cut])
        while await reader.readline() != b"PONG\r\n":
            pass
        has_begun.set()
        await is_given.wait()
        writer.write(FRAMES[cut:])
        await reader.read()
        writer.close()
        await writer.wait_closed()
        is_over.set()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        given = await nats.connect(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", allow_reconnect=False)
        heard = await given.subscribe("a")
        async with asyncio.timeout(PATIENT_S):
            await has_begun.wait()
            Tap.of(given)
            is_given.set()
            first, second = await heard.next_msg(PATIENT_S), await heard.next_msg(PATIENT_S)
            await given.close()
            await is_over.wait()
    assert (first.reply, first.headers, first.data) == ("reply", {"A": "b"}, b"hello")
    assert (second.reply, second.headers, second.data) == ("", None, b"again")


async def test_a_client_that_is_given_in_the_middle_of_a_message_may_lose_its_connection_then() -> None:
    connections, is_given, over = 0, asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        is_first = connections == 1
        writer.write(b'INFO {"version": "2.15.1", "max_payload": 1000000, "headers": true}\r\n')
        with suppress(ConnectionError):
            while line := await reader.readline():
                writer.write(b"PONG\r\n" * (line == b"PING\r\n"))
                if line.startswith(b"SUB") and is_first:
                    writer.write(b"PING\r\nMSG a 1 64\r\nold")
                elif line.startswith(b"SUB"):
                    writer.write(b"MSG a 1 3\r\nnew\r\n" * 30)
                elif line == b"PONG\r\n" and is_first:
                    is_given.set()
                    await over.wait()
                    break
        if is_first:  # a reset, so that nobody reads an end
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        given = await nats.connect(url, reconnect_time_wait=0.1, error_cb=_nothing)
        heard = await given.subscribe("a")
        async with asyncio.timeout(PATIENT_S):
            await is_given.wait()
            Tap.of(given)
            over.set()
            assert [(await heard.next_msg(PATIENT_S)).data for _ in range(30)] == [b"new"] * 30
        assert connections == 2
        await given.close()


async def _nothing(_: Exception) -> None:
    """For a client of nats-py, which logs each error otherwise."""


async def test_a_given_client_that_its_owner_has_reconnect_hears_over_the_next_connection(
    eventjet_nats: NatsServer,
) -> None:
    subject = fresh_name()
    given = await nats.connect(eventjet_nats.url, reconnect_time_wait=0.01, error_cb=_nothing)
    heard = await given.subscribe(subject, pending_msgs_limit=-1, pending_bytes_limit=-1)
    client = await over(given)
    other = await connect(Settings(servers=(eventjet_nats.url,), request_timeout_s=PATIENT_S))
    is_over = False

    async def publish() -> None:
        while not is_over:
            for _ in range(5):
                other.publish(subject, b"x")
            await asyncio.sleep(0)
            await other.api("INFO")

    publishing = asyncio.create_task(publish())
    async with asyncio.timeout(2 * PATIENT_S):
        for _ in range(20):
            await client.api("INFO")  # its answer often comes in one piece with messages of the subject
            await given.force_reconnect()
            while True:
                with suppress(StoreUnavailable):
                    await client.api("INFO")
                    break
            while not heard._pending_queue.empty():
                heard._pending_queue.get_nowait()
                heard._pending_queue.task_done()
            await heard.next_msg(PATIENT_S)
    is_over = True
    await publishing
    for each in (client, other, given):
        await each.close()


async def test_a_client_that_was_given_may_be_closed_and_connected_again(eventjet_nats: NatsServer) -> None:
    given = await nats.connect(eventjet_nats.url)
    for _ in range(3):
        client = await over(given)
        await client.api("INFO")
        await client.close()
        await given.close()
        await given.connect(eventjet_nats.url)
        await given.flush(int(PATIENT_S))
        heard = await given.subscribe("again." + fresh_name())
        await given.publish(heard.subject, b"x")
        assert (await heard.next_msg(PATIENT_S)).data == b"x"
    await given.close()


async def test_the_socket_is_not_read_while_nats_py_waits_for_a_callback(eventjet_nats: NatsServer) -> None:
    subject, goes_on = fresh_name(), asyncio.Event()

    async def wait(_: Exception) -> None:
        await goes_on.wait()

    given = await nats.connect(eventjet_nats.url, error_cb=wait)
    heard = await given.subscribe(subject, pending_msgs_limit=1)  # the second one is told to the callback
    client = await over(given)
    other = await connect(Settings(servers=(eventjet_nats.url,), request_timeout_s=PATIENT_S))
    reading: Any = cast("Any", given)._transport._io_reader._transport
    async with asyncio.timeout(PATIENT_S):
        while reading.is_reading():
            other.publish(subject, bytes(100_000))
            await other.api("INFO")
        goes_on.set()
        await heard.next_msg(PATIENT_S)
        await client.api("INFO")
    for each in (client, other, given):
        await each.close()


async def test_what_is_sent_over_a_socket_that_was_just_closed_is_a_lost_connection(
    eventjet_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect(Settings(servers=(eventjet_nats.url,), request_timeout_s=PATIENT_S))
    assert client.nats is not None
    transport: Any = cast("Any", client.nats)._transport._io_writer.transport

    def size() -> int:
        assert not transport.is_closing()  # uvloop raises here
        return 0

    monkeypatch.setattr(transport, "get_write_buffer_size", size)
    await client.api("INFO")
    transport.abort()
    with pytest.raises(ConnectionLost, match="NATS"):
        await client.api("INFO")
    await client.close()


async def test_a_connection_that_the_server_closes_was_not_silent() -> None:
    with NatsServer() as server:
        client = await connect(Settings(servers=(server.url,), request_timeout_s=PATIENT_S))
        asked = asyncio.Event()
        await client.serve("nobody.answers", lambda _: asked.set())
        waiting = asyncio.create_task(client.request("nobody.answers"))
        await asked.wait()
        server.kill()
        with pytest.raises(ConnectionLost, match="it closed the connection"):
            await waiting
        await client.close()


async def test_a_loop_may_read_into_byte_arrays(eventjet_nats: NatsServer) -> None:
    given = await nats.connect(eventjet_nats.url)
    client = await over(given)
    await client.api("INFO")
    stream: Any = cast("Any", given)._transport._io_reader
    plain = stream.feed_data
    stream.feed_data = lambda data: plain(bytearray(data))  # as a loop of Windows does
    async with asyncio.timeout(PATIENT_S):
        assert "api" in await client.api("INFO")
    await client.close()
    await given.close()


def test_an_endpoint_of_websockets_alone_is_one() -> None:
    with pytest.raises(UsageError, match="Give one kind"):
        Endpoint(("ws://127.0.0.1:80", "nats://127.0.0.1"))
    assert Endpoint(("wss://example.org/nats",)).addresses()[0].url == "wss://example.org:443/nats"


async def test_no_message_is_lost_to_members_that_leave_their_queue_group(eventjet_nats: NatsServer) -> None:
    subject, heard, more = fresh_name(), 0, asyncio.Event()

    def hear(_: Frame) -> None:
        nonlocal heard
        heard += 1
        more.set()

    async with AsyncExitStack() as opened:
        clients: list[Client] = []
        for _ in range(2):
            clients.append(await connect(Settings(servers=(eventjet_nats.url,), request_timeout_s=PATIENT_S)))
            opened.push_async_callback(clients[-1].close)
        staying, leaving = clients
        await staying.serve(subject, hear, "q")
        await staying.api("INFO")
        messages = b"PUB %b 1\r\nx\r\n" % subject.encode() * 10_000
        for _ in range(20):
            places = [await leaving.serve(subject, hear, "q") for _ in range(20)]
            await leaving.api("INFO")
            more.clear()
            publishing = asyncio.create_task(published(eventjet_nats, messages))
            await more.wait()
            await leaving.unsubscribe(places)
            await publishing
        async with asyncio.timeout(PATIENT_S):
            while heard < 20 * 10_000:
                more.clear()
                await more.wait()
