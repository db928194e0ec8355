"""`DurablePull`: a live worker's way of reading the log, through the one durable of its projection.

Opening deletes the durable and creates it after the worker's stored position: deleting turns away at once whoever still
waits there (a RESET would not). Nothing is acknowledged, since the position in SQL is the only truth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from eventjet import failpoints
from eventjet.codec.envelope import RawRecord, number_of
from eventjet.errors import ConnectionClosed, ConnectionLost, DeliveryGap, HistoryBroken
from eventjet.nats.api import create_consumer, delete_consumer
from eventjet.nats.connection import NatsConnection
from eventjet.nats.consumer import Delivery, Pulls
from eventjet.nats.endpoint import Endpoint


class DurablePull:
    """Read by one thread, closed from any.

    Any error ends it: the worker checks its lease and opens another. `next_batch` raises `DeliveryGap` when a delivery
    does not follow the one before, `Evicted` when the durable was deleted or moved, `HistoryBroken` for a hole in the
    positions unless `on_hole` takes it, `ConnectionLost` when the server is gone or silent, and `ConnectionClosed`
    after `close`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        stream: str,
        durable: str,
        *,
        position: int,
        batch_max: int = 1_000,
        linger_s: float = 0.5,
        timeout_s: float = 5.0,
        heartbeat_s: float = 5.0,
        expires_s: float = 30.0,
        on_hole: Callable[[int, int], None] | None = None,
    ) -> None:
        """Take the durable over; its first record is the one after `position`, or for 0 wherever the log begins."""
        self._batch_max = batch_max
        self._linger_s = linger_s
        self._silence_s = 2 * heartbeat_s
        self._on_hole = on_hole
        self._ready: list[RawRecord] = []
        self._quiet_s = 0.0
        self._link = link = NatsConnection.open(endpoint, timeout_s=timeout_s, ping_interval_s=heartbeat_s)
        try:
            link.ask(delete_consumer(stream, durable), timeout_s=timeout_s)
            failpoints.reach("worker.durable_deleted")
            consumer = link.ask(create_consumer(stream, durable, _config(durable, position)), timeout_s=timeout_s)
            failpoints.reach("worker.durable_created")
            self._pulls = Pulls(
                link, consumer, batch=batch_max, window=2 * batch_max, heartbeat_s=heartbeat_s, expires_s=expires_s
            )
            self._delivery = Delivery(
                stream, durable, self._pulls.sid, position, consumer.pending, watch_holes=True, anywhere=position == 0
            )
            self._pulls.ask()
        except BaseException:
            link.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[list[RawRecord]]:
        """Batches until `close`, empty ones included."""
        while True:
            try:
                batch = self.next_batch()
            except ConnectionClosed:
                return
            yield batch

    @property
    def position(self) -> int:
        """Of the last record received, which may not have been returned yet."""
        return self._delivery.position

    @property
    def pending(self) -> int:
        """Events the durable still had after that record, as its server knew when it sent it."""
        return self._delivery.pending

    def next_batch(self) -> list[RawRecord]:
        """1 to `batch_max` records as soon as there are any; empty when none came within `linger_s`."""
        deadline = time.monotonic() + self._linger_s
        while not self._ready:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return []
            self._receive(left_s)
        while len(self._ready) < self._batch_max and self._receive(0.0):
            pass
        batch, self._ready = self._ready[: self._batch_max], self._ready[self._batch_max :]
        self._pulls.ask()
        return batch

    def close(self) -> None:
        """Wake the reader and let go of the connection; the durable stays. From any thread, any number of times."""
        self._link.close()

    def _receive(self, timeout_s: float) -> bool:
        """Take what comes within the time; False when nothing came."""
        started = time.monotonic()
        frames = self._link.receive(timeout_s)
        if not frames:
            self._quiet_s += time.monotonic() - started
            if self._quiet_s > self._silence_s:
                raise ConnectionLost(f"NATS at {self._link.peer}", f"no heartbeat came for {self._quiet_s:.1f} s")
            return False
        self._quiet_s = 0.0
        had = len(self._ready)
        statuses = self._delivery.take(frames, self._ready)
        self._pulls.arrived(len(self._ready) - had)
        self._tell_holes()
        for status in statuses:
            self._check_nothing_else_went_out(status)
            self._pulls.ended(status)
        if statuses:
            self._pulls.ask()
        return True

    def _check_nothing_else_went_out(self, status: bytes) -> None:
        """A heartbeat names the last delivery of the consumer, to whomever it went (ADR-15).

        A deposed worker that resumes with a pull in hand may be given the last events of a log that then rests, and no
        later delivery would show the gap.
        """
        last = number_of(status, "Nats-Last-Consumer")
        if last is not None and last > self._delivery.sequence:
            at = number_of(status, "Nats-Last-Stream") or 0
            raise DeliveryGap(self._delivery.consumer, at, f"to another reader: delivery {last} never came here")

    def _tell_holes(self) -> None:
        holes, self._delivery.holes = self._delivery.holes, []
        for first, last in holes:
            if self._on_hole is None:
                raise HistoryBroken(self._delivery.stream, first, f"positions {first} to {last} are missing")
            self._on_hole(first, last)


def _config(durable: str, position: int) -> dict[str, Any]:
    start = {"deliver_policy": "by_start_sequence", "opt_start_seq": position + 1} if position else {}
    return {
        "durable_name": durable,
        "deliver_policy": "all",
        **start,
        "ack_policy": "none",
        "replay_policy": "instant",
        "max_deliver": -1,
    }
