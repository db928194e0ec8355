"""Many snapshots into the bucket at once, none over a newer one.

Each is written only if the entry is still the one that was looked at, so commands, other builds and retries may write
at the same time: whoever comes second looks again. Blocking.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from eventjet.codec.envelope import EXPECTED, MSG_ID, header, header_block, number_of
from eventjet.domain.history import FoldedState
from eventjet.errors import ApiRefused, NoResponders, StoreUnavailable, Unreachable
from eventjet.nats.api import get_record
from eventjet.nats.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.faults import api_fault
from eventjet.nats.protocol import Frame, publish_frame, status_of

WINDOW = 64
"""Snapshots written together: the server may have to send as many of 900,000 bytes, and keeps 64 MB for a reader."""
WINDOW_BYTES = 8_000_000

_PATIENCE_S = 30.0
_TIMEOUT_S = 10.0
_PAUSE_S = 0.2
_CONFLICTS = (10071, 10164)
_NO_MESSAGE = 10037


@dataclass(frozen=True, slots=True)
class Offer:
    """One snapshot to be written."""

    key: str
    """`<aggregate>.<encoded id>`: its key in the bucket and its subject in the log."""
    position: int
    """Of the last event in it."""
    event_id: str
    value: bytes


class _Entry(NamedTuple):
    """What the bucket holds at a key."""

    sequence: int
    """In the bucket's stream; 0 when it never held anything."""
    held: FoldedState[Any] | None
    """The snapshot, if it is to be believed."""


class BulkSnapshots:
    """The bucket of one app, for one aggregate type. A context manager."""

    def __init__(
        self, endpoint: Endpoint, app: str, bucket: str, last: int, decode: Callable[[bytes], FoldedState[Any] | None]
    ) -> None:
        """Offers hold all events up to position `last`; `decode` gives None for what is no snapshot."""
        self._endpoint = endpoint
        self._app = app
        self._last = last
        self._decode = decode
        self._bucket = bucket
        self._link: NatsConnection | None = None
        self._asked = 0
        self.written = 0
        self.newer = 0
        """How many had a snapshot of the same or of a later event."""

    def __enter__(self) -> BulkSnapshots:
        return self

    def __exit__(self, *_: object) -> None:
        self._hang_up()

    def put(self, offers: Sequence[Offer]) -> None:
        """Write those that are newer than what is there, at most `WINDOW` together.

        Tries again for half a minute while the server does not answer, then raises `StoreUnavailable` or
        `Unreachable`.
        """
        deadline = time.monotonic() + _PATIENCE_S
        lost = False
        left = list(offers)
        while left:
            try:
                left = self._round(left, through_leader=lost)
                lost = True
                if not left:
                    return
                fault: Exception = StoreUnavailable(f"The bucket {self._bucket}", f"{left[0].key} keeps changing")
            except (StoreUnavailable, Unreachable) as error:
                self._hang_up()
                fault = error
            if time.monotonic() > deadline:
                raise fault
            time.sleep(_PAUSE_S)

    def _round(self, offers: Sequence[Offer], *, through_leader: bool) -> list[Offer]:
        """Look at each entry and write what is newer; returns those whose entry changed in between."""
        link = self._link or NatsConnection.open(self._endpoint, timeout_s=_TIMEOUT_S)
        self._link = link
        if through_leader:
            # A replica that was asked may be behind the write that came in between.
            entries = [self._leaders(link, offer) for offer in offers]
        else:
            subjects = [f"$JS.API.DIRECT.GET.KV_{self._bucket}.{self._subject(offer)}" for offer in offers]
            entries = self._ask(link, [_request(subject) for subject in subjects], self._entry)
        due: list[tuple[Offer, int]] = []
        for offer, entry in zip(offers, entries, strict=True):
            if entry.held is None or not self._stands(link, offer, entry.held):
                due.append((offer, entry.sequence))
        frames = [_request(self._subject(offer), offer.value, expected) for offer, expected in due]
        stored = self._ask(link, frames, _stored)
        self.newer += len(offers) - len(due)
        self.written += sum(stored)
        return [offer for (offer, _), done in zip(due, stored, strict=True) if not done]

    def _stands(self, link: NatsConnection, offer: Offer, held: FoldedState[Any]) -> bool:
        """Whether the snapshot that is there holds all that the offer does, of this very log."""
        if held.position == offer.position:
            return held.event_id == offer.event_id
        if held.position <= self._last:
            return False  # older, or of an event that this log does not have
        record = get_record(link, self._app, held.position)
        named = f"{self._app}.{offer.key}".encode()
        return record is not None and record[2] == named and header(record[3], MSG_ID) == held.event_id

    def _entry(self, frame: Frame) -> _Entry:
        block, value = frame[3], frame[4]
        code = status_of(block)[0]
        if code == 404:
            return _Entry(0, None)
        sequence = number_of(block, "Nats-Sequence")
        if code or sequence is None:
            raise StoreUnavailable(f"The bucket {self._bucket}", f"it answered with status {code}")
        return _Entry(sequence, self._decode(value))

    def _leaders(self, link: NatsConnection, offer: Offer) -> _Entry:
        try:
            found = link.api(f"STREAM.MSG.GET.KV_{self._bucket}", {"last_by_subj": self._subject(offer)})["message"]
        except ApiRefused as refusal:
            if refusal.err_code != _NO_MESSAGE:
                raise
            return _Entry(0, None)
        return _Entry(int(found["seq"]), self._decode(base64.b64decode(found.get("data") or "")))

    def _ask(
        self, link: NatsConnection, requests: Sequence[Callable[[bytes], bytes]], read: Callable[[Frame], Any]
    ) -> list[Any]:
        """Send all requests and read their answers, in the order of the requests."""
        if not requests:
            return []
        self._asked += 1
        inbox = f"{link.inbox}.s{self._asked}"
        sid = link.subscribe(f"{inbox}.*")
        link.send(b"".join(request(f"{inbox}.{number}".encode()) for number, request in enumerate(requests)))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + _TIMEOUT_S
        while len(answers) < len(requests):
            frames = link.receive(max(0.0, deadline - time.monotonic()))
            if not frames:
                raise StoreUnavailable(f"The bucket {self._bucket}", f"none within {_TIMEOUT_S:g} s")
            for frame in frames:
                if frame[0] == sid:
                    if not frame[4] and status_of(frame[3])[0] == 503:
                        raise NoResponders(f"KV_{self._bucket}")
                    answers[int(frame[1].rpartition(b".")[2])] = read(frame)
        link.unsubscribe(sid)
        return [answers[number] for number in range(len(requests))]

    def _subject(self, offer: Offer) -> str:
        return f"$KV.{self._bucket}.{offer.key}"

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            with suppress(OSError):
                link.close()


def _request(subject: str, body: bytes = b"", expected: int | None = None) -> Callable[[bytes], bytes]:
    """A frame that lacks its reply subject; `expected` is the sequence of the entry that it replaces."""
    headers = b"" if expected is None else header_block([(EXPECTED, str(expected))])
    return lambda reply: publish_frame(subject, body, reply=reply, headers=headers)


def _stored(frame: Frame) -> bool:
    """Whether the server took it; False when the entry is not the expected one any more."""
    answer: dict[str, Any] = json.loads(frame[4])
    error = answer.get("error")
    if error is None:
        return True
    if error.get("err_code") in _CONFLICTS:
        return False
    raise api_fault("a snapshot", error)
