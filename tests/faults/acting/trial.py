"""Transfers between accounts, requested while their workers are killed; and the reckoning."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import TypeVar

from eventjet import Jet
from eventjet.errors import ConcurrencyConflict, OutcomeUnknown, StoreUnavailable, Unreachable
from eventjet.examples.transfer.accounts import Account, Book, Deposited, Withdrawn
from eventjet.examples.transfer.transfers import (
    Completed,
    CreditRefused,
    Failed,
    Refunded,
    Requested,
    Resumed,
    Stage,
    Transfer,
)
from tests.faults.acting.troupe import Troupe

T = TypeVar("T")

SOURCES, OPEN, CLOSED, FROZEN = 5, 5, 2, 3
START = Decimal(100_000)
PATIENCE = timedelta(seconds=6)
"""How long a transfer waits for a frozen account."""
ENDED_S = 400.0
_TENDED_S = 0.1


@dataclass
class Reckoning:
    """The counts at the end. `wrong` names every transfer that is not as it must be."""

    ends: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    money: Decimal = Decimal(0)
    expected: Decimal = Decimal(0)
    noted: Counter[str] = field(default_factory=Counter[str])
    mailed: Counter[str] = field(default_factory=Counter[str])
    early: int = 0
    latest_s: float = 0.0

    @property
    def is_right(self) -> bool:
        once = all(count == 1 for count in self.noted.values()) and len(self.noted) == self.ends.total()
        mailed = len(self.mailed) == self.ends.total()
        return not self.wrong and self.money == self.expected and once and mailed and not self.early

    def __str__(self) -> str:
        repeated = sum(count > 1 for count in self.mailed.values())
        return (
            f"{dict(self.ends)}; wrong {len(self.wrong)} {self.wrong[:3]}; money {self.money} of {self.expected}; "
            f"{len(self.noted)} noted, {sum(self.noted.values()) - len(self.noted)} of them again; {len(self.mailed)} "
            f"mailed, {repeated} more than once under the same key; deadlines: {self.early} early, at most "
            f"{self.latest_s:.1f} s late"
        )


async def insist(do: Callable[[], Awaitable[T]]) -> T:
    """Return the result, however often the log does not answer."""
    deadline = asyncio.get_running_loop().time() + ENDED_S
    while True:
        try:
            return await do()
        except (StoreUnavailable, OutcomeUnknown, Unreachable, ConcurrencyConflict, TimeoutError, OSError):
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.1)


class Transfers:
    """A run over an empty log of the app `transfers`."""

    def __init__(self, jet: Jet, seed: int) -> None:
        self.jet = jet
        self.chance = random.Random(seed)
        self.requested: dict[str, tuple[str, str]] = {}
        self.bonus = 0
        self.accounts = jet.repository(Account)
        self.transfers = jet.repository(Transfer)

    async def open(self) -> None:
        await self.jet.init()
        for number in range(SOURCES):
            await self.accounts.execute(f"s{number}", Account.deposit, START)
        for number in range(CLOSED):
            await self.accounts.execute(f"c{number}", Account.close)
        for number in range(FROZEN):
            await self.accounts.execute(f"f{number}", Account.freeze)

    async def ask(self) -> None:
        """Ask for one transfer, once, and have a rival write to an account that steps write to."""
        name, chance = f"t{len(self.requested)}", self.chance
        kind = chance.choices("ocf", (55, 15, 30))[0]
        target = f"{kind}{chance.randrange({'o': OPEN, 'c': CLOSED, 'f': FROZEN}[kind])}"
        source, amount = f"s{chance.randrange(SOURCES)}", Decimal(chance.randrange(1, 50))
        if chance.random() < 0.05:
            amount = START * 10  # more than there is
        self.requested[name] = (source, target)
        until = datetime.now(UTC) + PATIENCE
        once = self.transfers.command(f"ask-{name}")
        await insist(lambda: once.execute(name, Transfer.request, name, source, target, amount, until=until))
        rival = f"o{chance.randrange(OPEN)}"
        again = self.accounts.command(f"bonus-{name}")
        await insist(lambda: again.execute(rival, Account.deposit, Decimal(1)))
        self.bonus += 1

    async def ended(self, troupe: Troupe) -> bool:
        """Wait until every transfer has come to an end; False when that takes too long."""
        deadline = asyncio.get_running_loop().time() + ENDED_S
        open_ = list(self.requested)
        while open_ and asyncio.get_running_loop().time() < deadline:
            await asyncio.to_thread(troupe.tend)
            states = [(name, await insist(lambda name=name: self.transfers.load(name))) for name in open_]
            open_ = [name for name, state in states if state.stage is not Stage.ENDED]
            await asyncio.sleep(_TENDED_S)
        while asyncio.get_running_loop().time() < deadline:
            if (await insist(lambda: self.jet.repository(Book).load("all"))).notes >= len(self.requested):
                return not open_
            await asyncio.to_thread(troupe.tend)
            await asyncio.sleep(_TENDED_S)
        return False

    async def reckon(self, troupe: Troupe) -> Reckoning:
        """Count everything, by the log and by the mails that were sent."""
        reckoning = Reckoning(expected=START * SOURCES + self.bonus)
        withdrawn: Counter[str] = Counter()
        deposited: Counter[tuple[str, str]] = Counter()
        names = [
            f"{kind}{n}"
            for kind, count in zip("socf", (SOURCES, OPEN, CLOSED, FROZEN), strict=True)
            for n in range(count)
        ]
        for name in names:
            reckoning.money += (await self.accounts.load(name)).balance
            for event in await self.accounts.history(name):
                if isinstance(event.data, Withdrawn):
                    withdrawn[event.data.transfer] += 1
                elif isinstance(event.data, Deposited) and event.data.transfer:
                    deposited[event.data.transfer, name] += 1
        for name, (source, target) in self.requested.items():
            await self._reckon_transfer(
                reckoning, name, withdrawn[name], deposited[name, source], deposited[name, target]
            )
        reckoning.noted.update([event.data.transfer for event in await self.jet.repository(Book).history("all")])
        if troupe.outside.exists():
            reckoning.mailed.update(troupe.outside.read_text().split())
        return reckoning

    async def _reckon_transfer(self, reckoning: Reckoning, name: str, withdrawn: int, back: int, paid: int) -> None:
        history = await self.transfers.history(name)
        kinds = [type(event.data) for event in history]
        finals = [kind for kind in kinds if kind in (Completed, Refunded, Failed)]
        reckoning.ends[finals[0].__name__ if len(finals) == 1 else f"{len(finals)} ends"] += 1
        must = {Completed: (1, 0, 1), Refunded: (1, 1, 0), Failed: (0, 0, 0)}
        is_right = len(finals) == 1 and kinds[-1] is finals[0] and must[finals[0]] == (withdrawn, back, paid)
        if not is_right:
            reckoning.wrong.append(f"{name}: {[kind.__name__ for kind in kinds]} {(withdrawn, back, paid)}")
        first = history[0].data
        assert isinstance(first, Requested)
        for before, event in pairwise(history):
            if isinstance(event.data, Resumed):
                late_s = (event.recorded_at - before.recorded_at).total_seconds() - 2
            elif isinstance(event.data, CreditRefused) and event.data.reason == "it took too long":
                late_s = (event.recorded_at - first.until).total_seconds()
            else:
                continue
            reckoning.early += late_s < 0
            reckoning.latest_s = max(reckoning.latest_s, late_s)
