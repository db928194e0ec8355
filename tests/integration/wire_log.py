"""Logs of their own for the tests of `eventjet.nats`, filled through `eventjet.nats` itself."""

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
    """A stream whose subjects are `<name>.*.*`, holding these bodies from its first position on."""
    name = logs.fresh_name()
    logs.create(endpoint, name, **config)
    append(endpoint, name, bodies)
    return name


def append(endpoint: Endpoint, name: str, bodies: Iterable[bytes]) -> int:
    """Store one event a body, on ten subjects in turn; returns the last position."""
    numbered = enumerate(bodies, 1)
    records = ((f"account.{number % 10}", logs.block(version=number), body) for number, body in numbered)
    return logs.append(endpoint, name, records)


def flush(link: NatsConnection) -> None:
    """Return once the server has taken in all that was sent: it answers in order.

    A request that nobody answers would not do: of overlapping subscriptions the server tells only one.
    """
    link.api("INFO", timeout_s=60.0)


@contextmanager
def overhearing(endpoint: Endpoint, log: str) -> Generator[Callable[[], list[bytes]]]:
    """The reply subjects of what a log's consumers deliver to anybody meanwhile, as another client of it hears them."""
    with NatsConnection.open(endpoint) as link:
        link.subscribe("_INBOX.>")
        flush(link)

        def heard() -> list[bytes]:
            flush(link)
            found = [frame[2] for batch in iter(lambda: link.receive(0.2), []) for frame in batch]
            return [reply for reply in found if reply.startswith(b"$JS.ACK.") and log.encode() in reply.split(b".")]

        yield heard


def assert_form_2(replies: list[bytes], count: int) -> None:
    """As many deliveries, each with a domain and an account hash before the stream."""
    assert len(replies) == count
    for reply in replies:
        tokens = reply.split(b".")
        assert len(tokens) >= 11, reply
        assert tokens[2] == b"_", reply


def positions(batches: Iterable[list[RawRecord]]) -> list[int]:
    """The positions of all records, in the order read."""
    return [record[0] for batch in batches for record in batch]


def consumers(endpoint: Endpoint, name: str) -> list[str]:
    """The consumers the stream has now."""
    with NatsConnection.open(endpoint) as link:
        return link.api(f"CONSUMER.NAMES.{name}")["consumers"] or []
