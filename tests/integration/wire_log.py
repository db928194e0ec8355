"""Logs for the tests of `eventjet.nats`, filled through `eventjet.nats` itself."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from eventjet.codec.headers import RawRecord
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from tests import logs

FORM_2 = "feature_flags { js_ack_fc_v2: true }"
"""Configuration of a server that writes the newer reply subjects."""


def make_log(endpoint: Endpoint, bodies: Iterable[bytes] = (), **config: object) -> str:
    """Create a stream with the subjects `<name>.*.*` and these bodies from its first position on."""
    name = logs.fresh_name()
    logs.create(endpoint, name, **config)
    append(endpoint, name, bodies)
    return name


def append(endpoint: Endpoint, name: str, bodies: Iterable[bytes]) -> int:
    """Store an event for each body, on ten subjects in turn; return the last position."""
    numbered = enumerate(bodies, 1)
    records = ((f"account.{number % 10}", logs.block(version=number), body) for number, body in numbered)
    return logs.append(endpoint, name, records)


def flush(link: NatsConnection) -> None:
    """Return once the server has received all that was sent: it answers in order.

    A request without a responder would not do: the server notifies only one of overlapping subscriptions.
    """
    link.api("INFO", timeout_s=60.0)


@contextmanager
def overhearing(endpoint: Endpoint, log: str) -> Generator[Callable[[], list[bytes]]]:
    """Yield a function that returns the reply subjects of a log's deliveries, as another client sees them."""
    with NatsConnection.open(endpoint) as link:
        link.subscribe("_INBOX.>")
        flush(link)

        def heard() -> list[bytes]:
            flush(link)
            replies = [frame[2] for batch in iter(lambda: link.receive(0.2), []) for frame in batch]
            return [reply for reply in replies if reply.startswith(b"$JS.ACK.") and log.encode() in reply.split(b".")]

        yield heard


def assert_form_2(replies: list[bytes], count: int) -> None:
    """Assert the number of deliveries, each with a domain and an account hash before the stream."""
    assert len(replies) == count
    for reply in replies:
        tokens = reply.split(b".")
        assert len(tokens) >= 11, reply
        assert tokens[2] == b"_", reply


def positions(batches: Iterable[list[RawRecord]]) -> list[int]:
    """Return the positions of all records, in the order read."""
    return [record[0] for batch in batches for record in batch]


def consumers(endpoint: Endpoint, name: str) -> list[str]:
    """Return the names of the stream's consumers."""
    with NatsConnection.open(endpoint) as link:
        return link.api(f"CONSUMER.NAMES.{name}")["consumers"] or []
