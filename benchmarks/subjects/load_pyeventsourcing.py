"""pyeventsourcing: `python -m benchmarks.subjects.load_pyeventsourcing <store> <length> <snapshots> <repeats>`."""

from __future__ import annotations

import sys
import time
from decimal import Decimal
from uuid import uuid4

from benchmarks.postings import CURRENCY
from benchmarks.subjects.clock import Clock
from benchmarks.subjects.load_ours import CHUNK, MEMO
from benchmarks.subjects.peer_pyeventsourcing import Account, Bank, environment


class Snapshotting(Bank):
    name = "bank"
    snapshotting_intervals = {Account: CHUNK}  # noqa: RUF012 - as its documentation declares it


def main(store: str, length: int, snapshots: bool, repeats: int) -> None:
    application = (Snapshotting if snapshots else Bank)(environment(store))
    each = Decimal("12.50")
    account = Account(uuid4(), f"{0:032x}", each, CURRENCY, MEMO)
    for number in range(1, length):
        account.deposit(f"{number:032x}", each, CURRENCY, MEMO)
        if number % CHUNK == 0:
            application.save(account)
    application.save(account)
    latencies: list[float] = []
    application.repository.get(account.id)
    clock = Clock()
    clock.start()
    for _ in range(repeats):
        started = time.perf_counter()
        loaded: Account = application.repository.get(account.id)
        latencies.append(time.perf_counter() - started)
        if loaded.balance != each * length:
            raise RuntimeError(f"it holds {loaded.balance} and must hold {each * length}")
    clock.stop(repeats, latencies)
    application.close()


if __name__ == "__main__":
    store, length, snapshots, repeats = sys.argv[1:]
    main(store, int(length), snapshots == "1", int(repeats))
