"""What a snapshot is: a folded state, where it stands, and what makes it worth believing.

The value is one JSON object: position, version, event id, recent command ids, fingerprint (state's fields, events'
schemas, revision), state, and a checksum over all of it. An unknown fingerprint or a bad checksum makes it no snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime, time
from typing import Any, Generic, Protocol, TypeVar, cast

import orjson
from pydantic import TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

from eventjet.codec.json import BodyCodec
from eventjet.domain.aggregate import AggregateInfo, aggregate_info, event_info
from eventjet.domain.history import Commands, FoldedState
from eventjet.domain.subscription import folded_events
from eventjet.errors import DefinitionError, UnencodableEvent

S = TypeVar("S")

FORMAT = 1
QUEUE_MAX = 1_000
CLOSE_S = 2.0


class SnapshotStore(Protocol):
    """Holds the newest snapshot of each aggregate. Losing one costs time, never truth."""

    async def get(self, aggregate: str, aggregate_id: str) -> bytes | None:
        """The value, or None; raises nothing that a missing snapshot would not."""
        ...

    async def put(self, aggregate: str, aggregate_id: str, value: bytes) -> None:
        """Replace it; raises `StoreError` when that did not work."""
        ...


class SnapshotKeeper:
    """Writes snapshots after the ack, off the caller's path, from a bounded queue: one task a connection.

    A full queue drops: the next save of the aggregate brings another.
    """

    def __init__(self, store: SnapshotStore) -> None:
        self.store = store
        self.written = 0
        self.dropped = 0
        self._queue: asyncio.Queue[tuple[str, str, Callable[[], bytes | None]]] = asyncio.Queue(QUEUE_MAX)
        self._task: asyncio.Task[None] | None = None

    def keep(self, aggregate: str, aggregate_id: str, encode: Callable[[], bytes | None]) -> None:
        """Queue one; encoded when its turn comes."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
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
                    await self.store.put(aggregate, aggregate_id, value)
                    self.written += 1
            except Exception:  # noqa: BLE001  one state that cannot be kept must not keep the others from it
                self.dropped += 1
            finally:
                self._queue.task_done()


class SnapshotCodec(Generic[S]):
    """Snapshots of one aggregate type; raises `DefinitionError` when its state cannot be JSON."""

    def __init__(self, cls: Any) -> None:
        info = aggregate_info(cls)
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(cls)
            self._codec = BodyCodec(cls, cast("Any", adapter.core_schema))
            shape: Any = adapter.json_schema()
        except (PydanticUserError, PydanticUndefinedAnnotation, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0]
            fault = f"the state of {info.name!r} cannot be a snapshot: {reason}; leave out snapshot_every or change it"
            raise DefinitionError([fault]) from None
        self.fingerprint = _fingerprint(cls, info, shape)

    def encode(self, held: FoldedState[S]) -> bytes | None:
        """The value; None for a state that would not come back as it is."""
        try:
            state, again = self._codec.read_back(held.state)
        except UnencodableEvent:
            return None
        if not _alike(held.state, again):
            return None
        inner = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "position": held.position,
            "version": held.version,
            "event_id": held.event_id,
            "commands": held.commands.as_mapping(held.version),
            "complete": held.commands.complete,
            "state": orjson.Fragment(state),
        }
        body = orjson.dumps(inner)
        return orjson.dumps({"checksum": _checksum(body), "snapshot": orjson.Fragment(body)})

    def decode(self, value: bytes) -> FoldedState[S] | None:
        """The folded state; None for anything that is not exactly what this codec writes."""
        try:
            outer: dict[str, Any] = orjson.loads(value)
            inner: dict[str, Any] = outer["snapshot"]
            if outer["checksum"] != _checksum(orjson.dumps(inner)):
                return None
            if inner["format"] != FORMAT or inner["fingerprint"] != self.fingerprint:
                return None
            state = cast("S", self._codec.decode(orjson.dumps(inner["state"])))
            versions = {key: (int(first), int(last)) for key, (first, last) in inner["commands"].items()}
            commands = Commands(versions, complete=bool(inner["complete"]))
            return FoldedState(state, int(inner["version"]), int(inner["position"]), str(inner["event_id"]), commands)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def _fingerprint(cls: Any, info: AggregateInfo, shape: Any) -> str:
    events = sorted((event_info(one).name, event_info(one).schema) for one in folded_events(cls))
    told = orjson.dumps([FORMAT, info.name, info.revision, shape, events], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(told, digest_size=16).hexdigest()


def _alike(one: Any, other: Any) -> bool:
    """Whether two equal values also behave alike: a Counter is not a dict, 1 is not True, noon is not noon there."""
    if isinstance(one, datetime | time) and isinstance(other, datetime | time):
        return one.utcoffset() == other.utcoffset()
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return all(map(_alike, cast("Sequence[Any]", one), cast("Sequence[Any]", other)))
    if isinstance(one, dict):
        left, right = cast("dict[Any, Any]", one), cast("dict[Any, Any]", other)
        return list(left) == list(right) and all(map(_alike, left.values(), right.values()))
    if is_dataclass(one):
        return all(_alike(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))
    return True


def _checksum(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
