"""Snapshots of folded states, in the JetStream key-value bucket (ADR-8) `<app>_snapshots`.

The bucket has one value for each key, `<aggregate>.<encoded id>`. A snapshot that is larger than a value is divided:
its parts have keys of their own, `<aggregate>.<encoded id>.<number>`, and the value says how many they are and what
their digest is. Two writers may mix their parts, which the digest shows, and then the history is folded (ADR 0070).

A snapshot is one JSON object: position, version, event id, recent command ids, fingerprint (format, aggregate, state's
fields, events' schemas, revision), state, and a checksum over all of it. A value with another fingerprint is ignored.
Commands write snapshots one at a time; a build writes many at once, none over a newer one.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import orjson

from eventjet.codec.headers import EXPECTED, RawRecord, event_id_of, header_block
from eventjet.codec.json import dump_json, read_json
from eventjet.codec.shape import MEMBERS
from eventjet.codec.states import StateCodec, digest
from eventjet.codec.subjects import entity_key
from eventjet.domain.aggregate import event_info
from eventjet.domain.history import Commands, FoldedState
from eventjet.domain.subscription import folded_events
from eventjet.errors import ApiRefused, LogUnusable, StoreError, StoreUnavailable, UnencodableEvent, Unreachable
from eventjet.jetstream import api
from eventjet.jetstream.api import Conversation, Request
from eventjet.jetstream.client import Client
from eventjet.jetstream.connection import NatsConnection, ask_once
from eventjet.log.topology import explained_by, snapshots_config
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import Frame
from eventjet.observability import spans, tracing
from eventjet.runtime import is_cancelled

S = TypeVar("S")

FORMAT = 1
_HEAD, _TAIL = b'{"checksum":"%s","snapshot":', b"}"
_HEAD_BYTES = len(_HEAD % (b"0" * 32))
VALUE_MAX = 890_000
"""Bytes of one value at most."""
PARTS_MAX = 32
"""Values of one snapshot at most; larger states get no snapshot."""
SNAPSHOT_MAX = PARTS_MAX * VALUE_MAX
_PARTS = b'{"parts":'
QUEUE_MAX = 1_000
"""How many snapshots may wait to be written."""
CLOSE_S = 2.0
"""How long closing waits for queued snapshots to be written."""

WINDOW = 64
"""How many snapshots are read and written together: the server keeps 64 MB for a reader, and each has up to 900 KB."""
WINDOW_BYTES = 8_000_000

_RETRY_S = 30.0
_TIMEOUT_S = 10.0
_PAUSE_S = 0.2


class SnapshotCodec(Generic[S]):
    """Encodes and decodes the snapshots of one aggregate type; raises `DefinitionError` if its state cannot be JSON."""

    def __init__(self, cls: Any) -> None:
        self._states = StateCodec[S](cls, "a snapshot", "leave out snapshot_every")
        info = self._states.info
        events = sorted((event_info(kind).name, event_info(kind).schema) for kind in folded_events(cls))
        identity: list[Any] = [FORMAT, info.name, info.revision, self._states.shape, events]
        if MEMBERS in (shape := dump_json(self._states.wire_shape, orjson.OPT_SORT_KEYS)).decode():
            # pydantic's JSON Schema has the values of an enum, and stays the same when two members change places.
            identity.append(digest(shape))
        self.fingerprint = digest(dump_json(identity, orjson.OPT_SORT_KEYS))

    def faults(self) -> list[str]:
        """Return an error text for each field whose type a snapshot would not preserve."""
        return self._states.faults()

    def encode(self, folded: FoldedState[S]) -> bytes | None:
        """Return the snapshot as bytes; None for a state that decoding would not restore exactly."""
        try:
            state = self._states.encode(folded.state)
        except UnencodableEvent:
            return None
        snapshot = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "position": folded.position,
            "version": folded.version,
            "event_id": folded.event_id,
            "commands": folded.commands.as_mapping(folded.version),
            "complete": folded.commands.complete,
            "state": orjson.Fragment(state),
        }
        body = orjson.dumps(snapshot)
        return _HEAD % digest(body).encode() + body + _TAIL

    def decode(self, value: bytes) -> FoldedState[S] | None:
        """Return the folded state; None for bytes that this codec would not have written."""
        try:
            body = value[_HEAD_BYTES:-1]
            if value[:_HEAD_BYTES] != _HEAD % digest(body).encode() or value[-1:] != _TAIL:
                return None
            snapshot: dict[str, Any] = read_json(body)
            if snapshot["format"] != FORMAT or snapshot["fingerprint"] != self.fingerprint:
                return None
            state = self._states.decode(dump_json(snapshot["state"]))
            versions = {
                key: (_checked_number(first), _checked_number(last))
                for key, (first, last) in snapshot["commands"].items()
            }
            commands = Commands(versions, complete=bool(snapshot["complete"]))
            version, position = _checked_number(snapshot["version"]), _checked_number(snapshot["position"])
            return FoldedState(state, version, position, str(snapshot["event_id"]), commands)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def _checked_number(value: Any) -> int:
    """Return the value if it can be a version or a position; raises `ValueError` for anything else."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} counts nothing")
    return value


# The bucket.


@dataclass(frozen=True, slots=True)
class Bucket:
    """The requests to a key-value bucket; an entry's position is its sequence in the bucket's stream."""

    name: str

    def entry(self, key: str) -> Request[RawRecord | None]:
        """Read the entry of a key, None if there is none; may lag behind the leader."""
        return api.direct_last(f"KV_{self.name}", self._subject(key))

    def entry_from_leader(self, key: str) -> Request[RawRecord | None]:
        return api.last_message(f"KV_{self.name}", self._subject(key))

    def write(self, key: str, value: bytes, expected: int | None = None) -> Request[bool]:
        """Write the value of a key; with `expected`, only over the entry at that position (0 for none), else False."""
        headers = b"" if expected is None else header_block([(EXPECTED, str(expected))])
        what, parse = f"The snapshot {key}", partial(_written, key)
        return Request(what, self._subject(key), value, parse, headers, f"KV_{self.name}")

    def whole(self, key: str, value: bytes) -> Conversation[bytes]:
        """Return the snapshot of a value, put together if it is divided; the value itself if its parts do not fit."""
        if not value.startswith(_PARTS):
            return value
        parts = list[bytes]()
        try:
            divided: dict[str, Any] = read_json(value)
            for number in range(1, min(int(divided["parts"]), PARTS_MAX) + 1):
                part: RawRecord | None = yield self.entry_from_leader(f"{key}.{number}")
                parts.append(b"" if part is None else part[4])
            joined = b"".join(parts)
            return joined if digest(joined) == divided["digest"] else value
        except (ValueError, KeyError, TypeError):
            return value

    def divided(self, key: str, value: bytes) -> tuple[list[Request[bool]], bytes]:
        """Return the writes of a snapshot's parts, and the value to write after them; the snapshot if it fits."""
        if len(value) <= VALUE_MAX:
            return [], value
        parts = [value[start : start + VALUE_MAX] for start in range(0, len(value), VALUE_MAX)]
        writes = [self.write(f"{key}.{number}", part) for number, part in enumerate(parts, 1)]
        return writes, dump_json({"parts": len(parts), "digest": digest(value)})

    def _subject(self, key: str) -> str:
        return f"$KV.{self.name}.{key}"


def _written(key: str, frame: Frame) -> bool:
    try:
        api.answer_in(frame, f"The snapshot {key}")
    except ApiRefused as refusal:
        if refusal.err_code in (api.WRONG_SEQUENCE, api.IN_PROCESS):
            return False
        raise
    return True


class KeyValueSnapshots:
    """The newest snapshot of each aggregate, in a key-value bucket. A lost snapshot costs time, never correctness.

    One task writes snapshots from a bounded queue after their save was acknowledged, so that callers do not wait. If
    the queue is full, a new snapshot is dropped: a later save of the aggregate queues another.
    """

    def __init__(self, bucket: str, client: Client) -> None:
        self._bucket = Bucket(bucket)
        self._client = client
        self.written = 0
        self.dropped = 0
        self._queue: asyncio.Queue[tuple[str, str, Callable[[], bytes | None]]] = asyncio.Queue(QUEUE_MAX)
        self._task: asyncio.Task[None] | None = None

    async def get(self, aggregate: str, aggregate_id: str) -> bytes | None:
        """Return the snapshot of an aggregate; None if there is none, or if it cannot be read in time."""
        try:
            entry = await self.entry(aggregate, aggregate_id)
        except StoreError:
            return None
        return None if entry is None else entry[4]

    async def entry(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        """Return the snapshot as a record of the bucket, None if there is none; raises `StoreError`."""
        key = entity_key(aggregate, aggregate_id)
        entry = await self._client.ask(self._bucket.entry(key))
        if entry is not None and entry[4].startswith(_PARTS):
            return (*entry[:4], await self._client.run(self._bucket.whole(key, entry[4])))
        return entry

    async def put(self, aggregate: str, aggregate_id: str, value: bytes) -> None:
        """Write a snapshot, unless it has more than `SNAPSHOT_MAX` bytes; raises `StoreError`."""
        if len(value) <= SNAPSHOT_MAX:
            key = entity_key(aggregate, aggregate_id)
            parts, value = self._bucket.divided(key, value)
            for part in parts:
                await self._client.ask(part)
            await self._client.ask(self._bucket.write(key, value))

    def keep(self, aggregate: str, aggregate_id: str, encode: Callable[[], bytes | None]) -> None:
        """Queue a snapshot, which is encoded when its turn comes."""
        if self._task is None or self._task.done():
            # With an empty context: the task outlives the command that started it.
            self._task = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())
        try:
            self._queue.put_nowait((aggregate, aggregate_id, encode))
        except asyncio.QueueFull:
            self.dropped += 1

    async def close(self) -> None:
        """Write the queued snapshots, for `CLOSE_S` at most, and drop the rest."""
        if self._task is None:
            return
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._queue.join()
        finally:  # also if this is cancelled
            self.dropped += self._queue.qsize()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            aggregate, aggregate_id, encode = await self._queue.get()
            try:
                value = encode()
                if value is None:
                    self.dropped += 1
                else:
                    with tracing.span(spans.SNAPSHOT, labels={"eventjet.aggregate": aggregate}):
                        await self.put(aggregate, aggregate_id, value)
                    self.written += 1
            except BaseException as error:
                if is_cancelled(error):
                    raise
                self.dropped += 1
            finally:
                self._queue.task_done()


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot that a build is to write."""

    key: str
    """`<aggregate>.<encoded id>`: the key in the bucket, and the aggregate's subject in the log without the app."""
    position: int
    """Position of the last event that is folded into it."""
    event_id: str
    value: bytes


class BulkSnapshots:
    """Writes many snapshots of one aggregate type at once. It is a context manager, and blocks.

    Each is written only if the bucket's entry is still the entry that was read, so commands, other builds and retries
    may write at the same time: the slower writer reads again.
    """

    def __init__(
        self, endpoint: Endpoint, app: str, bucket: str, last: int, decode: Callable[[bytes], FoldedState[Any] | None]
    ) -> None:
        """`last` is the log position up to which all events are folded; `decode` returns None for invalid snapshots."""
        self._endpoint = endpoint
        self._app = app
        self._last = last
        self._decode = decode
        self._bucket = Bucket(bucket)
        self._link: NatsConnection | None = None
        self.written = 0
        self.newer = 0
        """How many aggregates had a snapshot of the same or a later event already."""

    def __enter__(self) -> BulkSnapshots:
        return self

    def __exit__(self, *_: object) -> None:
        self._hang_up()

    def put(self, offers: Sequence[Offer]) -> None:
        """Write up to `WINDOW` newer offers; raises `StoreUnavailable` or `Unreachable` after `_RETRY_S`."""
        deadline = time.monotonic() + _RETRY_S
        through_leader = False
        remaining = list(offers)
        while remaining:
            try:
                remaining = self._round(remaining, through_leader=through_leader)
                if not remaining:
                    return
                through_leader = True
                fault: Exception = StoreUnavailable(
                    f"The bucket {self._bucket.name}", f"{remaining[0].key} keeps changing"
                )
            except (StoreUnavailable, Unreachable, ApiRefused) as error:
                fault = error
                self._hang_up()
                if not isinstance(error, Unreachable):
                    with contextlib.suppress(StoreError, Unreachable):  # the bucket's settings may be the reason
                        state = ask_once(
                            self._endpoint, api.stream_info(f"KV_{self._bucket.name}"), timeout_s=_TIMEOUT_S
                        )
                        fault = explained_by(state, snapshots_config(self._app, 1), error)
                if isinstance(fault, LogUnusable | ApiRefused):
                    raise fault from error
            if time.monotonic() > deadline:
                raise fault
            time.sleep(_PAUSE_S)

    def _round(self, offers: Sequence[Offer], *, through_leader: bool) -> list[Offer]:
        """Read each entry and write the offers that are newer; return the offers whose entry changed in between."""
        link = self._link = self._link or NatsConnection.open(self._endpoint, timeout_s=_TIMEOUT_S)
        # A replica may lag behind the write that changed an entry.
        read = self._bucket.entry_from_leader if through_leader else self._bucket.entry
        entries = link.ask_all([read(offer.key) for offer in offers], timeout_s=_TIMEOUT_S)
        due: list[tuple[Offer, int]] = []
        for offer, entry in zip(offers, entries, strict=True):
            existing = None
            if entry is not None:
                existing = self._decode(link.run(self._bucket.whole(offer.key, entry[4]), _TIMEOUT_S))
            if existing is None or not self._is_current(link, offer, existing):
                due.append((offer, 0 if entry is None else entry[0]))
        writes: list[Request[bool]] = []
        for offer, expected in due:
            parts, value = self._bucket.divided(offer.key, offer.value)
            for part in parts:
                link.ask(part, timeout_s=_TIMEOUT_S)
            writes.append(self._bucket.write(offer.key, value, expected))
        stored = link.ask_all(writes, timeout_s=_TIMEOUT_S) if writes else []
        self.newer += len(offers) - len(due)
        self.written += sum(stored)
        return [offer for (offer, _), is_stored in zip(due, stored, strict=True) if not is_stored]

    def _is_current(self, link: NatsConnection, offer: Offer, existing: FoldedState[Any]) -> bool:
        """Return whether the existing snapshot is of this log and contains every event of the offer."""
        if existing.position == offer.position:
            return existing.event_id == offer.event_id
        if existing.position <= self._last:
            return False  # it is older, or of an event that this log does not have
        record = link.ask(api.message_at(self._app, existing.position))
        subject = f"{self._app}.{offer.key}".encode()
        return record is not None and record[2] == subject and event_id_of(record) == existing.event_id

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
