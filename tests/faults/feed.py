"""`Feed`: appends numbered events from a thread of its own, as the log's only writer, and survives the server."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from decimal import Decimal
from uuid import uuid4

from eventjet.codec.headers import header_block
from eventjet.errors import EventjetError
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.connection import NatsConnection, ask_once
from eventjet.nats.protocol import publish_frame
from tests.faults.tally import Added, Noted
from tests.integration.ledger_log import Ledger

CHUNK = 10
PAUSE_MAX_S = 0.5
ACKS_S = 3.0
OUTAGE_S = 300.0


class Feed:
    """In a `with` block it appends whatever is allowed, in small chunks.

    As nobody else writes, the event number n of `log` is at position n, whatever happened to its acknowledgement.
    """

    def __init__(self, ledger: Ledger, entities: int = 1_000, seed: int = 1) -> None:
        self.log: list[tuple[str, Added | Noted]] = []
        """In order; the last few may not be stored yet."""
        self.resent = 0
        """Events whose first try was taken away."""
        self.rate: float | None = None
        """Events in a second, at most; None is as fast as they go."""
        self._ledger = ledger
        self._entities = entities
        self._chance = random.Random(seed)
        self._numbers: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._versions: list[int] = []
        self._lasts: dict[str, int] = {}
        self._expected: list[int] = []
        self._allowed = 0
        self._stored = 0
        self._changed = threading.Condition()
        self._paused = False
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(OUTAGE_S)
        assert not self._thread.is_alive()

    def allow(self, count: int) -> None:
        """Append that many more."""
        with self._changed:
            self._allowed += count
            self._changed.notify_all()

    def go_on(self) -> None:
        """Go on after a pause."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def pause(self) -> None:
        """Append nothing for a while."""
        with self._changed:
            self._paused = True

    def end(self) -> None:
        """Allow no more events than are on their way."""
        with self._changed:
            self._allowed = max(self._stored, len(self.log))

    def finish(self, timeout_s: float = 120.0) -> int:
        """Wait until everything allowed is stored; returns the last position."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._paused = False
            self.rate = None
            self._changed.notify_all()
            while self._stored < self._allowed and self._failure is None:
                assert self._changed.wait(deadline - time.monotonic()), "the feed did not finish in time"
        self.check()
        return self._stored

    def check(self) -> None:
        """Raise the error that ended the thread."""
        if self._failure is not None:
            raise self._failure

    @property
    def busy(self) -> bool:
        """Return whether events are arriving."""
        return not self._paused and self._stored < self._allowed

    @property
    def left(self) -> int:
        """Return the number of events allowed and not stored yet."""
        return self._allowed - self._stored

    @property
    def stored(self) -> int:
        """Return the last position known to be stored."""
        return self._stored

    def _run(self) -> None:
        try:
            while self._wait():
                self._append()
        except BaseException as error:  # noqa: BLE001 - raised again in the test
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _wait(self) -> bool:
        with self._changed:
            while not self._closed and (self._paused or self._stored >= self._allowed):
                self._changed.wait(1.0)
            return not self._closed

    def _append(self) -> None:
        """Append over one connection; the next one goes on behind what is stored."""
        try:
            with NatsConnection.open(self._ledger.endpoint) as link:
                self._stored = link.ask(stream_info(self._ledger.name)).last
                reply = f"{link.inbox}.acks"
                acks = link.subscribe(reply)
                while self._wait():
                    began = time.monotonic()
                    chunk = self._next_chunk()
                    self._send(link, acks, reply.encode(), chunk)
                    with self._changed:
                        self._stored += len(chunk)
                        self._changed.notify_all()
                    if self.rate is not None:
                        due = began + min(PAUSE_MAX_S, len(chunk) / self.rate)
                        time.sleep(max(0.0, due - time.monotonic()))
        except (EventjetError, OSError, TimeoutError):
            self._wait_for_server()
            self.resent += len(self.log) - self._stored

    def _wait_for_server(self) -> None:
        deadline = time.monotonic() + OUTAGE_S
        while True:
            try:
                self._stored = ask_once(self._ledger.endpoint, stream_info(self._ledger.name)).last
                return
            except (EventjetError, OSError, TimeoutError):
                if time.monotonic() > deadline or self._closed:
                    raise
                time.sleep(0.05)

    def _next_chunk(self) -> Sequence[tuple[str, Added | Noted]]:
        wanted = min(CHUNK, self._allowed - self._stored)
        while len(self.log) < self._stored + wanted:
            entity = f"e-{self._chance.randrange(self._entities)}"
            self._counts[entity] = self._counts.get(entity, 0) + 1
            self._versions.append(self._counts[entity])
            self._expected.append(self._lasts.get(entity, 0))
            self._lasts[entity] = len(self._versions)
            if self._chance.random() < 0.05:
                self.log.append((entity, Noted(text="-")))
                continue
            number = self._numbers[entity] = self._numbers.get(entity, 0) + 1
            amount = Decimal(self._chance.randrange(-100_000, 100_000)) / 100
            self.log.append((entity, Added(number=number, amount=amount)))
        return self.log[self._stored : self._stored + wanted]

    def _send(
        self, link: NatsConnection, acks: bytes, reply: bytes, chunk: Sequence[tuple[str, Added | Noted]]
    ) -> None:
        frames: list[bytes] = []
        for before, (entity, data) in enumerate(chunk, self._stored):
            encoded = self._ledger.catalog.encode(data)
            # An event that an earlier connection may still have on its way cannot be stored a second time.
            pairs = [("Nats-Msg-Id", str(uuid4())), ("Nats-Expected-Last-Sequence", str(before))]
            pairs += [
                ("Ej-Type", encoded.type_name),
                ("Ej-Schema", str(encoded.schema)),
                ("Ej-Version", str(self._versions[before])),
            ]
            # On three servers, one that is still on its way may not be expected.
            if self._expected[before] <= self._stored:
                pairs.append(("Nats-Expected-Last-Subject-Sequence", str(self._expected[before])))
            headers = header_block(pairs)
            subject = f"{self._ledger.name}.ledger.{entity}"
            frames.append(publish_frame(subject, encoded.body, reply=reply, headers=headers))
        link.send(b"".join(frames))
        expected = list(range(self._stored + 1, self._stored + len(chunk) + 1))
        stored: list[int] = []
        deadline = time.monotonic() + ACKS_S
        while len(stored) < len(chunk):
            if time.monotonic() > deadline:
                raise TimeoutError("no acknowledgement")
            for sid, *_, body in link.receive(0.5):
                if sid == acks:
                    answer = json.loads(body)
                    if "error" in answer:
                        raise TimeoutError(str(answer))
                    stored.append(answer["seq"])
        assert stored == expected, "somebody else writes to this log"
