"""What limits a load at a snapshot, a direct get: `python -m benchmarks.subjects.get <nats> <repeats>`."""

from __future__ import annotations

import asyncio
import sys
import time
from decimal import Decimal

from benchmarks.bank import Account, bank
from benchmarks.postings import CURRENCY, postings
from benchmarks.subjects.clock import Clock


async def main(server: str, repeats: int) -> None:
    async with bank.connect(servers=server) as jet:
        await jet.init()
        ((_, _, tx_id, amount, memo),) = postings(1)
        await jet.repository(Account).execute("a", Account.deposit, tx_id, Decimal(amount), CURRENCY, memo)
        assert jet.client is not None
        subject = f"$JS.API.DIRECT.GET.{bank.name}.{bank.name}.account.a"
        latencies: list[float] = []
        clock = Clock()
        clock.start()
        for _ in range(repeats):
            started = time.perf_counter()
            await jet.client.request(subject)
            latencies.append(time.perf_counter() - started)
        clock.stop(repeats, latencies)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
