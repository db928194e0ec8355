"""Blocking readers of many records, over pull consumers.

`Deliveries` asks a consumer for messages and accepts only what follows the record before. `DurablePull` is a live
worker's way of reading the log, through the one durable of its projection. `read_range` reads a range of the log in
batches, complete or with an error: through an ephemeral consumer with overlapped pulls, ending by position and never by
a timeout or by a status that says there is nothing.

A delivery's reply subject says what JetStream knows of it: form 1 has 9 tokens, form 2 inserts a domain and an account
hash and has 11 or more (ADR-15; servers write form 2 with `feature_flags { js_ack_fc_v2: true }`, from 2.16 on by
default).
"""

from __future__ import annotations

import json
import random
import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Self

from eventjet import failpoints
from eventjet.codec.headers import RawRecord, number_of
from eventjet.errors import (
    ApiRefused,
    ConnectionClosed,
    ConnectionLost,
    DeliveryGap,
    Evicted,
    HistoryBroken,
    LogUnusable,
    SingleResponse,
    StoreError,
    StoreUnavailable,
    Unreachable,
)
from eventjet.jetstream.api import Consumer, create_consumer, delete_consumer, next_message
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import Frame, publish_frame, status_of

_EXPIRES_S = 30.0
"""How long a pull waits at the server."""
_BYTES_MAX = 4 * 1024 * 1024
_ENDED_FULL = ("message size exceeds maxbytes", "batch completed")
_UNKNOWN = b"\x00"
_BRIEF_NS = 1_000_000_000
_SILENT_S = 1.0
"""A brief pull has four heartbeats and an end: it is silent for this long only where its answers are cut."""
_TRIES = 2
_AHEAD = 4
_PULL = 5_000
"""How many pulls of a range are under way, and of how many records each."""
_BACKOFF_S = (0.05, 1.0)
_DELETE_S = 2.0
_ABANDONED_NS = 60_000_000_000
EVENTS_PER_RANGE = 100_000
"""Small enough that progress shows and a retry is cheap, large enough that opening a consumer does not."""


class Ack(NamedTuple):
    """One delivery, by its reply subject."""

    prefix: bytes
    """Everything before the delivery count: the same for all messages of a consumer from one server."""
    stream: str
    consumer: str
    delivered: int
    """1 on the first delivery of this message."""
    position: int
    """Sequence in the stream."""
    sequence: int
    """Sequence of this consumer's deliveries: 1, 2, 3 …"""


def parse_ack(reply: bytes) -> Ack:
    """Parse a `$JS.ACK` reply subject; raises `ValueError` when it is not one."""
    tokens = reply.split(b".")
    if tokens[:2] != [b"$JS", b"ACK"] or not (len(tokens) == 9 or len(tokens) >= 11):
        raise ValueError(f"{reply[:200]!r} is not a $JS.ACK subject")
    at = 4 if len(tokens) == 9 else 6
    delivered, position, sequence, _, _ = map(int, tokens[at : at + 5])
    stream, consumer = tokens[at - 2].decode(), tokens[at - 1].decode()
    return Ack(b".".join(tokens[:at]), stream, consumer, delivered, position, sequence)


class Deliveries:
    """The messages of one consumer from its first on, asked for in pulls that overlap.

    A record is accepted when it is a first delivery, its consumer sequence is the previous one plus 1, and its position
    is greater than the previous one; a `dense` reader accepts only the next position. Anything else raises
    `DeliveryGap` or `HistoryBroken`, after which the instance cannot be used.

    Up to `window` messages are asked for, in pulls of up to `batch`. They are counted by ADR-37: what was asked for,
    less what arrived, less what a pull that ended early says it left.
    """

    def __init__(
        self,
        link: NatsConnection,
        consumer: Consumer,
        position: int | None,
        *,
        batch: int,
        window: int,
        heartbeat_s: float,
        dense: bool,
    ) -> None:
        """`position` is the one before the consumer's start; None where it starts wherever the log begins."""
        limits = consumer.config
        batch = min(batch, limits.get("max_batch") or batch)
        self.records: list[RawRecord] = []
        """Accepted records, for the owner to take away."""
        self.position = position or 0
        """Position of the last record accepted; at first, the one before the consumer's start."""
        self.pending = consumer.pending
        """Messages after the last record, as the server knew them when it sent it."""
        self.outstanding = 0
        """Messages asked for that neither arrived nor were given up."""
        self._link = link
        self._consumer = consumer
        self._dense = dense
        self._anywhere = position is None
        self._sequence = 0
        self._prefix = _UNKNOWN
        self._fields = 1
        self._sid = link.subscribe(f"{link.inbox}.p")
        self._reply = f"{link.inbox}.p".encode()
        self._subject = link.routed(f"$JS.API.CONSUMER.MSG.NEXT.{consumer.stream}.{consumer.name}")
        self._batch = batch
        self._window = max(batch, min(window, batch * (limits.get("max_waiting") or 512)))
        expires_ns = int(_EXPIRES_S * 1e9)
        expires_ns = min(expires_ns, limits.get("max_expires") or expires_ns)
        room = max(_BYTES_MAX, link.max_payload + 65_536)
        self._request = {
            "expires": expires_ns,
            "idle_heartbeat": min(int(heartbeat_s * 1e9), expires_ns // 2),
            "max_bytes": min(room, limits.get("max_bytes") or room),
        }
        # The first pull soon has several answers, unless somebody between delivers only one.
        brief_ns = min(_BRIEF_NS, expires_ns)
        self._brief = {**self._request, "expires": brief_ns, "idle_heartbeat": brief_ns // 4}
        self._pulls = self._answers = 0
        self._checks = b""
        """Subscription to the answers to pulls that check how many there are."""
        self._heard_at = time.monotonic()

    def ask(self, limit: int | None = None) -> None:
        """Ask for more, up to the window; `limit` is how many messages are wanted beyond those already asked for."""
        frames: list[bytes] = []
        while (count := self._batch if limit is None else min(self._batch, limit)) > 0:
            if self.outstanding and self.outstanding + count > self._window:
                break
            request = json.dumps({"batch": count, **(self._request if self._pulls else self._brief)}).encode()
            self._pulls += 1
            frames.append(publish_frame(self._subject, request, reply=self._reply))
            self.outstanding += count
            limit = None if limit is None else limit - count
        if frames:
            self._link.send(b"".join(frames))

    def receive(self, timeout_s: float) -> bool:
        """Accept what arrives within the time; False when nothing did.

        Raises `Evicted` when the consumer is not there for us any more, `ApiRefused` when the server will not take
        such pulls, and `SingleResponse` where only one of a pull's answers arrives.
        """
        is_proven = self._answers > self._pulls
        frames = self._link.receive(timeout_s) if is_proven else self._first_frames(timeout_s)
        had = len(self.records)
        try:
            statuses = self._accept(frames)
        except DeliveryGap:
            if not is_proven and self._batch > 1:
                self._check_pulls()
            raise
        self.outstanding = max(0, self.outstanding - (len(self.records) - had))
        for status in statuses:
            self._check_nothing_else_went_out(status)
            self._check_pull(status)
        return bool(frames)

    def _first_frames(self, timeout_s: float) -> list[Frame]:
        """Return what arrives within the time, as long as no pull is known to have had a second answer."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            frames = self._link.receive(min(left_s, _SILENT_S))
            self._answers += sum(frame[0] == self._sid for frame in frames)
            now = time.monotonic()
            if frames:
                self._heard_at = now
            elif self._answers and self._batch > 1 and now - self._heard_at > _SILENT_S:
                self._check_pulls()
                self._heard_at = now
            if frames or now >= deadline:
                return frames

    def _check_pulls(self) -> None:
        """Raise `SingleResponse` where each of some more pulls has one answer, a message or a heartbeat.

        Then nothing can be read: what the server went on to send is gone. Else the messages that arrived are kept for
        `receive`.
        """
        if not self._checks:
            self._checks = self._link.subscribe(f"{self._link.inbox}.q.*")
        kept: list[Frame] = []
        try:
            for number in range(_TRIES):
                request = json.dumps({"batch": 2, **self._brief}).encode()
                self._link.publish(self._subject, request, reply=f"{self._link.inbox}.q.{number}")
                answers: list[Frame] = []
                deadline = time.monotonic() + _SILENT_S
                while len(answers) < 2 and (left_s := deadline - time.monotonic()) > 0:
                    frames = self._link.receive(left_s)
                    answers += [frame for frame in frames if frame[0] == self._checks]
                    kept += [frame for frame in frames if frame[0] != self._checks or frame[2]]
                if len(answers) != 1 or (not answers[0][2] and status_of(answers[0][3])[0] != 100):
                    return
        finally:
            self._link.keep(kept)
        raise SingleResponse(self._subject)

    def _accept(self, frames: list[Frame]) -> list[bytes]:
        """Append to the records, and return the status blocks among the frames; other subscriptions are ignored."""
        statuses: list[bytes] = []
        append = self.records.append
        prefix, fields = self._prefix, self._fields
        position, sequence = self.position, self._sequence
        tokens: list[bytes] = []
        for sid, subject, reply, headers, body in frames:
            parts = reply.rsplit(b".", fields)  # prefix, delivered, position, sequence, time, pending, maybe more
            if parts[0] != prefix:
                if sid != self._sid and not (sid == self._checks and reply):
                    continue
                if not reply:
                    statuses.append(headers)
                    continue
                prefix, fields, position = self._learn(reply, position, first=sequence == 0)
                parts = reply.rsplit(b".", fields)
            tokens = parts
            position += 1
            sequence += 1
            at = int(tokens[2])
            if at < position or int(tokens[3]) != sequence or tokens[1] != b"1":
                raise self._gap(reply, position - 1, sequence - 1)
            if at != position:
                if self._dense:
                    missing = "it is missing" if at == position + 1 else f"positions {position} to {at - 1} are missing"
                    raise HistoryBroken(self._consumer.stream, position, missing)
                position = at
            append((at, int(tokens[4]), subject, headers, body))
        self._prefix, self._fields = prefix, fields
        self.position, self._sequence = position, sequence
        if tokens:
            self.pending = int(tokens[5])
        return statuses

    def _learn(self, reply: bytes, position: int, *, first: bool) -> tuple[bytes, int, int]:
        """Return (prefix, fields after it, previous position) from a first reply, or the first by another server."""
        try:
            ack = parse_ack(reply)
        except ValueError as error:
            raise DeliveryGap(self._consumer.name, position + 1, f"as something else: {error}") from None
        if (ack.stream, ack.consumer) != (self._consumer.stream, self._consumer.name):
            raise DeliveryGap(self._consumer.name, ack.position, f"it comes from {ack.consumer!r} of {ack.stream!r}")
        if first and self._anywhere:
            position = ack.position - 1
        return ack.prefix, reply.count(b".") - ack.prefix.count(b"."), position

    def _gap(self, reply: bytes, position: int, sequence: int) -> DeliveryGap:
        ack = parse_ack(reply)
        if ack.delivered != 1:
            reason = f"as try {ack.delivered}"
        elif ack.sequence != sequence + 1:
            reason = f"as delivery {ack.sequence} after delivery {sequence}"
        else:
            reason = f"after position {position}"
        return DeliveryGap(self._consumer.name, ack.position, reason)

    def _check_nothing_else_went_out(self, status: bytes) -> None:
        """Raise `DeliveryGap` where a heartbeat names a delivery of the durable that went elsewhere (ADR-15).

        A deposed worker that resumes while its pull waits may get the last events of a log that then rests, and no
        later delivery would show the gap. An ephemeral one is its reader's own, which asks again.
        """
        last = number_of(status, "Nats-Last-Consumer")
        if last is not None and last > self._sequence and "durable_name" in self._consumer.config:
            at = number_of(status, "Nats-Last-Stream") or 0
            raise DeliveryGap(self._consumer.name, at, f"to another reader: delivery {last} never came here")

    def _check_pull(self, status: bytes) -> None:
        """Count a pull that ended, so that `ask` replaces it; raises for a consumer that is gone."""
        code, description = status_of(status)
        if code == 100:
            return
        self.outstanding = max(0, self.outstanding - (number_of(status, "Nats-Pending-Messages") or 0))
        lowered = description.lower()
        if code in (404, 408) or (code == 409 and lowered.startswith(_ENDED_FULL)):
            return
        if code == 503:
            raise Evicted(self._consumer.name, "nobody answers for it")
        if code == 409 and not lowered.startswith(("exceeded maxrequest", "consumer is push")):
            raise Evicted(self._consumer.name, description)
        raise ApiRefused(self._subject, code, 0, description or "no description")


class DurablePull:
    """Reads the log through a durable consumer, in one thread; may be closed from any.

    Opening deletes the durable and creates it after the worker's stored position: deleting turns away at once whoever
    still waits there (a RESET would not). Nothing is acknowledged, since the position in SQL is the only truth.

    Any error ends it: the worker checks its lease and opens another. `next_batch` raises `DeliveryGap` when a delivery
    does not follow the one before, `Evicted` when the durable was deleted or moved, `HistoryBroken` for a hole in the
    positions, `ConnectionLost` when the server is gone or silent, and `ConnectionClosed` after `close`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        stream: str,
        durable: str,
        *,
        position: int,
        filters: Sequence[str] = (),
        batch_max: int = 1_000,
        linger_s: float = 0.5,
        timeout_s: float = 5.0,
        heartbeat_s: float = 5.0,
    ) -> None:
        """Take the durable over; its first record is the one after `position`, or for 0 wherever the log begins.

        With `filters` it delivers the subjects that match one of them. Then gaps in the positions are what was left
        out, and only the consumer's own sequence shows what was lost on the way.
        """
        self._batch_max = batch_max
        self._linger_s = linger_s
        self._silence_s = 2 * heartbeat_s
        self._quiet_s = 0.0
        self.link = link = NatsConnection.open(endpoint, timeout_s=timeout_s, ping_interval_s=heartbeat_s)
        """For requests of the thread that reads, between two batches: what is delivered meanwhile is kept."""
        try:
            link.ask(delete_consumer(stream, durable), timeout_s=timeout_s)
            failpoints.reach("worker.durable_deleted")
            config = _config(durable, position, filters)
            consumer = link.ask(create_consumer(stream, durable, config), timeout_s=timeout_s)
            failpoints.reach("worker.durable_created")
            self._deliveries = Deliveries(
                link,
                consumer,
                position if filters else position or None,
                batch=batch_max,
                window=2 * batch_max,
                heartbeat_s=heartbeat_s,
                dense=not filters,
            )
            self._deliveries.ask()
        except BaseException:
            link.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[list[RawRecord]]:
        """Yield batches until `close`, empty ones included."""
        while True:
            try:
                batch = self.next_batch()
            except ConnectionClosed:
                return
            yield batch

    @property
    def position(self) -> int:
        """Position of the last record received, which may not have been returned yet."""
        return self._deliveries.position

    @property
    def pending(self) -> int:
        """Events after that record, as the server knew them when it sent it."""
        return self._deliveries.pending

    def next_batch(self) -> list[RawRecord]:
        """Return 1 to `batch_max` records as soon as there are any; empty when none arrived within `linger_s`."""
        deliveries = self._deliveries
        deadline = time.monotonic() + self._linger_s
        while not deliveries.records:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return []
            self._receive(left_s)
        while len(deliveries.records) < self._batch_max and self._receive(0.0):
            pass
        batch, deliveries.records = deliveries.records[: self._batch_max], deliveries.records[self._batch_max :]
        deliveries.ask()
        return batch

    def close(self) -> None:
        """Wake the reader and close the connection; the durable stays. From any thread, any number of times."""
        self.link.close()

    def _receive(self, timeout_s: float) -> bool:
        """Receive for this long; False when nothing arrived. Raises `ConnectionLost` after too long a silence."""
        started = time.monotonic()
        if self._deliveries.receive(timeout_s):
            self._quiet_s = 0.0
            self._deliveries.ask()
            return True
        self._quiet_s += time.monotonic() - started
        if self._quiet_s > self._silence_s:
            raise ConnectionLost(f"NATS at {self.link.peer}", f"no heartbeat came for {self._quiet_s:.1f} s")
        return False


def _config(durable: str, position: int, filters: Sequence[str]) -> dict[str, Any]:
    start = {"deliver_policy": "by_start_sequence", "opt_start_seq": position + 1} if position else {}
    return {
        "durable_name": durable,
        "deliver_policy": "all",
        **start,
        **({"filter_subjects": list(filters)} if filters else {}),
        "ack_policy": "none",
        "replay_policy": "instant",
        "max_deliver": -1,
    }


# A range of the log.


class Range(NamedTuple):
    """The positions `start` <= position < `end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.start)


def split(first: int, last: int, count: int) -> tuple[Range, ...]:
    """Divide the positions from `first` to `last` into at most `count` ranges of nearly the same size."""
    total = last - first + 1
    if total <= 0:
        return ()
    parts = max(1, min(count, total))
    edges = [first + total * number // parts for number in range(parts + 1)]
    return tuple(Range(start, end) for start, end in pairwise(edges))


def range_count(events: int, at_least: int = 1) -> int:
    """Return into how many ranges so many events are best divided."""
    return max(at_least, -(-events // EVENTS_PER_RANGE))


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The timeouts of a read."""

    timeout_s: float = 5.0
    """For connecting, and for one request."""
    patience_s: float = 30.0
    """How long a read may go without a new record before it gives up, not counting waits of its caller."""
    heartbeat_s: float = 5.0
    """How often an idle server sends a heartbeat; after two missing ones it counts as lost."""


_PATIENT = ReadOptions()


def read_range(
    endpoint: Endpoint,
    stream: str,
    start: int,
    end: int,
    *,
    batch: int = 2_000,
    filter_subject: str | None = None,
    allow_holes: bool = False,
    options: ReadOptions = _PATIENT,
) -> Generator[list[RawRecord]]:
    """Yield the records at `start` <= position < `end`, in order, in lists of `batch` (the last may be shorter).

    Unless filtered or with `allow_holes`, every position of the range must be there: the first that is not raises
    `HistoryBroken`, which includes a log that ends before `end`. Lost connections are made again for as long as
    records keep coming within `patience_s`; then, and when the first connection fails, `StoreUnavailable` or
    `Unreachable` is raised. Closing the iterator deletes the consumer.
    """
    dense = filter_subject is None and not allow_holes
    return _Range(endpoint, stream, end, batch, filter_subject, dense, options, max(start, 1)).batches()


@dataclass(slots=True)
class _Range:
    """One read, over as many consumers as it takes; `position` is the first that was not read yet."""

    endpoint: Endpoint
    stream: str
    end: int
    batch: int
    filter: str | None
    dense: bool
    options: ReadOptions
    position: int
    records: list[RawRecord] = field(default_factory=list[RawRecord])
    progress_at: float = field(default_factory=time.monotonic)
    reached: bool = False

    def batches(self) -> Generator[list[RawRecord]]:
        """Yield the batches, with a new connection and consumer after each that was lost."""
        backoff_s = _BACKOFF_S[0]
        while self.position < self.end:
            before = self.position
            try:
                yield from self._through_one_consumer()
            except LogUnusable:
                raise
            except (StoreUnavailable, Unreachable, Evicted) as error:
                if self.position > before:
                    backoff_s = _BACKOFF_S[0]
                waited_s = time.monotonic() - self.progress_at
                if not self.reached:
                    raise
                if waited_s > self.options.patience_s:
                    what = f"Reading {self.stream} from position {self.position}"
                    raise StoreUnavailable(what, f"for {waited_s:.0f} s; at last {error}") from error
                time.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter is no secret
                backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
        if self.records:
            yield self.records

    def _through_one_consumer(self) -> Generator[list[RawRecord]]:
        options = self.options
        with NatsConnection.open(
            self.endpoint, timeout_s=options.timeout_s, ping_interval_s=options.heartbeat_s
        ) as link:
            # From now on it pays to wait: an election, or a consumer that was placed on a server that just died.
            self.reached = True
            name = f"ej_read_{secrets.token_hex(8)}"
            config = {
                "deliver_policy": "by_start_sequence",
                "opt_start_seq": self.position,
                "ack_policy": "none",
                "replay_policy": "instant",
                "inactive_threshold": _ABANDONED_NS,
                "num_replicas": 1,
                "mem_storage": True,
            }
            request = create_consumer(self.stream, name, config, self.filter)
            consumer = link.ask(request, timeout_s=options.timeout_s)
            try:
                if consumer.pending or not self._is_at_the_end(link):
                    yield from self._drain(link, consumer)
            finally:
                if link.usable:  # else the server drops it by itself
                    with suppress(StoreError):
                        link.ask(delete_consumer(self.stream, name), timeout_s=_DELETE_S)

    def _drain(self, link: NatsConnection, consumer: Consumer) -> Generator[list[RawRecord]]:
        heartbeat_s = self.options.heartbeat_s
        before = self.position - 1
        deliveries = Deliveries(
            link, consumer, before, batch=_PULL, window=_AHEAD * _PULL, heartbeat_s=heartbeat_s, dense=self.dense
        )
        while self.position < self.end:
            deliveries.ask(None if self.filter else self.end - self.position - deliveries.outstanding)
            arrived = deliveries.receive(2 * heartbeat_s)
            if deliveries.records:
                self.progress_at = time.monotonic()
                self.position = deliveries.position + 1
                self.records += deliveries.records
                deliveries.records.clear()
                while self.records and self.records[-1][0] >= self.end:
                    self.records.pop()
            waited_s = time.monotonic() - self.progress_at
            if not arrived or waited_s > self.options.patience_s:
                raise ConnectionLost(f"The consumer of {self.stream}", f"it gave no record for {waited_s:.0f} s")
            while len(self.records) >= self.batch:
                full, self.records = self.records[: self.batch], self.records[self.batch :]
                yield full
                self.progress_at = time.monotonic()
            if deliveries.pending == 0 and self.position < self.end and self._is_at_the_end(link):
                return

    def _is_at_the_end(self, link: NatsConnection) -> bool:
        """Return whether the leader has nothing more of the range: a consumer on a replica may only be behind."""
        request = next_message(self.stream, self.position, self.filter or ">")
        following = link.ask(request, timeout_s=self.options.timeout_s)
        if following is not None and following[0] < self.end:
            return False
        if self.dense:
            reason = f"the log has nothing there, though positions up to {self.end - 1} were asked for"
            raise HistoryBroken(self.stream, self.position, reason)
        self.position = self.end
        return True
