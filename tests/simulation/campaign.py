"""Many schedules, by seed, on all processors; what they covered, and the seeds that broke a promise."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.simulation.client import Rules
from tests.simulation.world import PRODUCT, World

CHUNK = 1_000
"""Schedules that one process runs before it reports."""


@dataclass(slots=True)
class Report:
    """What some schedules gave."""

    schedules: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    """How often each outcome and each mishap occurred."""
    broken: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Seeds, and what did not hold."""

    def add(self, other: Report) -> None:
        """Take another's figures in."""
        self.schedules += other.schedules
        self.counts += other.counts
        self.broken += other.broken


def run(first_seed: int, count: int, rules: Rules = PRODUCT) -> Report:
    """Some schedules in this process."""
    report = Report()
    for seed in range(first_seed, first_seed + count):
        world = World(seed, rules)
        try:
            world.run()
        except AssertionError as error:
            report.broken.append((seed, str(error)))
        report.schedules += 1
        report.counts.update(world.counts)
    return report


def run_on_all_processors(
    first_seed: int, count: int, progress: Callable[[Report], object] = lambda report: None
) -> Report:
    """Some schedules, spread over the processors; `progress` is told the sum so far, after each chunk."""
    total = Report()
    # Spawned, not forked: the parent may have threads.
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        for report in pool.map(_run_chunk, _chunks(first_seed, count)):
            total.add(report)
            progress(total)
    return total


def traced(seed: int, rules: Rules = PRODUCT) -> tuple[list[str], str | None]:
    """The trace of one schedule, and what did not hold."""
    trace: list[tuple[object, ...]] = []
    broken: str | None = None
    try:
        World(seed, rules, trace).run()
    except AssertionError as error:
        broken = str(error)
    return [f"{entry[0]:10.6f}  " + "  ".join(map(str, entry[1:])) for entry in trace], broken


def _chunks(first_seed: int, count: int) -> Iterator[tuple[int, int]]:
    for start in range(first_seed, first_seed + count, CHUNK):
        yield start, min(CHUNK, first_seed + count - start)


def _run_chunk(chunk: tuple[int, int]) -> Report:
    return run(*chunk)
