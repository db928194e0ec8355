"""pyeventsourcing's commands: `python -m benchmarks.subjects.commands_pyeventsourcing <store> <count> <tasks>`.

An application's method gets the aggregate, calls its decision and saves it, as its documentation has it. Several tasks
are threads, each writing to accounts of its own, with a connection for each of sixteen.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from uuid import UUID

from eventsourcing.application import AggregateNotFoundError

from benchmarks.postings import CURRENCY, Posting, balances, shares
from benchmarks.subjects.clock import Clock
from benchmarks.subjects.peer_pyeventsourcing import POOL, Account, Bank, environment


class Teller(Bank):
    """The commands."""

    name = "bank"

    def post(self, posting: Posting) -> int:
        """The position of what was recorded."""
        account_id, is_deposit, tx_id, text, memo = posting
        amount = Decimal(text)
        try:
            account: Account = self.repository.get(account_id)
        except AggregateNotFoundError:
            account = Account(account_id, tx_id, amount if is_deposit else -amount, CURRENCY, memo)
        else:
            (account.deposit if is_deposit else account.withdraw)(tx_id, amount, CURRENCY, memo)
        return self.save(account)[-1].notification.id


def main(store: str, count: int, tasks: int) -> None:
    teller = Teller({**environment(store), **(POOL if tasks > 1 else {})})
    latencies: list[float] = []

    def post(postings: list[Posting]) -> None:
        for posting in postings:
            started = time.perf_counter()
            teller.post(posting)
            latencies.append(time.perf_counter() - started)

    work = shares(count, tasks)
    clock = Clock()
    with ThreadPoolExecutor(tasks) as threads:
        clock.start()
        list(threads.map(post, work))
        clock.stop(len(latencies), latencies)
    for account, (balance, _) in list(balances(count).items())[:100]:
        loaded = teller.repository.get(UUID(account)).balance
        if loaded != balance:
            raise RuntimeError(f"{account} holds {loaded} and must hold {balance}")
    teller.close()


if __name__ == "__main__":
    store, count, tasks = sys.argv[1:]
    main(store, int(count), int(tasks))
