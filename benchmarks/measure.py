"""Medians of interleaved runs, printed as ratios."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field


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

    def ratio(self, subject: str, versus: str) -> float:
        """How many times better `subject` is than `versus`: above 1 is better."""
        mine, theirs = self.median(subject), self.median(versus)
        return mine / theirs if self.higher_is_better else theirs / mine

    def show(self) -> None:
        print(f"\n{self.job}")
        for subject, values in self.values.items():
            print(
                f"  {subject:<44} {statistics.median(values):>12,.2f} {self.unit:<8}"
                f" ({min(values):,.2f} to {max(values):,.2f}, {len(values)} runs)"
            )


async def interleave(runs: int, *subjects: Callable[[], Awaitable[None]]) -> None:
    """A B A B …, so that what else the machine does falls on all alike."""
    for _ in range(runs):
        for subject in subjects:
            await subject()
