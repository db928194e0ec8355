"""Course booking, many short commands across two kinds of aggregate: `python -m benchmarks.booking`.

One after the other; every lap checks that exactly the right bookings stand. A booking is one atomic append on both
aggregates.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks import peers
from benchmarks.laps import told
from benchmarks.measure import Comparison, Figures, conditions, keep, show
from benchmarks.peers import PYEVENTSOURCING, Program, python
from benchmarks.stores import Store, Stores

OURS = "eventjet"


def main(runs: int, count: int) -> int:
    started = time.monotonic()
    print(conditions())
    rate = Figures("course booking, 1 task", "ops/s", higher_is_better=True)
    p50 = Figures("course booking, 1 task: a booking, p50", "ms", higher_is_better=False)
    p99 = Figures("course booking, 1 task: a booking, p99", "ms", higher_is_better=False)
    with Stores.opened() as stores:
        subjects: dict[str, tuple[Store, Program]] = {OURS: (stores.nats_always, python("book_ours"))}
        subjects[f"{OURS}, synced every 2 minutes"] = (stores.nats_default, python("book_ours"))
        executable = peers.pyeventsourcing_python()
        if executable is None:
            peers.left_out(PYEVENTSOURCING)
        else:
            program = python("book_pyeventsourcing", executable)
            subjects[f"{PYEVENTSOURCING} on PostgreSQL"] = (stores.postgres, program)
            subjects[f"{PYEVENTSOURCING} on SQLite"] = (stores.sqlite, program)
        for _ in range(runs):
            for name, (store, program) in subjects.items():
                with store() as url:
                    found = told(program(url, count))
                rate.add(name, found["count"] / found["wall_s"])
                p50.add(name, found["p50_ms"])
                p99.add(name, found["p99_ms"])
    for one in (rate, p50, p99):
        one.show()
    comparisons = [Comparison(one, OURS, name) for one in (rate, p50) for name in one.values if name != OURS]
    show(comparisons)
    keep([rate, p50, p99], comparisons)
    print(f"took {time.monotonic() - started:.0f} s; {conditions()}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--count", type=int, default=1_000, help="bookings asked for (%(default)s)")
    given = parser.parse_args()
    sys.exit(main(given.runs, given.count))
