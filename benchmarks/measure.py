"""Medians of interleaved runs, printed as ratios and kept as one object of JSON a figure."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "out" / "results.jsonl"


@dataclass
class Figures:
    """Rates or latencies of several subjects at one job."""

    job: str
    unit: str
    higher_is_better: bool
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, subject: str, value: float) -> None:
        self.values.setdefault(subject, []).append(value)

    def median(self, subject: str) -> float:
        return statistics.median(self.values[subject])

    def ratios(self, subject: str, versus: str) -> list[float]:
        """How many times better `subject` is than `versus`, above 1 is better: lap by lap, as they followed each other.

        So a machine that is slower for a minute is so for both. Subjects with unlike numbers of laps give one ratio.
        """
        pairs = list(zip(self.values[subject], self.values[versus], strict=False))
        if len(self.values[subject]) != len(self.values[versus]):
            pairs = [(self.median(subject), self.median(versus))]
        return [mine / theirs if self.higher_is_better else theirs / mine for mine, theirs in pairs]

    def show(self) -> None:
        print(f"\n{self.job}")
        for subject, values in self.values.items():
            print(
                f"  {subject:<52} {statistics.median(values):>12,.2f} {self.unit:<8}"
                f" ({min(values):,.2f} to {max(values):,.2f}, {len(values)} runs)"
            )

    def results(self) -> list[dict[str, Any]]:
        """One object a subject."""
        return [
            {
                "job": self.job,
                "subject": subject,
                "unit": self.unit,
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
                "runs": len(values),
            }
            for subject, values in self.values.items()
        ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One subject against another at one job, and what was aimed at."""

    figures: Figures
    subject: str
    versus: str
    target: float | None = None

    @property
    def ratios(self) -> list[float]:
        return self.figures.ratios(self.subject, self.versus)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def show(self) -> None:
        target = "" if self.target is None else f"  (target >= {self.target:.3g})"
        spread = f"({min(self.ratios):.2f} to {max(self.ratios):.2f})"
        print(f"  {self.subject} against {self.versus:<48} {self.ratio:>6.2f} {spread}{target}")

    def result(self) -> dict[str, Any]:
        (mine,) = [result for result in self.figures.results() if result["subject"] == self.subject]
        ratios = {"ratio": self.ratio, "ratio_min": min(self.ratios), "ratio_max": max(self.ratios)}
        if self.target is not None:
            ratios["target"] = self.target
        return {**mine, "versus": self.versus, **{name: round(value, 3) for name, value in ratios.items()}}


def report(
    figures: Sequence[Figures], comparisons: Sequence[Comparison] = (), note: str = "", *, is_kept: bool = True
) -> None:
    """Print the figures, a note on them, and the comparisons, write them down, and say how long all of it took."""
    for each in figures:
        each.show()
    if note:
        print(note)
    _show(comparisons)
    if is_kept:
        _keep(figures, comparisons)
    print(f"took {time.monotonic() - _STARTED:.0f} s; {conditions()}")


def _show(comparisons: Iterable[Comparison]) -> None:
    """Print them under their jobs; above 1 the first is better."""
    job = ""
    for comparison in comparisons:
        if comparison.figures.job != job:
            job = comparison.figures.job
            print(f"\nratios: {job}")
        comparison.show()


def _keep(figures: Iterable[Figures], comparisons: Iterable[Comparison]) -> None:
    """Write the results down, in the place of earlier ones of the same jobs."""
    results = [result for each in figures for result in each.results()]
    results += [comparison.result() for comparison in comparisons]
    jobs = {result["job"] for result in results}
    earlier = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    lines = [result for result in earlier if result["job"] not in jobs]
    lines += [{**result, "when_it_began": _BEGAN} for result in results]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"\nkept in {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")


def conditions() -> str:
    """What the machine was doing, and what it is."""
    return f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, Python {sys.version.split()[0]}"


_STARTED, _BEGAN = time.monotonic(), conditions()
