"""The workload "bank": 10,000 accounts, chosen by zipf 0.8, and bodies of 240 to 264 bytes.

The same facts for every subject: who, when and in which account is the library's own business, the rest is the event's.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias
from uuid import NAMESPACE_URL, UUID, uuid5

from sqlalchemy import Column, Integer, MetaData, Numeric, String, Table

from eventjet import App, Recorded, aggregate, event, projection

ACCOUNTS = 10_000
SKEW = 0.8
CURRENCY = "EUR"
_REMARK = "Standing order 4711/2026: rent, heating and utilities for the flat in the back building, third floor left, ref. "
_NAMES = ("Ada", "Grace", "Barbara", "Katherine", "Margaret Hamilton")

Posting: TypeAlias = tuple[UUID, str, str, str, str]
"""(account, kind: deposited or withdrawn, tx id, amount, memo)."""


@event("account.deposited")
class Deposited:
    tx_id: str
    amount: Decimal
    currency: str
    memo: str


@event("account.withdrawn")
class Withdrawn:
    tx_id: str
    amount: Decimal
    currency: str
    memo: str


AccountEvent = Deposited | Withdrawn


@aggregate("account")
class Account:
    balance: Decimal = Decimal(0)

    def evolve(self, event: AccountEvent) -> Account:
        return self


metadata = MetaData()

balances_table = Table(
    "account_balance",
    metadata,
    Column("account_id", String(40), primary_key=True),
    Column("balance", Numeric(14, 2), nullable=False),
    Column("postings", Integer, nullable=False),
)


@dataclass(frozen=True, slots=True)
class Balance:
    account_id: str
    balance: Decimal
    postings: int


@projection("account_balance", table=balances_table)
def balances(row: Balance | None, event: Recorded[AccountEvent]) -> Balance:
    data = event.data
    amount = data.amount if type(data) is Deposited else -data.amount
    if row is None:
        return Balance(event.aggregate_id, amount, 1)
    return Balance(row.account_id, row.balance + amount, row.postings + 1)


bank = App("benchbank", aggregates=[Account], projections=[balances])


def postings(count: int, seed: int = 42) -> Iterator[Posting]:
    """The same postings for the same numbers: 70 % deposits, 30 % withdrawals, which may overdraw."""
    chance = random.Random(seed)
    accounts = [uuid5(NAMESPACE_URL, f"bank/{index}") for index in range(ACCOUNTS)]
    chance.shuffle(accounts)
    weights = list(itertools.accumulate((rank + 1) ** -SKEW for rank in range(ACCOUNTS)))
    for number in range(count):
        rank = bisect.bisect_left(weights, chance.random() * weights[-1])
        kind = "deposited" if chance.random() < 0.7 else "withdrawn"
        amount = f"{chance.randint(1, 9999)}.{chance.randint(0, 99):02d}"
        memo = f"{_REMARK}{chance.choice(_NAMES)} {number:08d} at the usual branch, in cash"
        yield accounts[min(rank, ACCOUNTS - 1)], kind, f"{chance.getrandbits(128):032x}", amount, memo


@dataclass(frozen=True, slots=True)
class Truth:
    """What every read model of the first `count` postings must hold."""

    count: int
    accounts: int
    total: Decimal
    """Sum of all balances."""
    first: str
    """Of the busiest account, whose balance is looked at by itself."""
    balance: Decimal
    postings: int

    def faults(self, found: dict[str, Any]) -> list[str]:
        """What `found` has of the names above and gets wrong."""
        told = {name: getattr(self, name) for name in ("accounts", "total", "balance", "postings")}
        return [
            f"{name} is {found.get(name)}, not {value}"
            for name, value in told.items()
            if Decimal(str(found.get(name, "NaN"))) != value
        ]


def truth(count: int, seed: int = 42) -> Truth:
    """By the plainest loop."""
    sums: dict[UUID, Decimal] = {}
    counts: dict[UUID, int] = {}
    for account, kind, _, amount, _ in postings(count, seed):
        sums[account] = sums.get(account, Decimal(0)) + (Decimal(amount) if kind == "deposited" else -Decimal(amount))
        counts[account] = counts.get(account, 0) + 1
    busiest = max(counts, key=lambda account: counts[account])
    return Truth(count, len(sums), sum(sums.values(), Decimal(0)), str(busiest), sums[busiest], counts[busiest])
