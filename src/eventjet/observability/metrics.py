"""PURE: all metrics, the counters of one process, and the text that Prometheus scrapes (exposition format 0.0.4).

A test checks `docs/reference/metrics.md` against the metrics that are declared here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Metric:
    """One Prometheus metric."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ("projection", "revision")
    buckets: tuple[float, ...] = ()


POSITION = Metric("eventjet_projection_position", "gauge", "Position up to which the rows are true.")
LAG_EVENTS = Metric("eventjet_projection_lag_events", "gauge", "Events of the log that are not in the rows yet.")
LAG_SECONDS = Metric(
    "eventjet_projection_lag_seconds", "gauge", "Age of the oldest event that is not in the rows yet; 0 without lag."
)
QUARANTINED = Metric(
    "eventjet_projection_quarantined", "gauge", "Events in its quarantine that wait for a decision or a worker."
)
STATE = Metric(
    "eventjet_projection_state",
    "gauge",
    "1 for the state it is in, 0 for the others.",
    ("projection", "revision", "state"),
)
HAS_LEASE = Metric(
    "eventjet_projection_has_lease", "gauge", "1 while this process holds the lease, 0 while it stands by."
)
LOG_POSITION = Metric("eventjet_log_position", "gauge", "Position of the log's last event.", ())
EVENTS = Metric("eventjet_events_total", "counter", "Events of its subscription that this process has committed.")
BATCHES = Metric("eventjet_batches_total", "counter", "Transactions that this process has committed.")
COMMIT_SECONDS = Metric(
    "eventjet_commit_seconds",
    "histogram",
    "How long the transaction of a batch took, rows and checkpoint.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
TERMS = Metric(
    "eventjet_terms_total",
    "counter",
    "Terms of this process that ended: drained (asked to stop), fenced (another took over, or it was paused), "
    "failed (an event or the log stopped it), fault (anything that is tried again).",
    ("projection", "revision", "reason"),
)
_FOLLOWER = ("name", "kind")
FOLLOWER_POSITION = Metric("eventjet_follower_position", "gauge", "Position up to which everything is done.", _FOLLOWER)
FOLLOWER_LAG = Metric(
    "eventjet_follower_lag_events", "gauge", "Positions of the log after it, while one of them concerns it.", _FOLLOWER
)
FOLLOWER_QUARANTINED = Metric(
    "eventjet_follower_quarantined",
    "gauge",
    "Events in its quarantine that wait for a decision or a worker.",
    _FOLLOWER,
)
HAS_CURSOR = Metric(
    "eventjet_follower_has_cursor", "gauge", "1 while this process has the cursor, 0 while it stands by.", _FOLLOWER
)
HANDLED = Metric("eventjet_follower_handled_total", "counter", "Events that this process has dealt with.", _FOLLOWER)
TRIES = Metric(
    "eventjet_follower_tries_total",
    "counter",
    "Tries of this process: done, failed (tried again, or quarantined), passing (an outage: tried for ever), "
    "quarantined (given up).",
    (*_FOLLOWER, "outcome"),
)
FOLLOWER_TERMS = Metric(
    "eventjet_follower_terms_total",
    "counter",
    "Terms of this process that ended, as those of projections.",
    (*_FOLLOWER, "reason"),
)
HEALTHY = Metric("eventjet_worker_healthy", "gauge", "1 when `/healthz` answers 200.", ())
LOOK_AGE = Metric(
    "eventjet_worker_look_age_seconds", "gauge", "Age of the look that the gauges of projections and log are from.", ()
)

METRICS = tuple(metric for metric in tuple(globals().values()) if isinstance(metric, Metric))
"""All metrics, in the order of their declarations."""
TERM_ENDS = ("drained", "fenced", "failed", "fault")
"""How a lease session ends: values of the label `reason` of `eventjet_terms_total`."""

TRY_OUTCOMES = ("done", "failed", "passing", "quarantined")
"""How an attempt ends: values of the label `outcome` of `eventjet_follower_tries_total`."""

Labels = tuple[str, ...]
Sample = tuple[Metric, Labels, float]
"""A metric, the values of its labels, and its value."""


@dataclass(slots=True)
class Meter:
    """Counters of one projection in one process; updated once for each batch, and read by any thread."""

    projection: str
    revision: int
    events: int = 0
    batches: int = 0
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(COMMIT_SECONDS.buckets) + 1))
    terms: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TERM_ENDS, 0))

    def committed(self, events: int, seconds: float) -> None:
        """Count a committed batch."""
        self.events += events
        self.batches += 1
        self.seconds += seconds
        self.buckets[bisect_left(COMMIT_SECONDS.buckets, seconds)] += 1

    def lines(self) -> list[tuple[Metric, str]]:
        """Return the lines of the exposition format, each with its metric."""
        label_values = (self.projection, str(self.revision))
        lines = [
            (EVENTS, line(EVENTS, label_values, self.events)),
            (BATCHES, line(BATCHES, label_values, self.batches)),
            *((TERMS, line(TERMS, (*label_values, reason), count)) for reason, count in self.terms.items()),
        ]
        total = 0
        name = COMMIT_SECONDS.name
        labels = _labels(COMMIT_SECONDS.labels, label_values)
        for bound, count in zip((*COMMIT_SECONDS.buckets, "+Inf"), list(self.buckets), strict=True):
            total += count
            lines.append((COMMIT_SECONDS, f'{name}_bucket{{{labels},le="{bound}"}} {total}'))
        lines.append((COMMIT_SECONDS, f"{name}_sum{{{labels}}} {self.seconds!r}"))
        lines.append((COMMIT_SECONDS, f"{name}_count{{{labels}}} {total}"))
        return lines


@dataclass(slots=True)
class FollowerMeter:
    """Counters of one reactor or process type in one process; read by any thread."""

    name: str
    kind: str
    handled: int = 0
    tries: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TRY_OUTCOMES, 0))
    terms: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TERM_ENDS, 0))

    def lines(self) -> list[tuple[Metric, str]]:
        """Return the lines of the exposition format, each with its metric."""
        label_values = (self.name, self.kind)
        return [
            (HANDLED, line(HANDLED, label_values, self.handled)),
            *((TRIES, line(TRIES, (*label_values, outcome), count)) for outcome, count in self.tries.items()),
            *(
                (FOLLOWER_TERMS, line(FOLLOWER_TERMS, (*label_values, reason), count))
                for reason, count in self.terms.items()
            ),
        ]


def exposition(samples: Iterable[Sample], meters: Iterable[Meter | FollowerMeter]) -> str:
    """Return the text for Prometheus: every metric with its help and type, even if it has no value yet."""
    by_metric: dict[Metric, list[str]] = {metric: [] for metric in METRICS}
    for metric, labels, value in samples:
        by_metric[metric].append(line(metric, labels, value))
    for meter in meters:
        for metric, text in meter.lines():
            by_metric[metric].append(text)
    return "".join(
        "\n".join([f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}", *lines, ""])
        for metric, lines in by_metric.items()
    )


def line(metric: Metric, labels: Labels, value: float) -> str:
    """Return one line of the exposition format."""
    label_text = f"{{{_labels(metric.labels, labels)}}}" if labels else ""
    return f"{metric.name}{label_text} {value!r}"


def _labels(names: Labels, values: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
