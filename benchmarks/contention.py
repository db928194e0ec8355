"""Commands whose writers compete, and ids on long histories: `python -m benchmarks.contention`.

Several processes and connections write to the same aggregates, each as fast as it can; beside them one connection alone
on one aggregate, in turns. The server syncs before every acknowledgement. After each lap the balances must tell every
command once, and none may have failed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from benchmarks.bank import Account, bank
from benchmarks.laps import ROOT, result_of
from benchmarks.measure import Comparison, Figures, conditions, report
from benchmarks.options import parser_of
from benchmarks.peers import python
from eventjet.dev import NatsServer

ALONE = "1 connection, 1 aggregate"


@dataclass(frozen=True, slots=True)
class Crowd:
    """Who competes for what."""

    name: str
    processes: int
    connections: int
    """Of each process."""
    aggregates: int
    target: float | None = None
    """Least share of the rate of one connection alone."""


CROWDS = (
    Crowd(ALONE, 1, 1, 1),
    Crowd("4 processes, 50 aggregates", 4, 1, 50),
    Crowd("16 connections, 1 aggregate", 2, 8, 1, 0.5),
    Crowd("64 connections, 1 aggregate", 2, 32, 1, 0.5),
    Crowd("128 connections, 1 aggregate", 2, 64, 1),
)


class Job:
    """The figures of all crowds."""

    def __init__(self) -> None:
        self.rate = Figures("contention: commands", "ops/s", higher_is_better=True)
        self.lost = Figures("contention: races lost", "/command", higher_is_better=False)
        self.p50 = Figures("contention: p50", "ms", higher_is_better=False)
        self.p99 = Figures("contention: p99", "ms", higher_is_better=False)
        self.worst = Figures("contention: worst", "ms", higher_is_better=False)
        self.least = Figures("contention: commands of the slowest connection", "", higher_is_better=True)
        self.figures = [self.rate, self.lost, self.p50, self.p99, self.worst, self.least]

    def lap(self, crowd: Crowd, seconds: int) -> None:
        with NatsServer() as server:
            asyncio.run(_init(server.url))
            results = run(server.url, crowd, seconds)
            total = asyncio.run(_total(server.url, crowd.aggregates))
        by_connection = [latencies for result in results for latencies in result["latencies_ms"]]
        latencies = sorted(chain.from_iterable(by_connection))
        count, failed = len(latencies), sum(result["failed"] for result in results)
        if failed or total != count:
            raise RuntimeError(f"{crowd.name}: {failed} of {count} commands failed, and {total} were recorded")
        wall_s = max(result["ended"] for result in results) - min(result["began"] for result in results)
        self.rate.add(crowd.name, count / wall_s)
        self.lost.add(crowd.name, sum(result["conflicts"] for result in results) / count)
        self.p50.add(crowd.name, latencies[count // 2])
        self.p99.add(crowd.name, latencies[min(count - 1, count * 99 // 100)])
        self.worst.add(crowd.name, latencies[-1])
        self.least.add(crowd.name, min(map(len, by_connection)))


def run(server: str, crowd: Crowd, seconds: int) -> list[dict[str, Any]]:
    """All processes of a crowd at once, from when the last of them is ready; what each of them tells."""
    command = python("rivals")
    numbers = (crowd.connections, crowd.aggregates, seconds)
    processes = [
        subprocess.Popen(
            command(server, number, *numbers), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        for number in range(crowd.processes)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError(f"{crowd.name}: a process ended before it was ready; see above")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [json.loads(process.communicate(timeout=600)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


async def _init(server: str) -> None:
    async with bank.connect(servers=server) as jet:
        await jet.init()


async def _total(server: str, aggregates: int) -> int:
    async with bank.connect(servers=server) as jet:
        accounts = jet.repository(Account)
        return sum([int((await accounts.load(f"a{number}")).balance) for number in range(aggregates)])


def ids(figures: Figures, events: int) -> None:
    with NatsServer() as server:
        result = result_of(python("known_ids")(server.url, events, 20))
    figures.add(f"{events:,} ids known", result["p50_ms"])


def main(runs: int, seconds: int, only: Sequence[str]) -> int:
    print(conditions())
    job, with_id = Job(), Figures("contention: command(id) on one aggregate, p50", "ms", higher_is_better=False)
    chosen = [crowd for crowd in CROWDS if not only or any(part in crowd.name for part in only)]
    for _ in range(runs):
        for crowd in chosen:
            job.lap(crowd, seconds)
        for events in () if only else (100, 10_000):
            ids(with_id, events)
    figures = [each for each in (*job.figures, with_id) if each.values]
    comparisons = [
        Comparison(job.rate, crowd.name, ALONE, crowd.target)
        for crowd in chosen
        if crowd.name != ALONE and ALONE in job.rate.values
    ]
    report(figures, comparisons, is_kept=not only)
    return 0


if __name__ == "__main__":
    parser = parser_of(__doc__, runs=3)
    parser.add_argument("--seconds", type=int, default=5, help="of a lap (%(default)s)")
    parser.add_argument("--only", action="append", default=[], help="a part of a row's name; nothing is kept then")
    options = parser.parse_args()
    sys.exit(main(options.runs, options.seconds, options.only))
