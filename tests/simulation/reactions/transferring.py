"""A schedule of a process with deadlines: transfers between accounts, some of which freeze, or close."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from eventjet.commands.repository import Repositories
from eventjet.domain.position import PAUSED
from eventjet.domain.recorded import Recorded
from eventjet.examples.transfer.accounts import Account, Deposited, Withdrawn
from eventjet.examples.transfer.transfers import (
    RETRY_AFTER,
    CreditRefused,
    Postponed,
    Requested,
    Resumed,
    Stage,
    Transfer,
)
from eventjet.projections.fold import aggregate_key_of
from tests.simulation.reactions.app import transferring
from tests.simulation.reactions.books import Broken
from tests.simulation.reactions.log import at_once
from tests.simulation.reactions.streams import BASE_NS

if TYPE_CHECKING:
    from tests.simulation.reactions.world import ReactionWorld

_TRANSFERS_MAX = 12
_LETTERS = {
    "Requested": "q", "Debited": "d", "Failed": "f", "Postponed": "p", "Resumed": "r", "CreditRefused": "x",
    "Completed": "c", "Refunded": "b",
}  # fmt: skip
_STORY = re.compile(r"q(f|d(pr)*(c|xb|pxb))")
"""The possible histories of a transfer, each step once."""
_START = Decimal(100)


class Transferring:
    """The app, its users, and the checks of its transfers."""

    may_be_skipped = False
    """Whether a cursor may be set beyond positions that are not done."""

    def __init__(self, world: ReactionWorld) -> None:
        self.app = transferring()
        self._world = world
        self._ids: list[str] = []
        self._stages: dict[str, bool] = {}
        self._seen = 0

    async def use(self) -> None:
        """Open accounts, then request transfers while accounts freeze, thaw and close."""
        world = self._world
        random = world.random
        own = self._repositories()
        accounts, transfers = own.of(Account), own.of(Transfer)
        names = [f"a{index}" for index in range(2 + int(random() * 4))]
        for name in names:
            await accounts.execute(name, Account.deposit, _START)
        for number in range(2 + int(random() * _TRANSFERS_MAX)):
            await asyncio.sleep(random() * random() * world.weather.calm_at / 5.0)
            if random() < 0.35:
                name = names[int(random() * len(names))]
                change = (Account.freeze, Account.freeze, Account.thaw, Account.close)[int(random() * 4)]
                await accounts.execute(name, change)
            first = int(random() * len(names))
            second = (first + 1 + int(random() * (len(names) - 1))) % len(names)
            self._ids.append(f"x{number}")
            until = datetime.fromtimestamp(BASE_NS / 1e9 + world.loop.now + 1.0 + random() * 15.0, UTC)
            amount = Decimal(1 + int(random() * 60))
            await transfers.execute(
                f"x{number}", Transfer.request, f"x{number}", names[first], names[second], amount, until=until
            )
        world.count("transfers", len(self._ids))

    def grown(self) -> None:
        """Take in the new records of the log: every event of a transfer wakes it."""
        world = self._world
        records = world.truth.all
        for position, _, subject, _, _ in records[self._seen :]:
            key = aggregate_key_of(subject)
            if key[0] == "transfer":
                world.books.relevant[position] = key
                # A step is handled when it is recorded: the next step follows from the newest state.
                world.books.first[position] = 0.0
            world.note("log", position, subject.decode())
        self._seen = len(records)

    async def handle(self, event: Recorded[Any], to: Any) -> None:
        """Fail, since this app has no reactor."""
        raise AssertionError

    def unsettled(self, living: set[str]) -> str:
        """Return what is not yet done, or an empty text."""
        world = self._world
        known = world.books.by_name["transfer"]
        if known.cursor.state == PAUSED:
            return "it is paused"
        if known.cursor.owner not in living:
            return f"transfer is {known.cursor.owner}'s, who is gone"
        for position, entry in known.entries.items():
            if entry.is_open:
                return f"position {position} is {entry.event.resolution}: {entry.event.reason}"
        for position in world.books.relevant:
            if not known.cursor.is_done(position):
                return f"it has not come to position {position}"
        transfers = self._repositories().of(Transfer)
        for transfer_id in self._ids:
            if not self._stages.get(transfer_id):
                self._stages[transfer_id] = at_once(transfers.load(transfer_id)).stage is Stage.ENDED
            if not self._stages[transfer_id]:
                return f"the transfer {transfer_id} has not ended"
        for subject in {record.subject for record in world.timers.records.values()}:
            if ".due." in subject:
                return f"{subject} has fired and is not cleared"
        return ""

    def check_end(self) -> None:
        """Raise `Broken` for a broken promise."""
        world = self._world
        own = self._repositories()
        moved: dict[tuple[str, str, str], int] = {}
        total = Decimal(0)
        accounts = {key[1] for key in map(aggregate_key_of, {record[2] for record in world.truth.all})}
        for name in sorted(account_id for account_id in accounts if account_id.startswith("a")):
            total += at_once(own.of(Account).load(name)).balance - _START
            for event in at_once(own.of(Account).history(name)):
                if isinstance(event.data, Withdrawn | Deposited) and event.data.transfer:
                    kind = type(event.data).__name__
                    moved[event.data.transfer, name, kind] = moved.get((event.data.transfer, name, kind), 0) + 1
        if total:
            raise Broken(f"there is {total} more money than before")
        for transfer_id in self._ids:
            self._check_transfer(at_once(own.of(Transfer).history(transfer_id)), moved)
        world.count("timer fired", sum(world.timers.fired.values()))
        world.count("timer fired twice", world.timers.twice)

    def _check_transfer(self, history: list[Recorded[Any]], moved: dict[tuple[str, str, str], int]) -> None:
        transfer_id = history[0].aggregate_id
        story = "".join(_LETTERS[type(event.data).__name__] for event in history)
        if not _STORY.fullmatch(story):
            raise Broken(f"the transfer {transfer_id} went {story}")
        request: Requested = history[0].data
        expected: dict[tuple[str, str, str], int] = {}
        if "d" in story:
            expected[transfer_id, request.source, "Withdrawn"] = 1
            expected[transfer_id, request.target if story.endswith("c") else request.source, "Deposited"] = 1
        if {key: times for key, times in moved.items() if key[0] == transfer_id} != expected:
            raise Broken(f"the transfer {transfer_id} went {story} and moved {moved}")
        for before, event in pairwise(history):
            if not isinstance(before.data, Postponed):
                continue
            after = event.recorded_at - before.recorded_at
            self._world.count(f"deadline: {type(event.data).__name__}")
            if isinstance(event.data, Resumed) and after < RETRY_AFTER:
                raise Broken(f"the transfer {transfer_id} was tried again after {after}")
            if isinstance(event.data, CreditRefused) and event.recorded_at < request.until - timedelta(milliseconds=1):
                raise Broken(f"the transfer {transfer_id} was given up {request.until - event.recorded_at} early")

    def _repositories(self) -> Repositories:
        return Repositories(self.app, self._world.truth)
