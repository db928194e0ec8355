"""A range of the log is read completely and in order, or ends with an error that names the position."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from eventjet.dev import NatsServer
from eventjet.errors import ApiRefused, DeliveryGap, Forbidden, HistoryBroken, StoreUnavailable, Unreachable
from eventjet.jetstream.api import message_at, next_message, stream_info
from eventjet.jetstream.connection import NatsConnection, ask_once
from eventjet.jetstream.reader import read_range
from eventjet.nats.endpoint import Endpoint
from tests.integration.wire_fake import FakeServer, delivery, jetstream
from tests.integration.wire_log import append, consumers, make_log, positions

FORMS = {"form 1": "", "form 2": "feature_flags { js_ack_fc_v2: true }"}
IMPATIENT = {"timeout_s": 5.0, "patience_s": 4.0, "heartbeat_s": 0.25}
LARGE = 30_000
KILOBYTE = b"k" * 1_000


@pytest.fixture(scope="module")
def log(endpoint: Endpoint) -> str:
    """Return a log of ten thousand small events."""
    return make_log(endpoint, (b"%d" % number for number in range(1, 10_001)))


@pytest.mark.parametrize("form", FORMS)
def test_a_range_is_read_completely_in_order_and_as_stored(form: str) -> None:
    with NatsServer(sync_interval="1m", config=FORMS[form]) as server:
        endpoint = Endpoint((server.url,))
        name = make_log(endpoint, (b"%d" % number for number in range(1, 5001)))
        batches = list(read_range(endpoint, name, 11, 4712, batch=1000))
        assert [len(batch) for batch in batches] == [1000, 1000, 1000, 1000, 701]
        records = [record for batch in batches for record in batch]
        assert [record[0] for record in records] == list(range(11, 4712))
        assert all(record[4] == b"%d" % record[0] for record in records)
        assert all(record[2] == f"{name}.account.{record[0] % 10}".encode() for record in records)
        assert all(
            record[3].startswith(b"NATS/1.0\r\nNats-Msg-Id: ") and record[3][-4:] == b"\r\n\r\n" for record in records
        )
        times = [record[1] for record in records]
        assert times == sorted(times)
        assert abs(times[0] / 1e9 - time.time()) < 60
        assert ask_once(endpoint, message_at(name, 11)) == records[0]


def test_an_empty_range_sends_no_request() -> None:
    nowhere = Endpoint(("nats://127.0.0.1:1",))
    assert list(read_range(nowhere, "none", 5, 5)) == []
    assert list(read_range(nowhere, "none", 5, 4)) == []


def test_a_range_without_events_ends_at_once(endpoint: Endpoint, log: str) -> None:
    started = time.monotonic()
    empty = make_log(endpoint)
    assert list(read_range(endpoint, empty, 1, 100, allow_holes=True)) == []
    assert list(read_range(endpoint, log, 10_001, 20_000, allow_holes=True)) == []
    assert list(read_range(endpoint, log, 1, 10_001, filter_subject=f"{log}.account.none")) == []
    assert time.monotonic() - started < 25.0


def test_a_log_that_ends_before_the_range_is_an_error_with_the_position(endpoint: Endpoint, log: str) -> None:
    with pytest.raises(HistoryBroken, match="broken at position 10001") as raised:
        positions(read_range(endpoint, log, 9_990, 10_050))
    assert raised.value.position == 10_001
    with pytest.raises(HistoryBroken, match="broken at position 1:"):
        positions(read_range(endpoint, make_log(endpoint), 1, 2))


def test_a_filter_selects_one_history_in_any_range(endpoint: Endpoint, log: str) -> None:
    subject = f"{log}.account.3"
    assert positions(read_range(endpoint, log, 1, 10_001, filter_subject=subject)) == list(range(3, 10_001, 10))
    assert positions(read_range(endpoint, log, 14, 33, filter_subject=subject)) == [23]
    assert positions(read_range(endpoint, log, 9_994, 20_000, filter_subject=subject)) == []
    assert len(positions(read_range(endpoint, log, 1, 10_001, filter_subject=f"{log}.*.4"))) == 1_000


def test_a_log_may_begin_after_position_one(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"{}"] * 5, first_seq=1_001)
    state = ask_once(endpoint, stream_info(name))
    assert (state.first, state.last, state.messages) == (1_001, 1_005, 5)
    assert positions(read_range(endpoint, name, 1_001, 1_006)) == list(range(1_001, 1_006))
    assert positions(read_range(endpoint, name, 1, 1_004, allow_holes=True)) == [1_001, 1_002, 1_003]
    with pytest.raises(HistoryBroken, match="positions 1 to 1000 are missing"):
        positions(read_range(endpoint, name, 1, 1_006))


def test_a_hole_is_an_error_with_the_position(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"{}"] * 20)
    with NatsConnection.open(endpoint) as link:
        for position in (7, 8, 20):
            link.api(f"STREAM.MSG.DELETE.{name}", {"seq": position})
    with pytest.raises(HistoryBroken, match="positions 7 to 8 are missing") as raised:
        positions(read_range(endpoint, name, 1, 21))
    assert raised.value.position == 7
    with pytest.raises(HistoryBroken, match="broken at position 20"):
        positions(read_range(endpoint, name, 9, 21))
    assert positions(read_range(endpoint, name, 9, 20)) == list(range(9, 20))
    expected = [p for p in range(1, 20) if p not in (7, 8)]
    assert positions(read_range(endpoint, name, 1, 21, allow_holes=True)) == expected
    assert (ask_once(endpoint, stream_info(name)).deleted, ask_once(endpoint, message_at(name, 7))) == (3, None)


@pytest.mark.parametrize("size", [0, 900_000])
def test_bodies_of_any_size_are_read_completely(endpoint: Endpoint, size: int) -> None:
    bodies = [b"%d" % number + b"x" * size if size else b"" for number in range(40)]
    name = make_log(endpoint, bodies)
    read = [record[4] for batch in read_range(endpoint, name, 1, 41, batch=7) for record in batch]
    assert read == bodies


def test_large_bodies_are_read_in_smaller_batches(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"x" * 900_000] * 80)
    sizes = [sum(len(record[4]) for record in batch) for batch in read_range(endpoint, name, 1, 81)]
    assert sum(sizes) == 80 * 900_000
    assert max(sizes) < 30_000_000


def test_the_consumer_is_deleted_at_the_end_and_when_the_reader_stops_early(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [KILOBYTE] * 5_000)
    assert len(positions(read_range(endpoint, name, 1, 5_001))) == 5_000
    assert consumers(endpoint, name) == []
    reading = read_range(endpoint, name, 1, 5_001, batch=10)
    next(reading)
    assert len(consumers(endpoint, name)) == 1
    reading.close()
    assert consumers(endpoint, name) == []


def test_appends_during_a_read_do_not_disturb_it(endpoint: Endpoint, log: str) -> None:
    name = make_log(endpoint, [KILOBYTE] * 3_000)
    writer = threading.Thread(target=append, args=(endpoint, name, [KILOBYTE] * 3_000))
    writer.start()
    try:
        assert positions(read_range(endpoint, name, 1, 3_001, batch=100)) == list(range(1, 3_001))
        filtered = positions(read_range(endpoint, name, 1, 3_001, filter_subject=f"{name}.account.1"))
        assert filtered == list(range(1, 3_001, 10))
    finally:
        writer.join()


@pytest.fixture(scope="module")
def large() -> Iterator[tuple[NatsServer, Endpoint, str]]:
    """Yield a server whose log has more events than fit into the buffers between it and a reader."""
    with NatsServer(sync_interval="1m") as server:
        endpoint = Endpoint((server.url,))
        yield server, endpoint, make_log(endpoint, [KILOBYTE] * LARGE)


def delete_consumers(server: NatsServer, endpoint: Endpoint, name: str) -> None:
    with NatsConnection.open(endpoint) as link:
        for consumer in consumers(endpoint, name):
            with suppress(ApiRefused):  # the read has ended meanwhile
                link.api(f"CONSUMER.DELETE.{name}.{consumer}")


def kill(server: NatsServer, endpoint: Endpoint, name: str) -> None:
    server.kill()
    server.start()


def restart(server: NatsServer, endpoint: Endpoint, name: str) -> None:
    server.stop()
    server.start()


def pause(server: NatsServer, endpoint: Endpoint, name: str) -> None:
    server.pause()
    threading.Event().wait(1.5)
    server.resume()


@pytest.mark.parametrize("fault", [delete_consumers, kill, restart, pause])
def test_a_read_continues_after_a_fault_without_losses_or_repetitions(
    large: tuple[NatsServer, Endpoint, str], fault: Callable[[NatsServer, Endpoint, str], None]
) -> None:
    _, endpoint, name = large
    options = {"timeout_s": 5.0, "patience_s": 20.0, "heartbeat_s": 0.25}
    read_positions: list[int] = []
    disturbance = threading.Thread(target=fault, args=large)
    for number, batch in enumerate(read_range(endpoint, name, 1, LARGE + 1, batch=1_000, **options)):
        read_positions += [record[0] for record in batch]
        if number == 2:
            disturbance.start()
    disturbance.join()
    assert read_positions == list(range(1, LARGE + 1))


def test_a_server_that_stays_away_ends_the_read_with_an_error(large: tuple[NatsServer, Endpoint, str]) -> None:
    server, endpoint, name = large
    reading = read_range(endpoint, name, 1, LARGE + 1, batch=100, **IMPATIENT)
    next(reading)
    server.pause()
    started = time.monotonic()
    try:
        with pytest.raises(StoreUnavailable, match=rf"Reading {name} from position \d+ had no answer"):
            positions(reading)
    finally:
        server.resume()
    assert time.monotonic() - started < 60.0


def test_a_read_without_a_server_fails_at_once() -> None:
    with pytest.raises(Unreachable, match="refused the connection"):
        next(read_range(Endpoint(("nats://127.0.0.1:1",)), "bank", 1, 2))


def test_a_missing_stream_is_an_error(endpoint: Endpoint) -> None:
    with pytest.raises(ApiRefused, match="stream not found"):
        next(read_range(endpoint, "nothing", 1, 2))
    with pytest.raises(ApiRefused, match="stream not found"):
        ask_once(endpoint, stream_info("nothing"))


def test_a_reader_without_the_right_to_read_is_forbidden() -> None:
    allowed = '{publish: ["$JS.API.STREAM.>", "l.>"]}'
    users = f"authorization {{ timeout: 30, users: [{{user: ada, password: x, permissions: {allowed}}}] }}"
    with NatsServer(sync_interval="1m", config=users) as server:
        endpoint = Endpoint((server.url,), user="ada", password="x")
        with NatsConnection.open(endpoint) as link:
            link.api("STREAM.CREATE.l", {"name": "l", "subjects": ["l.*.*"]})
        with pytest.raises(Forbidden, match=r"denied \$JS.API.CONSUMER.CREATE.l"):
            next(read_range(endpoint, "l", 1, 2))


def test_a_slow_caller_is_not_taken_for_a_silent_server(large: tuple[NatsServer, Endpoint, str]) -> None:
    _, endpoint, name = large
    options = {"timeout_s": 5.0, "patience_s": 4.0, "heartbeat_s": 0.1}
    count, pause_s = 0, 4.5
    for batch in read_range(endpoint, name, 1, LARGE + 1, batch=10_000, **options):
        count += len(batch)
        threading.Event().wait(pause_s)
        pause_s = 0.1
    assert count == LARGE


def test_pulls_respect_the_limits_of_the_server() -> None:
    with NatsServer(sync_interval="1m", config="jetstream { limits { max_request_batch: 50 } }") as server:
        endpoint = Endpoint((server.url,))
        name = make_log(endpoint, [b"{}"] * 1_000)
        assert len(positions(read_range(endpoint, name, 1, 1_001))) == 1_000


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ((3, 3, 1), "position 3, but as delivery 3 after delivery 1"),
        ((1, 2, 1), "position 1, but after position 1"),
        ((2, 2, 2), "position 2, but as try 2"),
        ((2, 1, 1), "position 2, but as delivery 1 after delivery 1"),
    ],
)
def test_a_delivery_out_of_order_is_an_error(second: tuple[int, int, int], text: str) -> None:
    """No real server does this to a private consumer, but a rival on a durable does."""

    def on_pull(consumer: bytes, _: int) -> bytes:
        position, sequence, delivered = second
        return delivery(consumer, 1, 1) + delivery(consumer, position, sequence, delivered=delivered)

    with FakeServer(jetstream(on_pull)) as fake, pytest.raises(DeliveryGap, match=text):
        list(read_range(fake.endpoint, "bank", 1, 9, allow_holes=True))


def test_a_delivery_of_another_consumer_is_an_error() -> None:
    script = jetstream(lambda _, number: delivery(b"other", number, number))
    with FakeServer(script) as fake, pytest.raises(DeliveryGap, match="it comes from 'other'"):
        list(read_range(fake.endpoint, "bank", 1, 9))


def test_the_state_of_a_stream_has_its_identity(endpoint: Endpoint) -> None:
    name = make_log(endpoint, [b"{}"] * 12, metadata={"eventjet.log": "abc"}, deny_delete=True)
    state = ask_once(endpoint, stream_info(name))
    assert (state.first, state.last, state.messages, state.deleted, state.subjects) == (1, 12, 12, 0, 10)
    assert state.metadata["eventjet.log"] == "abc"
    assert state.config["deny_delete"] is True
    empty = ask_once(endpoint, stream_info(make_log(endpoint)))
    assert (empty.last, empty.messages) == (0, 0)


def test_single_records_are_read_through_the_leader(endpoint: Endpoint, log: str) -> None:
    with NatsConnection.open(endpoint) as link:
        record = link.ask(message_at(log, 4_711))
        assert record == next(read_range(endpoint, log, 4_711, 4_712))[0]
        assert link.ask(message_at(log, 10_001)) is None
        following = link.ask(next_message(log, 4_711, f"{log}.account.5"))
        assert following is not None
        assert following[0] == 4_715
        assert link.ask(next_message(log, 10_001)) is None
