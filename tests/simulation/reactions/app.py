"""The apps of schedules: a reactor that notes events, a process that counts them, and the example's transfers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from eventjet import App, Reaction, Recorded, Retry, Step, aggregate, do, event, listens, process, reactor
from eventjet.examples.transfer.accounts import Account
from eventjet.examples.transfer.transfers import Transfer

RETRY = Retry(tries=3, first_s=0.1, most_s=0.5, timeout_s=2.0)


@event("thing.happened")
class Happened:
    number: int


@aggregate("thing")
class Thing:
    """An aggregate whose events a reactor or a process takes."""

    count: int = 0

    def happen(self, number: int) -> Happened:
        return Happened(number=number)

    def evolve(self, event: Happened) -> Thing:
        return replace(self, count=self.count + 1)


@event("ledger.noted")
class Noted:
    position: int
    """The position of the noted event."""
    line: int


@aggregate("ledger", snapshot_every=100)
class Ledger:
    """An aggregate that notes: a command that is executed twice notes twice."""

    count: int = 0

    def note(self, position: int, line: int) -> Noted:
        return Noted(position=position, line=line)

    def evolve(self, event: Noted) -> Ledger:
        return replace(self, count=self.count + 1)


@event("tally.counted")
class Counted:
    number: int


@event("tally.told")
class Told:
    pass


POISON = 1_000
"""Numbers from here on cannot be counted."""


def tally_of(event: Recorded[Happened]) -> str | None:
    """Return the id of the tally of a number; every seventh has none."""
    return f"y{event.data.number % 3}" if event.data.number % 7 else None


@process("tally")
class Tally:
    """A process that counts events and has each noted."""

    counted: int = 0
    told: int = 0
    number: int = 0

    @listens(tally_of)
    def count(self, event: Recorded[Happened]) -> Counted:
        if event.data.number >= POISON:
            raise ValueError("poison")
        return Counted(number=event.data.number)

    def tell(self) -> Told:
        return Told()

    def step(self) -> Step[Tally, Counted | Told] | None:
        if self.told == self.counted:
            return None
        return do(Ledger, f"l{self.number % 2}", Ledger.note, self.number, 0).then(Tally.tell)

    def evolve(self, event: Counted | Told) -> Tally:
        if isinstance(event, Counted):
            return replace(self, counted=self.counted + 1, number=event.number)
        return replace(self, told=self.told + 1)


@lru_cache
def reacting(partitions: int) -> App:
    """Return an app with a reactor of this number of partitions."""

    @reactor("echo", start="beginning", retry=RETRY, partitions=partitions)
    async def echo(event: Recorded[Happened], to: Reaction[Any]) -> None:
        await to.deps.handle(event, to)

    return App("things", aggregates=[Thing, Ledger], reactors=[echo])


@lru_cache
def transferring() -> App:
    """Return an app with a process that has deadlines."""
    return App("transfers", aggregates=[Account], processes=[Transfer])


@lru_cache
def hearing() -> App:
    """Return an app with a process that listens."""
    return App("tallies", aggregates=[Thing, Ledger], processes=[Tally])
