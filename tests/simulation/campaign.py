"""Runs of many seeded schedules on all processors: what they covered, and the seeds that broke a promise."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Protocol, TypeAlias

from tests.simulation.client import Rules
from tests.simulation.world import PRODUCT, World

CHUNK = 1_000
"""Schedules that one process runs before it reports."""


@dataclass(slots=True)
class Report:
    """The result of some schedules."""

    schedules: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    """The number of each outcome and mishap."""
    broken: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Seeds, and the promises that they broke."""

    def add(self, other: Report) -> None:
        """Add the figures of another report."""
        self.schedules += other.schedules
        self.counts += other.counts
        self.broken += other.broken


class Schedule(Protocol):
    """A schedule that is made from a seed."""

    @property
    def counts(self) -> dict[str, int]: ...

    def run(self) -> None:
        """Raises `AssertionError` when a promise was broken."""
        ...


Trace: TypeAlias = list[tuple[object, ...]]


def run(first_seed: int, count: int, rules: Rules = PRODUCT) -> Report:
    """Run some schedules of saves in this process."""
    return run_each(lambda seed: World(seed, rules), first_seed, count)


def run_each(make: Callable[[int], Schedule], first_seed: int, count: int) -> Report:
    """Run some schedules in this process."""
    report = Report()
    for seed in range(first_seed, first_seed + count):
        world = make(seed)
        try:
            world.run()
        except AssertionError as error:
            report.broken.append((seed, str(error)))
        report.schedules += 1
        report.counts.update(world.counts)
    return report


def run_on_all_processors(
    first_seed: int,
    count: int,
    progress: Callable[[Report], object] = lambda report: None,
    run_some: Callable[[int, int], Report] = run,
    chunk: int = CHUNK,
) -> Report:
    """Run some schedules on all processors; `progress` gets the sum so far after each chunk.

    Other processes find `run_some` by its name, so it must be a function of a module.
    """
    total = Report()
    # Spawned, not forked: the parent may have threads.
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        firsts = range(first_seed, first_seed + count, chunk)
        counts = [min(chunk, first_seed + count - first) for first in firsts]
        for report in pool.map(run_some, firsts, counts):
            total.add(report)
            progress(total)
    return total


def traced(seed: int, rules: Rules = PRODUCT) -> tuple[list[str], str | None]:
    """Return the trace of a schedule of saves, and the broken promise."""
    trace: Trace = []
    return traced_of(World(seed, rules, trace), trace)


def traced_of(world: Schedule, trace: Trace) -> tuple[list[str], str | None]:
    """Return the trace of a schedule, and the broken promise."""
    broken: str | None = None
    try:
        world.run()
    except AssertionError as error:
        broken = str(error)
    return [f"{entry[0]:10.6f}  " + "  ".join(map(str, entry[1:])) for entry in trace], broken
