"""The apps of schedules: things that happen, a reactor that notes them, and the transfers of the examples."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from eventjet import App, Reaction, Recorded, Retry, aggregate, event, reactor
from eventjet.examples.transfer.accounts import Account
from eventjet.examples.transfer.transfers import Transfer

RETRY = Retry(tries=3, first_s=0.1, most_s=0.5, timeout_s=2.0)


@event("thing.happened")
class Happened:
    number: int


@aggregate("thing")
class Thing:
    """What happens to it is reacted to."""

    count: int = 0

    def happen(self, number: int) -> Happened:
        return Happened(number=number)

    def evolve(self, event: Happened) -> Thing:
        return replace(self, count=self.count + 1)


@event("ledger.noted")
class Noted:
    position: int
    """Of what is noted."""
    line: int


@aggregate("ledger", snapshot_every=100)
class Ledger:
    """What was noted; asked twice, it notes twice."""

    count: int = 0

    def note(self, position: int, line: int) -> Noted:
        return Noted(position=position, line=line)

    def evolve(self, event: Noted) -> Ledger:
        return replace(self, count=self.count + 1)


class Outside(Protocol):
    """What reactors meet beyond the log: one schedule."""

    async def handle(self, event: Recorded[Happened], to: Reaction[Outside]) -> None: ...


@lru_cache
def reacting(partitions: int) -> App:
    """With a reactor that is divided so."""

    @reactor("echo", start="beginning", retry=RETRY, partitions=partitions)
    async def echo(event: Recorded[Happened], to: Reaction[Outside]) -> None:
        await to.deps.handle(event, to)

    return App("things", aggregates=[Thing, Ledger], reactors=[echo])


@lru_cache
def transferring() -> App:
    """With a process that has deadlines."""
    return App("transfers", aggregates=[Account], processes=[Transfer])
