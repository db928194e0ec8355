"""Snapshots in a JetStream key-value bucket (ADR-8): `<app>_snapshots`, history 1, key `<aggregate>.<encoded id>`.

One at a time as commands go, or many at once, none over a newer one.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from eventjet.codec.headers import EXPECTED, MSG_ID, RawRecord, header, header_block
from eventjet.codec.subjects import entity_key
from eventjet.domain.history import FoldedState
from eventjet.errors import ApiRefused, LogUnusable, StoreError, StoreUnavailable, Unreachable
from eventjet.jetstream.api import (
    IN_PROCESS,
    WRONG_SEQUENCE,
    Request,
    answer_in,
    direct_last,
    last_message,
    message_at,
    stream_info,
)
from eventjet.jetstream.client import Client
from eventjet.jetstream.connection import NatsConnection, ask_once
from eventjet.log.topology import bucket_config, explained_by
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import Frame
from eventjet.observability import tracing
from eventjet.runtime import is_cancelled

VALUE_MAX = 890_000
"""Bytes of one value; larger states are not kept."""
QUEUE_MAX = 1_000
CLOSE_S = 2.0

WINDOW = 64
"""Snapshots written together: the server may have to send as many of 900,000 bytes, and keeps 64 MB for a reader."""
WINDOW_BYTES = 8_000_000

_PATIENCE_S = 30.0
_TIMEOUT_S = 10.0
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is asked of a key-value bucket; an entry's position is its sequence in the bucket's stream."""

    name: str

    def entry(self, key: str) -> Request[RawRecord | None]:
        """What is at a key; may lag behind the leader on a replica."""
        return direct_last(f"KV_{self.name}", self._subject(key))

    def entry_from_leader(self, key: str) -> Request[RawRecord | None]:
        return last_message(f"KV_{self.name}", self._subject(key))

    def write(self, key: str, value: bytes, expected: int | None = None) -> Request[bool]:
        """Replace what is at a key; False when it is no longer the entry at position `expected` (0 for none)."""
        headers = b"" if expected is None else header_block([(EXPECTED, str(expected))])
        what, parse = f"The snapshot {key}", partial(_written, key)
        return Request(what, self._subject(key), value, parse, headers, f"KV_{self.name}")

    def _subject(self, key: str) -> str:
        return f"$KV.{self.name}.{key}"


def _written(key: str, frame: Frame) -> bool:
    try:
        answer_in(frame, f"The snapshot {key}")
    except ApiRefused as refusal:
        if refusal.err_code in (WRONG_SEQUENCE, IN_PROCESS):
            return False
        raise
    return True


class KeyValueSnapshots:
    """The newest snapshot of each aggregate. Losing one costs time, never truth.

    They are written after the ack, off the caller's path, from a bounded queue: one task a connection. A full queue
    drops: the next save of the aggregate brings another.
    """

    def __init__(self, bucket: str, client: Client) -> None:
        self._bucket = Bucket(bucket)
        self._client = client
        self.written = 0
        self.dropped = 0
        self._queue: asyncio.Queue[tuple[str, str, Callable[[], bytes | None]]] = asyncio.Queue(QUEUE_MAX)
        self._task: asyncio.Task[None] | None = None

    async def get(self, aggregate: str, aggregate_id: str) -> bytes | None:
        """The value; None also for what cannot be read in time."""
        try:
            entry = await self.entry(aggregate, aggregate_id)
        except StoreError:
            return None
        return None if entry is None else entry[4]

    async def entry(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        """The value as the bucket's own record, None for none; raises `StoreError`."""
        return await self._client.ask(self._bucket.entry(entity_key(aggregate, aggregate_id)))

    async def put(self, aggregate: str, aggregate_id: str, value: bytes) -> None:
        """Replace it, but for a value beyond `VALUE_MAX` bytes; raises `StoreError` when that did not work."""
        if len(value) <= VALUE_MAX:
            await self._client.ask(self._bucket.write(entity_key(aggregate, aggregate_id), value))

    def keep(self, aggregate: str, aggregate_id: str, encode: Callable[[], bytes | None]) -> None:
        """Queue one; encoded when its turn comes."""
        if self._task is None or self._task.done():
            # Of no command: it outlives the one that began it.
            self._task = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())
        try:
            self._queue.put_nowait((aggregate, aggregate_id, encode))
        except asyncio.QueueFull:
            self.dropped += 1

    async def close(self) -> None:
        """Write what is queued, for two seconds at most."""
        if self._task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._queue.join()
        self.dropped += self._queue.qsize()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None

    async def _run(self) -> None:
        while True:
            aggregate, aggregate_id, encode = await self._queue.get()
            try:
                value = encode()
                if value is None:
                    self.dropped += 1
                else:
                    with tracing.span(tracing.SNAPSHOT, labels={"eventjet.aggregate": aggregate}):
                        await self.put(aggregate, aggregate_id, value)
                    self.written += 1
            except BaseException as raised:
                if is_cancelled(raised):
                    raise
                self.dropped += 1
            finally:
                self._queue.task_done()


@dataclass(frozen=True, slots=True)
class Offer:
    """One snapshot to be written."""

    key: str
    """`<aggregate>.<encoded id>`: its key in the bucket, and its subject in the log without the app."""
    position: int
    """Of the last event in it."""
    event_id: str
    value: bytes


class BulkSnapshots:
    """Many snapshots of one aggregate type, written at once. A context manager; blocking.

    Each is written only if the entry is still the one that was looked at, so commands, other builds and retries may
    write at the same time: whoever comes second looks again.
    """

    def __init__(
        self, endpoint: Endpoint, app: str, bucket: str, last: int, decode: Callable[[bytes], FoldedState[Any] | None]
    ) -> None:
        """Offers hold all events up to position `last`; `decode` gives None for what is no snapshot."""
        self._endpoint = endpoint
        self._app = app
        self._last = last
        self._decode = decode
        self._bucket = Bucket(bucket)
        self._link: NatsConnection | None = None
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
                fault: Exception = StoreUnavailable(f"The bucket {self._bucket.name}", f"{left[0].key} keeps changing")
            except (StoreUnavailable, Unreachable, ApiRefused) as error:
                fault = error if isinstance(error, Unreachable) else self._explained(error)
                self._hang_up()
                if isinstance(fault, LogUnusable | ApiRefused):
                    raise fault from error
            if time.monotonic() > deadline:
                raise fault
            time.sleep(_PAUSE_S)

    def _explained(self, error: StoreUnavailable | ApiRefused) -> StoreError:
        """What the settings of the bucket have to do with it."""
        try:
            found = ask_once(self._endpoint, stream_info(f"KV_{self._bucket.name}"), timeout_s=_TIMEOUT_S)
        except (StoreError, Unreachable):
            return error
        return explained_by(found, bucket_config(self._app, 1), error)

    def _round(self, offers: Sequence[Offer], *, through_leader: bool) -> list[Offer]:
        """Look at each entry and write what is newer; returns those whose entry changed in between."""
        link = self._link or NatsConnection.open(self._endpoint, timeout_s=_TIMEOUT_S)
        self._link = link
        # A replica that was asked may be behind the write that came in between.
        look = self._bucket.entry_from_leader if through_leader else self._bucket.entry
        entries = link.ask_all([look(offer.key) for offer in offers], timeout_s=_TIMEOUT_S)
        due: list[tuple[Offer, int]] = []
        for offer, entry in zip(offers, entries, strict=True):
            held = None if entry is None else self._decode(entry[4])
            if held is None or not self._stands(link, offer, held):
                due.append((offer, 0 if entry is None else entry[0]))
        writes = [self._bucket.write(offer.key, offer.value, expected) for offer, expected in due]
        stored = link.ask_all(writes, timeout_s=_TIMEOUT_S) if writes else []
        self.newer += len(offers) - len(due)
        self.written += sum(stored)
        return [offer for (offer, _), done in zip(due, stored, strict=True) if not done]

    def _stands(self, link: NatsConnection, offer: Offer, held: FoldedState[Any]) -> bool:
        """Whether the snapshot that is there holds all that the offer does, of this very log."""
        if held.position == offer.position:
            return held.event_id == offer.event_id
        if held.position <= self._last:
            return False  # older, or of an event that this log does not have
        record = link.ask(message_at(self._app, held.position))
        named = f"{self._app}.{offer.key}".encode()
        return record is not None and record[2] == named and (header(record[3], MSG_ID) or "") == held.event_id

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
