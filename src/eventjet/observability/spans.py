"""The kinds of spans and their attributes; a test checks `docs/reference/metrics.md` against this module.

Each kind has a histogram of its duration, `<name>.duration` in seconds. Its labels are the attributes with few values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["internal", "producer", "consumer", "server", "client"]

OUTCOME = "eventjet.outcome"
"""How a command ended: `done` with events, `nothing` recorded, `refused` by a domain error, or `failed`."""
LOST = "eventjet.conflicts"
APPEND_SECONDS = "eventjet.append_seconds"
"""Seconds from the start of the save until its outcome was known."""
ERROR = "error.type"
"""The class of an error, without its message; the name is from OpenTelemetry's semantic conventions."""

BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histograms' buckets, in seconds."""
LINKS_MAX = 100
"""Links of one span at most; the traces of further events are not linked."""


@dataclass(frozen=True, slots=True)
class SpanType:
    """One kind of span."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    """Attributes that are labels of the histogram too."""
    attributes: tuple[str, ...] = ()
    """Attributes of the span alone."""

    @property
    def metric(self) -> str:
        """Name of the histogram of durations."""
        return f"{self.name}.duration"

    @property
    def prometheus(self) -> str:
        """Name of the histogram in Prometheus: with its unit, and without dots."""
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
