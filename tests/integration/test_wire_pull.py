"""A worker's durable delivers every event once and in order after a position, and reports a takeover."""

from __future__ import annotations

import threading
import time

import pytest

from eventjet.codec.headers import RawRecord
from eventjet.dev import NatsServer
from eventjet.errors import (
    ApiRefused,
    ConnectionClosed,
    ConnectionLost,
    DeliveryGap,
    Evicted,
    HistoryBroken,
    StoreUnavailable,
)
from eventjet.jetstream.api import reading_records
from eventjet.jetstream.connection import NatsConnection
from eventjet.jetstream.reader import DurablePull
from eventjet.nats.endpoint import Endpoint
from tests.integration.wire_fake import FakeServer, delivery, jetstream, status
from tests.integration.wire_log import append, consumers, flush, make_log, positions


def take(pull: DurablePull, count: int) -> list[RawRecord]:
    """Return the next `count` records, waiting a bounded time."""
    records: list[RawRecord] = []
    deadline = time.monotonic() + 20.0
    while len(records) < count and time.monotonic() < deadline:
        records += pull.next_batch()
    return records


def test_a_worker_starts_after_its_position_and_follows_the_tail(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"{}"] * 5_000)
    with DurablePull(endpoint, name, "p_balances", position=1_234, batch_max=100) as pull:
        records = take(pull, 3_766)
        assert positions([records]) == list(range(1_235, 5_001))
        assert (pull.position, pull.pending) == (5_000, 0)
        append(endpoint, name, [b"new"] * 7)
        assert positions([take(pull, 7)]) == list(range(5_001, 5_008))
    assert consumers(endpoint, name) == ["p_balances"]


def test_an_empty_read_model_starts_at_the_beginning_of_the_log(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"{}"] * 10, first_seq=1_001)
    with DurablePull(endpoint, name, "p", position=0) as pull:
        assert positions([take(pull, 10)]) == list(range(1_001, 1_011))


def test_a_last_event_delivered_to_a_rival_is_noticed_without_a_later_event(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"{}"] * 10)
    with (
        DurablePull(endpoint, name, "p", position=0, heartbeat_s=4.0) as pull,
        NatsConnection.open(endpoint) as rival,
    ):
        assert positions([take(pull, 10)]) == list(range(1, 11))
        # The rival was stopped with an open pull, which reaches the durable of its successor.
        rival.subscribe(f"{rival.inbox}.p")
        rival.publish(f"$JS.API.CONSUMER.MSG.NEXT.{name}.p", b'{"batch":5}', reply=f"{rival.inbox}.p")
        flush(rival)

        def follow() -> None:
            # The server serves waiting pulls in turn, one message each; no event follows the stray one.
            for number in range(11, 21):
                append(endpoint, name, [b"new"])
                assert positions([take(pull, 1)]) == [number]

        with pytest.raises(DeliveryGap, match="another reader"):
            follow()


def test_events_delivered_during_a_check_of_pulls_are_kept(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"{}"])
    check_begun = threading.Event()

    def append_during_a_check(link: NatsConnection) -> None:
        while not any(b".q." in frame[2] for frame in link.receive(60.0)):
            pass
        check_begun.set()
        for _ in range(3):
            append(endpoint, name, [b"new"])

    with NatsConnection.open(endpoint) as link, DurablePull(endpoint, name, "p", position=1, linger_s=0.1) as pull:
        link.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{name}.p")
        flush(link)
        appending = threading.Thread(target=append_during_a_check, args=(link,))
        appending.start()
        records: list[RawRecord] = []
        deadline = time.monotonic() + 60.0
        while len(records) < 3 and time.monotonic() < deadline:
            records += pull.next_batch()
        appending.join()
        assert check_begun.is_set()
        assert positions([records]) == [2, 3, 4]


def test_events_delivered_while_a_page_is_read_are_kept(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"{}"] * 500, allow_direct=True)
    with DurablePull(endpoint, name, "p", position=500, linger_s=0.1) as pull:
        for number in range(501, 601, 2):
            append(endpoint, name, [b"new"])  # on its way while the page is read
            assert len(pull.link.run(reading_records(name, f"{name}.account.*", 400))) == 400
            append(endpoint, name, [b"new"])
            assert positions([take(pull, 2)]) == [number, number + 1]


def test_batches_are_bounded_and_need_not_be_full(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"{}"] * 1_000)
    with DurablePull(endpoint, name, "p", position=0, batch_max=64, linger_s=60) as pull:
        sizes: list[int] = []
        while sum(sizes) < 1_000:
            sizes.append(len(pull.next_batch()))
        assert max(sizes) <= 64
        append(endpoint, name, [b"one"])
        started = time.monotonic()
        assert len(take(pull, 1)) == 1
        assert time.monotonic() - started < 30


def test_silence_gives_an_empty_batch_after_the_linger(endpoint: Endpoint) -> None:
    name = make_log(endpoint)
    with DurablePull(endpoint, name, "p", position=0, linger_s=3.0, heartbeat_s=2.0) as pull:
        for _ in range(2):
            started = time.monotonic()
            assert pull.next_batch() == []
            assert 2.9 < time.monotonic() - started < 30
        assert pull.pending == 0


def test_a_position_ahead_of_the_log_waits_for_it(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"{}"] * 3)
    with DurablePull(endpoint, name, "p", position=3, linger_s=0.1) as pull:
        assert pull.next_batch() == []
        append(endpoint, name, [b"{}"])
        assert positions([take(pull, 1)]) == [4]


def test_expired_pulls_are_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.jetstream.reader._EXPIRES_S", 0.5)
    with NatsServer(sync_interval="1m") as server:
        endpoint = Endpoint((server.url,))
        limits = {"name": "limited", "subjects": ["limited.*.*"]}
        with NatsConnection.open(endpoint) as link:
            link.api("STREAM.CREATE.limited", limits)
        with DurablePull(endpoint, "limited", "p", position=0, batch_max=10, linger_s=0.1) as pull:
            until = time.monotonic() + 1.6
            while time.monotonic() < until:
                assert pull.next_batch() == []
            append(endpoint, "limited", [b"{}"] * 100)
            assert positions([take(pull, 100)]) == list(range(1, 101))


def test_a_takeover_evicts_the_former_worker_at_once(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"{}"] * 100)
    with DurablePull(endpoint, name, "p", position=0, linger_s=60.0) as deposed:
        assert len(take(deposed, 100)) == 100
        with DurablePull(endpoint, name, "p", position=50) as owner:
            started = time.monotonic()
            with pytest.raises(Evicted, match="Consumer Deleted"):
                deposed.next_batch()
            assert time.monotonic() - started < 30.0
            append(endpoint, name, [b"{}"] * 5)
            assert positions([take(owner, 55)]) == list(range(51, 106))


def test_a_rival_that_pulls_from_the_same_durable_is_noticed(endpoint: Endpoint) -> None:
    name = make_log(endpoint)
    with DurablePull(endpoint, name, "p", position=0, batch_max=5) as pull, NatsConnection.open(endpoint) as rival:
        append(endpoint, name, [b"{}"] * 5)
        assert len(take(pull, 5)) == 5
        rival.subscribe("stolen")
        rival.publish(f"$JS.API.CONSUMER.MSG.NEXT.{name}.p", b'{"batch": 3, "expires": 5000000000}', reply="stolen")
        flush(rival)
        append(endpoint, name, [b"{}"] * 40)
        with pytest.raises(DeliveryGap, match="as delivery"):
            take(pull, 40)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"409 Consumer Deleted", Evicted),
        (b"409 Leadership Change", Evicted),
        (b"409 Server Shutdown", Evicted),
        (b"409 Exceeded MaxWaiting", Evicted),
        (b"503", Evicted),
        (b"409 Exceeded MaxRequestBatch of 5", ApiRefused),
        (b"409 Consumer is push based", ApiRefused),
        (b"400 Bad Request", ApiRefused),
    ],
)
def test_a_refused_pull_ends_the_reader(line: bytes, kind: type[Exception]) -> None:
    with (
        FakeServer(jetstream(lambda consumer, number: status(line))) as fake,
        DurablePull(fake.endpoint, "bank", "p", position=0) as pull,
        pytest.raises(kind),
    ):
        pull.next_batch()


@pytest.mark.parametrize(
    "line",
    [
        b"404 No Messages\r\nNats-Pending-Messages: 1000",
        b"408 Request Timeout\r\nNats-Pending-Messages: 1000",
        b"409 Message Size Exceeds MaxBytes\r\nNats-Pending-Messages: 1000",
        b"409 Batch Completed\r\nNats-Pending-Messages: 1000",
    ],
)
def test_a_completed_pull_is_requested_again(line: bytes) -> None:
    def on_pull(consumer: bytes, number: int) -> bytes:
        return delivery(consumer, number, number) if number == 1 else status(line) if number < 50 else b""

    with (
        FakeServer(jetstream(on_pull)) as fake,
        DurablePull(fake.endpoint, "bank", "p", position=0, linger_s=0.1) as pull,
    ):
        assert positions([take(pull, 1)]) == [1]
        assert pull.next_batch() == []


def test_heartbeats_alone_are_neither_records_nor_silence() -> None:
    beats = status(b"100 Idle Heartbeat") * 3
    with (
        FakeServer(jetstream(lambda consumer, number: beats)) as fake,
        DurablePull(fake.endpoint, "bank", "p", position=0, linger_s=0.1) as pull,
    ):
        assert pull.next_batch() == []


def test_a_hole_is_an_error(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"{}"] * 10)
    with NatsConnection.open(endpoint) as link:
        for position in (3, 6, 7):
            link.api(f"STREAM.MSG.DELETE.{name}", {"seq": position})
    with DurablePull(endpoint, name, "p", position=2) as pull, pytest.raises(HistoryBroken, match="position 3"):
        pull.next_batch()


def test_closing_from_another_thread_ends_the_reader_promptly(endpoint: Endpoint) -> None:
    pull = DurablePull(endpoint, make_log(endpoint), "p", position=0, linger_s=60.0)
    end_times: list[float] = []

    def read() -> None:
        assert list(pull) == []
        end_times.append(time.monotonic())

    reader = threading.Thread(target=read)
    reader.start()
    threading.Event().wait(0.3)
    started = time.monotonic()
    pull.close()
    reader.join(50.0)
    assert end_times
    assert end_times[0] - started < 30.0
    with pytest.raises(ConnectionClosed):
        pull.next_batch()


def test_a_server_that_dies_or_stops_answering_ends_the_pull() -> None:
    with NatsServer(sync_interval="1m") as server:
        endpoint = Endpoint((server.url,))
        name = make_log(endpoint)
        with DurablePull(endpoint, name, "p", position=0, linger_s=0.1, heartbeat_s=2.0) as pull:
            assert pull.next_batch() == []
            server.pause()
            started = time.monotonic()
            with pytest.raises(ConnectionLost):
                take(pull, 1)
            assert time.monotonic() - started < 30.0
            server.resume()
        with DurablePull(endpoint, name, "p", position=0) as pull:
            server.kill()
            with pytest.raises(StoreUnavailable):
                take(pull, 1)


def test_a_slow_worker_is_not_taken_for_a_silent_server(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"{}"] * 300)
    with DurablePull(endpoint, name, "p", position=0, batch_max=100, linger_s=0.05, heartbeat_s=2.0) as pull:
        records: list[RawRecord] = []
        pause_s = 5.0  # longer than silence may last
        while len(records) < 300:
            batch = take(pull, 1)  # 1 to 100 records, depending on the speed of the server
            assert batch
            records += batch
            threading.Event().wait(pause_s)
            pause_s = 0.1
        assert positions([records]) == list(range(1, 301))
        assert pull.next_batch() == []
        append(endpoint, name, [b"{}"])
        assert len(take(pull, 1)) == 1


def test_large_events_do_not_break_the_count_of_pulls(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"x" * 900_000] * 30)
    with DurablePull(endpoint, name, "p", position=0, batch_max=1_000) as pull:
        assert positions([take(pull, 30)]) == list(range(1, 31))
        append(endpoint, name, [b"{}"] * 3_000)
        assert len(take(pull, 3_000)) == 3_000


def test_a_missing_stream_leaves_no_link_behind(endpoint: Endpoint) -> None:
    with pytest.raises(ApiRefused, match="stream not found"):
        DurablePull(endpoint, "nothing", "p", position=0)
