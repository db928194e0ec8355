"""`Shadow`: a read model being made beside the live one, until a swap puts it in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import Connection, Engine, Table

from eventjet.errors import Dropped
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild.load import Target
from eventjet.sql.checkpoint import RETIRED, Checkpoint

TAIL_MAX = 5_000
"""Events a shadow may be behind when it is caught up while the live worker waits; more are caught up before."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """The shadow is the live read model now."""

    position: int
    generation: int
    location: str
    """Where its table is: empty where it is declared."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """Nothing has changed; the swap is to be tried again."""

    reason: str


def check_kept(resolved: AnyResolved, live: Checkpoint) -> None:
    """Raise `Dropped` for one that has no place any more: where it would go, another revision's rows may be."""
    if live.state == RETIRED:
        raise Dropped(resolved)


class Swappable(Protocol):
    """What can take a live read model's place."""

    @property
    def resolved(self) -> AnyResolved: ...

    def check_swappable(self, connection: Connection) -> None:
        """Raise `RebuildRefused` for what a swap could not carry; only looks."""
        ...

    def live_checkpoint(self) -> Checkpoint | None:
        """How far the live read model is."""
        ...

    def swap(self, log: str, tail: Callable[[int], None] | None) -> Swapped | NotYet:
        """Put it in the place of the live one, if it is at least as far.

        `tail` catches it up to a position; without it the live position is of another past and does not count.
        """
        ...


class Shadow(Swappable, Protocol):
    """One run's copy of one read model. Every method blocks."""

    @property
    def resolved(self) -> ResolvedProjection: ...
    @property
    def target(self) -> Target:
        """Where parts are loaded."""
        ...

    @property
    def table(self) -> Table:
        """For the live writer."""
        ...

    def create(self, *, to_swap: bool = True) -> None:
        """Announce the run and make the empty shadow; raises `RebuildRefused` for what a swap could not carry."""
        ...

    def remember(self) -> None:
        """Take the live quarantine over, for `target.known`; the swap makes sure that no other decisions were made."""
        ...

    def copy_live(self) -> Checkpoint | None:
        """Copy the live rows as one snapshot shows them; return the checkpoint of that snapshot.

        `target.known` is the quarantine of that snapshot.
        """
        ...

    def count(self) -> int:
        """Rows there are."""
        ...

    def finish(self) -> None:
        """Make it what the declared table is: durable, with its keys and indexes."""
        ...

    def engine(self) -> Engine:
        """Connections that see the shadow's checkpoint where the live one's would be."""
        ...

    def copied(self) -> str:
        """The quoted name of what `copy_live` made."""
        ...

    def made(self) -> str:
        """The quoted name of the shadow's table."""
        ...

    def interrupt(self) -> None:
        """End what this run's connections are doing, from another thread. Never raises."""
        ...

    def drop(self) -> None:
        """Remove the shadow, or what it replaced, and forget the run. Never raises."""
        ...
