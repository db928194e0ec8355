"""Commands with an id on a long history: `python -m benchmarks.subjects.known_ids <nats> <events> <commands>`.

Each event of the history was recorded by a command of its own, and the aggregate has no snapshots: the id of each new
command is one of all that must be told from.
"""

from __future__ import annotations

import asyncio
import sys
import time
from decimal import Decimal

from benchmarks.bank import Account, Deposited, bank
from benchmarks.subjects.clock import Clock
from eventjet import Imported


async def main(server: str, events: int, commands: int) -> None:
    async with bank.connect(servers=server) as jet:
        await jet.init()
        past = (
            Imported(Account, "a", Deposited(tx_id=str(number), amount=Decimal(1), currency="EUR", memo="past"))
            for number in range(events)
        )
        await jet.append_many(past, source="past")
        accounts = jet.repository(Account)
        await accounts.load("a")
        latencies: list[float] = []
        clock = Clock()
        clock.start()
        for number in range(commands):
            started = time.perf_counter()
            await accounts.command(f"new-{number}").execute("a", Account.deposit, "x", Decimal(1), "EUR", "new")
            latencies.append(time.perf_counter() - started)
        clock.stop(commands, latencies)
        again = await accounts.command("past/1").execute("a", Account.deposit, "0", Decimal(1), "EUR", "past")
        if (await accounts.load("a")).balance != events + commands or again.version != 1:
            raise RuntimeError("a command that was recorded before was recorded again")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
