"""A recorded event: an event with what the log knows of it, and the metadata of the work in progress."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MemberDescriptorType
from typing import Any, Generic, TypeAlias, TypeVar, cast

from eventjet.domain.state import own_copy
from eventjet.errors import UsageError

E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Metadata:
    """What travels beside the facts: who, in which conversation, because of what.

    ```python
    once = jet.repository(Account).command(metadata=Metadata(actor="clerk-3", extra={"channel": "web"}))
    await once.execute("a-1", Account.deposit, Decimal(1))
    ```
    """

    correlation: str | None = None
    """The conversation this belongs to."""
    causation: str | None = None
    """The id of the event or command that led here."""
    actor: str | None = None
    """Who acted."""
    traceparent: str | None = None
    """W3C trace context of the caller."""
    extra: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    """Anything else, short; names are `[a-z][a-z0-9-]*`."""


NO_METADATA = Metadata()
Rest: TypeAlias = tuple[datetime, str, str | None, Metadata]
"""(recorded at, event id, command id, metadata)."""
_current: ContextVar[Metadata] = ContextVar("eventjet_metadata", default=NO_METADATA)
"""Tasks inherit it, threads do not."""


class _Unread:
    """What the later fields of a `Recorded` are read from when one of them is asked for first."""

    __slots__ = ("_block", "_rest", "_time_ns")
    _block: bytes | None
    """Its headers; None once they have been read."""
    _rest: Callable[[int, bytes], Rest]
    _time_ns: int


@dataclass(frozen=True, slots=True)
class Recorded(_Unread, Generic[E_co]):
    """Immutable; equal when everything the log knows is equal.

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
    """1, 2, 3 … within the aggregate."""
    position: int
    """The stream sequence: one dense order over all events of an app."""
    recorded_at: datetime
    """UTC; the server's clock when it stored the event, or what its import said."""
    event_id: str = ""
    aggregate: str = ""
    """The aggregate's name."""
    command_id: str | None = None
    metadata: Metadata = NO_METADATA


class _Late:
    """A field that may not be read yet. Threads that ask at once read the same."""

    __slots__ = ("_slot",)

    def __init__(self, slot: MemberDescriptorType) -> None:
        self._slot = slot

    def __get__(self, one: Recorded[Any] | None, owner: type | None = None) -> Any:
        if one is None:
            return self
        try:
            return self._slot.__get__(one)
        except AttributeError:
            _read_rest(one)
        return self._slot.__get__(one)

    def __set__(self, one: Recorded[Any], value: Any) -> None:
        self._slot.__set__(one, value)  # by a constructor: a frozen class keeps everybody else out


_LATE = ("recorded_at", "event_id", "command_id", "metadata")
for _name in _LATE:
    setattr(Recorded, _name, _Late(vars(Recorded)[_name]))


def _read_rest(one: Any) -> None:
    block = one._block
    if block is None:
        return  # another thread was quicker
    for name, value in zip(_LATE, one._rest(one._time_ns, block), strict=True):
        object.__setattr__(one, name, value)
    object.__setattr__(one, "_block", None)


class _Unsealed(_Unread, Generic[E_co]):
    """Of the same slots as a `Recorded`, and open until it becomes one."""

    __slots__ = Recorded.__slots__


def recorded(
    data: Any,
    aggregate_id: str,
    version: int,
    position: int,
    aggregate: str,
    rest: Callable[[int, bytes], Rest],
    time_ns: int,
    block: bytes,
) -> Recorded[Any]:
    """A `Recorded` whose time, id, command and metadata `rest` reads when they are asked for; it raises nothing.

    In a fifth of the time, too: a frozen class sets each field by a call.
    """
    made = cast("Any", _Unsealed)()
    made.data = data
    made.aggregate_id = aggregate_id
    made.version = version
    made.position = position
    made.aggregate = aggregate
    made._rest = rest
    made._time_ns = time_ns
    made._block = block
    made.__class__ = Recorded
    return made


def own_event(one: Recorded[E]) -> Recorded[E]:
    """The same event for a function that shares it with no other: where its data could be changed, that is a copy."""
    data = own_copy(one.data)
    if data is one.data:
        return one
    given, made = cast("Any", one), cast("Any", _Unsealed)()
    made.data = data
    made.aggregate_id = one.aggregate_id
    made.version = one.version
    made.position = one.position
    made.aggregate = one.aggregate
    block: bytes | None = getattr(one, "_block", None)  # none where a constructor made it, or all has been read
    if block is None:
        for name in _LATE:
            setattr(made, name, getattr(one, name))
    else:
        made._rest = given._rest
        made._time_ns = given._time_ns
    made._block = block
    made.__class__ = Recorded
    return made


def current_metadata() -> Metadata:
    """What is recorded beside the events of this task."""
    return _current.get()


@contextmanager
def with_metadata(metadata: Metadata) -> Generator[Metadata]:
    """Record this beside every event saved within; what it leaves None comes from the outer one.

    ```python
    with with_metadata(Metadata(correlation="order-9")):
        await jet.repository(Account).execute("a-1", Account.deposit, Decimal(1))
    ```
    """
    check_metadata(metadata)
    merged = merge(_current.get(), metadata)
    token = _current.set(merged)
    try:
        yield merged
    finally:
        _current.reset(token)


def check_metadata(metadata: object) -> None:
    """Raise `UsageError` for what is no `Metadata`: a dict is easily given."""
    if not isinstance(metadata, Metadata):
        kind = type(metadata).__name__
        raise UsageError(f"The metadata is given as {kind}. Give Metadata(actor=…, extra={{…}}), of `eventjet`.")


def merge(outer: Metadata, inner: Metadata) -> Metadata:
    """`inner` laid over `outer`, field by field."""
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
