"""The bank's postings into JetStream: `python -m benchmarks.subjects.append_ours import|fill <nats> <count>`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from decimal import Decimal

from benchmarks.bank import Account, Deposited, Withdrawn, bank
from benchmarks.log import fill
from benchmarks.postings import CURRENCY, postings
from benchmarks.subjects.clock import Clock
from eventjet import Imported


def _events(count: int) -> Iterator[Imported]:
    for account, is_deposit, tx_id, amount, memo in postings(count):
        made = Deposited if is_deposit else Withdrawn
        event = made(tx_id=tx_id, amount=Decimal(amount), currency=CURRENCY, memo=memo)
        yield Imported(Account, str(account), event)


async def imported(server: str, count: int) -> None:
    async with bank.connect(servers=server) as jet:
        await jet.init()
        clock = Clock()
        clock.start()
        report = await jet.append_many(_events(count), source="bench")
        clock.stop(report.stored)


def filled(server: str, count: int) -> None:
    clock = Clock()
    clock.start()
    fill(server, count)
    clock.stop(count)


if __name__ == "__main__":
    job, server, count = sys.argv[1:]
    if job == "import":
        asyncio.run(imported(server, int(count)))
    else:
        filled(server, int(count))
