"""Loads of one aggregate of 10 to 10,000 events, with and without snapshots: `python -m benchmarks.loads`.

Subjects take turns, each lap in a process of its own on a store of its own; every load's balance is checked. Peers
without a row for snapshots have them, but take them by hand.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from benchmarks import peers
from benchmarks.laps import result_of
from benchmarks.measure import Comparison, Figures, conditions, report
from benchmarks.options import parser_of
from benchmarks.peers import EVENTSOURCE, PYEVENTSOURCING, Program, python
from benchmarks.stores import Store, Stores

OURS = "eventjet"
LIMIT = "limit by hand: one direct get of the last message"
LENGTHS = (10, 100, 1_000, 10_000)
_TARGETS = {
    ("load of 1,000 events", PYEVENTSOURCING): 2.0,
    **{(f"load of {length:,} events, with snapshots", LIMIT): 1 / 1.5 for length in LENGTHS if length >= 100},
}
"""From a hundred events on there is a snapshot: two gets that travel together take 1.5 times one at the most."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Whoever loads."""

    name: str
    store: Store
    program: Program


def _subjects(stores: Stores, snapshots: bool) -> list[Subject]:
    subjects = [Subject(OURS, stores.nats_always, python("load_ours"))]
    executable = peers.pyeventsourcing_python()
    if executable is not None:
        name = f"{PYEVENTSOURCING} on PostgreSQL"
        subjects.append(Subject(name, stores.postgres, python("load_pyeventsourcing", executable)))
    executable = None if snapshots else peers.eventsource_python()
    if executable is not None:
        name = f"{EVENTSOURCE} on PostgreSQL"
        subjects.append(Subject(name, stores.postgres, python("load_eventsource", executable)))
    return subjects


def _lap(subject: Subject, figures: Figures, length: int, snapshots: bool) -> None:
    repeats = max(5, min(200, 20_000 // length)) if not snapshots else 100
    with subject.store() as store:
        result = result_of(subject.program(store, length, int(snapshots), repeats))
    figures.add(subject.name, result["p50_ms"])


def _limit(stores: Stores, figures: Figures) -> None:
    with stores.nats_always() as store:
        figures.add(LIMIT, result_of(python("get")(store, 200))["p50_ms"])


def main(runs: int, lengths: list[int]) -> int:
    print(conditions())
    jobs: list[tuple[int, bool, Figures]] = []
    for snapshots in (False, True):
        for length in lengths:
            name = f"load of {length:,} events{', with snapshots' if snapshots else ''}"
            jobs.append((length, snapshots, Figures(name, "ms", higher_is_better=False)))
    with Stores.opened() as stores:
        for _ in range(runs):
            for length, snapshots, figures in jobs:
                for subject in _subjects(stores, snapshots):
                    _lap(subject, figures, length, snapshots)
                if snapshots:
                    _limit(stores, figures)
    comparisons = [
        Comparison(figures, OURS, name, _TARGETS.get((figures.job, name.removesuffix(" on PostgreSQL"))))
        for _, _, figures in jobs
        for name in figures.values
        if name != OURS
    ]
    report([figures for _, _, figures in jobs], comparisons)
    return 0


if __name__ == "__main__":
    parser = parser_of(__doc__, runs=3)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="(%(default)s)")
    options = parser.parse_args()
    sys.exit(main(options.runs, [int(length) for length in options.lengths.split(",")]))
