"""Projection catch-up, exactly once, against floors and peers in one run: `python -m benchmarks.catchup`.

Subjects take turns (A B A B …), each in a process of its own, and every lap's rows are compared with the truth: a wrong
one ends the run. Wall rates hold for a quiet machine; client CPU per event also for a busy one. How many events a
subject gets in a lap follows from its speed; `--help` names the sizes, each with its environment variable. Needs Linux.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, partial
from pathlib import Path

from benchmarks import bank_by_hand, message_db, peers
from benchmarks.bank import bank
from benchmarks.laps import APP, Lap, lap, last_line, worker_lap
from benchmarks.log import fill
from benchmarks.measure import Comparison, Figures, conditions, report
from benchmarks.options import add_size, parser_of
from benchmarks.peers import python
from benchmarks.postings import balances
from benchmarks.readmodel import check
from eventjet import App
from eventjet.dev import NatsServer, PostgresServer
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables

WORKER = "eventjet worker"
WRITES = "eventjet worker, SQL by hand that only writes"
ASKS = "eventjet worker, SQL by hand that asks"
OURS = (WORKER, WRITES, ASKS)
FLOOR = "floor by hand: nats-py, eventjet's decoder, SQL"
LIMIT = "limit by hand: nats-py, bodies alone, SQL"
PYEVENTSOURCING = "pyeventsourcing, a commit an event"
EVENTSOURCE = "eventsource-py, batches by hand"
PROTEAN = "Protean, rebuild from Message DB"
EMMETT = "Emmett, rebuild"
MEMORY_MAX_MB = 300
TARGETS = {
    "PostgreSQL": {FLOOR: 1.2, EVENTSOURCE: 5.0, PYEVENTSOURCING: 25.0},
    "SQLite": {EVENTSOURCE: 2.0, PYEVENTSOURCING: 6.0},
}


@dataclass
class Databases:
    """An empty database for every lap, and the peers' stores for all of them."""

    postgres: PostgresServer
    folder: Path
    count: int = 0
    current: list[str] = field(default_factory=list[str])

    def new(self, kind: str) -> str:
        self.count += 1
        name = f"bench{self.count}"
        if kind == "SQLite":
            return f"sqlite:///{self.folder / name}.db"
        url = self.postgres.create_database(name)
        self.current.append(name)
        return url

    def lasting(self, kind: str) -> str:
        """One that laps do not drop."""
        url = self.new(kind)
        self.current.clear()
        return url

    def drop(self) -> None:
        """The last one, if it is on the server."""
        if self.current:
            self.postgres.drop_database(self.current.pop())


@dataclass(frozen=True, slots=True)
class Subject:
    """Whoever catches up."""

    name: str
    count: int
    run: Callable[[str], Lap]
    """Into the empty database of this URL."""
    in_cents: bool = True
    view: str | None = None
    """Where its read model is, if not there."""


@dataclass(frozen=True, slots=True)
class Job:
    """Catch-up into one kind of database."""

    database: str
    subjects: list[Subject]
    rate: Figures
    cpu: Figures
    startup: Figures

    @classmethod
    def of(cls, database: str, subjects: list[Subject]) -> Job:
        name = f"catch-up into {database}"
        return cls(
            database,
            subjects,
            Figures(name, "events/s", higher_is_better=True),
            Figures(f"{name}: CPU of the client", "µs/event", higher_is_better=False),
            Figures(f"{name}: start-up, not in the rates", "s", higher_is_better=False),
        )

    def lap(self, subject: Subject, databases: Databases) -> None:
        url = databases.new(self.database)
        done = subject.run(url)
        if done.last != subject.count:
            raise RuntimeError(f"{subject.name} took {done.last} of {subject.count} events")
        try:
            check(subject.view or url, _truth(subject.count), in_cents=subject.in_cents)
        except RuntimeError as error:
            raise RuntimeError(f"{subject.name} into {self.database}: {error}") from None
        self.note(subject.name, done)
        if url.startswith("postgresql"):
            databases.drop()

    def note(self, name: str, done: Lap) -> None:
        self.rate.add(name, done.count / done.wall_s)
        self.cpu.add(name, done.client_cpu_s / done.count * 1e6)
        self.startup.add(name, done.startup_s)

    def comparisons(self) -> list[Comparison]:
        """By the clock, with what is aimed at, and by the client's CPU, in which a peer's waiting does not count."""
        others = [subject.name for subject in self.subjects if subject.name not in OURS]
        targets = TARGETS[self.database]
        return [
            *[Comparison(self.rate, WORKER, name, targets.get(name)) for name in others],
            Comparison(self.rate, WRITES, ASKS),
            *[Comparison(self.cpu, WORKER, name) for name in others],
            Comparison(self.cpu, WRITES, ASKS),
        ]


@cache
def _truth(count: int) -> dict[str, tuple[Decimal, int]]:
    return balances(count)


def _worker(nats: str, count: int, url: str, app: App = bank, place: str = APP) -> Lap:
    engine = Database(url).sync_engine()
    create_tables(engine, app.projections.values())
    engine.dispose()
    return worker_lap(nats, url, count, place)


def _by_hand(nats: str, name: str, app: App, count: int) -> Subject:
    """SQL by hand over a log of its own, which is shorter."""
    fill(nats, count, app.name)
    place = f"benchmarks.bank_by_hand:{app.name.removeprefix('bench')}"
    return Subject(name, count, lambda url: _worker(nats, count, url, app, place))


def _peers(databases: Databases, kind: str, sizes: argparse.Namespace) -> list[Subject]:
    """Those that are installed, their stores filled."""
    python_peers = (
        (EVENTSOURCE, "peer_eventsource", peers.eventsource_python(), sizes.batch_peer_events),
        (PYEVENTSOURCING, "peer_pyeventsourcing", peers.pyeventsourcing_python(), sizes.peer_events),
        (PROTEAN, "peer_protean", peers.protean_python(), sizes.slow_peer_events),
    )
    subjects: list[Subject] = []
    for name, module, executable, count in python_peers:
        if name == PROTEAN and kind != "PostgreSQL":
            continue
        if executable is None:
            peers.left_out(name)
            continue
        store = databases.lasting(kind)
        if name == PROTEAN:
            message_db.install(store)
        program = python(module, executable)
        _say(name, last_line(program("fill", store, store, count)), count, kind)
        subjects.append(Subject(name, count, lambda url, f=program, s=store, c=count: lap(f("run", s, url, c))))
    return [*subjects, *_emmett(databases, sizes.peer_events)] if kind == "PostgreSQL" else subjects


def _emmett(databases: Databases, count: int) -> list[Subject]:
    """Its read model is in the database of its store, in which every lap makes it again."""
    fill, run = (peers.emmett(job, databases.folder) for job in ("fill", "run"))
    if fill is None or run is None:
        peers.left_out(EMMETT)
        return []
    store = databases.lasting("PostgreSQL")
    _say(EMMETT, last_line(fill(store, count)), count, "PostgreSQL")
    return [Subject(EMMETT, count, lambda _: lap(run(store, count)), view=store)]


def _say(name: str, version: str, count: int, kind: str) -> None:
    print(f"{name}: version {version}, {count:,} events in its store on {kind}")


def _context(nats: str, count: int) -> list[Subject]:
    names = {
        "read": "frames into records, one core",
        "decode": "… and records into events",
        "fold": "… and events onto rows",
    }
    return [
        Subject(name, count, lambda _, k=kind: lap(python("context")(nats, count, k))) for kind, name in names.items()
    ]


def main(sizes: argparse.Namespace) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="eventjet-bench-") as folder,
        NatsServer(sync_interval="2m") as nats,
        PostgresServer() as postgres,
    ):
        smallest, largest = fill(nats.url, sizes.events)
        print(
            f"{conditions()}; a log of {sizes.events:,} events "
            f"with bodies of {smallest} to {largest} bytes; the databases fsync"
        )
        databases = Databases(postgres, Path(folder))
        sql = [
            _by_hand(nats.url, WRITES, bank_by_hand.writes, sizes.by_hand_events),
            _by_hand(nats.url, ASKS, bank_by_hand.asks, sizes.asking_events),
        ]
        by_hand = {FLOOR: "records", LIMIT: "bodies"}
        jobs: list[Job] = []
        for kind in sizes.databases.split(","):
            ours = [Subject(WORKER, sizes.events, partial(_worker, nats.url, sizes.events), in_cents=False)]
            floors = [
                Subject(
                    name,
                    sizes.events,
                    lambda url, how=how: lap(python("floor")(nats.url, url, sizes.events, how)),
                )
                for name, how in by_hand.items()
            ]
            jobs.append(Job.of(kind, [*ours, *sql, *floors, *_peers(databases, kind, sizes)]))
        context = Job.of("nowhere: the limits of one core", _context(nats.url, sizes.events))
        for _ in range(sizes.runs):
            for job in jobs:
                for subject in job.subjects:
                    job.lap(subject, databases)
            for subject in context.subjects:
                context.note(subject.name, subject.run(""))
        memory = _memory(databases, sizes.memory) if sizes.memory else None
    _report(jobs, context, memory)
    return 0


def _memory(databases: Databases, count: int) -> Figures:
    """The largest size of each process of a worker over a long log, into PostgreSQL."""
    figures = Figures("memory of a worker", "MB", higher_is_better=False)
    with NatsServer(sync_interval="2m") as nats:
        fill(nats.url, count)
        url = databases.new("PostgreSQL")
        done = _worker(nats.url, count, url)
        check(url, _truth(count), in_cents=False)
        assert done.memory_mb is not None
        figures.add(f"{WORKER}, {count:,} events into PostgreSQL", done.memory_mb)
        if done.memory_mb >= MEMORY_MAX_MB:
            raise RuntimeError(f"{WORKER} came to {done.memory_mb:.0f} MB, and {MEMORY_MAX_MB} are allowed")
    return figures


def _report(jobs: list[Job], context: Job, memory: Figures | None) -> None:
    figures = [each for job in [*jobs, context] for each in (job.rate, job.cpu)] + [job.startup for job in jobs]
    figures += [memory] if memory is not None else []
    report(figures, [comparison for job in jobs for comparison in job.comparisons()])


def _sizes() -> argparse.Namespace:
    parser = parser_of(__doc__)
    size = partial(add_size, parser, "EVENTJET_BENCH")
    size("runs", 3, "laps of each subject")
    size("events", 200_000, "events in the log, for eventjet and the floors")
    size("by_hand_events", 30_000, "events in the log of SQL by hand that only writes")
    size("asking_events", 2_500, "events in the log of SQL by hand that asks")
    size("batch_peer_events", 60_000, "events in the store of the peer that works in batches")
    size("peer_events", 3_000, "events in the store of the peer that commits one by one")
    size("slow_peer_events", 250, "events in the store of the peer that takes milliseconds for one")
    size("memory", 0, "events for a run that looks at the worker's memory, 0 for none")
    parser.add_argument("--databases", default="PostgreSQL,SQLite", help="which (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_sizes()))
