"""From a command's answer to its row: `python -m benchmarks.subjects.lag_ours <nats> <database> <count> <per second>`.

Commands leave at a steady rate whatever became of earlier ones; each waits until a worker, another process, has its
event in SQL.
"""

from __future__ import annotations

import asyncio
import sys
import time
from decimal import Decimal

from benchmarks.bank import Account, balances, bank
from benchmarks.postings import CURRENCY, Posting, postings
from benchmarks.subjects.clock import Clock


async def main(server: str, database: str, count: int, per_s: float) -> None:
    async with bank.connect(servers=server, database=database) as jet:
        accounts = jet.repository(Account)
        latencies: list[float] = []

        async def execute_and_wait(posting: Posting) -> None:
            account, is_deposit, tx_id, amount, memo = posting
            decision = Account.deposit if is_deposit else Account.withdraw
            done = await accounts.execute(str(account), decision, tx_id, Decimal(amount), CURRENCY, memo)
            started = time.perf_counter()
            await jet.caught_up(balances.name, position=done.position, timeout_s=30)
            latencies.append(time.perf_counter() - started)

        clock = Clock()
        begun = time.monotonic()
        clock.start()
        async with asyncio.TaskGroup() as tasks:
            for number, posting in enumerate(postings(count)):
                await asyncio.sleep(max(0.0, begun + number / per_s - time.monotonic()))
                tasks.create_task(execute_and_wait(posting))
        clock.stop(len(latencies), latencies)


if __name__ == "__main__":
    server, database, count, per_s = sys.argv[1:]
    asyncio.run(main(server, database, int(count), float(per_s)))
