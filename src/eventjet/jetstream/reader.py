"""Blocking readers of many records, over pull consumers.

`Deliveries` asks a consumer for messages and accepts only a record that follows the previous one. `DurablePull` is how
a worker reads the log live, through the durable consumer of its projection. `read_range` reads a range of the log in
batches, complete or with an error: through an ephemeral consumer with overlapping pulls. It ends by position, never by
a timeout or by a status that says there is nothing.

The reply subject of a delivery carries its metadata: form 1 has 9 tokens, form 2 inserts a domain and an account hash
and has 11 or more (ADR-15; servers write form 2 with `feature_flags { js_ack_fc_v2: true }`, from 2.16 on by default).
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
"""A silence of this length after a first answer is suspicious: a brief pull has four heartbeats and an end."""
_TRIES = 2
_AHEAD = 4
_LIST_BYTES = 4_000_000
"""Bytes of bodies from which on a list of records is given away, though it has fewer than it may have."""
_PULL = 5_000
"""Records of one pull of a range; `_AHEAD` pulls are under way at once."""
_BACKOFF_S = (0.05, 1.0)
_DELETE_S = 2.0
_ABANDONED_NS = 60_000_000_000
EVENTS_PER_RANGE = 100_000
"""Small enough that progress shows and a retry is cheap, large enough that opening a consumer costs little."""


class Ack(NamedTuple):
    """The metadata of one delivery, from its reply subject."""

    prefix: bytes
    """All tokens before the delivery count: the same for all messages of a consumer from one server."""
    stream: str
    consumer: str
    delivered: int
    """How often the message was delivered by now; 1 on the first delivery."""
    position: int
    """The message's sequence in the stream."""
    sequence: int
    """The number of this delivery of the consumer: 1, 2, 3 …"""


def parse_ack(reply: bytes) -> Ack:
    """Parse a `$JS.ACK` reply subject; raises `ValueError` for any other subject."""
    tokens = reply.split(b".")
    if tokens[:2] != [b"$JS", b"ACK"] or not (len(tokens) == 9 or len(tokens) >= 11):
        raise ValueError(f"{reply[:200]!r} is not a $JS.ACK subject")
    index = 4 if len(tokens) == 9 else 6
    delivered, position, sequence, _, _ = map(int, tokens[index : index + 5])
    stream, consumer = tokens[index - 2].decode(), tokens[index - 1].decode()
    return Ack(b".".join(tokens[:index]), stream, consumer, delivered, position, sequence)


class Deliveries:
    """The deliveries of one consumer, from its first message on, requested in overlapping pulls.

    A record is accepted if it is a first delivery, its consumer sequence is the previous one plus 1, and its position
    is greater than the previous one; a `dense` reader accepts only the next position. Anything else raises
    `DeliveryGap` or `HistoryBroken`, after which the instance cannot be used.

    Up to `window` messages are outstanding, in pulls of up to `batch`. They are counted as in ADR-37: the messages
    asked for, minus those that arrived, minus those that a pull which ended early reports as not sent.
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
        """`position` is the position before the consumer's start; None if it starts wherever the log begins."""
        limits = consumer.config
        batch = min(batch, limits.get("max_batch") or batch)
        self.records: list[RawRecord] = []
        """Accepted records; the owner removes those that it has read."""
        self.position = position or 0
        """Position of the last accepted record; at first, the position before the consumer's start."""
        self.pending = consumer.pending
        """How many messages follow the last record, as the server knew when it sent that record."""
        self.outstanding = 0
        """How many messages were asked for, have not arrived, and may still arrive."""
        self._link = link
        self._consumer = consumer
        self._dense = dense
        self._starts_anywhere = position is None
        self._sequence = 0
        self._prefix = _UNKNOWN
        self._fields = 1
        self._sid = link.subscribe(f"{link.inbox}.p.0")
        self._reply = f"{link.inbox}.p.0".encode()
        self._subject = link.routed(f"$JS.API.CONSUMER.MSG.NEXT.{consumer.stream}.{consumer.name}")
        self._batch = batch
        self._window = max(batch, min(window, batch * (limits.get("max_waiting") or 512)))
        expires_ns = int(_EXPIRES_S * 1e9)
        expires_ns = min(expires_ns, limits.get("max_expires") or expires_ns)
        bytes_max = max(_BYTES_MAX, link.max_payload + 65_536)
        self._request = {
            "expires": expires_ns,
            "idle_heartbeat": min(int(heartbeat_s * 1e9), expires_ns // 2),
            "max_bytes": min(bytes_max, limits.get("max_bytes") or bytes_max),
        }
        # The first pull soon has several answers, unless something between here and the server delivers only one.
        brief_ns = min(_BRIEF_NS, expires_ns)
        self._brief_request = {**self._request, "expires": brief_ns, "idle_heartbeat": brief_ns // 4}
        self._pulls = self._answers = 0
        self._check_sid = b""
        """Subscription id for the answers to the pulls of `_check_pulls`; empty before the first check."""
        self._heard_at = time.monotonic()

    def ask(self, limit: int | None = None) -> None:
        """Ask for more messages, up to the window, and at most `limit` beyond the outstanding ones."""
        frames: list[bytes] = []
        while (count := self._batch if limit is None else min(self._batch, limit)) > 0:
            if self.outstanding and self.outstanding + count > self._window:
                break
            request = json.dumps({"batch": count, **(self._request if self._pulls else self._brief_request)}).encode()
            self._pulls += 1
            frames.append(publish_frame(self._subject, request, reply=self._reply))
            self.outstanding += count
            limit = None if limit is None else limit - count
        if frames:
            self._link.send(b"".join(frames))

    def receive(self, timeout_s: float) -> bool:
        """Accept the messages that arrive within the timeout; return False if none did.

        Raises `DeliveryGap` and `HistoryBroken` for a record that is not accepted, `Evicted` if the consumer was
        deleted, moved or does not answer, `ApiRefused` if the server refuses such pulls, and `SingleResponse` if only
        one answer of a pull arrives.
        """
        is_proven = self._answers > self._pulls
        frames = self._link.receive(timeout_s) if is_proven else self._first_frames(timeout_s)
        count_before = len(self.records)
        try:
            statuses = self._accept(frames)
        except DeliveryGap:
            if not is_proven and self._batch > 1:
                self._check_pulls()
            raise
        self.outstanding = max(0, self.outstanding - (len(self.records) - count_before))
        for status in statuses:
            self._check_other_readers(status)
            self._check_pull(status)
        return bool(frames)

    def _first_frames(self, timeout_s: float) -> list[Frame]:
        """Return the frames that arrive within the timeout, and check pulls that may have only one answer each."""
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
        """Raise `SingleResponse` if each of two more pulls has only one answer, a message or a heartbeat.

        Then nothing can be read: the further answers of the server are lost. Otherwise the messages that arrived are
        kept for `receive`.
        """
        if not self._check_sid:
            self._check_sid = self._link.subscribe(f"{self._link.inbox}.q.*")
        kept_frames: list[Frame] = []
        try:
            for number in range(_TRIES):
                request = json.dumps({"batch": 2, **self._brief_request}).encode()
                self._link.publish(self._subject, request, reply=f"{self._link.inbox}.q.{number}")
                answers: list[Frame] = []
                deadline = time.monotonic() + _SILENT_S
                while len(answers) < 2 and (left_s := deadline - time.monotonic()) > 0:
                    frames = self._link.receive(left_s)
                    answers += [frame for frame in frames if frame[0] == self._check_sid]
                    kept_frames += [frame for frame in frames if frame[0] != self._check_sid or frame[2]]
                if len(answers) != 1 or (not answers[0][2] and status_of(answers[0][3])[0] != 100):
                    return
        finally:
            self._link.keep(kept_frames)
        raise SingleResponse(self._subject)

    def _accept(self, frames: list[Frame]) -> list[bytes]:
        """Append the records among the frames, and return their status blocks; other subscriptions are ignored."""
        statuses: list[bytes] = []
        append = self.records.append
        prefix, fields = self._prefix, self._fields
        position, sequence = self.position, self._sequence
        tokens: list[bytes] = []
        for sid, subject, reply, headers, body in frames:
            parts = reply.rsplit(b".", fields)  # prefix, delivered, position, sequence, time, pending, maybe more
            if parts[0] != prefix:
                if sid != self._sid and not (sid == self._check_sid and reply):
                    continue
                if not reply:
                    statuses.append(headers)
                    continue
                prefix, fields, position = self._learn(reply, position, is_first=sequence == 0)
                parts = reply.rsplit(b".", fields)
            tokens = parts
            position += 1
            sequence += 1
            record_position = int(tokens[2])
            if record_position < position or int(tokens[3]) != sequence or tokens[1] != b"1":
                raise self._gap(reply, position - 1, sequence - 1)
            if record_position != position:
                if self._dense:
                    missing = (
                        "it is missing"
                        if record_position == position + 1
                        else f"positions {position} to {record_position - 1} are missing"
                    )
                    raise HistoryBroken(self._consumer.stream, position, missing)
                position = record_position
            append((record_position, int(tokens[4]), subject, headers, body))
        self._prefix, self._fields = prefix, fields
        self.position, self._sequence = position, sequence
        if tokens:
            self.pending = int(tokens[5])
        return statuses

    def _learn(self, reply: bytes, position: int, *, is_first: bool) -> tuple[bytes, int, int]:
        """Return (prefix, fields after it, previous position) from the first reply subject that a server sends."""
        try:
            ack = parse_ack(reply)
        except ValueError as error:
            raise DeliveryGap(self._consumer.name, position + 1, f"as something else: {error}") from None
        if (ack.stream, ack.consumer) != (self._consumer.stream, self._consumer.name):
            raise DeliveryGap(self._consumer.name, ack.position, f"it comes from {ack.consumer!r} of {ack.stream!r}")
        if is_first and self._starts_anywhere:
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

    def _check_other_readers(self, status: bytes) -> None:
        """Raise `DeliveryGap` if a heartbeat names a delivery of the durable that another reader received (ADR-15).

        A deposed worker that resumes while its pull waits may receive the last events before the log grows no more, and
        then no later delivery shows the gap. An ephemeral consumer has no other reader.
        """
        last_delivery = number_of(status, "Nats-Last-Consumer")
        if last_delivery is not None and last_delivery > self._sequence and "durable_name" in self._consumer.config:
            position = number_of(status, "Nats-Last-Stream") or 0
            raise DeliveryGap(
                self._consumer.name, position, f"to another reader: delivery {last_delivery} never came here"
            )

    def _check_pull(self, status: bytes) -> None:
        """Count a pull that ended, so that `ask` replaces it; raises `Evicted`, or `ApiRefused` for all such pulls."""
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
    """A reader of the log through a durable consumer, for one thread; it may be closed from any thread.

    Opening it deletes the durable and creates it again after the worker's stored position: deleting evicts at once any
    reader that still waits there (a RESET would not). Nothing is acknowledged, since the position in SQL is the only
    truth.

    Any error ends the reader: the worker checks its lease and opens another. `next_batch` raises `DeliveryGap` when a
    delivery does not follow the previous one, `Evicted` when the durable was deleted or moved, `HistoryBroken` for a
    hole in the positions, `ConnectionLost` when the server is gone or silent, and `ConnectionClosed` after `close`.
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
        """Take over the durable; the first record is the one after `position`, or for 0 the first of the log.

        With `filters`, only records whose subject matches one of them are delivered. Then positions have gaps, and only
        the consumer's sequence shows that a record was lost on the way.
        """
        self._batch_max = batch_max
        self._linger_s = linger_s
        self._silence_s = 2 * heartbeat_s
        self._quiet_s = 0.0
        self.link = link = NatsConnection.open(endpoint, timeout_s=timeout_s, ping_interval_s=heartbeat_s)
        """For requests of the reading thread between two batches: records that arrive meanwhile are kept."""
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
        """Yield batches until `close`, also empty batches."""
        while True:
            try:
                batch = self.next_batch()
            except ConnectionClosed:
                return
            yield batch

    @property
    def position(self) -> int:
        """Position of the last received record, which `next_batch` may not have returned yet."""
        return self._deliveries.position

    @property
    def pending(self) -> int:
        """How many events follow the last received record, as the server knew when it sent that record."""
        return self._deliveries.pending

    def next_batch(self) -> list[RawRecord]:
        """Return 1 to `batch_max` records as soon as there are any; empty if none arrived within `linger_s`."""
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
        """Wake the reader and close the connection; the durable is kept. Any thread may call it, also repeatedly."""
        self.link.close()

    def _receive(self, timeout_s: float) -> bool:
        """Receive for `timeout_s`; return False if nothing arrived. Raises `ConnectionLost` without heartbeats."""
        started_at = time.monotonic()
        if self._deliveries.receive(timeout_s):
            self._quiet_s = 0.0
            self._deliveries.ask()
            return True
        self._quiet_s += time.monotonic() - started_at
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
    """A range of the log: the positions `start` <= position < `end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.start)


def split(first: int, last: int, count: int) -> tuple[Range, ...]:
    """Divide the positions from `first` to `last` into at most `count` ranges of nearly the same size."""
    total = max(0, last - first + 1)
    parts = max(1, min(count, total))
    edges = [first + total * number // parts for number in range(parts + 1)]
    return tuple(Range(start, end) for start, end in pairwise(edges) if start < end)


def range_count(events: int, at_least: int = 1) -> int:
    """Return into how many ranges to divide this number of events, `at_least` or more."""
    return max(at_least, -(-events // EVENTS_PER_RANGE))


def read_range(
    endpoint: Endpoint,
    stream: str,
    start: int,
    end: int,
    *,
    batch: int = 2_000,
    filter_subject: str | None = None,
    allow_holes: bool = False,
    timeout_s: float = 5.0,
    patience_s: float = 30.0,
    heartbeat_s: float = 5.0,
) -> Generator[list[RawRecord]]:
    """Yield the records at `start` <= position < `end`, in order, in lists of `batch`, or shorter if bodies are large.

    Without a filter and `allow_holes`, every position of the range must be in the log: the first missing position
    raises `HistoryBroken`, also if the log ends before `end`. Lost connections are opened again for as long as records
    keep arriving within `patience_s`, not counting the time that the caller takes; after that, and when the first
    connection fails, `StoreUnavailable` or `Unreachable` is raised. `timeout_s` is for connecting and for one request;
    an idle server sends a heartbeat every `heartbeat_s`, and counts as lost after two missing ones. Closing the
    iterator deletes the consumer.
    """
    dense = filter_subject is None and not allow_holes
    read = _Read(endpoint, stream, end, batch, filter_subject, dense, timeout_s, patience_s, heartbeat_s, max(start, 1))
    return read.batches()


@dataclass(slots=True)
class _Read:
    """One read of a range, over as many consumers as it takes; `position` is the first position not read yet."""

    endpoint: Endpoint
    stream: str
    end: int
    batch: int
    filter: str | None
    dense: bool
    timeout_s: float
    patience_s: float
    heartbeat_s: float
    position: int
    records: list[RawRecord] = field(default_factory=list[RawRecord])
    size: int = 0
    """Bytes of the bodies in `records`, or less."""
    progress_at: float = field(default_factory=time.monotonic)
    reached: bool = False

    def batches(self) -> Generator[list[RawRecord]]:
        """Yield the batches, opening a new connection and consumer whenever one is lost."""
        backoff_s = _BACKOFF_S[0]
        while self.position < self.end:
            start = self.position
            try:
                yield from self._read_with_consumer()
            except LogUnusable:
                raise
            except (StoreUnavailable, Unreachable, Evicted) as error:
                if self.position > start:
                    backoff_s = _BACKOFF_S[0]
                waited_s = time.monotonic() - self.progress_at
                if not self.reached:
                    raise
                if waited_s > self.patience_s:
                    what = f"Reading {self.stream} from position {self.position}"
                    raise StoreUnavailable(what, f"for {waited_s:.0f} s; at last {error}") from error
                time.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter is no secret
                backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
        if self.records:
            yield self.records

    def _read_with_consumer(self) -> Generator[list[RawRecord]]:
        with NatsConnection.open(self.endpoint, timeout_s=self.timeout_s, ping_interval_s=self.heartbeat_s) as link:
            # From now on a failure may pass: an election, or a consumer that was placed on a server that just died.
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
            consumer = link.ask(request, timeout_s=self.timeout_s)
            try:
                if consumer.pending or not self._is_at_the_end(link):
                    yield from self._drain(link, consumer)
            finally:
                if link.usable:  # otherwise the server drops the consumer by itself
                    with suppress(StoreError):
                        link.ask(delete_consumer(self.stream, name), timeout_s=_DELETE_S)

    def _drain(self, link: NatsConnection, consumer: Consumer) -> Generator[list[RawRecord]]:
        deliveries = Deliveries(
            link,
            consumer,
            self.position - 1,
            batch=_PULL,
            window=_AHEAD * _PULL,
            heartbeat_s=self.heartbeat_s,
            dense=self.dense,
        )
        while self.position < self.end:
            deliveries.ask(None if self.filter else self.end - self.position - deliveries.outstanding)
            arrived = deliveries.receive(2 * self.heartbeat_s)
            if deliveries.records:
                self.progress_at = time.monotonic()
                self.position = deliveries.position + 1
                self.records += deliveries.records
                self.size += sum([len(record[4]) for record in deliveries.records])
                deliveries.records.clear()
                while self.records and self.records[-1][0] >= self.end:
                    self.records.pop()
            waited_s = time.monotonic() - self.progress_at
            if not arrived or waited_s > self.patience_s:
                raise ConnectionLost(f"The consumer of {self.stream}", f"it gave no record for {waited_s:.0f} s")
            while len(self.records) >= self.batch or (self.records and self.size > _LIST_BYTES):
                batch, self.records = self.records[: self.batch], self.records[self.batch :]
                self.size = 0
                yield batch
                self.progress_at = time.monotonic()
            if deliveries.pending == 0 and self.position < self.end and self._is_at_the_end(link):
                return

    def _is_at_the_end(self, link: NatsConnection) -> bool:
        """Return whether the leader has no more of the range, where a replica may lag; raises `HistoryBroken`."""
        request = next_message(self.stream, self.position, self.filter or ">")
        record = link.ask(request, timeout_s=self.timeout_s)
        if record is not None and record[0] < self.end:
            return False
        if self.dense:
            reason = f"the log has nothing there, though positions up to {self.end - 1} were asked for"
            raise HistoryBroken(self.stream, self.position, reason)
        self.position = self.end
        return True
