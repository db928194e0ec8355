"""A schedule of a process that listens: it counts each event once, and has each noted once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from eventjet.codec.records import Decoder
from eventjet.commands.repository import Repositories
from eventjet.domain.position import PAUSED
from eventjet.domain.quarantined import BLOCKED
from eventjet.domain.recorded import Recorded
from tests.simulation.reactions.app import POISON, Counted, Happened, Ledger, Thing, Told, hearing, tally_of
from tests.simulation.reactions.books import Broken
from tests.simulation.reactions.log import at_once

if TYPE_CHECKING:
    from tests.simulation.reactions.world import ReactionWorld

_EVENTS_MAX = 25


class Hearing:
    """The app, its users, and the checks of its listening process."""

    may_be_skipped = False
    """Whether a cursor may be set beyond positions that are not done."""

    def __init__(self, world: ReactionWorld) -> None:
        self.app = hearing()
        self._world = world
        self._positions: dict[int, int] = {}
        """The position of each number."""
        self._counted: list[int] = []
        self._seen = 0
        self._decode = Decoder(self.app.catalog)

    async def use(self) -> None:
        """Record numbers, now and then one that cannot be counted."""
        world = self._world
        random = world.random
        things = self._repositories().of(Thing)
        has_poison = random() < 0.3
        count = 3 + int(random() * _EVENTS_MAX)
        for number in range(1, count + 1):
            recorded_number = number + POISON if has_poison and random() < 0.1 else number
            await things.execute(f"t{int(random() * 4)}", Thing.happen, recorded_number)
            if random() < 0.4:
                await asyncio.sleep(random() * random() * world.weather.calm_at / 5.0)
        world.count("events to hear", count)

    def grown(self) -> None:
        """Take in the new records of the log."""
        world = self._world
        books, records = world.books, world.truth.all
        for record in records[self._seen :]:
            position = record[0]
            event: Recorded[Any] | None = self._decode(record)
            assert event is not None
            if isinstance(event.data, Happened):
                by = tally_of(event)
                if by is not None:
                    self._positions[event.data.number] = position
                    books.relevant[position] = "tally", by
            elif isinstance(event.data, Counted):
                self._counted.append(event.data.number)
                books.succeeded(self._positions[event.data.number])
            if isinstance(event.data, Counted | Told):
                # The next step follows from the newest state, so these events may be handled late.
                books.relevant[position] = "told", event.aggregate_id
                books.first[position] = 0.0
            world.note("log", position, type(event.data).__name__)
        self._seen = len(records)

    async def handle(self, event: Recorded[Any], to: Any) -> None:
        """Fail, since this app has no reactor."""
        raise AssertionError

    def unsettled(self, living: set[str]) -> str:
        """Return what is not yet done, or an empty text."""
        books = self._world.books
        known = books.by_name["tally"]
        if known.cursor.state == PAUSED:
            return "it is paused"
        if known.cursor.owner not in living:
            return f"tally is {known.cursor.owner}'s, who is gone"
        heads = {entry.key: entry for _, entry in sorted(known.entries.items(), reverse=True) if entry.is_open}
        for entry in heads.values():
            if entry.event.resolution == BLOCKED:
                return f"position {entry.position} is blocked"
        for position in books.relevant:
            if not known.cursor.is_done(position):
                return f"it has not come to position {position}"
        return ""

    def check_end(self) -> None:
        """Raise `Broken` for a broken promise."""
        world = self._world
        world.books.check_end()
        if len(set(self._counted)) < len(self._counted):
            raise Broken(f"something was counted twice: {self._counted}")
        if any(number >= POISON for number in self._counted):
            raise Broken("what cannot be counted was counted")
        ledgers = self._repositories().of(Ledger)
        noted_positions = sorted(
            event.data.position for name in ("l0", "l1") for event in at_once(ledgers.history(name))
        )
        waits = [entry for entry in world.books.by_name["tally"].entries.values() if entry.is_open]
        if len(set(noted_positions)) < len(noted_positions):
            raise Broken(f"something was noted twice: {noted_positions}")
        if not waits and noted_positions != sorted(self._counted):
            raise Broken(f"{noted_positions} was noted, and {sorted(self._counted)} counted")

    def _repositories(self) -> Repositories:
        return Repositories(self.app, self._world.truth)
