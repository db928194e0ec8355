"""A decision not yet taken, and what comes of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from eventjet.domain.history import FoldedState
from eventjet.domain.recorded import NO_METADATA, Metadata
from eventjet.errors import UsageError
from eventjet.repository.token import token_at
from eventjet.store.store import Append

if TYPE_CHECKING:
    from eventjet.repository.repository import Repository

S = TypeVar("S")
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Committed(Generic[S, E]):
    """What came of a decision."""

    state: S
    """The state after its events."""
    events: tuple[E, ...]
    """What was recorded; empty when the decision was that nothing follows."""
    position: int
    """Position of the aggregate's last event; hand it to `caught_up` to read your write."""
    version: int
    """Version of the aggregate's last event."""
    app: str = field(repr=False)
    """Whose log that is."""

    @property
    def token(self) -> str:
        """The app and the position, as text for an HTTP header; `caught_up` takes it in another process."""
        return token_at(self.app, self.position)


@dataclass(frozen=True, slots=True)
class Planned(Generic[S, E]):
    """What `Repository.decide` returns and `Jet.transact` takes."""

    repository: Repository[S, E]
    aggregate_id: str
    decide: Callable[[S], E | Sequence[E] | None]
    command_id: str | None = None
    metadata: Metadata = NO_METADATA


@dataclass(frozen=True, slots=True)
class Decided(Generic[S, E]):
    """A decision that was taken on a state."""

    plan: Planned[S, E]
    held: FoldedState[S]
    append: Append | None
    """What follows from it; None for nothing."""
    state: S
    """After its events."""


def recorded_events(result: Any) -> tuple[Any, ...]:
    """What a decision returned, as a tuple; raises `UsageError` for a coroutine or an iterator."""
    if result is None:
        return ()
    if isinstance(result, list | tuple):
        return tuple(cast("Sequence[Any]", result))
    if hasattr(result, "__await__") or hasattr(result, "__next__"):
        if hasattr(result, "close"):
            result.close()
        raise UsageError("A decision returned a coroutine or an iterator. Return one event, a list of them, or None.")
    return (result,)
