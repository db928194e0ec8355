"""A schedule of a reactor that handles events, sometimes slowly, after failures, or never."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from eventjet.codec.subjects import cursor_name
from eventjet.commands.repository import Repositories
from eventjet.domain.position import PAUSED
from eventjet.domain.quarantined import QUARANTINED
from eventjet.domain.reactor import partition_of
from eventjet.domain.recorded import Recorded
from eventjet.projections.fold import aggregate_key_of
from tests.simulation.reactions.app import Happened, Ledger, Noted, Thing, reacting
from tests.simulation.reactions.books import Broken
from tests.simulation.reactions.log import at_once
from tests.simulation.reactions.loop import PROCESS

if TYPE_CHECKING:
    from tests.simulation.reactions.world import ReactionWorld

_EVENTS_MAX = 40


class Plan:
    """How the handling of an event goes."""

    def __init__(self, world: ReactionWorld) -> None:
        random = world.random
        self.seconds = random() * random() * (0.1 if random() < 0.8 else 2.0)
        self.fails = 0 if random() < 0.8 else 1 + int(random() * random() * 12.0)
        self.hangs = random() < 0.1
        """Whether an attempt hangs instead of failing."""
        self.passes = random() < 0.2
        """Whether its error is a passing one."""
        self.lines = int(random() * 3)
        self.tries = 0


class Reacting:
    """The app, its users, and its reactor with the effects of handling."""

    may_be_skipped = True
    """Whether a cursor may be set beyond positions that are not done."""

    def __init__(self, world: ReactionWorld) -> None:
        self.partitions = 1 if world.random() < 0.5 else 2 + int(world.random() * 3)
        self.app = reacting(self.partitions)
        self._world = world
        self._plans: dict[int, Plan] = {}
        self._seen = 0
        world.count(f"partitions {self.partitions}")

    async def use(self) -> None:
        """Record events, in bursts."""
        world = self._world
        random = world.random
        things = Repositories(self.app, world.truth).of(Thing)
        number = 0
        count = 3 + int(random() * _EVENTS_MAX)
        names = [f"t{index}" for index in range(1 + int(random() * 8))]
        while number < count:
            for _ in range(1 + int(random() * random() * 20)):
                number += 1
                await things.execute(names[int(random() * len(names))], Thing.happen, number)
            await asyncio.sleep(random() * random() * 2.0 * world.weather.calm_at / 8.0)
        world.count("events", number)

    def grown(self) -> None:
        """Take in the new records of the log."""
        books = self._world.books
        records = self._world.truth.all
        for position, _, subject, _, _ in records[self._seen :]:
            key = aggregate_key_of(subject)
            if key[0] == "thing":
                books.relevant[position] = key
        self._seen = len(records)

    async def handle(self, event: Recorded[Happened], to: Any) -> None:
        """Handle an event as the reactor does."""
        world = self._world
        process = PROCESS.get()
        assert process is not None
        key = event.aggregate, event.aggregate_id
        name = cursor_name("echo", partition_of(key, self.partitions), self.partitions)
        world.note(process.name, "begins", event.position)
        try:
            world.books.begins(name, process.name, event.position, world.loop.now)
        except Broken as error:
            world.broke(error)
        plan = self._plans.setdefault(event.position, Plan(world))
        plan.tries += 1
        await asyncio.sleep(plan.seconds)
        if plan.tries <= plan.fails:
            world.count("try that hangs" if plan.hangs else "try that passes" if plan.passes else "try that fails")
            if plan.hangs:
                await asyncio.sleep(60.0)
            raise OSError("for now") if plan.passes else ValueError("no")
        ledger = f"l{event.position % 2}"
        for line in range(plan.lines):
            if world.rules.once:
                await to.repository(Ledger).execute(ledger, Ledger.note, event.position, line)
            else:
                await to.repository(Ledger)._repository.execute(ledger, Ledger.note, event.position, line)
        world.note(process.name, "has handled", event.position)
        world.books.succeeded(event.position)

    def unsettled(self, living: set[str]) -> str:
        """Return what is not yet done, or an empty text."""
        books = self._world.books
        for name, known in books.by_name.items():
            cursor = known.cursor
            if cursor.state == PAUSED:
                return f"{name} is paused"
            if cursor.owner not in living:
                return f"{name} is {cursor.owner}'s, who is gone"
            heads: set[Any] = set()
            for position, entry in sorted(known.entries.items()):
                if entry.is_open and entry.key not in heads:
                    heads.add(entry.key)
                    if entry.event.resolution != QUARANTINED:
                        return f"position {position} is {entry.event.resolution}"
        for position, key in books.relevant.items():
            name = cursor_name("echo", partition_of(key, self.partitions), self.partitions)
            if not books.by_name[name].cursor.is_done(position):
                return f"{name} has not come to position {position}"
        return ""

    def check_end(self) -> None:
        """Raise `Broken` for a broken promise."""
        world = self._world
        world.books.check_end()
        ledgers = Repositories(self.app, world.truth).of(Ledger)
        counts: dict[tuple[int, int], int] = {}
        for name in ("l0", "l1"):
            for event in at_once(ledgers.history(name)):
                data: Noted = event.data
                counts[data.position, data.line] = counts.get((data.position, data.line), 0) + 1
        for (position, line), times in counts.items():
            if times > 1:
                raise Broken(f"line {line} for position {position} was noted {times} times")
        for position in world.books.first:
            for line in range(self._plans[position].lines):
                if (position, line) not in counts:
                    raise Broken(f"line {line} for position {position} was never noted")
