"""Rebuild of one read model, against the bare reader, a peer's catch-up and each other: `python -m benchmarks.rebuild`.

Subjects take turns (A B A B …) on one log, and every lap's rows are compared with the truth: a wrong one ends it. Warm
laps are calls in a process that has rebuilt before, from the call until the new table is swapped in; cold ones are the
program `eventjet rebuild`, from its start to its end. Wall rates hold for a quiet machine; CPU by part (the JVM, the
Python workers, …) also for a busy one, and it is what scales on a cluster. `--help` names the sizes. Needs Linux.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.bank import bank
from benchmarks.laps import Lap, lap, last_line
from benchmarks.log import fill
from benchmarks.measure import Comparison, Figures, conditions, report
from benchmarks.options import add_size, parser_of
from benchmarks.peers import python
from benchmarks.postings import balances
from benchmarks.readmodel import check
from benchmarks.rebuilder import ProgramRun, Rebuild, Rebuilder, make_archive, run_program
from benchmarks.usage import DRIVER, JVM, POSTGRES, SERVER, WORKERS
from eventjet.dev import NatsServer, PostgresServer
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables

FRAMES = "limit: bytes into frames, one core"
RECORDS = "limit: frames into records, one core"
LOAD = "limit: COPY of the finished rows"
LOCAL = "local engine"
SPARK = "Spark from JetStream"
ARCHIVE = "Spark from an archive"
LOCAL_PROGRAM = "eventjet rebuild --engine local, from nothing"
SPARK_PROGRAM = "eventjet rebuild --engine spark, from nothing"
PEER = "pyeventsourcing, catch-up"

TARGETS = (
    (LOCAL, FRAMES, 0.4),
    (LOCAL, RECORDS, None),
    (SPARK, LOCAL, 0.8),
    (ARCHIVE, SPARK, 2.0),
)
PEER_TARGETS = (
    (LOCAL, None),
    (LOCAL_PROGRAM, None),
    (SPARK, None),
    (SPARK_PROGRAM, 50.0),
)
FIRST_TASK_MAX_S = 6.0
"""On Spark."""


@dataclass
class Tables:
    """What was measured, one table a kind."""

    events: int
    rate: Figures = field(init=False)
    cpu: Figures = field(init=False)
    parts: Figures = field(init=False)
    memory: Figures = field(init=False)
    first_task: Figures = field(init=False)

    def __post_init__(self) -> None:
        job = f"rebuild of {self.events:,} events into PostgreSQL"
        self.rate = Figures(job, "events/s", higher_is_better=True)
        self.cpu = Figures(f"{job}: CPU of all parts", "s/million", higher_is_better=False)
        self.parts = Figures(f"{job}: CPU by part", "s/million", higher_is_better=False)
        self.memory = Figures(f"{job}: most memory by part", "MB", higher_is_better=False)
        self.first_task = Figures(f"{job}: from nothing to the first read", "s", higher_is_better=False)

    def rebuild(self, name: str, rebuild: Rebuild) -> None:
        self.rate.add(name, rebuild.events / rebuild.wall_s)
        self.cpu.add(name, rebuild.cpu_us_an_event)
        for part in (SERVER, POSTGRES, DRIVER, JVM, WORKERS):
            if part in rebuild.cpu_s:
                self.parts.add(f"{name}: {part}", rebuild.cpu_s[part] / rebuild.events * 1e6)
                self.memory.add(f"{name}: {part}", rebuild.peak_mb[part])

    def program(self, name: str, run: ProgramRun) -> None:
        self.rate.add(name, self.events / run.wall_s)
        self.first_task.add(name, run.first_task_s)

    def read(self, name: str, lap: Lap) -> None:
        """A reader's own CPU alone."""
        self.rate.add(name, lap.count / lap.wall_s)
        self.parts.add(f"{name}: reader", lap.client_cpu_s / lap.count * 1e6)

    def peer(self, lap: Lap) -> None:
        """From another store, so of its CPU only the client's is known, which says nothing here."""
        self.rate.add(PEER, lap.count / lap.wall_s)

    def comparisons(self) -> list[Comparison]:
        pairs = [*TARGETS, *((name, PEER, target) for name, target in PEER_TARGETS)]
        return [
            Comparison(figures, name, other, target if figures is self.rate else None)
            for figures, compared in ((self.rate, pairs), (self.cpu, TARGETS))
            for name, other, target in compared
            if {name, other} <= figures.values.keys()
        ]

    def report(self) -> None:
        figures = [self.rate, self.cpu, self.parts, self.memory, self.first_task]
        first_s = self.first_task.median(SPARK_PROGRAM)
        verdict = "met" if first_s <= FIRST_TASK_MAX_S else f"missed by {first_s - FIRST_TASK_MAX_S:.1f} s"
        report(figures, self.comparisons(), f"  (target for Spark <= {FIRST_TASK_MAX_S:g} s: {verdict})")


def main(sizes: argparse.Namespace) -> int:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eventjet-bench-")))
        nats = stack.enter_context(NatsServer(sync_interval="2m"))
        postgres = stack.enter_context(PostgresServer())
        smallest, largest = fill(nats.url, sizes.events)
        truth = balances(sizes.events)
        print(
            f"{conditions()}; a log of {sizes.events:,} events "
            f"with bodies of {smallest} to {largest} bytes; PostgreSQL fsyncs; Spark's master is {sizes.master}",
            flush=True,
        )
        archive = folder / "archive"
        make_archive(nats, archive, sizes.master)
        tables = Tables(sizes.events)
        limits = _limits(nats, postgres, sizes.events, truth, tables)
        laps = [*limits, *_programs(nats, postgres, sizes, truth, tables)]
        roads: tuple[tuple[str, str, Path | None], ...] = (
            (LOCAL, "local", None),
            (SPARK, "spark", None),
            (ARCHIVE, "spark", archive),
        )
        url = new_database(postgres, "warm")
        rebuilders = {
            engine: stack.enter_context(Rebuilder(nats, postgres, url, sizes.events, sizes.master))
            for engine in ("local", "spark")
        }
        for name, engine, source in roads:
            # The first of each road finds nothing warm and does not count.
            rebuilders[engine].rebuild(engine, source)
            warm = partial(_warm, partial(rebuilders[engine].warm, engine, source), url, truth)
            laps.append(lambda name=name, warm=warm: tables.rebuild(name, warm()))
        laps += _peer(postgres, sizes, tables)
        for _ in range(sizes.runs):
            for each in laps:
                each()
    tables.report()
    return 0


def new_database(postgres: PostgresServer, name: str) -> str:
    """An empty read model in a database of its own."""
    url = postgres.create_database(name)
    engine = Database(url).sync_engine()
    create_tables(engine, bank.projections.values())
    engine.dispose()
    return url


def _limits(
    nats: NatsServer,
    postgres: PostgresServer,
    count: int,
    truth: Mapping[str, tuple[Decimal, int]],
    tables: Tables,
) -> list[Callable[[], None]]:
    def limit(name: str, how_far: str) -> None:
        tables.read(name, lap(python("context")(nats.url, count, how_far)))

    def load() -> None:
        url = postgres.create_database("copied")
        done = lap(python("copy")(url, count))
        check(url, truth, in_cents=False)
        postgres.drop_database("copied")
        tables.read(LOAD, done)

    return [partial(limit, FRAMES, "frames"), partial(limit, RECORDS, "read"), load]


def _programs(
    nats: NatsServer,
    postgres: PostgresServer,
    sizes: argparse.Namespace,
    truth: Mapping[str, tuple[Decimal, int]],
    tables: Tables,
) -> list[Callable[[], None]]:
    url = new_database(postgres, "program")

    def program(name: str, *options: str) -> None:
        done = run_program(nats, url, *options)
        check(url, truth, in_cents=False)
        tables.program(name, done)

    return [
        partial(program, LOCAL_PROGRAM, "--engine", "local"),
        partial(program, SPARK_PROGRAM, "--engine", "spark", "--master", sizes.master),
    ]


def _warm(run: Callable[[], Rebuild], url: str, truth: Mapping[str, tuple[Decimal, int]]) -> Rebuild:
    rebuild = run()
    check(url, truth, in_cents=False)
    if rebuild.rows != len(truth):
        raise RuntimeError(f"the rebuild tells of {rebuild.rows} rows, and there are {len(truth)}")
    return rebuild


def _peer(postgres: PostgresServer, sizes: argparse.Namespace, tables: Tables) -> list[Callable[[], None]]:
    """pyeventsourcing's own catch-up, the nearest it has to a rebuild, if it is installed and wanted."""
    count = sizes.peer_events
    if not count or find_spec("eventsourcing") is None:
        return []
    store = postgres.create_database("peerstore")
    truth = balances(count)
    last_line(python("peer_pyeventsourcing")("fill", store, store, count))

    def catch_up() -> None:
        url = postgres.create_database("peer")
        done = lap(python("peer_pyeventsourcing")("run", store, url, count))
        check(url, truth, in_cents=True)
        postgres.drop_database("peer")
        tables.peer(done)

    return [catch_up]


def _sizes() -> argparse.Namespace:
    parser = parser_of(__doc__)
    size = partial(add_size, parser, "EVENTJET_BENCH_REBUILD")
    size("runs", 3, "laps of each subject")
    size("events", 100_000, "events in the log")
    size("peer_events", 10_000, "events in the store of pyeventsourcing, 0 to leave it out")
    parser.add_argument("--master", default="local[2]", help="Spark's (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_sizes()))
