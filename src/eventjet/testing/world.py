"""`world`: a whole app in memory, whose processes and reactors run until they rest and whose clock the test moves."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from eventjet.codec.subjects import entity_of
from eventjet.commands.repository import Repositories
from eventjet.domain.history import FoldedState
from eventjet.domain.moment import later
from eventjet.domain.process import ProcessInfo
from eventjet.domain.recorded import Recorded, own_event
from eventjet.errors import UsageError
from eventjet.jet import Jet
from eventjet.log.memory import MemoryStore
from eventjet.projections.app_ref import Application
from eventjet.subscriptions.declarations import opened_deps
from eventjet.subscriptions.handlers import Cause, EventReaction
from eventjet.subscriptions.process_steps import NextDeadline, ProcessRunner
from eventjet.testing.memory import open_in_memory

_ROUNDS_MAX = 10_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class WorldClock:
    """The clock of a log in memory, which stands still until the test moves it."""

    now: datetime

    def time_ns(self) -> int:
        """Return the time in nanoseconds since 1970."""
        since = self.now - _EPOCH
        return ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1_000


class World:
    """An app in memory, made by `world`; its processes and reactors do nothing before `settle`.

    `jet` is used like a real one. Read models are brought up to date as those of `App.in_memory` are.
    """

    def __init__(self, app: Application, deps: Any, jet: Jet, clock: WorldClock) -> None:
        self.jet = jet
        self._clock = clock
        self._store = jet.store
        self._repositories = Repositories(app, jet.store)
        self._repositories.guard.check()  # the world belongs to this loop, as its `jet` does
        self._app = app
        self._deps = deps
        self._runners = [ProcessRunner(self._repositories, cls, info) for cls, info in app.processes.items()]
        self._position = 0
        jet.run_processes = self.settle

    @property
    def now(self) -> datetime:
        """The time of the log's clock, at which events are recorded; `pass_time` moves it."""
        return self._clock.now

    async def settle(self) -> None:
        """Run processes, reactors and due deadlines until nothing is left to do now.

        Raises what a handler or a decision raises, and `AssertionError` after 10,000 rounds.
        """
        self._repositories.guard.check()
        for _ in range(_ROUNDS_MAX):
            records = [record async for record in self._store.records(start=self._position + 1)]
            for record in records:
                self._position = record[0]
                event = self.jet.decode(record)
                if event is not None:
                    await self._handle(event)
            if not records and not await self._come_due():
                return
        raise AssertionError(
            f"it does not come to rest within {_ROUNDS_MAX:,} rounds; look for a reactor, a process or a deadline that "
            "causes its own next event"
        )

    async def pass_time(self, by: timedelta) -> None:
        """Move the clock forward and settle; each deadline on the way comes due at its own time."""
        end = later(self.now, by)
        while True:
            await self.settle()
            due = [deadline.at for _, _, _, deadline in await self._waiting() if deadline.at <= end]
            if not due:
                break
            self._clock.now = max(self.now, min(due))
        self._clock.now = end
        await self.settle()

    async def _handle(self, event: Recorded[Any]) -> None:
        for runner in self._runners:
            info = runner.info
            if event.aggregate == info.name:
                await runner.advance(event.aggregate_id, position=event.position)
                continue
            process_id = await _heard(runner, info, event)
            if process_id is not None:
                await runner.advance(process_id)
        for reactor in self._app.reactors.values():
            if isinstance(event.data, reactor.events):
                await reactor.handle(
                    own_event(event),
                    EventReaction(self._repositories, self._deps, Cause.of_event(reactor.name, event), 1),
                )

    async def _come_due(self) -> bool:
        """Run the decision of the earliest deadline that is due; return False when none is due."""
        for runner, process_id, folded, deadline in await self._waiting():
            if deadline.at <= self.now:
                await runner.come_due(process_id, folded.version, self.now)
                return True
        return False

    async def _waiting(self) -> list[tuple[ProcessRunner, str, FoldedState[Any], NextDeadline]]:
        """Return the next deadline of every process that has one, the earliest first."""
        waiting: list[tuple[ProcessRunner, str, FoldedState[Any], NextDeadline]] = []
        subjects = {record[2] async for record in self._store.records()}
        entities = sorted(entity_of(subject) for subject in subjects)
        for runner in self._runners:
            for aggregate, process_id in entities:
                if aggregate == runner.info.name and runner.info.has_deadlines:
                    folded = await runner.advance(process_id)
                    deadline = await runner.next_deadline(process_id, folded)
                    if deadline is not None:
                        waiting.append((runner, process_id, folded, deadline))
        return sorted(waiting, key=lambda entry: entry[3].at)


async def _heard(runner: ProcessRunner, info: ProcessInfo, event: Recorded[Any]) -> str | None:
    """Give an event to the process that listens to it; return the process's id, or None."""
    listener = info.listener_to(event.data.__class__)
    process_id = None if listener is None else listener.by(own_event(event))
    if listener is not None and process_id is not None:
        await runner.hear(process_id, listener, event)
    return process_id


@asynccontextmanager
async def world(app: Application, *, now: datetime, deps: Any = None) -> AsyncGenerator[World]:
    """Run a whole app in memory during the block, with a clock that starts at `now`.

    `deps` replaces what `App(deps=…)` opens; without `deps`, that is opened. Raises `UsageError` for a time without a
    zone.

    ```python
    async with world(bank, now=datetime(2030, 1, 1, tzinfo=UTC)) as there:
        await there.jet.repository(Account).execute("a-1", Account.open, "ada")
        await there.pass_time(timedelta(days=1))
        assert there.now == datetime(2030, 1, 2, tzinfo=UTC)
    ```
    """
    if now.tzinfo is None:
        raise UsageError(f"{now.isoformat()} has no time zone. Give a time with its zone.")
    clock = WorldClock(now)
    opening = opened_deps(app) if deps is None else nullcontext(deps)
    async with opening as opened, open_in_memory(app, MemoryStore(app.name, clock.time_ns)) as jet:
        yield World(app, opened, jet, clock)
