"""As `lag_ours`: `python -m benchmarks.subjects.lag_pyeventsourcing <store> <read model> <count> <per second>`.

A `ProjectionRunner` subscribes and commits an event at a time; `wait` is its own way to read one's writes.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

from eventsourcing.persistence import IntegrityError
from eventsourcing.projection import ProjectionRunner
from eventsourcing.utils import retry

from benchmarks.postings import Posting, postings
from benchmarks.subjects.clock import Clock
from benchmarks.subjects.commands_pyeventsourcing import Teller
from benchmarks.subjects.peer_pyeventsourcing import POOL, Balances, BalancesView, environment

THREADS = 16


def main(store: str, view: str, count: int, per_s: float) -> None:
    both = {**environment(store), **POOL, **environment(view, "BALANCES_")}
    latencies: list[float] = []
    with ProjectionRunner(
        application_class=Teller, projection_class=Balances, view_class=BalancesView, env=both
    ) as runner:
        teller = runner.app

        # Two threads may write to one account: then the library's own decorator tries again.
        post = retry(IntegrityError, max_attempts=50)(teller.post)

        def post_and_wait(posting: Posting) -> None:
            position = post(posting)
            started = time.perf_counter()
            runner.wait(position, timeout=30)
            latencies.append(time.perf_counter() - started)

        clock = Clock()
        waiting: list[Future[None]] = []
        begun = time.monotonic()
        clock.start()
        with ThreadPoolExecutor(THREADS) as threads:
            for number, posting in enumerate(postings(count)):
                time.sleep(max(0.0, begun + number / per_s - time.monotonic()))
                waiting.append(threads.submit(post_and_wait, posting))
        for each in waiting:
            each.result()
        clock.stop(len(latencies), latencies)


if __name__ == "__main__":
    store, view, count, per_s = sys.argv[1:]
    main(store, view, int(count), float(per_s))
