"""Course booking, many short commands across two kinds of aggregate: `python -m benchmarks.booking`.

One after the other, and by sixteen tasks at once; every lap checks that exactly the right bookings stand. A booking is
one atomic append on both aggregates.
"""

from __future__ import annotations

import sys

from benchmarks import peers
from benchmarks.bookings import TASKS_MAX
from benchmarks.laps import result_of
from benchmarks.measure import Comparison, Figures, conditions, report
from benchmarks.options import parser_of
from benchmarks.peers import PYEVENTSOURCING, Program, python
from benchmarks.stores import Store, Stores

OURS = "eventjet"
REPLICATED = f"{OURS}, three replicas"
ON_POSTGRES = f"{PYEVENTSOURCING} on PostgreSQL"
TASKS = (1, TASKS_MAX)


def main(runs: int, count: int) -> int:
    print(conditions())
    figures: list[Figures] = []
    comparisons: list[Comparison] = []
    with Stores.opened() as stores:
        for tasks in TASKS:
            rate, p50, p99 = _measured(stores, runs, count, tasks)
            figures += [rate, p50, p99]
            comparisons += [
                Comparison(each, OURS, name, 1.0 if tasks > 1 and each is rate and name == ON_POSTGRES else None)
                for each in (rate, p50)
                for name in each.values
                if name != OURS
            ]
    report(figures, comparisons)
    return 0


def _measured(stores: Stores, runs: int, count: int, tasks: int) -> tuple[Figures, Figures, Figures]:
    """Rate, and the times of single bookings, of all subjects in turns."""
    job = f"course booking, {tasks} task{'s' if tasks > 1 else ''}"
    rate = Figures(job, "ops/s", higher_is_better=True)
    p50 = Figures(f"{job}: a booking, p50", "ms", higher_is_better=False)
    p99 = Figures(f"{job}: a booking, p99", "ms", higher_is_better=False)
    for _ in range(runs):
        for name, (store, program) in _subjects(stores, tasks).items():
            with store() as url:
                result = result_of(program(url, count, tasks))
            rate.add(name, result["count"] / result["wall_s"])
            p50.add(name, result["p50_ms"])
            p99.add(name, result["p99_ms"])
    return rate, p50, p99


def _subjects(stores: Stores, tasks: int) -> dict[str, tuple[Store, Program]]:
    own = python("book_ours")
    subjects: dict[str, tuple[Store, Program]] = {
        OURS: (stores.nats_always, own),
        f"{OURS}, synced every 2 minutes": (stores.nats_default, own),
        REPLICATED: (stores.nats_replicas, own),
    }
    executable = peers.pyeventsourcing_python()
    if executable is None:
        peers.left_out(PYEVENTSOURCING)
        return subjects
    program = python("book_pyeventsourcing", executable)
    subjects[ON_POSTGRES] = (stores.postgres, program)
    if tasks == 1:
        subjects[f"{PYEVENTSOURCING} on SQLite"] = (stores.sqlite, program)
    return subjects


if __name__ == "__main__":
    parser = parser_of(__doc__, runs=3)
    parser.add_argument("--count", type=int, default=1_000, help="bookings asked for (%(default)s)")
    options = parser.parse_args()
    sys.exit(main(options.runs, options.count))
