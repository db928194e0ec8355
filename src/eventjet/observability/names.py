"""Every metric, declared once. `docs/reference/metrics.md` is checked against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, as Prometheus knows it."""

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
PARKED = Metric("eventjet_projection_parked", "gauge", "Events in its quarantine that wait for a decision or a worker.")
STATE = Metric(
    "eventjet_projection_state",
    "gauge",
    "1 for the state it is in, 0 for the others.",
    ("projection", "revision", "state"),
)
HELD = Metric("eventjet_projection_held", "gauge", "1 while this process holds the lease, 0 while it stands by.")
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
HEALTHY = Metric("eventjet_worker_healthy", "gauge", "1 when `/healthz` answers 200.", ())
LOOK_AGE = Metric(
    "eventjet_worker_look_age_seconds", "gauge", "Age of the look that the gauges of projections and log are from.", ()
)

METRICS = (
    POSITION,
    LAG_EVENTS,
    LAG_SECONDS,
    PARKED,
    STATE,
    HELD,
    LOG_POSITION,
    EVENTS,
    BATCHES,
    COMMIT_SECONDS,
    TERMS,
    HEALTHY,
    LOOK_AGE,
)
TERM_ENDS = ("drained", "fenced", "failed", "fault")
"""Values of `reason` of `eventjet_terms_total`."""
