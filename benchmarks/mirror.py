"""Readers on a mirror beside readers on the leader, while commands run: `python -m benchmarks.mirror`.

Two regions on this machine, synced before every acknowledgement. In turns the log of the first is left alone, has
a mirror in the second, and is read again and again from its leader or from the mirror. As if each region were a machine
of its own, the server of the log and the commands have one half of the cores, the mirror's server and the reader the
other. What a reader costs the leader is the CPU of its process for each command, and what it takes of their rate.
Needs Linux and two cores.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.bank import Account, bank
from benchmarks.log import fill
from benchmarks.measure import Comparison, Figures, conditions, report
from benchmarks.options import parser_of
from benchmarks.usage import SERVER, Parts
from eventjet.dev import NatsServer
from eventjet.jetstream.reader import read_range
from eventjet.nats.endpoint import Endpoint
from eventjet.operations import mirrors
from eventjet.settings import Settings
from tests.two_regions import Regions, two_regions

ALONE, MIRRORED = "no mirror, no reader", "a mirror, no reader"
ON_LEADER, ON_MIRROR = "a mirror, a reader on the leader", "a mirror, a reader on the mirror"
COPIED_MAX_S = 600
TASKS = 16
_CORES = sorted(os.sched_getaffinity(0))
EAST_CORES, WEST_CORES = _CORES[: len(_CORES) // 2], _CORES[len(_CORES) // 2 :]


def main(runs: int, count: int, seconds: float) -> int:
    print(conditions())
    rate = Figures("commands beside readers", "ops/s", higher_is_better=True)
    cpu = Figures("commands beside readers: CPU of the leader", "µs/command", higher_is_better=False)
    read = Figures("commands beside readers: events read", "events/s", higher_is_better=True)
    copied = Figures("a log that gets a mirror: copied", "events/s", higher_is_better=True)
    for _ in range(runs):
        for subject in (ALONE, MIRRORED, ON_LEADER, ON_MIRROR):
            with (
                TemporaryDirectory(prefix="eventjet-bench-") as folder,
                two_regions(Path(folder), bank.name) as regions,
            ):
                lap(regions, subject, count, seconds, (rate, cpu, read, copied))
    figures = [rate, cpu, read, copied]
    comparisons = [
        *(Comparison(each, MIRRORED, ALONE) for each in (rate, cpu)),
        *(Comparison(each, ON_MIRROR, MIRRORED) for each in (rate, cpu)),
        *(Comparison(each, ON_MIRROR, ON_LEADER) for each in (rate, cpu, read)),
    ]
    report(figures, comparisons)
    return 0


def lap(regions: Regions, subject: str, count: int, seconds: float, figures: tuple[Figures, ...]) -> None:
    rate, cpu, read, copied = figures
    fill(regions.east.url, count)
    settings = regions.settings(Path())
    if subject != ALONE:
        began = time.monotonic()
        mirrors.create(bank.name, settings, 1)
        while mirrors.status(bank.name, settings).last < count:
            if time.monotonic() - began > COPIED_MAX_S:
                raise RuntimeError(f"the mirror did not have {count:,} events after {COPIED_MAX_S} s")
            time.sleep(0.1)
        copied.add("one replica, synced always", count / (time.monotonic() - began))
    server = {ON_LEADER: regions.east, ON_MIRROR: regions.west}.get(subject)
    for pid, cores in ((os.getpid(), EAST_CORES), (regions.east.pid, EAST_CORES), (regions.west.pid, WEST_CORES)):
        _pin(pid, cores)
    with reading(server, count) as done:
        before, events, began = _cpu_s(regions.east), done(), time.monotonic()
        commands = asyncio.run(_commands(settings.for_log(), seconds))
        took_s, events = time.monotonic() - began, done() - events
        cpu.add(subject, (_cpu_s(regions.east) - before) / commands * 1e6)
    _pin(os.getpid(), _CORES)  # the servers of the next lap begin as those of this one did
    rate.add(subject, commands / took_s)
    if server is not None:
        read.add(subject, events / took_s)
    if subject != ALONE and mirrors.status(bank.name, settings).fault is not None:
        raise RuntimeError("the mirror is not sound")


async def _commands(settings: Settings, seconds: float) -> int:
    """Execute commands on new accounts by several tasks, and return how many."""
    done = 0
    async with bank.connect(settings) as jet:
        accounts = jet.repository(Account)
        until = time.monotonic() + seconds

        async def work(task: int) -> None:
            nonlocal done
            number = 0
            while time.monotonic() < until:
                number += 1
                await accounts.execute(f"new-{task}-{number}", Account.deposit, "tx", Decimal(1), "EUR", "a memo")
                done += 1

        async with asyncio.TaskGroup() as tasks:
            for task in range(TASKS):
                tasks.create_task(work(task))
    return done


@contextmanager
def reading(server: NatsServer | None, count: int) -> Generator[Any]:
    """Have a process read the log again and again; yields a function that returns how many events it has read."""
    context = multiprocessing.get_context("spawn")
    read = context.Value("q", 0)
    arguments = None if server is None else (server.url, count, read, WEST_CORES)
    process = None if arguments is None else context.Process(target=_read, args=arguments, daemon=True)
    if process is not None:
        process.start()
        while not read.value:
            if not process.is_alive():
                raise RuntimeError(f"the reader ended with status {process.exitcode}; see above")
            time.sleep(0.05)
    yield lambda: read.value
    if process is not None:
        process.kill()
        process.join()


def _read(url: str, count: int, read: Any, cores: Sequence[int]) -> None:
    _pin(os.getpid(), cores)
    while True:
        for records in read_range(Endpoint((url,)), bank.name, 1, count + 1):
            read.value += len(records)


def _pin(pid: int, cores: Sequence[int]) -> None:
    """Keep all threads of a process on these cores; threads and processes that it starts stay there too."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def _cpu_s(server: NatsServer) -> float:
    return Parts(server.pid, 0, 0).cpu_s()[SERVER]


if __name__ == "__main__":
    parser = parser_of(__doc__, runs=3)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    sys.exit(main(options.runs, options.count, options.seconds))
