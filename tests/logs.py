"""Logs of a test's own: made, filled and read without the store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import chain
from uuid import uuid4

from eventjet.codec.headers import EXPECTED, VERSION, RawRecord, header, header_block, number_of
from eventjet.jetstream.api import last_message, stream_info
from eventjet.jetstream.connection import NatsConnection, ask_once
from eventjet.jetstream.reader import read_range
from eventjet.log.predecessors import PredecessorReader
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import publish_frame

NEXT = "next"
"""In place of a version: `append` writes the next one of the subject, and what it is written after."""
WINDOW, WINDOW_BYTES = 500, 4_000_000
"""How much is sent before an acknowledgement is awaited."""


def fresh_name(kind: str = "app") -> str:
    """Return an unused name for an app and its log."""
    return f"{kind}_{uuid4().hex[:12]}"


def create(endpoint: Endpoint, name: str, **config: object) -> None:
    """Create a stream whose subjects are `<name>.*.*`."""
    full = {"name": name, "subjects": [f"{name}.*.*"], "storage": "file", **config}
    with NatsConnection.open(endpoint) as link:
        link.api(f"STREAM.CREATE.{name}", full)


def block(type_name: str = "account.deposited", schema: int = 1, version: int | str = NEXT, **more: str) -> bytes:
    """Return a header block as the store writes it; `more` sets other headers, with _ for the - in their names."""
    pairs = {"Nats-Msg-Id": str(uuid4()), "Ej-Type": type_name, "Ej-Schema": str(schema), "Ej-Version": str(version)}
    return header_block((pairs | {name.replace("_", "-"): value for name, value in more.items()}).items())


def append(endpoint: Endpoint, name: str, records: Iterable[tuple[str, bytes, bytes]]) -> int:
    """Store (subject after the log's name, header block, body) triples; return the last position."""
    last, size = 0, 0
    frames: dict[int, tuple[str, bytes]] = {}
    with NatsConnection.open(endpoint) as link, closing(_Histories(endpoint, name)) as histories:
        reply = f"{link.inbox}.acks"
        acks = link.subscribe(f"{reply}.*")

        def flush() -> int:
            positions = stored(link, acks, [frame for _, frame in frames.values()])
            for number in sorted(frames):
                histories.stored(frames[number][0], positions[f"{reply}.{number}".encode()])
            return max(positions.values())

        for number, (short, unplaced, body) in enumerate(records):
            subject = f"{name}.{short}"
            headers = histories.placed(subject, unplaced)
            frames[number] = subject, publish_frame(subject, body, reply=f"{reply}.{number}".encode(), headers=headers)
            size += len(frames[number][1])
            if len(frames) == WINDOW or size > WINDOW_BYTES:
                last, size = flush(), 0
                frames.clear()
        return flush() if frames else last


class _Histories:
    """The last record of each subject, as position and version; for the only writer of the subjects."""

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self._earlier = PredecessorReader(endpoint, name)
        self._link = NatsConnection.open(endpoint)
        self._name = name
        self._versions: dict[str, int] = {}
        self._positions: dict[str, int | None] = {}

    def placed(self, subject: str, headers: bytes) -> bytes:
        """Return the headers of the subject's next record: with its version, and its last position if known."""
        if subject not in self._versions:
            self._look(subject)
        version, position = number_of(headers, VERSION), self._positions[subject]
        self._positions[subject] = None  # until it is acknowledged
        if version is not None:
            self._versions[subject] = version
            return headers
        if header(headers, VERSION) != NEXT:
            return headers
        self._versions[subject] += 1
        lines = b"Ej-Version: %d" % self._versions[subject]
        if position is not None and header(headers, EXPECTED) is None:
            lines += b"\r\n%b: %d" % (EXPECTED.encode(), position)
        return headers.replace(b"Ej-Version: next", lines)

    def stored(self, subject: str, position: int) -> None:
        """Note where an acknowledged record is."""
        self._positions[subject] = position or None

    def close(self) -> None:
        self._earlier.close()
        self._link.close()

    def _look(self, subject: str) -> None:
        record = self._link.ask(last_message(self._name, subject))
        self._positions[subject] = 0 if record is None else record[0]
        while record is not None and number_of(record[3], VERSION) is None:
            record = self._earlier.before(subject.encode(), record[0])
        self._versions[subject] = 0 if record is None else number_of(record[3], VERSION) or 0


def stored(link: NatsConnection, acks: bytes, frames: Sequence[bytes]) -> dict[bytes, int]:
    """Publish, and wait for every acknowledgement; return the subject of each reply with the position in it.

    0 is that of a message that was not stored, because the log has its id.
    """
    link.send(b"".join(frames))
    positions: dict[bytes, int] = {}
    answers = 0
    while answers < len(frames):
        received = [frame for frame in link.receive(60.0) if frame[0] == acks]
        assert received, "the server acknowledged nothing for 60 s"
        answers += len(received)
        for _, reply, *_, body in received:
            answer = json.loads(body)
            assert "error" not in answer, answer
            positions[reply] = 0 if answer.get("duplicate") else answer["seq"]
    return positions


def records_of(endpoint: Endpoint, name: str) -> list[RawRecord]:
    """Return all records of a log."""
    state = ask_once(endpoint, stream_info(name))
    return list(chain.from_iterable(read_range(endpoint, name, state.first, state.last + 1)))
