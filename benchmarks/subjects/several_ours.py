"""Decisions of several events: `python -m benchmarks.subjects.several_ours <job> <nats> <seconds> <tasks>`.

Job is `events` (two of one aggregate) or `aggregates` (one of each of two), with `-alone` where each save is a batch of
its own, as if others could not share it. Each task has aggregates of its own, which it has loaded before.
"""

from __future__ import annotations

import asyncio
import sys
import time
from decimal import Decimal
from functools import partial
from typing import Any, cast

from benchmarks.bank import Account, Deposited, bank
from benchmarks.postings import CURRENCY
from benchmarks.subjects.clock import Clock
from eventjet import Jet

WARM_UP_S = 0.3
_AMOUNT = Decimal(1)


async def main(job: str, server: str, seconds: float, tasks: int) -> None:
    async with bank.connect(servers=server, replicas=3 if "," in server else 1) as jet:
        await jet.init()
        unit, _, alone = job.partition("-")
        if alone:
            sender = cast("Any", jet.repository(Account).executor.store)._sender
            sender.send = partial(sender.send, alone=True)
        save = _two_events if unit == "events" else _two_aggregates
        until = time.monotonic() + WARM_UP_S
        first = await asyncio.gather(*(_saves(save, jet, task, until) for task in range(tasks)))
        clock = Clock()
        clock.start()
        until = time.monotonic() + seconds
        saved = await asyncio.gather(*(_saves(save, jet, task, until) for task in range(tasks)))
        clock.stop(sum(saved))
        await _check(jet, list(map(sum, zip(first, saved, strict=True))))


async def _saves(save: Any, jet: Jet, task: int, until: float) -> int:
    count = 0
    while not count or time.monotonic() < until:
        await save(jet, task)
        count += 1
    return count


def _deposit(account: Account) -> Deposited:
    return account.deposit("", _AMOUNT, CURRENCY, "")


def _deposit_twice(account: Account) -> list[Deposited]:
    return [_deposit(account)] * 2


async def _two_events(jet: Jet, task: int) -> None:
    await jet.repository(Account).execute(f"{task}-a", _deposit_twice)


async def _two_aggregates(jet: Jet, task: int) -> None:
    accounts = jet.repository(Account)
    await jet.transact(*(accounts.decide(f"{task}-{name}", _deposit) for name in "ab"))


async def _check(jet: Jet, saved: list[int]) -> None:
    accounts = jet.repository(Account)
    for task, count in enumerate(saved):
        balance = sum([(await accounts.load(f"{task}-{name}")).balance for name in "ab"])
        if balance != 2 * count * _AMOUNT:
            raise RuntimeError(f"task {task} made {count} saves, and its accounts hold {balance}")


if __name__ == "__main__":
    job, server, seconds, tasks = sys.argv[1:]
    asyncio.run(main(job, server, float(seconds), int(tasks)))
