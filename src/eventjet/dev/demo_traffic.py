"""The demo's traffic: commands from concurrent tasks on two connections, and an import of old accounts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from itertools import count
from typing import Any

from eventjet.examples.demo_bank import Account, Deposited, InsufficientFunds, Opened
from eventjet.jet import Jet
from eventjet.repository import Imported

TASKS = 64
"""Commands in flight at once."""
_HOT = 10
"""So many accounts get a twentieth of all commands, on both connections: there they meet."""
_EVENTS_PER_ACCOUNT = 40
_BLOCK = 100
"""Imported accounts whose events are mixed with each other's."""
_PAUSE_S = 0.02


@dataclass(slots=True)
class DemoTally:
    """What became of the commands."""

    sent: int = 0
    recorded: int = 0
    refused: int = 0
    """The decision said no: too little money."""
    decided: int = 0
    """Decisions made; those beyond one a command followed a conflict."""


_Order = tuple[int, int, Any, Any]
"""One command: number of its account, number of its connection, decision, argument."""


class Traffic:
    """Commands on a number of accounts; two connections, as two processes would have.

    Each account has its connection, except that commands on the hot ones come by either.
    """

    def __init__(self, jets: Sequence[Jet], accounts: int) -> None:
        self._repositories = [jet.repository(Account) for jet in jets]
        self._accounts = accounts
        self._random = random.Random(0)  # noqa: S311  traffic, the same in every run

    async def open_accounts(self, progress: Callable[[int], None]) -> DemoTally:
        orders = ((number, number, Account.open, f"owner {number}") for number in range(self._accounts))
        return await self._execute_all(orders, progress)

    async def run(self, commands: int, progress: Callable[[int], None]) -> DemoTally:
        return await self._execute_all((self._order() for _ in range(commands)), progress)

    @asynccontextmanager
    async def kept_up(self) -> AsyncGenerator[DemoTally]:
        """A few dozen commands a second during the block; the tally is complete after it."""
        tally = DemoTally()
        stop = asyncio.Event()

        async def keep_on() -> None:
            while not stop.is_set():
                await self._execute(self._order(), tally)
                await asyncio.sleep(_PAUSE_S)

        arriving = asyncio.create_task(keep_on())
        try:
            yield tally
        finally:
            stop.set()
            await arriving

    def _order(self) -> _Order:
        chance = self._random
        hot = chance.random() < 0.05
        number = chance.randrange(min(_HOT, self._accounts) if hot else self._accounts)
        decide = Account.deposit if chance.random() < 0.6 else Account.withdraw
        by = chance.randrange(len(self._repositories)) if hot else number
        return number, by, decide, Decimal(chance.randrange(100, 30_000)) / 100

    async def _execute_all(self, orders: Iterator[_Order], progress: Callable[[int], None]) -> DemoTally:
        """`TASKS` tasks that take from one iterator, so each waits for nobody but the log."""
        tally = DemoTally()

        async def take() -> None:
            for order in orders:
                await self._execute(order, tally)
                progress(tally.sent)

        async with asyncio.TaskGroup() as group:
            for _ in range(TASKS):
                group.create_task(take())
        return tally

    async def _execute(self, order: _Order, tally: DemoTally) -> None:
        number, by, decide, argument = order
        repository = self._repositories[by % len(self._repositories)]

        def decision(state: Any) -> Any:
            tally.decided += 1
            return decide(state, argument)

        try:
            done = await repository.execute(f"a-{number:05d}", decision)
            tally.recorded += len(done.events)
        except InsufficientFunds:
            tally.refused += 1
        tally.sent += 1


def old_account_id(number: int) -> str:
    """The id of an account that the demo imports."""
    return f"old-{number:05d}"


def old_accounts(events: int) -> Iterator[Imported]:
    """So many events of accounts from elsewhere, each account's in order, a block's mixed."""
    chance = random.Random(1)  # noqa: S311  amounts, the same in every run
    for first in count(step=_BLOCK):
        for number in range(_EVENTS_PER_ACCOUNT):
            for account in range(first, first + _BLOCK):
                if not events:
                    return
                events -= 1
                amount = Decimal(chance.randrange(100, 10_000)) / 100
                event = Deposited(amount=amount) if number else Opened(owner=f"owner {account}")
                yield Imported(Account, old_account_id(account), event)
