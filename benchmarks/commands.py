"""Commands (load, decide, append one event) against the limit and the peers: `python -m benchmarks.commands`.

Subjects take turns, each lap in a process of its own on a store of its own; every lap compares a hundred balances with
the truth. The limit is the same events as bare publishes with an expected sequence over the same client. PostgreSQL and
SQLite sync with every commit, so the row with `sync_interval: always` is the one to compare them with.

Three replicas are three servers on this machine, which share its cores and its disk. Their tables have the rows of one
replica beside them, of the same turns. `--only` names the tables to make.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import peers
from benchmarks.laps import result_of
from benchmarks.measure import Comparison, Figures, conditions, report
from benchmarks.options import parser_of
from benchmarks.peers import EMMETT, EVENTSOURCE, PROTEAN, PYEVENTSOURCING, Program, python
from benchmarks.stores import Store, Stores

EXECUTE = "eventjet"
WARM = "eventjet, every account in the cache"
UNCACHED = "eventjet, loading every time"
LIMIT = "limit by hand: bare publish with expected sequence"
ONE_REPLICA = "one replica"
TASKS = 64
MANY = 256
SLOW_SHARE = 5
"""A peer of some milliseconds a command gets this fraction of the commands."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Whoever carries out commands."""

    name: str
    store: Store
    program: Callable[[str, int, int], list[str]]
    share: int = 1


@dataclass
class Job:
    """One number of tasks on one kind of durability."""

    name: str
    tasks: int
    subjects: list[Subject]
    targets: dict[tuple[str, str], float]
    times: int = 1
    """So many times the commands of other jobs: with many tasks most would be the first on their account."""

    def __post_init__(self) -> None:
        self.rate = Figures(self.name, "ops/s", higher_is_better=True)
        self.p50 = Figures(f"{self.name}: p50", "ms", higher_is_better=False)
        self.p99 = Figures(f"{self.name}: p99", "ms", higher_is_better=False)
        self.figures = [self.rate, self.p50, self.p99]

    def lap(self, subject: Subject, count: int) -> None:
        with subject.store() as store:
            result = result_of(subject.program(store, self.times * count // subject.share, self.tasks))
        self.rate.add(subject.name, result["count"] / result["wall_s"])
        self.p50.add(subject.name, result["p50_ms"])
        self.p99.add(subject.name, result["p99_ms"])

    def comparisons(self) -> list[Comparison]:
        others = [subject.name for subject in self.subjects if subject.name != EXECUTE]
        return [Comparison(self.rate, EXECUTE, name, self.targets.get((EXECUTE, name))) for name in others]


def jobs(stores: Stores, folder: Path) -> list[Job]:
    always, default = stores.nats_always, stores.nats_default
    limit, own = Subject(LIMIT, always, _ours("publish")), Subject(EXECUTE, always, _ours("execute"))
    uncached = Subject(UNCACHED, always, _ours("uncached"))
    by_default = [Subject(EXECUTE, default, _ours("execute")), Subject(LIMIT, default, _ours("publish"))]
    on_postgres = f"{PYEVENTSOURCING} on PostgreSQL"
    return [
        Job(
            "commands, 1 task",
            1,
            [own, limit, uncached, *_peers(stores, folder, tasks=1)],
            {(EXECUTE, LIMIT): 0.8, (EXECUTE, on_postgres): 2.5},
        ),
        Job(f"commands, {TASKS} tasks", TASKS, [own, limit, *_peers(stores, folder, TASKS)], {(EXECUTE, LIMIT): 0.7}),
        Job("commands, 1 task, synced every 2 minutes", 1, by_default, {}),
        Job(f"commands, {TASKS} tasks, synced every 2 minutes", TASKS, by_default, {}),
        *(_replicated(stores, tasks, times) for tasks, times in ((1, 1), (TASKS, 4), (MANY, 8))),
    ]


def _replicated(stores: Stores, tasks: int, times: int) -> Job:
    """Three replicas beside one, both synced before every answer."""
    warm = Subject(WARM, stores.nats_replicas, _ours("warm"))
    setups = {"": stores.nats_replicas, f", {ONE_REPLICA}": stores.nats_always}
    subjects = [
        Subject(f"{name}{setup}", store, _ours(job))
        for setup, store in setups.items()
        for name, job in ((EXECUTE, "execute"), (LIMIT, "publish"))
    ]
    subjects.insert(1, warm)
    targets = {(EXECUTE, LIMIT): 0.7} if tasks == MANY else {}
    if tasks == TASKS:
        targets[(EXECUTE, f"{EXECUTE}, {ONE_REPLICA}")] = 3.0
    return Job(f"commands on three replicas, {tasks} task{'s' if tasks > 1 else ''}", tasks, subjects, targets, times)


def _ours(job: str) -> Callable[[str, int, int], list[str]]:
    return lambda store, count, tasks: python("ours")(job, store, count, tasks)


def _peers(stores: Stores, folder: Path, tasks: int) -> list[Subject]:
    """On the stores they recommend; those that write one after the other have no row with several tasks."""
    subjects: list[Subject] = []

    def add(name: str, store: Store, program: Program | None, share: int = 1) -> None:
        if program is None:
            peers.left_out(name)
        else:
            subjects.append(Subject(name, store, program, share))

    executable = peers.pyeventsourcing_python()
    own = None if executable is None else python("commands_pyeventsourcing", executable)
    add(f"{PYEVENTSOURCING} on PostgreSQL", stores.postgres, own)
    if tasks == 1:
        add(f"{PYEVENTSOURCING} on SQLite", stores.sqlite, own)
    executable = peers.eventsource_python()
    own = None if executable is None else python("commands_eventsource", executable)
    add(f"{EVENTSOURCE} on PostgreSQL", stores.postgres, own)
    if tasks == 1:
        add(f"{EVENTSOURCE} on SQLite", stores.sqlite, own)
    add(f"{EMMETT} on PostgreSQL", stores.postgres, peers.emmett("commands", folder))
    if tasks == 1:
        executable = peers.protean_python()
        own = None if executable is None else python("peer_protean", executable)
        program = None if own is None else lambda store, count, _: own("commands", store, "-", count)
        add(f"{PROTEAN} on Message DB", stores.message_db, program, SLOW_SHARE)
    return subjects


def main(runs: int, count: int, only: str) -> int:
    print(conditions())
    with Stores.opened() as stores, TemporaryDirectory(prefix="eventjet-bench-") as folder:
        chosen = [job for job in jobs(stores, Path(folder)) if only in job.name]
        for _ in range(runs):
            for job in chosen:
                for subject in job.subjects:
                    job.lap(subject, count)
    figures = [each for job in chosen for each in job.figures]
    report(figures, [comparison for job in chosen for comparison in job.comparisons()])
    return 0


if __name__ == "__main__":
    parser = parser_of(__doc__, runs=3)
    parser.add_argument("--count", type=int, default=1_000, help="commands of a lap (%(default)s)")
    parser.add_argument("--only", default="", metavar="WORDS", help="the tables with these words in their name")
    options = parser.parse_args()
    sys.exit(main(options.runs, options.count, options.only))
