"""Spans and their metrics, told to OpenTelemetry where the application has set it up; else nothing is done.

A trace goes on in the header `traceparent` (W3C trace context), through the log and through served commands. Each kind
of span has a histogram of its duration, `<name>.duration` in seconds, by its labels: the attributes that have few
values. `docs/reference/metrics.md` is checked against what is declared here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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


if TYPE_CHECKING:
    from eventjet.observability.otel import Telemetry
    from eventjet.observability.tracing import SpanType

_APIS = ("opentelemetry.trace", "opentelemetry.metrics")
_LOOK_S = 0.1
"""Between two looks for a provider, where there is none yet: the API asks the environment each time."""
_active: Telemetry | None = None
_looked_at = 0.0


def active() -> Telemetry | None:
    """What tells OpenTelemetry, soon after the application has given it a provider; looked for until then."""
    global _active, _looked_at
    if _active is None and (_APIS[0] in sys.modules or _APIS[1] in sys.modules):
        now = time.monotonic()
        if now - _looked_at >= _LOOK_S:
            from eventjet.observability.otel import found

            _looked_at, _active = now, found()
    return _active


@contextmanager
def connected() -> Generator[None]:
    """Around a connection: looks for a provider now, and tells in the end what has not been told yet."""
    global _looked_at  # noqa: PLW0603 - as above
    _looked_at = 0.0
    try:
        yield
    finally:
        if (telemetry := active()) is not None:
            telemetry.tell()


@contextmanager
def telling(telemetry: Telemetry) -> Generator[None]:
    """Within the block this is told, whatever the application has set up."""
    global _active  # noqa: PLW0603 - as above
    before, _active = _active, telemetry
    try:
        yield
    finally:
        _active = before


def span(
    kind: SpanType,
    name: str = "",
    labels: Mapping[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    *,
    parent: str | None = None,
) -> AbstractContextManager[dict[str, Any]]:
    """A span within the block; `more`, and what is put into it as it is yielded, are its other attributes.

    `name` comes after the kind's own; `parent` is the `traceparent` of what led here, where no span is current.
    """
    telemetry = active()
    return nullcontext({}) if telemetry is None else telemetry.span(kind, name, labels or {}, parent, more=more)


def batch(
    projection: str, revision: int, events: int, position: int, parents: Callable[[], Iterable[str]] = tuple
) -> AbstractContextManager[Any]:
    """The span of a transaction of a projection within the block, of so many events up to a position.

    It is linked to the traces that the headers `parents` gives are of, and a part of the one where there is one only.
    """
    telemetry = active()
    if telemetry is None:
        return nullcontext()
    labels = {"eventjet.projection": projection, "eventjet.revision": revision}
    more = {"eventjet.events": events, "eventjet.position": position}
    return telemetry.batch(projection, labels, parents(), more)


def current_traceparent() -> str | None:
    """The `traceparent` of the current span; None without OpenTelemetry or without a span."""
    telemetry = active()
    return None if telemetry is None else telemetry.traceparent()
