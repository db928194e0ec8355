"""Logs of a test's own: made, filled and read without the store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import chain
from uuid import uuid4

from eventjet.codec.envelope import VERSION, RawRecord, header, header_block, number_of
from eventjet.nats.api import last_message, stream_info
from eventjet.nats.connection import NatsConnection, ask_once
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import publish_frame
from eventjet.nats.ranges import read_range
from eventjet.store.earlier import EarlierRecords

NEXT = "next"
"""Instead of a version: `append` puts the one that comes next on the subject."""
WINDOW, WINDOW_BYTES = 500, 4_000_000
"""How much is on its way before an acknowledgement is waited for."""


def fresh_name(kind: str = "app") -> str:
    """The name of an app, and of its log, that nobody has used."""
    return f"{kind}_{uuid4().hex[:12]}"


def create(endpoint: Endpoint, name: str, **config: object) -> None:
    """A stream whose subjects are `<name>.*.*`."""
    full = {"name": name, "subjects": [f"{name}.*.*"], "storage": "file", **config}
    with NatsConnection.open(endpoint) as link:
        link.api(f"STREAM.CREATE.{name}", full)


def block(type_name: str = "account.deposited", schema: int = 1, version: int | str = NEXT, **more: str) -> bytes:
    """A header block as the store writes it; `more` adds and replaces headers, with _ for the - in their names."""
    pairs = {"Nats-Msg-Id": str(uuid4()), "Ej-Type": type_name, "Ej-Schema": str(schema), "Ej-Version": str(version)}
    return header_block((pairs | {name.replace("_", "-"): value for name, value in more.items()}).items())


def append(endpoint: Endpoint, name: str, records: Iterable[tuple[str, bytes, bytes]]) -> int:
    """Store (subject after the log's name, header block, body) triples; returns the last position."""
    last, size = 0, 0
    frames: list[bytes] = []
    with NatsConnection.open(endpoint) as link, closing(_Versions(endpoint, name)) as versions:
        reply = f"{link.inbox}.acks"
        acks = link.subscribe(reply)
        for subject, unnumbered, body in records:
            headers = versions.put(f"{name}.{subject}", unnumbered)
            frames.append(publish_frame(f"{name}.{subject}", body, reply=reply.encode(), headers=headers))
            size += len(frames[-1])
            if len(frames) == WINDOW or size > WINDOW_BYTES:
                last = stored(link, acks, frames)
                frames, size = [], 0
        return stored(link, acks, frames) if frames else last


class _Versions:
    """The version that is next on each subject, as the log and what was written since have it."""

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self._earlier = EarlierRecords(endpoint, name)
        self._link = NatsConnection.open(endpoint)
        self._name = name
        self._versions: dict[str, int] = {}

    def put(self, subject: str, headers: bytes) -> bytes:
        """The headers with a version, where they ask for the next one."""
        if (told := number_of(headers, VERSION)) is not None:
            self._versions[subject] = told
        elif header(headers, VERSION) == NEXT:
            self._versions[subject] = (self._versions.get(subject) or self._last(subject)) + 1
            return headers.replace(b"Ej-Version: next", b"Ej-Version: %d" % self._versions[subject])
        return headers

    def close(self) -> None:
        self._earlier.close()
        self._link.close()

    def _last(self, subject: str) -> int:
        record = self._link.ask(last_message(self._name, subject))
        while record is not None and number_of(record[3], VERSION) is None:
            record = self._earlier.before(subject.encode(), record[0])
        return 0 if record is None else number_of(record[3], VERSION) or 0


def stored(link: NatsConnection, acks: bytes, frames: Sequence[bytes]) -> int:
    """Publish, and wait for every acknowledgement; the last position."""
    link.send(b"".join(frames))
    expected, last = len(frames), 0
    while expected:
        received = [frame for frame in link.receive(60.0) if frame[0] == acks]
        assert received, "the server acknowledged nothing for 60 s"
        for *_, body in received:
            answer = json.loads(body)
            assert "error" not in answer, answer
            last = max(last, answer["seq"])
        expected -= len(received)
    return last


def records_of(endpoint: Endpoint, name: str) -> list[RawRecord]:
    """All that a log holds."""
    state = ask_once(endpoint, stream_info(name))
    return list(chain.from_iterable(read_range(endpoint, name, state.first, state.last + 1)))
