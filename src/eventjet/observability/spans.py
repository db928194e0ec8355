"""The kinds of spans and their attributes; `docs/reference/metrics.md` is checked against what is declared here.

Each kind has a histogram of its duration, `<name>.duration` in seconds, by its labels: the attributes that have few
values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["internal", "producer", "consumer", "server", "client"]

OUTCOME = "eventjet.outcome"
LOST = "eventjet.conflicts"
APPEND_SECONDS = "eventjet.append_seconds"
"""How long the save took, until its outcome was known."""
ERROR = "error.type"
"""As OpenTelemetry's conventions call it: the class of what was raised, and nothing of what it says."""

BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper ends of the histograms, in seconds."""
LINKS_MAX = 100
"""Traces that one span is linked to; events beyond that are not."""


@dataclass(frozen=True, slots=True)
class SpanType:
    """One kind of span."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    """Attributes that its histogram has too."""
    attributes: tuple[str, ...] = ()
    """Others."""

    @property
    def metric(self) -> str:
        """Its histogram."""
        return f"{self.name}.duration"

    @property
    def prometheus(self) -> str:
        """How Prometheus names that: with its unit, and without dots."""
        return self.metric.replace(".", "_") + "_seconds"


COMMAND = SpanType(
    "eventjet.command",
    "internal",
    "A command: load, decide, append, and again where another writer was quicker; called `account.deposit`. Of several "
    "aggregates at once: `transact`.",
    ("eventjet.aggregate", "eventjet.decision", OUTCOME),
    ("eventjet.aggregate_id", LOST, "eventjet.events", "eventjet.position", APPEND_SECONDS),
)
LOAD = SpanType(
    "eventjet.load",
    "client",
    "A state read from its snapshot and the log.",
    ("eventjet.aggregate",),
    ("eventjet.version",),
)
SNAPSHOT = SpanType("eventjet.snapshot", "client", "A snapshot written, beside the commands.", ("eventjet.aggregate",))
BATCH = SpanType(
    "eventjet.batch",
    "consumer",
    "One transaction of a projection: rows and checkpoint. Linked to the commands that its events came from; where all "
    "came from one, it is a part of that trace.",
    ("eventjet.projection", "eventjet.revision"),
    ("eventjet.events", "eventjet.position"),
)
HANDLE = SpanType(
    "eventjet.handle",
    "consumer",
    "One try of a reactor, process, publication or inbox at an event, in the trace of the command that recorded it.",
    ("eventjet.name", "eventjet.kind"),
    ("eventjet.attempt", "eventjet.position"),
)
STEP = SpanType(
    "eventjet.step",
    "internal",
    "One step of a process, both decisions and their save.",
    ("eventjet.name",),
    ("eventjet.decision", APPEND_SECONDS),
)
SERVE = SpanType(
    "eventjet.serve",
    "server",
    "A command served over the wire, in its caller's trace.",
    ("eventjet.aggregate", "eventjet.decision"),
    ("eventjet.status",),
)
REQUEST = SpanType(
    "eventjet.request", "client", "A command asked of a service.", ("eventjet.aggregate", "eventjet.decision")
)
REBUILD = SpanType("eventjet.rebuild", "internal", "A rebuild, a verification or another bulk job.", ())
PHASE = SpanType("eventjet.rebuild.phase", "internal", "One phase of such a job.", ("eventjet.phase",))

SPANS = (COMMAND, LOAD, SNAPSHOT, BATCH, HANDLE, STEP, SERVE, REQUEST, REBUILD, PHASE)

CONFLICTS = "eventjet.command.conflicts"
CONFLICTS_PROMETHEUS = "eventjet_command_conflicts_total"
CONFLICTS_HELP = "Races that commands lost, after which they decided again."
OUTCOMES = ("done", "nothing", "refused", "failed")
"""Of a command: it recorded something, nothing, raised an error of the domain, or one of eventjet's."""
