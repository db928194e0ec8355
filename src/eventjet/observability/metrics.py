"""PURE: counters of one process, and the text that Prometheus scrapes (exposition format 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from eventjet.observability.names import (
    BATCHES,
    COMMIT_SECONDS,
    EVENTS,
    METRICS,
    TERM_ENDS,
    TERMS,
    Metric,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[str, ...]
Sample = tuple[Metric, Labels, float]
"""A metric, the values of its labels, and its value."""


@dataclass(slots=True)
class Meter:
    """What one process counts about one projection; told once a batch, read by any thread."""

    projection: str
    revision: int
    events: int = 0
    batches: int = 0
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(COMMIT_SECONDS.buckets) + 1))
    terms: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TERM_ENDS, 0))

    def committed(self, events: int, seconds: float) -> None:
        """A batch was committed."""
        self.events += events
        self.batches += 1
        self.seconds += seconds
        self.buckets[bisect_left(COMMIT_SECONDS.buckets, seconds)] += 1

    def lines(self) -> list[tuple[Metric, str]]:
        """Its lines of exposition, each with its metric."""
        own = (self.projection, str(self.revision))
        found = [
            (EVENTS, line(EVENTS, own, self.events)),
            (BATCHES, line(BATCHES, own, self.batches)),
            *((TERMS, line(TERMS, (*own, reason), count)) for reason, count in self.terms.items()),
        ]
        total = 0
        name = COMMIT_SECONDS.name
        labels = _labels(COMMIT_SECONDS.labels, own)
        for resolved, count in zip((*COMMIT_SECONDS.buckets, "+Inf"), list(self.buckets), strict=True):
            total += count
            found.append((COMMIT_SECONDS, f'{name}_bucket{{{labels},le="{resolved}"}} {total}'))
        found.append((COMMIT_SECONDS, f"{name}_sum{{{labels}}} {self.seconds!r}"))
        found.append((COMMIT_SECONDS, f"{name}_count{{{labels}}} {total}"))
        return found


def exposition(samples: Iterable[Sample], meters: Iterable[Meter]) -> str:
    """Every metric under its help and type, also one that has no line yet: a first scrape shows all there will be."""
    by_metric: dict[Metric, list[str]] = {metric: [] for metric in METRICS}
    for metric, labels, value in samples:
        by_metric[metric].append(line(metric, labels, value))
    for meter in meters:
        for metric, text in meter.lines():
            by_metric[metric].append(text)
    return "".join(_block(metric, lines) for metric, lines in by_metric.items())


def line(metric: Metric, labels: Labels, value: float) -> str:
    """One line of exposition."""
    shown = f"{{{_labels(metric.labels, labels)}}}" if labels else ""
    return f"{metric.name}{shown} {value!r}"


def _block(metric: Metric, lines: list[str]) -> str:
    said = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    return "\n".join([f"# HELP {metric.name} {said}", f"# TYPE {metric.name} {metric.kind}", *lines, ""])


def _labels(names: Labels, values: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
