"""Decisions of several events, each save by itself and sharing batches: `python -m benchmarks.several`.

Prints the table of "Several events in one decision" in docs/reference/performance.md: saves a second, the medians of
laps taken in turns, each on a server of its own. Every lap checks that each save is in the log once.
"""

from __future__ import annotations

import sys
import time
from statistics import median

from benchmarks.laps import result_of
from benchmarks.measure import conditions
from benchmarks.options import parser_of
from benchmarks.peers import python
from benchmarks.stores import Stores

JOBS = ("events-alone", "events", "aggregates-alone", "aggregates")
TASKS = (1, 16, 64)


def main(runs: int, seconds: float) -> int:
    started = time.monotonic()
    print(conditions())
    program = python("several_ours")
    with Stores.opened() as stores:
        places = {
            "one replica": stores.nats_always,
            "one replica, synced every 2 minutes": stores.nats_default,
            "three replicas": stores.nats_replicas,
        }
        print("| | tasks | two events, by itself | sharing | two aggregates, by itself | sharing |")
        print("|---|---:|---:|---:|---:|---:|")
        for name, store in places.items():
            for tasks in TASKS:
                rates: dict[str, list[float]] = {job: [] for job in JOBS}
                for job in runs * JOBS:
                    with store() as url:
                        result = result_of(program(job, url, seconds, tasks))
                    rates[job].append(result["count"] / result["wall_s"])
                medians = " | ".join(f"{median(values):,.0f}" for values in rates.values())
                print(f"| {name if tasks == TASKS[0] else ''} | {tasks} | {medians} |", flush=True)
    print(f"took {time.monotonic() - started:.0f} s; {conditions()}")
    return 0


if __name__ == "__main__":
    parser = parser_of(__doc__, runs=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a lap (%(default)s)")
    options = parser.parse_args()
    sys.exit(main(options.runs, options.seconds))
