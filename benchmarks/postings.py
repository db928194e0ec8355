"""The workload "bank", in plain Python: 10,000 accounts, chosen by zipf 0.8, and what their balances must come to.

The same facts for every subject. Who, when and in which account is each library's own business; the rest is the
event's, so long that eventjet's bodies are 240 to 264 bytes.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import TypeAlias
from uuid import NAMESPACE_URL, UUID, uuid5

ACCOUNTS = 10_000
SKEW = 0.8
CURRENCY = "EUR"
_REMARK = (
    "Standing order 4711/2026: rent, heating and utilities for the flat in the back building, third floor left, no. "
)
_NAMES = ("Ada", "Grace", "Barbara", "Katherine", "Margaret H. Hamilton")

Posting: TypeAlias = tuple[UUID, bool, str, str, str]
"""(account, whether it is a deposit and not a withdrawal, tx id, amount, memo)."""


def postings(count: int, seed: int = 42) -> Iterator[Posting]:
    """The same postings for the same numbers: 70 % deposits, 30 % withdrawals, which may overdraw."""
    chance = random.Random(seed)
    accounts = [uuid5(NAMESPACE_URL, f"bank/{index}") for index in range(ACCOUNTS)]
    chance.shuffle(accounts)
    weights = list(itertools.accumulate((rank + 1) ** -SKEW for rank in range(ACCOUNTS)))
    for number in range(count):
        rank = bisect.bisect_left(weights, chance.random() * weights[-1])
        is_deposit = chance.random() < 0.7
        amount = f"{chance.randint(1, 9999)}.{chance.randint(0, 99):02d}"
        memo = f"{_REMARK}{chance.choice(_NAMES)} {number:08d} at the usual branch, in cash"
        yield accounts[min(rank, ACCOUNTS - 1)], is_deposit, f"{chance.getrandbits(128):032x}", amount, memo


def balances(count: int, seed: int = 42) -> dict[str, tuple[Decimal, int]]:
    """What every read model of the first `count` postings must hold: account → (balance, postings)."""
    rows: dict[UUID, tuple[Decimal, int]] = {}
    for account, is_deposit, _, amount, _ in postings(count, seed):
        balance, number = rows.get(account, (Decimal(0), 0))
        rows[account] = (balance + (Decimal(amount) if is_deposit else -Decimal(amount)), number + 1)
    return {str(account): row for account, row in rows.items()}


def shares(count: int, tasks: int) -> list[list[Posting]]:
    """The first `count` postings for so many tasks that write at once, each to accounts of its own, in their order."""
    by_task: list[list[Posting]] = [[] for _ in range(tasks)]
    owner: dict[UUID, int] = {}
    for posting in postings(count):
        task = owner.setdefault(posting[0], len(owner) % tasks)
        by_task[task].append(posting)
    return by_task
