"""Bulk append of the bank's postings: `python -m benchmarks.append`.

eventjet imports with `append_many`, and once more when everything is there. pyeventsourcing saves 500 events at a time.
By hand they are pipelined publishes, and atomic batches that were made before the clock started, on one replica and on
three. Every acknowledgement is awaited, and counts are checked.
"""

from __future__ import annotations

import sys

from benchmarks import peers
from benchmarks.laps import result_of
from benchmarks.measure import Comparison, Figures, conditions, report
from benchmarks.options import parser_of
from benchmarks.peers import PYEVENTSOURCING, python
from benchmarks.stores import Stores

OURS = "eventjet: append_many"
AGAIN = "eventjet: append_many, repeated"
LIMIT = "by hand: pipelined publishes, each synced"
BATCHES = "by hand: ready batches of 1,000"
AIM = 3.0


def main(runs: int, count: int) -> int:
    print(conditions())
    figures = Figures("bulk append", "events/s", higher_is_better=True)
    theirs = f"{PYEVENTSOURCING} on PostgreSQL, 500 a save"
    executable = peers.pyeventsourcing_python()
    with Stores.opened() as stores:
        for _ in range(runs):
            for name, job in ((OURS, "import"), (AGAIN, "again"), (LIMIT, "fill"), (BATCHES, "batches")):
                with stores.nats_always() as nats:
                    _note(figures, name, result_of(python("append_ours")(job, nats, count)), count)
            for name, job in ((OURS, "import"), (BATCHES, "batches")):
                with stores.nats_replicas() as nats:
                    result = result_of(python("append_ours")(job, nats, count, 3))
                    _note(figures, f"{name}, three replicas", result, count)
            if executable is not None:
                with stores.postgres() as store:
                    result = result_of(python("append_pyeventsourcing", executable)(store, count))
                    _note(figures, theirs, result, count)
    comparisons = [
        Comparison(figures, OURS, name, AIM if name == theirs else None) for name in figures.values if name != OURS
    ]
    report([figures], comparisons)
    return 0


def _note(figures: Figures, name: str, result: dict[str, float], count: int) -> None:
    if result["count"] != count:
        raise RuntimeError(f"{name} stored {result['count']:.0f} of {count} events")
    figures.add(name, count / result["wall_s"])


if __name__ == "__main__":
    parser = parser_of(__doc__, runs=3)
    parser.add_argument("--count", type=int, default=20_000)
    options = parser.parse_args()
    sys.exit(main(options.runs, options.count))
