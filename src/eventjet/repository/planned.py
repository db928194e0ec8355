"""A decision not yet taken, what comes of one, and where that is in the log as a token."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from eventjet.domain.history import FoldedState
from eventjet.domain.recorded import NO_METADATA, Metadata
from eventjet.errors import UsageError
from eventjet.store.store import Append

if TYPE_CHECKING:
    from eventjet.repository.repository import Repository

S = TypeVar("S")
E = TypeVar("E")

_TOKEN = re.compile(r"([a-z][a-z0-9_]{0,62}):(0|[1-9][0-9]{0,18})", re.ASCII)
_POSITION_MAX = 2**63 - 1


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
        """The app and the position as text for an HTTP header, `bank:1234`; `caught_up` takes it in another process."""
        return f"{self.app}:{self.position}"


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


def position_in(token: str, app: str) -> int:
    """The position that a token names; raises `UsageError` for what is no token, or one of another app."""
    found = _TOKEN.fullmatch(token.strip(" \t"))
    if found is None or int(found[2]) > _POSITION_MAX:
        raise UsageError(f"{token[:80]!r} is not a token. Hand on `Committed.token` as it is, for instance {app}:1234.")
    if found[1] != app:
        raise UsageError(
            f"The token {found[0]!r} is of the app {found[1]!r}, and this connection is of {app!r}. "
            "Hand it to a process of the app that made it."
        )
    return int(found[2])
