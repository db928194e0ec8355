"""eventjet's loads: `python -m benchmarks.subjects.load_ours <nats> <length> <snapshots: 0 or 1> <repeats>`.

Loads go past the cache, as in a process that has not seen the aggregate. With snapshots one is written every hundred
events; without, the whole history is read.
"""

from __future__ import annotations

import asyncio
import sys
import time
from decimal import Decimal
from typing import Any

from benchmarks.subjects.clock import Clock
from eventjet import App, aggregate, event

CHUNK = 100
TAIL = 50
"""Events after the last snapshot."""
MEMO = "Standing order 4711/2026: rent, heating and utilities for the flat in the back building, third floor left"


@event("account.deposited")
class Deposited:
    tx_id: str
    amount: Decimal
    currency: str
    memo: str


@aggregate("plain")
class Plain:
    balance: Decimal = Decimal(0)

    def evolve(self, event: Deposited) -> Plain:
        return Plain(balance=self.balance + event.amount)


@aggregate("account", snapshot_every=CHUNK)
class Account:
    balance: Decimal = Decimal(0)

    def evolve(self, event: Deposited) -> Account:
        return Account(balance=self.balance + event.amount)


def _deposits(count: int) -> list[Deposited]:
    return [Deposited(tx_id=f"{n:032x}", amount=Decimal("12.50"), currency="EUR", memo=MEMO) for n in range(count)]


async def main(server: str, length: int, snapshots: bool, repeats: int) -> None:
    account_class: Any = Account if snapshots else Plain
    app = App("benchload", aggregates=[account_class])
    async with app.connect(servers=server) as jet:
        await jet.init()
        accounts = jet.repository(account_class)
        left = length
        while left > 0:
            # The last save leaves a tail behind the snapshot, as it usually is.
            chunk = min(CHUNK, left) if left <= TAIL or left > CHUNK else left - min(TAIL, left // 2)
            await accounts.execute("a", lambda _, n=chunk: _deposits(n))
            left -= chunk
        due = Decimal("12.50") * length
        latencies: list[float] = []
        accounts.executor.cache.drop("a")
        await accounts.load("a")
        clock = Clock()
        clock.start()
        for _ in range(repeats):
            accounts.executor.cache.drop("a")
            started = time.perf_counter()
            state = await accounts.load("a")
            latencies.append(time.perf_counter() - started)
            if state.balance != due:
                raise RuntimeError(f"it holds {state.balance} and must hold {due}")
        clock.stop(repeats, latencies)


if __name__ == "__main__":
    server, length, snapshots, repeats = sys.argv[1:]
    asyncio.run(main(server, int(length), snapshots == "1", int(repeats)))
