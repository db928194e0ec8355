"""eventsource-py's loads: `python -m benchmarks.subjects.load_eventsource <store> <length> 0 <repeats>`."""

from __future__ import annotations

import asyncio
import sys
import time
from decimal import Decimal
from uuid import uuid4

from eventsource import AggregateRepository

from benchmarks.postings import CURRENCY
from benchmarks.subjects.clock import Clock
from benchmarks.subjects.commands_eventsource import Account, Deposit
from benchmarks.subjects.peer_eventsource import close, create_schema, open_store

CHUNK = 100
MEMO = "Standing order 4711/2026: rent, heating and utilities for the flat in the back building, third floor left"


async def main(store_url: str, length: int, repeats: int) -> None:
    store, engine = open_store(store_url)
    await create_schema(engine)
    accounts = AggregateRepository(event_store=store, aggregate_factory=Account, enable_tracing=False)
    name, each = uuid4(), Decimal("12.50")
    account = accounts.create_new(name)
    for number in range(length):
        command = Deposit(account_id=name, tx_id=f"{number:032x}", amount=each, currency=CURRENCY, memo=MEMO)
        account.execute(command)
        if (number + 1) % CHUNK == 0 or number + 1 == length:
            await accounts.save_all([account])
    latencies: list[float] = []
    await accounts.load(name)
    clock = Clock()
    clock.start()
    for _ in range(repeats):
        started = time.perf_counter()
        loaded = await accounts.load(name)
        latencies.append(time.perf_counter() - started)
        if loaded.state.balance != each * length:
            raise RuntimeError(f"it holds {loaded.state.balance} and must hold {each * length}")
    clock.stop(repeats, latencies)
    await close(store, engine)


if __name__ == "__main__":
    store_url, length, _, repeats = sys.argv[1:]
    asyncio.run(main(store_url, int(length), int(repeats)))
