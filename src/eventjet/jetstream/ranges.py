"""`read_range`: a range of the log as batches of raw records, unbroken, or an error; `split`: one range into parts.

Reads through an ephemeral pull consumer with overlapped pulls, and ends by position: never by a timeout or by a status
that says there is nothing. A connection or a consumer lost on the way is made again after the last record.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from eventjet.codec.headers import RawRecord
from eventjet.errors import (
    ConnectionLost,
    Evicted,
    HistoryBroken,
    LogUnusable,
    StoreError,
    StoreUnavailable,
    Unreachable,
)
from eventjet.jetstream.api import Consumer, create_consumer, delete_consumer, next_message
from eventjet.jetstream.connection import NatsConnection
from eventjet.jetstream.consumer import Deliveries
from eventjet.nats.endpoint import Endpoint

_AHEAD = 4
_PULL = 5_000
_BACKOFF_S = (0.05, 1.0)
_FORGET_S = 2.0
_ABANDONED_NS = 60_000_000_000
EVENTS_PER_RANGE = 100_000
"""Small enough that progress shows and a retry is cheap, large enough that opening a consumer does not."""


class Range(NamedTuple):
    """Positions `start` <= position < `end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.start)


def split(first: int, last: int, count: int) -> tuple[Range, ...]:
    """`count` ranges at most, of nearly the same size, that hold every position from `first` to `last`."""
    total = last - first + 1
    if total <= 0:
        return ()
    parts = max(1, min(count, total))
    edges = [first + total * number // parts for number in range(parts + 1)]
    return tuple(Range(start, end) for start, end in pairwise(edges))


def range_count(events: int, at_least: int = 1) -> int:
    """How many ranges so many events are worth."""
    return max(at_least, -(-events // EVENTS_PER_RANGE))


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How patient a read is."""

    timeout_s: float = 5.0
    """For connecting, and for one request."""
    patience_s: float = 30.0
    """How long a read may go without one new record before it gives up, waits of its caller not counted."""
    heartbeat_s: float = 5.0
    """How often an idle server is to say that it is there; after two it counts as lost."""


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
    """One read. Its consumers come and go; `position` is the first that was not read yet."""

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
        """Go through as many consumers as it takes."""
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
                        link.ask(delete_consumer(self.stream, name), timeout_s=_FORGET_S)

    def _drain(self, link: NatsConnection, consumer: Consumer) -> Generator[list[RawRecord]]:
        heartbeat_s = self.options.heartbeat_s
        before = self.position - 1
        deliveries = Deliveries(
            link, consumer, before, batch=_PULL, window=_AHEAD * _PULL, heartbeat_s=heartbeat_s, dense=self.dense
        )
        while self.position < self.end:
            deliveries.ask(None if self.filter else self.end - self.position - deliveries.outstanding)
            came = deliveries.receive(2 * heartbeat_s)
            if deliveries.records:
                self.progress_at = time.monotonic()
                self.position = deliveries.position + 1
                self.records += deliveries.records
                deliveries.records.clear()
                while self.records and self.records[-1][0] >= self.end:
                    self.records.pop()
            waited_s = time.monotonic() - self.progress_at
            if not came or waited_s > self.options.patience_s:
                raise ConnectionLost(f"The consumer of {self.stream}", f"it gave no record for {waited_s:.0f} s")
            while len(self.records) >= self.batch:
                full, self.records = self.records[: self.batch], self.records[self.batch :]
                yield full
                self.progress_at = time.monotonic()
            if deliveries.pending == 0 and self.position < self.end and self._is_at_the_end(link):
                return

    def _is_at_the_end(self, link: NatsConnection) -> bool:
        """Whether the leader has nothing more of the range: a consumer on a replica may only be behind."""
        request = next_message(self.stream, self.position, self.filter or ">")
        following = link.ask(request, timeout_s=self.options.timeout_s)
        if following is not None and following[0] < self.end:
            return False
        if self.dense:
            reason = f"the log has nothing there, though positions up to {self.end - 1} were asked for"
            raise HistoryBroken(self.stream, self.position, reason)
        self.position = self.end
        return True
