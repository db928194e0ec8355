"""The workload as a log in JetStream, written as the store writes it but without commands: only reading is measured."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice

from benchmarks.bank import Deposited, Withdrawn, bank
from benchmarks.postings import CURRENCY, Posting, postings
from eventjet.codec.envelope import header_block
from eventjet.domain.identity import encode_id
from eventjet.settings import Settings
from eventjet.store.topology import IDENTITY, stream_config
from eventjet.wire import Endpoint, Link
from eventjet.wire.frames import publish_frame

_WINDOW = 2_000


def fill(url: str, count: int, app: str = bank.name) -> tuple[int, int]:
    """A fresh stream with the first `count` postings; returns the smallest and the largest body in bytes."""
    smallest, largest = 1 << 30, 0
    with Link.open(Endpoint.of(Settings(servers=(url,)))) as link:
        link.api(f"STREAM.CREATE.{app}", {**stream_config(app, 1), "metadata": {IDENTITY: str(uuid.uuid4())}})
        reply = f"{link.inbox}.acks"
        sid = link.subscribe(reply)
        records = _records(count)
        stored = 0
        while window := list(islice(records, _WINDOW)):
            frames: list[bytes] = []
            for subject, block, body in window:
                smallest, largest = min(smallest, len(body)), max(largest, len(body))
                frames.append(publish_frame(f"{app}.{subject}", body, reply=reply.encode(), headers=block))
            link.send(b"".join(frames))
            stored += len(window)
            _await_acks(link, sid, len(window))
        found = link.api(f"STREAM.INFO.{app}")["state"]
        if (found["first_seq"], found["last_seq"], found["messages"]) != (1, count, count):
            raise RuntimeError(f"the log of {count} events came out as {found}")
    return smallest, largest


def _records(count: int) -> Iterator[tuple[str, bytes, bytes]]:
    versions: dict[uuid.UUID, tuple[int, int]] = {}
    for position, posting in enumerate(postings(count), 1):
        account = posting[0]
        version, last = versions.get(account, (0, 0))
        versions[account] = (version + 1, position)
        encoded = bank.catalog.encode(_event(posting))
        block = header_block(
            [
                ("Nats-Msg-Id", str(uuid.UUID(posting[2]))),
                ("Nats-Expected-Last-Subject-Sequence", str(last)),
                ("Ej-Type", encoded.type_name),
                ("Ej-Schema", str(encoded.schema)),
                ("Ej-Version", str(version + 1)),
            ]
        )
        yield f"account.{encode_id(str(account))}", block, encoded.body


def _event(posting: Posting) -> Deposited | Withdrawn:
    _, is_deposit, tx_id, amount, memo = posting
    made = Deposited if is_deposit else Withdrawn
    return made(tx_id=tx_id, amount=Decimal(amount), currency=CURRENCY, memo=memo)


def _await_acks(link: Link, sid: bytes, expected: int) -> None:
    while expected:
        answers = [frame for frame in link.receive(30.0) if frame[0] == sid]
        if not answers:
            raise RuntimeError("the server acknowledged nothing for 30 s")
        for *_, body in answers:
            if "error" in (answer := json.loads(body)):
                raise RuntimeError(f"the server refused an event: {answer}")
        expected -= len(answers)
