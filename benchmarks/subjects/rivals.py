"""A process of rivals: `python -m benchmarks.subjects.rivals <nats> <number> <connections> <aggregates> <seconds>`.

Opens its connections, says so, waits for a line, and carries out commands over each of them, one after the other, on
aggregates drawn at random. What has begun when the seconds are over is ended. Rivals share the aggregates.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from decimal import Decimal
from random import Random
from typing import Any

from benchmarks.bank import Account, bank
from eventjet import Jet
from eventjet.errors import ConcurrencyConflict


async def main(server: str, number: int, connections: int, aggregates: int, seconds: int) -> None:
    async with AsyncExitStack() as stack:
        rivals = [
            Rival(await stack.enter_async_context(bank.connect(servers=server)), number * connections + index)
            for index in range(connections)
        ]
        for rival in rivals:
            await rival.accounts.load("a0")
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        started, cpu = time.time(), time.process_time()
        await asyncio.gather(*(rival.run(aggregates, seconds) for rival in rivals))
        result = {
            "began": started,
            "ended": time.time(),
            "cpu_s": time.process_time() - cpu,
            "conflicts": sum(rival.conflicts for rival in rivals),
            "failed": sum(rival.failed for rival in rivals),
            "latencies_ms": [[round(latency * 1e3, 3) for latency in rival.latencies] for rival in rivals],
        }
        print(json.dumps(result), flush=True)


class Rival:
    """One connection."""

    def __init__(self, jet: Jet, seed: int) -> None:
        self.conflicts = self.failed = 0
        self.latencies: list[float] = []
        self.accounts = jet.repository(Account)
        self._random = Random(seed)
        store: Any = jet.store
        self._append = store.append
        store.append = self._counted

    async def _counted(self, writes: Any) -> int:
        try:
            return await self._append(writes)
        except ConcurrencyConflict:
            self.conflicts += 1
            raise

    async def run(self, aggregates: int, seconds: int) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            name = f"a{self._random.randrange(aggregates)}"
            started = time.perf_counter()
            try:
                await self.accounts.execute(name, Account.deposit, "x", Decimal(1), "EUR", "of a rival")
            except ConcurrencyConflict:
                self.failed += 1
            self.latencies.append(time.perf_counter() - started)


if __name__ == "__main__":
    server, *numbers = sys.argv[1:]
    asyncio.run(main(server, *map(int, numbers)))
