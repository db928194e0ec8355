"""A recorded event: an event with what the log knows of it, and the metadata of the work in progress."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Generic, TypeVar, cast

from eventjet.errors import UsageError

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
_current: ContextVar[Metadata] = ContextVar("eventjet_metadata", default=NO_METADATA)
"""Tasks inherit it, threads do not."""


@dataclass(frozen=True, slots=True)
class Recorded(Generic[E_co]):
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


class _Unsealed(Generic[E_co]):
    """Becomes a `Recorded`, as immutable as others, at the end of its own constructor."""

    __slots__ = Recorded.__slots__

    def __init__(
        self,
        data: Any,
        aggregate_id: str,
        version: int,
        position: int,
        recorded_at: datetime,
        event_id: str,
        aggregate: str,
        command_id: str | None = None,
        metadata: Metadata = NO_METADATA,
    ) -> None:
        self.data = data
        self.aggregate_id = aggregate_id
        self.version = version
        self.position = position
        self.recorded_at = recorded_at
        self.event_id = event_id
        self.aggregate = aggregate
        self.command_id = command_id
        self.metadata = metadata
        self.__class__ = Recorded  # pyright: ignore[reportAttributeAccessIssue]  the slots are the same


recorded = cast("Callable[..., Recorded[Any]]", _Unsealed)
"""Makes a `Recorded` of its fields in order, in a fifth of the time: a frozen class sets each field by a call."""


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
