"""eventjet's commands: `python -m benchmarks.subjects.ours <job> <nats> <count> <tasks>`.

Job is `execute` (as an application calls it: hot aggregates are in the cache), `uncached` (every command loads first),
`warm` (as `execute`, and every account is loaded before the clock starts),
`publish` (the limit: the same events as bare publishes with an expected sequence, from known sequences). Several URLs,
separated by commas, are the servers of a cluster, on which the log has three replicas.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import TypeAlias
from uuid import UUID, uuid4

import orjson

from benchmarks.bank import Account, bank
from benchmarks.postings import CURRENCY, Posting, balances, postings, shares
from benchmarks.subjects.clock import Clock
from eventjet import Jet
from eventjet.codec.headers import EXPECTED, MSG_ID, header_block

Call: TypeAlias = Callable[[Posting], Awaitable[object]]


async def main(job: str, server: str, count: int, tasks: int) -> None:
    async with bank.connect(servers=server, replicas=3 if "," in server else 1) as jet:
        await jet.init()
        call = _publisher(jet) if job == "publish" else _executor(jet, cached=job != "uncached")
        if job == "warm":
            for name in {str(posting[0]) for posting in postings(count)}:
                await jet.repository(Account).load(name)
        latencies: list[float] = []
        clock = Clock()

        async def execute(postings: list[Posting]) -> None:
            for posting in postings:
                started = time.perf_counter()
                await call(posting)
                latencies.append(time.perf_counter() - started)

        work = shares(count, tasks)
        clock.start()
        await asyncio.gather(*map(execute, work))
        clock.stop(len(latencies), latencies)
        if job != "publish":
            await _check(jet, count)


def _executor(jet: Jet, *, cached: bool) -> Call:
    accounts = jet.repository(Account)

    async def call(posting: Posting) -> object:
        account, is_deposit, tx_id, amount, memo = posting
        name = str(account)
        if not cached:
            accounts.executor.cache.drop(name)
        decision = Account.deposit if is_deposit else Account.withdraw
        return await accounts.execute(name, decision, tx_id, Decimal(amount), CURRENCY, memo)

    return call


def _publisher(jet: Jet) -> Call:
    assert jet.client is not None
    client, sequences = jet.client, dict[UUID, int]()

    async def call(posting: Posting) -> object:
        account, _, tx_id, amount, memo = posting
        body = orjson.dumps({"tx_id": tx_id, "amount": amount, "currency": CURRENCY, "memo": memo})
        headers = header_block([(MSG_ID, str(uuid4())), (EXPECTED, str(sequences.get(account, 0)))])
        answer = await client.request(f"{bank.name}.account.{account}", body, headers)
        sequences[account] = orjson.loads(answer[4])["seq"]
        return answer

    return call


async def _check(jet: Jet, count: int) -> None:
    expected = balances(count)
    accounts = jet.repository(Account)
    for name in list(expected)[:100]:
        balance = (await accounts.load(name)).balance
        if balance != expected[name][0]:
            raise RuntimeError(f"{name} holds {balance} and must hold {expected[name][0]}")


if __name__ == "__main__":
    job, server, count, tasks = sys.argv[1:]
    asyncio.run(main(job, server, int(count), int(tasks)))
