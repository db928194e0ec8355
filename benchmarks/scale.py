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
import os
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from benchmarks.laps import worker_lap
from benchmarks.log import Filling
from benchmarks.measure import Comparison, Figures, keep, show
from benchmarks.postings import balances
from benchmarks.readmodel import check
from benchmarks.rebuild import new_database
from benchmarks.rebuilder import Made, Rebuilder, make_archive
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
        self.made = 0

    def database(self) -> str:
        self.made += 1
        return new_database(self.postgres, f"scale{self.made}")

    def rebuilder(self, nats: NatsServer, count: int) -> Rebuilder:
        """In a process of its own, so that its memory is its own, with a database of its own."""
        return Rebuilder(nats, self.postgres, self.database(), count, self.master)

    def rebuild(self, nats: NatsServer, engine: str, archive: Path | None, count: int) -> Made:
        """The second of two: a start would hide what an event takes."""
        with self.rebuilder(nats, count) as rebuilder:
            right(rebuilder.rebuild(engine, archive), rebuilder.database, count)
            return right(rebuilder.rebuild(engine, archive), rebuilder.database, count)


truth = cache(balances)


def right(made: Made, database: str, count: int) -> Made:
    """Raises `RuntimeError` unless it read all and the table holds what the postings say."""
    if made.events != count:
        raise RuntimeError(f"it read {made.events} of {count} events")
    check(database, truth(count), in_cents=False)
    return made


def roads(bench: Bench, count: int, folder: Path) -> dict[str, Made]:
    """Over one log, each to the right table."""
    found: dict[str, Made] = {}
    archive = folder / "archive"
    with NatsServer(sync_interval="2m") as nats, Filling(nats.url, count) as filling:
        grow(filling, count)
        url = bench.database()
        with step(f"the live worker over {count:,} events"):
            worker_lap(nats.url, url, count)
            check(url, truth(count), in_cents=False)
        found[LOCAL] = told(LOCAL, bench.rebuild(nats, "local", None, count))
        found[SPARK] = told(SPARK, bench.rebuild(nats, "spark", None, count))
        make_archive(nats, archive, bench.master, "--to", str(int(count * SEALED)))
        found[TAIL] = told(TAIL, bench.rebuild(nats, "spark", archive, count))
        make_archive(nats, archive, bench.master)
        found[ARCHIVE] = told(ARCHIVE, bench.rebuild(nats, "spark", archive, count))
    return found


def longer(bench: Bench, count: int, archive: Path) -> dict[str, Made]:
    """Rebuild on three roads while the log is short, so that all is warm, and then over all of it."""
    rebuilds: dict[str, Made] = {}
    with ExitStack() as stack:
        nats = stack.enter_context(NatsServer(sync_interval="2m"))
        filling = stack.enter_context(Filling(nats.url, count))
        rebuilders = {name: stack.enter_context(bench.rebuilder(nats, count)) for name in GROWING}
        grow(filling, min(STEP, count))
        make_archive(nats, archive, bench.master)
        for name, rebuilder in rebuilders.items():
            right(rebuilder.rebuild(*_road(name, archive)), rebuilder.database, filling.stored)
        grow(filling, count)
        make_archive(nats, archive, bench.master)
        for name, rebuilder in rebuilders.items():
            rebuilds[name] = told(name, right(rebuilder.rebuild(*_road(name, archive)), rebuilder.database, count))
    return rebuilds


def again(bench: Bench, count: int, archive: Path) -> dict[str, Made]:
    """Rebuild the short log once more after the long one: machines become slower, and the long one takes minutes."""
    with NatsServer(sync_interval="2m") as nats, Filling(nats.url, count) as filling:
        grow(filling, count)
        make_archive(nats, archive, bench.master)
        return {name: told(name, bench.rebuild(nats, *_road(name, archive), count)) for name in GROWING}


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


def told(name: str, made: Made) -> Made:
    """Print one rebuild as soon as it is done."""
    parts = ", ".join(
        f"{part} {spent / made.events * 1e6:.1f} s and {made.peak_mb[part]:,.0f} MB"
        for part, spent in made.cpu_s.items()
    )
    print(
        f"{name}: right, {made.events:,} events in {made.wall_s:.1f} s ({made.events / made.wall_s:,.0f}/s); "
        f"{made.cpu_us_an_event:.1f} CPU-seconds a million; {parts}",
        flush=True,
    )
    return made


def main(sizes: argparse.Namespace) -> int:
    started = time.monotonic()
    print(
        f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; Spark's master is {sizes.master}", flush=True
    )
    with tempfile.TemporaryDirectory(prefix="eventjet-scale-") as folder, PostgresServer() as postgres:
        bench = Bench(postgres, sizes.master)
        short = roads(bench, sizes.events, Path(folder))
        long = longer(bench, sizes.long, Path(folder, "long")) if sizes.long else {}
        after = again(bench, sizes.events, Path(folder, "again")) if sizes.long else {}
    grown = report(short, long, after)
    print(f"took {time.monotonic() - started:.0f} s, load average {os.getloadavg()[0]:.1f}")
    return 1 if grown else 0


def report(short: dict[str, Made], long: dict[str, Made], after: dict[str, Made]) -> list[str]:
    """Print and keep the figures; returns the parts that grew."""
    cpu = Figures("long rebuilds: CPU of all parts", "s/million", higher_is_better=False)
    memory = Figures("long rebuilds: most memory by part", "MB", higher_is_better=False)
    grown: list[str] = []
    comparisons: list[Comparison] = []
    for name, made in short.items():
        _note(cpu, memory, name, made)
        if name not in long:
            continue
        _note(cpu, memory, name, after[name])
        later = _note(cpu, memory, name, long[name])
        comparisons.append(Comparison(cpu, later, f"{name}, {made.events:,} events", 1 / CPU_GROWTH_MAX))
        for part, held in long[name].peak_mb.items():
            print(f"{name}: {part} held {held:,.0f} MB, {held / made.peak_mb[part]:.2f} times as much")
            allowed = max(GROWTH_MAX * made.peak_mb[part], JVM_MB if part == JVM else 0)
            if held > allowed and part not in (SERVER, POSTGRES):
                grown.append(f"{name}: {part}")
    if long:
        local, archived = (f"{name}, {long[name].events:,} events" for name in (LOCAL, ARCHIVE))
        comparisons.append(Comparison(cpu, archived, local, 1 / SPARK_MAX))
    cpu.show()
    memory.show()
    show(comparisons)
    keep([cpu, memory], comparisons)
    if grown:
        print(f"grew with the log: {', '.join(grown)}", file=sys.stderr)
    return grown


def _note(cpu: Figures, memory: Figures, name: str, made: Made) -> str:
    subject = f"{name}, {made.events:,} events"
    cpu.add(subject, made.cpu_us_an_event)
    for part, held in made.peak_mb.items():
        memory.add(f"{subject}: {part}", held)
    return subject


def _sizes() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000, help="in the log of all roads (%(default)s)")
    parser.add_argument("--long", type=int, default=10_000_000, help="in the longer log, 0 for none (%(default)s)")
    parser.add_argument("--master", default="local[2]", help="Spark's (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_sizes()))
