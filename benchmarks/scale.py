"""Rebuilds of long logs: `python -m benchmarks.scale`.

First every road to a read model over one log: the live worker, the local engine, Spark from JetStream, Spark from an
archive of most of the log and JetStream for the rest, Spark from an archive of all of it. Each must give the same
table, which is the one that the postings say. Then a log ten times as long: memory must not grow with it, and CPU per
event should not; the short one is rebuilt again after it, and the mean of both times counts. Ends with status 1 when a
table is wrong or a part grew. Needs Linux, and disk for the longer log (about 0.6 GB a million events), in the folder
for temporary files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from benchmarks.laps import worker_lap
from benchmarks.log import Filling
from benchmarks.measure import Comparison, Figures, conditions, report
from benchmarks.options import parser_of
from benchmarks.postings import balances
from benchmarks.readmodel import check
from benchmarks.rebuild import new_database
from benchmarks.rebuilder import Rebuild, Rebuilder, make_archive
from benchmarks.usage import JVM, POSTGRES, SERVER
from eventjet.dev import NatsServer, PostgresServer

SEALED = 0.7
"""Which part of the log the archive holds when the rest is read from JetStream."""
STEP = 500_000
GROWTH_MAX = 1.25
"""How much more of memory any part may hold over a log ten times as long."""
JVM_MB = 1_700
"""A JVM may fill its heap of 1 GB sooner or later, whatever it reads; with what it holds beside."""
CPU_GROWTH_MAX = 1.15

LOCAL, SPARK = "local engine", "Spark from JetStream"
TAIL, ARCHIVE = "Spark from an archive and the tail", "Spark from an archive"
GROWING = (LOCAL, SPARK, ARCHIVE)
"""The roads that are taken over the longer log, too."""
SPARK_MAX = 1.3
"""How much more CPU Spark from an archive may take than the local engine over the longer log."""


class Bench:
    """The servers, and one log at a time."""

    def __init__(self, postgres: PostgresServer, master: str) -> None:
        self.postgres = postgres
        self.master = master
        self._databases = 0

    def database(self) -> str:
        self._databases += 1
        return new_database(self.postgres, f"scale{self._databases}")

    def rebuilder(self, nats: NatsServer, count: int) -> Rebuilder:
        """In a process of its own, so that its memory is its own, with a database of its own."""
        return Rebuilder(nats, self.postgres, self.database(), count, self.master)

    def rebuild(self, nats: NatsServer, engine: str, archive: Path | None, count: int) -> Rebuild:
        """The second of two: a start would hide what an event takes."""
        with self.rebuilder(nats, count) as rebuilder:
            checked(rebuilder.rebuild(engine, archive), rebuilder.database, count)
            return checked(rebuilder.rebuild(engine, archive), rebuilder.database, count)


truth = cache(balances)


def checked(rebuild: Rebuild, database: str, count: int) -> Rebuild:
    """Raises `RuntimeError` unless it read all and the table holds what the postings say."""
    if rebuild.events != count:
        raise RuntimeError(f"it read {rebuild.events} of {count} events")
    check(database, truth(count), in_cents=False)
    return rebuild


def roads(bench: Bench, count: int, folder: Path) -> dict[str, Rebuild]:
    """Over one log, each to the right table."""
    rebuilds: dict[str, Rebuild] = {}
    archive = folder / "archive"
    with NatsServer(sync_interval="2m") as nats, Filling(nats.url, count) as filling:
        grow(filling, count)
        url = bench.database()
        with step(f"the live worker over {count:,} events"):
            worker_lap(nats.url, url, count)
            check(url, truth(count), in_cents=False)
        rebuilds[LOCAL] = printed(LOCAL, bench.rebuild(nats, "local", None, count))
        rebuilds[SPARK] = printed(SPARK, bench.rebuild(nats, "spark", None, count))
        make_archive(nats, archive, bench.master, "--to", str(int(count * SEALED)))
        rebuilds[TAIL] = printed(TAIL, bench.rebuild(nats, "spark", archive, count))
        make_archive(nats, archive, bench.master)
        rebuilds[ARCHIVE] = printed(ARCHIVE, bench.rebuild(nats, "spark", archive, count))
    return rebuilds


def longer(bench: Bench, count: int, archive: Path) -> dict[str, Rebuild]:
    """Rebuild on three roads while the log is short, so that all is warm, and then over all of it."""
    rebuilds: dict[str, Rebuild] = {}
    with ExitStack() as stack:
        nats = stack.enter_context(NatsServer(sync_interval="2m"))
        filling = stack.enter_context(Filling(nats.url, count))
        rebuilders = {name: stack.enter_context(bench.rebuilder(nats, count)) for name in GROWING}
        grow(filling, min(STEP, count))
        make_archive(nats, archive, bench.master)
        for name, rebuilder in rebuilders.items():
            checked(rebuilder.rebuild(*_road(name, archive)), rebuilder.database, filling.stored)
        grow(filling, count)
        make_archive(nats, archive, bench.master)
        for name, rebuilder in rebuilders.items():
            rebuilds[name] = printed(name, checked(rebuilder.rebuild(*_road(name, archive)), rebuilder.database, count))
    return rebuilds


def again(bench: Bench, count: int, archive: Path) -> dict[str, Rebuild]:
    """Rebuild the short log once more after the long one: machines become slower, and the long one takes minutes."""
    with NatsServer(sync_interval="2m") as nats, Filling(nats.url, count) as filling:
        grow(filling, count)
        make_archive(nats, archive, bench.master)
        return {name: printed(name, bench.rebuild(nats, *_road(name, archive), count)) for name in GROWING}


def _road(name: str, archive: Path) -> tuple[str, Path | None]:
    """Return the engine and the archive of one of the roads in `GROWING`."""
    return "local" if name == LOCAL else "spark", archive if name == ARCHIVE else None


def grow(filling: Filling, count: int) -> None:
    """Fill the log, telling how far it is."""
    started, before = time.monotonic(), filling.stored
    while filling.stored < count:
        filling.to(min(count, filling.stored + STEP))
        rate = (filling.stored - before) / (time.monotonic() - started)
        print(f"  the log holds {filling.stored:,} events ({rate:,.0f}/s)", flush=True)


@contextmanager
def step(name: str) -> Generator[None]:
    started = time.monotonic()
    yield
    print(f"{name}: right, after {time.monotonic() - started:.0f} s", flush=True)


def printed(name: str, rebuild: Rebuild) -> Rebuild:
    """Print one rebuild as soon as it is done."""
    parts = ", ".join(
        f"{part} {spent / rebuild.events * 1e6:.1f} s and {rebuild.peak_mb[part]:,.0f} MB"
        for part, spent in rebuild.cpu_s.items()
    )
    print(
        f"{name}: right, {rebuild.events:,} events in {rebuild.wall_s:.1f} s "
        f"({rebuild.events / rebuild.wall_s:,.0f}/s); "
        f"{rebuild.cpu_us_an_event:.1f} CPU-seconds a million; {parts}",
        flush=True,
    )
    return rebuild


def main(sizes: argparse.Namespace) -> int:
    print(f"{conditions()}; Spark's master is {sizes.master}", flush=True)
    with tempfile.TemporaryDirectory(prefix="eventjet-scale-") as folder, PostgresServer() as postgres:
        bench = Bench(postgres, sizes.master)
        short = roads(bench, sizes.events, Path(folder))
        long = longer(bench, sizes.long, Path(folder, "long")) if sizes.long else {}
        after = again(bench, sizes.events, Path(folder, "again")) if sizes.long else {}
    return 1 if _compare(short, long, after) else 0


def _compare(short: dict[str, Rebuild], long: dict[str, Rebuild], after: dict[str, Rebuild]) -> list[str]:
    """Print and keep the figures; returns the parts that grew."""
    cpu = Figures("long rebuilds: CPU of all parts", "s/million", higher_is_better=False)
    memory = Figures("long rebuilds: most memory by part", "MB", higher_is_better=False)
    grown: list[str] = []
    comparisons: list[Comparison] = []
    for name, rebuild in short.items():
        _note(cpu, memory, name, rebuild)
        if name not in long:
            continue
        _note(cpu, memory, name, after[name])
        later = _note(cpu, memory, name, long[name])
        comparisons.append(Comparison(cpu, later, f"{name}, {rebuild.events:,} events", 1 / CPU_GROWTH_MAX))
        for part, megabytes in long[name].peak_mb.items():
            print(f"{name}: {part} held {megabytes:,.0f} MB, {megabytes / rebuild.peak_mb[part]:.2f} times as much")
            allowed = max(GROWTH_MAX * rebuild.peak_mb[part], JVM_MB if part == JVM else 0)
            if megabytes > allowed and part not in (SERVER, POSTGRES):
                grown.append(f"{name}: {part}")
    if long:
        local, archived = (f"{name}, {long[name].events:,} events" for name in (LOCAL, ARCHIVE))
        comparisons.append(Comparison(cpu, archived, local, 1 / SPARK_MAX))
    report([cpu, memory], comparisons)
    if grown:
        print(f"grew with the log: {', '.join(grown)}", file=sys.stderr)
    return grown


def _note(cpu: Figures, memory: Figures, name: str, rebuild: Rebuild) -> str:
    subject = f"{name}, {rebuild.events:,} events"
    cpu.add(subject, rebuild.cpu_us_an_event)
    for part, megabytes in rebuild.peak_mb.items():
        memory.add(f"{subject}: {part}", megabytes)
    return subject


def _sizes() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--events", type=int, default=1_000_000, help="in the log of all roads (%(default)s)")
    parser.add_argument("--long", type=int, default=10_000_000, help="in the longer log, 0 for none (%(default)s)")
    parser.add_argument("--master", default="local[2]", help="Spark's (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_sizes()))
