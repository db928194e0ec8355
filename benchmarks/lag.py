"""From a command's answer to its row in PostgreSQL, at a steady rate: `python -m benchmarks.lag`."""

from __future__ import annotations

import sys

from benchmarks import peers
from benchmarks.laps import initialise, result_of, running_worker
from benchmarks.measure import Comparison, Figures, conditions, report
from benchmarks.options import parser_of
from benchmarks.peers import PYEVENTSOURCING, python
from benchmarks.postings import balances
from benchmarks.readmodel import check
from benchmarks.stores import Stores

OURS = "eventjet"
P99_MAX_MS = 50.0


def _ours(stores: Stores, count: int, per_s: int) -> dict[str, float]:
    with stores.nats_always() as nats, stores.postgres() as database:
        initialise(nats, database)
        with running_worker(nats, database):
            result = result_of(python("lag_ours")(nats, database, count, per_s))
        check(database, balances(count), in_cents=False)
    return result


def _theirs(stores: Stores, executable: str, count: int, per_s: int) -> dict[str, float]:
    with stores.postgres() as store, stores.postgres() as view:
        result = result_of(python("lag_pyeventsourcing", executable)(store, view, count, per_s))
        check(view, balances(count), in_cents=True)
    return result


def main(runs: int, count: int, per_s: int) -> int:
    print(conditions())
    p50 = Figures(f"command to row at {per_s}/s: p50", "ms", higher_is_better=False)
    p99 = Figures(f"command to row at {per_s}/s: p99", "ms", higher_is_better=False)
    reached = Figures(f"command to row at {per_s}/s: rate reached", "ops/s", higher_is_better=True)
    executable = peers.pyeventsourcing_python()
    if executable is None:
        peers.left_out(PYEVENTSOURCING)

    def note(name: str, result: dict[str, float]) -> None:
        if result["count"] != count:
            raise RuntimeError(f"{name} saw {result['count']:.0f} of {count} rows")
        p50.add(name, result["p50_ms"])
        p99.add(name, result["p99_ms"])
        reached.add(name, count / result["wall_s"])

    with Stores.opened() as stores:
        for _ in range(runs):
            note(OURS, _ours(stores, count, per_s))
            if executable is not None:
                note(PYEVENTSOURCING, _theirs(stores, executable, count, per_s))
    comparisons = [Comparison(each, OURS, name) for each in (p50, p99) for name in each.values if name != OURS]
    report([p50, p99, reached], comparisons, f"  aimed at: p99 of {OURS} at most {P99_MAX_MS:g} ms")
    return 0


if __name__ == "__main__":
    parser = parser_of(__doc__, runs=3)
    parser.add_argument("--count", type=int, default=1_200)
    parser.add_argument("--per-s", type=int, default=200)
    options = parser.parse_args()
    sys.exit(main(options.runs, options.count, options.per_s))
