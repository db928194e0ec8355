"""Logs of their own for the tests of `eventjet.nats`, filled through `eventjet.nats` itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from uuid import uuid4

from eventjet.codec.envelope import RawRecord
from eventjet.nats.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import publish_frame

WINDOW = 500
FORM_2 = "feature_flags { js_ack_fc_v2: true }"
"""Configuration of a server that writes the newer reply subjects."""


def fresh_name() -> str:
    """A stream that nobody has used."""
    return f"app_{uuid4().hex[:12]}"


def make_log(endpoint: Endpoint, bodies: Iterable[bytes] = (), **config: object) -> str:
    """A stream whose subjects are `<name>.*.*`, holding these bodies from its first position on."""
    name = fresh_name()
    full = {"name": name, "subjects": [f"{name}.*.*"], "storage": "file", **config}
    with NatsConnection.open(endpoint) as link:
        link.api(f"STREAM.CREATE.{name}", full)
    append(endpoint, name, bodies)
    return name


def append(endpoint: Endpoint, name: str, bodies: Iterable[bytes]) -> int:
    """Store one event a body, on ten subjects in turn; returns the last position."""
    last = 0
    with NatsConnection.open(endpoint) as link:
        acks = link.subscribe(f"{link.inbox}.acks")
        frames: list[bytes] = []
        for number, body in enumerate(bodies, 1):
            subject = f"{name}.account.{number % 10}"
            frames.append(publish_frame(subject, body, reply=f"{link.inbox}.acks".encode(), headers=block(number)))
            if len(frames) >= WINDOW or sum(map(len, frames)) > 4_000_000:
                last = _stored(link, acks, frames)
        return _stored(link, acks, frames) if frames else last


def block(number: int) -> bytes:
    """A header block as an event carries it."""
    return f"NATS/1.0\r\nNats-Msg-Id: {uuid4()}\r\nEj-Type: account.deposited\r\nEj-Version: {number}\r\n\r\n".encode()


@contextmanager
def overhearing(endpoint: Endpoint, log: str) -> Generator[Callable[[], list[bytes]]]:
    """The reply subjects of what a log's consumers deliver to anybody meanwhile, as another client of it hears them."""
    with NatsConnection.open(endpoint) as link:
        link.subscribe("_INBOX.>")
        link.flush()

        def heard() -> list[bytes]:
            link.flush()
            found = [reply for _, _, reply, _, _ in link.frames(0.2) if reply.startswith(b"$JS.ACK.")]
            return [reply for reply in found if log.encode() in reply.split(b".")]

        yield heard


def assert_form_2(replies: list[bytes], count: int) -> None:
    """As many deliveries, each with a domain and an account hash before the stream."""
    assert len(replies) == count
    for reply in replies:
        tokens = reply.split(b".")
        assert len(tokens) >= 11, reply
        assert tokens[2] == b"_", reply


def _stored(link: NatsConnection, acks: bytes, frames: list[bytes]) -> int:
    """Send, and wait for every acknowledgement."""
    expected = len(frames)
    link.send(b"".join(frames))
    frames.clear()
    last = 0
    while expected:
        received = [frame for frame in link.receive(20.0) if frame[0] == acks]
        assert received, "the server acknowledged nothing for 20 s"
        for *_, body in received:
            answer = json.loads(body)
            assert "error" not in answer, answer
            last = answer["seq"]
        expected -= len(received)
    return last


def positions(batches: Iterable[list[RawRecord]]) -> list[int]:
    """The positions of all records, in the order read."""
    return [record[0] for batch in batches for record in batch]


def consumers(endpoint: Endpoint, name: str) -> list[str]:
    """The consumers the stream has now."""
    with NatsConnection.open(endpoint) as link:
        return link.api(f"CONSUMER.NAMES.{name}")["consumers"] or []
