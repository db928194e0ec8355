"""The workload as a log in JetStream, written as the store writes it but without commands: only reading is measured."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import islice
from typing import Self

from benchmarks.bank import Deposited, Withdrawn, bank
from benchmarks.postings import CURRENCY, Posting, postings
from eventjet import App
from eventjet.codec.headers import header_block
from eventjet.domain.identity import encode_id
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.topology import IDENTITY, stream_config
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import publish_frame
from eventjet.settings import Settings

_WINDOW = 2_000


Records = Iterator[tuple[str, bytes, bytes]]
"""(subject after the app's name, header block, body) of each event."""


def fill(
    url: str, count: int, app: str = bank.name, records: Records | None = None, **config: object
) -> tuple[int, int]:
    """A fresh stream with the first `count` postings, or other `records`; returns the least and the largest body."""
    with Filling(url, count, app, records, **config) as filling:
        return filling.to(count)


class Filling:
    """A fresh stream with its own `config`, which is filled step by step with the first of `total` postings."""

    def __init__(
        self, url: str, total: int, app: str = bank.name, records: Records | None = None, **config: object
    ) -> None:
        self.stored = 0
        self._app = app
        self._link = NatsConnection.open(Endpoint.of(Settings(servers=(url,))))
        stream = {**stream_config(app, 1), **config, "metadata": {IDENTITY: str(uuid.uuid4())}}
        self._link.api(f"STREAM.CREATE.{app}", stream)
        self._reply = f"{self._link.inbox}.acks"
        self._sid = self._link.subscribe(self._reply)
        self._records = bank_records(total) if records is None else records
        self._smallest, self._largest = 1 << 30, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def to(self, count: int) -> tuple[int, int]:
        """Go on until the log holds so many; returns the smallest and the largest body so far, in bytes."""
        while window := list(islice(self._records, min(_WINDOW, count - self.stored))):
            frames: list[bytes] = []
            for subject, block, body in window:
                self._smallest, self._largest = min(self._smallest, len(body)), max(self._largest, len(body))
                reply = self._reply.encode()
                frames.append(publish_frame(f"{self._app}.{subject}", body, reply=reply, headers=block))
            self._link.send(b"".join(frames))
            self.stored += len(window)
            await_acks(self._link, self._sid, len(window))
        state = self._link.api(f"STREAM.INFO.{self._app}")["state"]
        if (state["first_seq"], state["last_seq"], state["messages"]) != (1, count, count):
            raise RuntimeError(f"the log of {count} events came out as {state}")
        return self._smallest, self._largest


def bank_records(count: int) -> Records:
    """Return the first `count` postings as records of the bank."""
    return chained(bank, "account", ((str(posting[0]), event_of(posting)) for posting in postings(count)), _ids(count))


def _ids(count: int) -> Iterator[str]:
    return (str(uuid.UUID(posting[2])) for posting in postings(count))


def chained(app: App, aggregate: str, events: Iterable[tuple[str, object]], ids: Iterator[str]) -> Records:
    """Return records of (aggregate id, event) pairs, each with the version that comes next."""
    versions: dict[str, tuple[int, int]] = {}
    for position, (aggregate_id, data) in enumerate(events, 1):
        version, last = versions.get(aggregate_id, (0, 0))
        versions[aggregate_id] = (version + 1, position)
        encoded = app.catalog.encode(data)
        block = header_block(
            [
                ("Nats-Msg-Id", next(ids)),
                ("Nats-Expected-Last-Subject-Sequence", str(last)),
                ("Ej-Type", encoded.type_name),
                ("Ej-Schema", str(encoded.schema)),
                ("Ej-Version", str(version + 1)),
            ]
        )
        yield f"{aggregate}.{encode_id(aggregate_id)}", block, encoded.body


def event_of(posting: Posting) -> Deposited | Withdrawn:
    _, is_deposit, tx_id, amount, memo = posting
    event_class = Deposited if is_deposit else Withdrawn
    return event_class(tx_id=tx_id, amount=Decimal(amount), currency=CURRENCY, memo=memo)


def await_acks(link: NatsConnection, sid: bytes, expected: int) -> None:
    while expected:
        answers = [frame for frame in link.receive(30.0) if frame[0] == sid]
        if not answers:
            raise RuntimeError("the server acknowledged nothing for 30 s")
        for *_, body in answers:
            if "error" in (answer := json.loads(body)):
                raise RuntimeError(f"the server refused an event: {answer}")
        expected -= len(answers)
