"""Folding one aggregate's history: versions contiguous, chain unbroken, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from eventjet.errors import HistoryBroken

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Held(Generic[S]):
    """A folded state and where it stands."""

    state: S
    version: int
    """Version of its last event, 0 for none."""
    position: int
    """Position of its last event, 0 for none."""


@dataclass(frozen=True, slots=True)
class Link:
    """One event of a history, as far as its chain goes."""

    version: int
    position: int
    expected: int | None
    """The position it was written after, where its header says so (the first of a batch)."""
    data: Any
    """The event; None for a retired one, which is passed over."""


def fold_history(held: Held[S], links: Iterable[Link], evolve: Callable[[S, Any], S], subject: str) -> Held[S]:
    """Fold one aggregate's events onto a state.

    Raises `HistoryBroken` when a version is not the next, or an event follows another one than it expected.
    """
    state, version, position = held.state, held.version, held.position
    for link in links:
        if link.version != version + 1:
            raise HistoryBroken(subject, link.position, f"version {link.version} follows version {version}")
        if link.position <= position:
            raise HistoryBroken(subject, link.position, f"it comes after position {position}")
        if link.expected is not None and link.expected != position:
            raise HistoryBroken(
                subject, link.position, f"it was written after position {link.expected}, but {position} came before it"
            )
        if link.data is not None:
            state = evolve(state, link.data)
        version, position = link.version, link.position
    return Held(state, version, position)
