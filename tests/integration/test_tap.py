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


async def publish_raw(server: NatsServer, raw: bytes) -> None:
    """Send raw protocol bytes over a new connection, and return once the server has processed them."""
    url = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(b'CONNECT {"verbose": false, "headers": true}\r\n' + raw + b"PING\r\n")
    while (await reader.readline()) != b"PONG\r\n":
        pass
    writer.close()
    await writer.wait_closed()


@pytest.fixture
async def nats_client(eventjet_nats: NatsServer) -> AsyncIterator[NatsClient]:
    client = await nats.connect(eventjet_nats.url)
    yield client
    await client.close()


async def client_over(nats_client: NatsClient) -> Client:
    client = Client(given_endpoint(nats_client, Settings()), PATIENT_S, nats_client)
    await client.connect()
    return client


async def test_a_header_named_status_is_not_a_status_line(eventjet_nats: NatsServer) -> None:
    client = await connect(Settings(servers=(eventjet_nats.url,), request_timeout_s=PATIENT_S))
    frames: asyncio.Queue[Frame] = asyncio.Queue()
    subject = fresh_name()
    await client.serve(subject, frames.put_nowait)
    await client.api("INFO")
    block = b"NATS/1.0\r\nStatus: 503\r\nA:b\r\n\r\n"
    await publish_raw(eventjet_nats, b"HPUB %b %d %d\r\n%b\r\n" % (subject.encode(), len(block), len(block), block))
    async with asyncio.timeout(PATIENT_S):
        frame = await frames.get()
    assert frame[3] == block
    assert not nobody_listens(frame)
    await client.close()


async def test_bytes_that_are_not_text_stop_no_reader(eventjet_nats: NatsServer, nats_client: NatsClient) -> None:
    payloads: asyncio.Queue[bytes] = asyncio.Queue()
    subject = fresh_name()

    async def hear(message: Any) -> None:
        payloads.put_nowait(message.data)

    await nats_client.subscribe(f"{subject}.>", cb=hear)
    client = await client_over(nats_client)
    frames: asyncio.Queue[Frame] = asyncio.Queue()
    await client.serve(f"{subject}.>", frames.put_nowait)
    await client.api("INFO")
    name = subject.encode()
    await publish_raw(
        eventjet_nats, b"PUB %b.a\xff 1\r\nx\r\nPUB %b.b _INBOX.\xff 1\r\ny\r\nPUB %b.c 1\r\nz\r\n" % ((name,) * 3)
    )
    async with asyncio.timeout(PATIENT_S):
        while await payloads.get() != b"z":
            pass
        assert [(await frames.get())[4] for _ in range(3)] == [b"x", b"y", b"z"]
    assert "streams" in await client.api("INFO")
    await client.close()


async def test_requests_pending_on_a_lost_connection_are_not_sent_over_the_next() -> None:
    with NatsServer() as server:
        client = await connect(Settings(servers=(server.url,), request_timeout_s=PATIENT_S))
        name = fresh_name()
        await declare(client, name, 1)
        assert client.nats is not None
        server.pause()
        # Fill the socket: afterwards nats-py keeps the commands.
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
        for task in waiting:
            with pytest.raises(ConnectionLost):
                await task
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


async def test_closing_does_not_wait_for_a_server_that_reads_nothing() -> None:
    with NatsServer() as server:
        client = await connect(Settings(servers=(server.url,), request_timeout_s=PATIENT_S))
        assert client.nats is not None
        server.pause()
        while client.nats.pending_data_size == 0:
            client.publish("elsewhere", bytes(800_000))
            await asyncio.sleep(0.001)
        async with asyncio.timeout(PATIENT_S):
            await client.close()


async def test_callbacks_of_a_given_client_are_still_called(eventjet_nats: NatsServer) -> None:
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error))

    config = (
        'authorization { timeout: 30, users = [ {user: "ada", password: "x", '
        'permissions: { publish: { deny: ["No.>"] } } } ] }'
    )
    with NatsServer(config=config) as server:
        nats_client = await nats.connect(server.url, user="ada", password="x", error_cb=note)
        client = await client_over(nats_client)
        denied: list[str] = []
        client.on_denied.append(lambda fault: denied.append(fault.subject))
        await nats_client.publish("No.entry", b"")
        await client.api("INFO")
        assert denied == ["No.entry"]
        async with asyncio.timeout(PATIENT_S):
            while not any("no.entry" in text for text in errors):
                await asyncio.sleep(0.01)
        await client.close()
        await nats_client.publish("No.more", b"")
        await nats_client.flush()
        assert denied == ["No.entry"]
        await nats_client.close()


async def test_a_timed_out_unsubscription_is_not_renewed_by_a_reconnect() -> None:
    with NatsServer() as server:
        has_reconnected = asyncio.Event()

        async def reconnected() -> None:
            has_reconnected.set()

        nats_client = await nats.connect(
            server.url, reconnect_time_wait=0.1, max_reconnect_attempts=-1, reconnected_cb=reconnected
        )
        client = await client_over(nats_client)
        subscription = await client.serve("work", lambda frame: None, "workers")
        await client.api("INFO")
        server.pause()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.unsubscribe([subscription])
        server.kill()
        server.start()
        async with asyncio.timeout(PATIENT_S):
            await has_reconnected.wait()
        with pytest.raises(NoRespondersError):
            await nats_client.request("work", b"", timeout=PATIENT_S)
        await client.close()
        await nats_client.close()


async def test_an_incompatible_nats_py_is_refused_and_its_version_named(nats_client: NatsClient) -> None:
    incompatible = NatsClient()
    del incompatible._flush_queue
    with pytest.raises(UsageError, match=r"nats-py 2\.\d+\.\d+ has no _flush_queue"):
        Tap.of(incompatible)
    incompatible = NatsClient()
    del cast("Any", incompatible)._ps.needed
    with pytest.raises(UsageError, match=r"nats-py 2\.\d+\.\d+ has no _ps.needed"):
        Tap.of(incompatible)
    assert Tap.of(nats_client) is Tap.of(nats_client)


async def test_messages_of_one_loop_turn_arrive_in_order(nats_client: NatsClient) -> None:
    payloads: asyncio.Queue[bytes] = asyncio.Queue()
    subject = fresh_name()

    async def hear(message: Any) -> None:
        payloads.put_nowait(message.data)

    await nats_client.subscribe(subject, cb=hear)
    for number in range(100):
        send(nats_client, subject, b"%d" % number, b"NATS/1.0\r\nA: b\r\n\r\n")
    async with asyncio.timeout(PATIENT_S):
        assert [await payloads.get() for _ in range(100)] == [b"%d" % number for number in range(100)]


FRAMES = b"HMSG a 1 reply 17 22\r\nNATS/1.0\r\nA:b\r\n\r\nhello\r\nMSG a 1 5\r\nagain\r\n"


@pytest.mark.parametrize("cut", range(len(FRAMES)))
async def test_a_client_may_be_given_in_the_middle_of_a_message(cut: int) -> None:
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
        nats_client = await nats.connect(
            f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", allow_reconnect=False
        )
        subscription = await nats_client.subscribe("a")
        async with asyncio.timeout(PATIENT_S):
            await has_begun.wait()
            Tap.of(nats_client)
            is_given.set()
            first, second = await subscription.next_msg(PATIENT_S), await subscription.next_msg(PATIENT_S)
            await nats_client.close()
            await is_over.wait()
    assert (first.reply, first.headers, first.data) == ("reply", {"A": "b"}, b"hello")
    assert (second.reply, second.headers, second.data) == ("", None, b"again")


async def test_a_client_given_in_the_middle_of_a_message_may_lose_its_connection() -> None:
    connections, is_given, is_over = 0, asyncio.Event(), asyncio.Event()

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
                    await is_over.wait()
                    break
        if is_first:  # a reset, so that the client does not read an end of the stream
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        nats_client = await nats.connect(url, reconnect_time_wait=0.1, error_cb=_nothing)
        subscription = await nats_client.subscribe("a")
        async with asyncio.timeout(PATIENT_S):
            await is_given.wait()
            Tap.of(nats_client)
            is_over.set()
            assert [(await subscription.next_msg(PATIENT_S)).data for _ in range(30)] == [b"new"] * 30
        assert connections == 2
        await nats_client.close()


async def _nothing(_: Exception) -> None:
    """Ignore an error: without a callback nats-py logs it."""


async def test_a_given_client_receives_messages_after_its_owner_reconnects_it(
    eventjet_nats: NatsServer,
) -> None:
    subject = fresh_name()
    nats_client = await nats.connect(eventjet_nats.url, reconnect_time_wait=0.01, error_cb=_nothing)
    subscription = await nats_client.subscribe(subject, pending_msgs_limit=-1, pending_bytes_limit=-1)
    client = await client_over(nats_client)
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
            await nats_client.force_reconnect()
            while True:
                with suppress(StoreUnavailable):
                    await client.api("INFO")
                    break
            while not subscription._pending_queue.empty():
                subscription._pending_queue.get_nowait()
                subscription._pending_queue.task_done()
            await subscription.next_msg(PATIENT_S)
    is_over = True
    await publishing
    for connection in (client, other, nats_client):
        await connection.close()


async def test_a_given_client_may_be_closed_and_connected_again(eventjet_nats: NatsServer) -> None:
    nats_client = await nats.connect(eventjet_nats.url)
    for _ in range(3):
        client = await client_over(nats_client)
        await client.api("INFO")
        await client.close()
        await nats_client.close()
        await nats_client.connect(eventjet_nats.url)
        await nats_client.flush(int(PATIENT_S))
        subscription = await nats_client.subscribe("again." + fresh_name())
        await nats_client.publish(subscription.subject, b"x")
        assert (await subscription.next_msg(PATIENT_S)).data == b"x"
    await nats_client.close()


async def test_the_socket_is_not_read_while_nats_py_waits_for_a_callback(eventjet_nats: NatsServer) -> None:
    subject, goes_on = fresh_name(), asyncio.Event()

    async def wait(_: Exception) -> None:
        await goes_on.wait()

    nats_client = await nats.connect(eventjet_nats.url, error_cb=wait)
    subscription = await nats_client.subscribe(
        subject, pending_msgs_limit=1
    )  # the second message is reported to the callback
    client = await client_over(nats_client)
    other = await connect(Settings(servers=(eventjet_nats.url,), request_timeout_s=PATIENT_S))
    transport: Any = cast("Any", nats_client)._transport._io_reader._transport
    async with asyncio.timeout(PATIENT_S):
        while transport.is_reading():
            other.publish(subject, bytes(100_000))
            await other.api("INFO")
        goes_on.set()
        await subscription.next_msg(PATIENT_S)
        await client.api("INFO")
    for connection in (client, other, nats_client):
        await connection.close()


async def test_sending_over_a_closed_socket_is_a_lost_connection(
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


async def test_a_connection_closed_by_the_server_is_reported_as_closed() -> None:
    with NatsServer() as server:
        client = await connect(Settings(servers=(server.url,), request_timeout_s=PATIENT_S))
        is_received = asyncio.Event()
        await client.serve("nobody.answers", lambda _: is_received.set())
        waiting = asyncio.create_task(client.request("nobody.answers"))
        await is_received.wait()
        server.kill()
        with pytest.raises(ConnectionLost, match="it closed the connection"):
            await waiting
        await client.close()


async def test_a_loop_may_read_into_byte_arrays(eventjet_nats: NatsServer) -> None:
    nats_client = await nats.connect(eventjet_nats.url)
    client = await client_over(nats_client)
    await client.api("INFO")
    stream: Any = cast("Any", nats_client)._transport._io_reader
    plain = stream.feed_data
    stream.feed_data = lambda data: plain(bytearray(data))  # as a loop of Windows does
    async with asyncio.timeout(PATIENT_S):
        assert "api" in await client.api("INFO")
    await client.close()
    await nats_client.close()


def test_an_endpoint_has_only_websocket_urls_or_none() -> None:
    with pytest.raises(UsageError, match="Give one kind"):
        Endpoint(("ws://127.0.0.1:80", "nats://127.0.0.1"))
    assert Endpoint(("wss://example.org/nats",)).addresses()[0].url == "wss://example.org:443/nats"


async def test_no_message_is_lost_to_members_that_leave_their_queue_group(eventjet_nats: NatsServer) -> None:
    subject, received, more = fresh_name(), 0, asyncio.Event()

    def hear(_: Frame) -> None:
        nonlocal received
        received += 1
        more.set()

    async with AsyncExitStack() as stack:
        clients: list[Client] = []
        for _ in range(2):
            clients.append(await connect(Settings(servers=(eventjet_nats.url,), request_timeout_s=PATIENT_S)))
            stack.push_async_callback(clients[-1].close)
        staying, leaving = clients
        await staying.serve(subject, hear, "q")
        await staying.api("INFO")
        messages = b"PUB %b 1\r\nx\r\n" % subject.encode() * 10_000
        for _ in range(20):
            subscriptions = [await leaving.serve(subject, hear, "q") for _ in range(20)]
            await leaving.api("INFO")
            more.clear()
            publishing = asyncio.create_task(publish_raw(eventjet_nats, messages))
            await more.wait()
            await leaving.unsubscribe(subscriptions)
            await publishing
        async with asyncio.timeout(PATIENT_S):
            while received < 20 * 10_000:
                more.clear()
                await more.wait()
