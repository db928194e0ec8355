"""`@reactor`: an effect outside the log, at least once for each event, in order for each aggregate.

Declarations only. PURE; `reactions.reaction` makes what a handler is given, and a worker calls it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeAlias
from zlib import crc32

from typing_extensions import TypeVar

from eventjet.domain.aggregate import AggregateType
from eventjet.domain.committed import Committed
from eventjet.domain.parked import AggregateKey
from eventjet.domain.recorded import Recorded
from eventjet.domain.subscription import recorded_events_of, shown_name
from eventjet.errors import DefinitionError

S = TypeVar("S")
E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)
D = TypeVar("D")
D_co = TypeVar("D_co", covariant=True, default=object)
D_contra = TypeVar("D_contra", contravariant=True, default=object)
P = ParamSpec("P")

Start: TypeAlias = Literal["new", "beginning"] | int
"""Where something begins to follow the log: after its end, with its first event, or after a position."""
PARTITIONS_MAX = 64
"""Each partition reads all of the reactor's events, and keeps its own."""
_PARAMETERS = 2


@dataclass(frozen=True, slots=True)
class Retry:
    """How often one event is tried before it is parked, and how long between.

    ```python
    assert [Retry(tries=4).pause_s(attempt) for attempt in (1, 2, 3)] == [0.2, 0.4, 0.8]
    ```
    """

    tries: int = 8
    first_s: float = 0.2
    """Pause after the first try; each is twice the one before."""
    most_s: float = 30.0
    timeout_s: float = 60.0
    """How long one try may take; one that takes longer is cut off and counts."""
    passing: tuple[type[Exception], ...] = (OSError, TimeoutError)
    """What ends by itself: tried for ever and never parked, as is a log that does not answer."""

    def pause_s(self, attempt: int) -> float:
        """After so many tries."""
        return min(self.most_s, self.first_s * 2.0 ** min(attempt - 1, 20))


class Reacted(Protocol[S, E]):
    """As `Repository`, with command ids made of the reactor, the event and a number."""

    async def execute(
        self,
        aggregate_id: str,
        decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Committed[S, E]:
        """Once, whatever becomes of this try; raises what `Repository.execute` does."""
        ...

    async def load(self, aggregate_id: str, /) -> S:
        """The state now."""
        ...


class Reaction(Protocol[D_co]):
    """What the handler of a `reactor` or an `inbox` is given beside its event."""

    @property
    def deps(self) -> D_co:
        """What `App(deps=…)` opened: clients, mailers."""
        ...

    @property
    def key(self) -> str:
        """The same on every try of this event: hand it to the outside world as the idempotency key."""
        ...

    @property
    def attempt(self) -> int:
        """1 on the first try of this term."""
        ...

    def repository(self, aggregate: AggregateType[S, E], /) -> Reacted[S, E]:
        """The repository of one aggregate type, whose commands are carried out once, whatever becomes of this try."""
        ...

    def named(self, name: str) -> Reaction[D_co]:
        """The same with a name before the number in ids and key, for calls whose order depends on what was read."""
        ...


@dataclass(frozen=True, slots=True)
class Reactor(Generic[E_contra, D_contra]):
    """What `@reactor` makes of a handler."""

    name: str
    handle: Callable[[Recorded[E_contra], Reaction[D_contra]], Coroutine[Any, Any, None]]
    start: Start = "new"
    retry: Retry = field(default_factory=Retry)
    on_error: Literal["quarantine", "stop"] = "quarantine"
    revision: int = 1
    partitions: int = 1
    """Among how many cursors its aggregates are divided, each of which another worker may hold."""

    @property
    def events(self) -> tuple[type, ...]:
        """Its subscription; raises `DefinitionError` for a handler that does not say it."""
        return recorded_events_of(self.handle)

    def faults(self, is_known: Callable[[type], bool]) -> list[str]:
        """What is wrong with it in an app that folds the events that are known."""
        handle = self.handle
        faults = [*start_faults(self.start), *retry_faults(self.retry, self.on_error)]
        if not inspect.iscoroutinefunction(handle):
            faults.append(f"{shown_name(handle)} is not an `async def`")
        if len(inspect.signature(handle).parameters) != _PARAMETERS:
            faults.append(f"{shown_name(handle)} does not take (event, reaction)")
        if self.revision < 1:
            faults.append(f"its revision is {self.revision}; give 1 or more")
        if not 1 <= self.partitions <= PARTITIONS_MAX:
            faults.append(f"it has {self.partitions} partitions; give 1 to {PARTITIONS_MAX}")
        try:
            faults += [
                f"{shown_name(handle)} takes {shown_name(one)}, which no aggregate of the app folds"
                for one in self.events
                if not is_known(one)
            ]
        except DefinitionError as error:
            faults += error.faults
        return faults


def start_faults(start: Any) -> list[str]:
    """What is wrong with where something begins."""
    if isinstance(start, int) and not isinstance(start, bool):
        return [] if start >= 0 else [f"it starts after position {start}; give 0 or more"]
    return [] if start in ("new", "beginning") else [f'it starts at {start!r}; give "new", "beginning" or a position']


def retry_faults(retry: Retry, on_error: Any) -> list[str]:
    """What is wrong with what becomes of an event that cannot be handled."""
    faults: list[str] = []
    if retry.tries < 1 or not all(map(_is_span, (retry.first_s, retry.most_s, retry.timeout_s))):
        faults.append(f"{retry} tries nothing, or never again; give a try at the least, and finite seconds above 0")
    if on_error not in ("quarantine", "stop"):
        faults.append(f'its on_error is {on_error!r}; give "quarantine" or "stop"')
    return faults


def _is_span(seconds: Any) -> bool:
    """Whether it is a finite number of seconds above 0."""
    try:
        return isinstance(seconds, int | float) and 0 < float(seconds) < math.inf
    except OverflowError:
        return False


def partition_of(key: AggregateKey, partitions: int) -> int:
    """Which partition an aggregate belongs to, from 0 on: the same in every process, for good."""
    return crc32(f"{key[0]}.{key[1]}".encode("utf-8", "surrogatepass")) % partitions


class Reacting(Protocol):
    """Declares a reactor."""

    def __call__(self, handle: Callable[[Recorded[E], Reaction[D]], Coroutine[Any, Any, None]], /) -> Reactor[E, D]: ...


def reactor(
    name: str,
    /,
    *,
    start: Start = "new",
    retry: Retry | None = None,
    on_error: Literal["quarantine", "stop"] = "quarantine",
    revision: int = 1,
    partitions: int = 1,
) -> Reacting:
    """Declare an async handler of one event, `(event, reaction)`; the event's annotation is its subscription.

    Each event is handled at least once, those of one aggregate one after the other, and never by a rebuild. One that
    raises is tried again, then parked, and later events of its aggregate wait behind it; `on_error="stop"` stops the
    reactor instead. `start` counts when `eventjet init` makes its cursor. Raise `revision` when older code must not
    handle another event. `partitions` divides the aggregates among so many cursors, which the workers that run share.

    ```python
    @reactor("letters")
    async def letters(event: Recorded[Opened], reaction: Reaction[list[str]]) -> None:
        reaction.deps.append(f"welcome {event.data.owner}, {reaction.key}")

    sent: list[str] = []
    handled = await reacted(letters, Opened(owner="ada"), deps=sent)
    assert sent == [f"welcome ada, {handled.key}"]
    ```
    """

    def declare(handle: Any, /) -> Reactor[Any, Any]:
        return Reactor(name, handle, start, retry or Retry(), on_error, revision, partitions)

    return declare
