"""Recorded events, with their position, time and metadata in the log, and the metadata of the current task."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MemberDescriptorType
from typing import Any, Generic, TypeAlias, TypeVar, cast

from eventjet.domain.state import own_copy

E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Metadata:
    """The context recorded with events: the actor, the conversation, and the cause.

    ```python
    once = jet.repository(Account).command(metadata=Metadata(actor="clerk-3", extra={"channel": "web"}))
    await once.execute("a-1", Account.deposit, Decimal(1))
    ```
    """

    correlation: str | None = None
    """The id of the conversation to which the events belong."""
    causation: str | None = None
    """The id of the event or command that caused the events."""
    actor: str | None = None
    """The person or program that acted."""
    traceparent: str | None = None
    """W3C trace context of the caller."""
    extra: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    """Any other short values; names are `[a-z][a-z0-9-]*`."""


NO_METADATA = Metadata()
LateFields: TypeAlias = tuple[datetime, str, str | None, Metadata]
"""(recorded at, event id, command id, metadata)."""
_current: ContextVar[Metadata] = ContextVar("eventjet_metadata", default=NO_METADATA)
"""The metadata of the current task; tasks inherit it, threads do not."""


class _Unread:
    """The source of the late fields of a `Recorded`, which are decoded when one of them is first read."""

    __slots__ = ("_block", "_decode", "_time_ns")
    _block: bytes | None
    """The headers of the record; None once they have been decoded."""
    _decode: Callable[[int, bytes], LateFields]
    _time_ns: int


@dataclass(frozen=True, slots=True)
class Recorded(_Unread, Generic[E_co]):
    """An event as the log recorded it; immutable, and equal when all its fields are equal.

    ```python
    await jet.repository(Account).execute("a-1", Account.deposit, Decimal(1))
    (recorded,) = await jet.repository(Account).history("a-1")
    assert (recorded.data, recorded.version) == (Deposited(amount=Decimal(1)), 1)
    ```
    """

    data: E_co
    """The event."""
    aggregate_id: str
    version: int
    """The number of the event within the aggregate: 1, 2, 3 …"""
    position: int
    """The stream sequence, one dense order over all events of an app."""
    recorded_at: datetime
    """When the server stored the event, by the server's clock and in UTC; for an imported event, the imported time."""
    event_id: str = ""
    aggregate: str = ""
    """The name of the aggregate type."""
    command_id: str | None = None
    metadata: Metadata = NO_METADATA


class _LateField:
    """A field that is decoded when it is first read; concurrent threads get the same value."""

    __slots__ = ("_slot",)

    def __init__(self, slot: MemberDescriptorType) -> None:
        self._slot = slot

    def __get__(self, event: Recorded[Any] | None, owner: type | None = None) -> Any:
        if event is None:
            return self
        try:
            return self._slot.__get__(event)
        except AttributeError:
            _decode_late_fields(event)
        return self._slot.__get__(event)

    def __set__(self, event: Recorded[Any], value: Any) -> None:
        self._slot.__set__(event, value)  # only constructors get here, since the class is frozen


_LATE_FIELDS = ("recorded_at", "event_id", "command_id", "metadata")
for _name in _LATE_FIELDS:
    setattr(Recorded, _name, _LateField(vars(Recorded)[_name]))


def _decode_late_fields(event: Any) -> None:
    block = event._block
    if block is None:
        return  # another thread has decoded the fields
    for name, value in zip(_LATE_FIELDS, event._decode(event._time_ns, block), strict=True):
        object.__setattr__(event, name, value)
    object.__setattr__(event, "_block", None)


class _Unsealed(_Unread, Generic[E_co]):
    """A class with the slots of `Recorded` whose fields can be set before the object becomes a `Recorded`."""

    __slots__ = Recorded.__slots__


def recorded(
    data: Any,
    aggregate_id: str,
    version: int,
    position: int,
    aggregate: str,
    decode: Callable[[int, bytes], LateFields],
    time_ns: int,
    block: bytes,
) -> Recorded[Any]:
    """Return a `Recorded` that `decode`, which must not raise, completes on first access: five times as fast."""
    event = cast("Any", _Unsealed)()
    event.data = data
    event.aggregate_id = aggregate_id
    event.version = version
    event.position = position
    event.aggregate = aggregate
    event._decode = decode
    event._time_ns = time_ns
    event._block = block
    event.__class__ = Recorded
    return event


def own_event(event: Recorded[E]) -> Recorded[E]:
    """Return the event for one function alone: with its own copy of the data if the data can be changed in place."""
    data = own_copy(event.data)
    if data is event.data:
        return event
    original, copied = cast("Any", event), cast("Any", _Unsealed)()
    copied.data = data
    copied.aggregate_id = event.aggregate_id
    copied.version = event.version
    copied.position = event.position
    copied.aggregate = event.aggregate
    block: bytes | None = getattr(event, "_block", None)  # None if made by the constructor, or already decoded
    if block is None:
        for name in _LATE_FIELDS:
            setattr(copied, name, getattr(event, name))
    else:
        copied._decode = original._decode
        copied._time_ns = original._time_ns
    copied._block = block
    copied.__class__ = Recorded
    return copied


def current_metadata() -> Metadata:
    """Return the metadata that is recorded with the events of this task."""
    return _current.get()


@contextmanager
def with_metadata(metadata: Metadata) -> Generator[Metadata]:
    """Record this metadata with every event saved in the block; fields that are None come from the outer metadata.

    ```python
    with with_metadata(Metadata(correlation="order-9")):
        await jet.repository(Account).execute("a-1", Account.deposit, Decimal(1))
    ```
    """
    merged = merge(_current.get(), metadata)
    token = _current.set(merged)
    try:
        yield merged
    finally:
        _current.reset(token)


def merge(outer: Metadata, inner: Metadata) -> Metadata:
    """Return `inner` with the fields it leaves empty taken from `outer`; `extra` is merged by name."""
    if inner is NO_METADATA or outer is NO_METADATA:
        return outer if inner is NO_METADATA else inner
    return replace(
        inner,
        correlation=inner.correlation or outer.correlation,
        causation=inner.causation or outer.causation,
        actor=inner.actor or outer.actor,
        traceparent=inner.traceparent or outer.traceparent,
        extra={**outer.extra, **inner.extra},
    )
