"""What is told to OpenTelemetry, imported only where an application uses it (extra `otel`).

Spans carry types of errors, never what they say, and no value of an event. Where a trace is not sampled, and the
sampler would not record what is beneath, no span is made: what it would lead to is beneath its parent. A command's span
is completed late, while the server is at work: its caller waits only for the span's id. See ADR 0033.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Token
from importlib.metadata import version
from typing import Any

from opentelemetry import context, metrics, trace
from opentelemetry.metrics import Counter, Histogram
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from eventjet.errors import EventjetError, UnexpectedExit
from eventjet.observability import spans
from eventjet.observability.spans import BUCKETS, COMMAND, ERROR, LINKS_MAX, LOST, OUTCOME, SPANS, SpanType

BATCH = 16
DELAY_S = 0.1
_FAULT = Status(StatusCode.ERROR)
_NOWHERE = context.Context()


class Told(threading.local):
    """Commands of this thread's loop that have ended and are not told yet: `BATCH` at most, or those of one turn more.

    Many one after the other take half the processor time of each on its own, whose code is in no cache.
    """

    def __init__(self, durations: Histogram, conflicts: Counter) -> None:
        self.durations = durations
        self.conflicts = conflicts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[CommandSpan] = []

    def soon(self, ended: CommandSpan) -> None:
        """Tell it once there are `BATCH`, after `DELAY_S`, or when the connection is closed."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self.now()  # of a loop that ended first
            self._loop, self._timer = loop, None
        self._waiting.append(ended)
        if self._timer is None:
            self._timer = loop.call_later(DELAY_S, self._due)
        if len(self._waiting) == BATCH:
            # In its next turn the loop sends what tasks have written in this one; in the one after, the server works.
            loop.call_soon(loop.call_soon, self.now)

    def now(self) -> None:
        """Tell all that has ended."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            try:
                one.tell()
            except BaseException as raised:  # noqa: BLE001 - of the application's processors or readers; the others go on
                assert self._loop is not None
                error = UnexpectedExit.instead_of(raised)
                self._loop.call_exception_handler({"message": "a command could not be told", "exception": error})

    def _due(self) -> None:
        self._timer = None
        self.now()


class CommandSpan:
    """Used by one task."""

    __slots__ = (
        "_began",
        "_ended_ns",
        "_labels",
        "_made",
        "_outcome",
        "_seconds",
        "_token",
        "_told",
        "attributes",
        "conflicts",
    )

    def __init__(
        self, told: Told, made: Span | None, token: Token[context.Context] | None, labels: tuple[str, str] | None
    ) -> None:
        self._told = told
        self._made = made
        self._token = token
        self._labels = labels
        """Aggregate and decision; None where nothing is measured."""
        self.conflicts = 0
        """Races lost."""
        self.attributes: dict[str, Any] = {}
        """Attributes of the span."""
        self._began = time.perf_counter()

    def ended(self, events: int, error: BaseException | None = None) -> None:
        """Tell what came of it, when there is time."""
        if self._token is not None:
            context.detach(self._token)
        if self._made is None and self._labels is None:
            return
        self._seconds = time.perf_counter() - self._began
        self._ended_ns = time.time_ns()
        if error is None:
            self._outcome = "done" if events else "nothing"
            if events != 1:
                self.attributes["eventjet.events"] = events
        else:
            is_ours = isinstance(error, EventjetError) or not isinstance(error, Exception)
            self._outcome = "failed" if is_ours else "refused"
            self.attributes[ERROR] = type(error).__qualname__
        self._told.soon(self)

    def tell(self) -> None:
        """Complete the span, whose name says aggregate and decision, and record the metrics."""
        made, attributes, outcome = self._made, self.attributes, self._outcome
        if made is not None:
            if outcome != "done":
                attributes[OUTCOME] = outcome
            if self.conflicts:
                attributes[LOST] = self.conflicts
            made.set_attributes(attributes)
            if outcome == "failed":
                made.set_status(_FAULT)
            made.end(self._ended_ns)
        if self._labels is not None:
            aggregate, decision = self._labels
            labels = {"eventjet.aggregate": aggregate, "eventjet.decision": decision, OUTCOME: outcome}
            # The context is for exemplars, which name the span: its own, and not that of whoever is current now.
            within = _NOWHERE if made is None else set_span_in_context(made, _NOWHERE)
            self._told.durations.record(self._seconds, labels, within)
            if self.conflicts:
                self._told.conflicts.add(self.conflicts, {"eventjet.aggregate": aggregate}, within)


_SCOPE = "eventjet"
_LOOK_S = 1.0
"""Between two looks for a `MeterProvider`, while there is none."""
_DROPS_UNSAMPLED = re.compile(
    r"ParentBased\{.*,remoteParentNotSampled:AlwaysOffSampler,localParentSampled:[^,]*,localParentNotSampled:AlwaysOffSampler\}",
    re.DOTALL,
)
"""How `ParentBased` describes itself where it drops what is in no sampled trace (OpenTelemetry's SDK specification)."""
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_KINDS = {each.name: SpanKind[each.kind.upper()] for each in SPANS}


def found() -> Telemetry | None:
    """What tells the application's providers; None while it has set none."""
    has_tracer = not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    return Telemetry.of(None, None) if has_tracer or _has_meter() else None


def _has_meter(meters: metrics.MeterProvider | None = None) -> bool:
    # Its placeholder is not public, and any other provider is the application's.
    return type(meters or metrics.get_meter_provider()).__name__ not in ("_ProxyMeterProvider", "NoOpMeterProvider")


class Telemetry:
    """Safe for any number of tasks and threads."""

    def __init__(self, tracer: trace.Tracer, meter: metrics.Meter, *, is_measured: bool) -> None:
        self._tracer = tracer
        sampler = getattr(tracer, "sampler", None)  # the SDK's; another's spans are always asked for
        self._drops_unsampled = sampler is not None and bool(_DROPS_UNSAMPLED.fullmatch(sampler.get_description()))
        self._is_measured, self._looked_at = is_measured, 0.0
        self._durations = {
            each.name: meter.create_histogram(
                each.metric, unit="s", description=each.help, explicit_bucket_boundaries_advisory=BUCKETS
            )
            for each in SPANS
        }
        conflicts = meter.create_counter(spans.CONFLICTS, unit="{conflict}", description=spans.CONFLICTS_HELP)
        self._told = Told(self._durations[COMMAND.name], conflicts)

    @classmethod
    def of(cls, tracers: trace.TracerProvider | None, meters: metrics.MeterProvider | None) -> Telemetry:
        """Of these providers; None for the application's, which may still be set."""
        own = version("eventjet")
        return cls(
            trace.get_tracer(_SCOPE, own, tracers),
            metrics.get_meter(_SCOPE, own, meters),
            is_measured=_has_meter(meters),
        )

    def traceparent(self) -> str | None:
        """The header of the current span."""
        known = trace.get_current_span().get_span_context()
        return f"00-{known.trace_id:032x}-{known.span_id:016x}-{known.trace_flags:02x}" if known.is_valid else None

    @contextmanager
    def span(
        self,
        kind: SpanType,
        name: str,
        labels: Mapping[str, Any],
        parent: str | None = None,
        links: Iterable[str] = (),
        *,
        more: dict[str, Any] | None = None,
    ) -> Generator[dict[str, Any]]:
        more = {} if more is None else more
        began = time.perf_counter()
        linked = [Link(one) for one in map(_parsed, links) if one is not None]
        made, within = self._begun(f"{kind.name} {name}".rstrip(), parent, _KINDS[kind.name], linked)
        token = None if within is None else context.attach(within)
        try:
            yield more
        except BaseException as error:
            more[ERROR] = type(error).__qualname__
            if made is not None:
                made.set_status(_FAULT)
            raise
        finally:
            if token is not None:
                context.detach(token)
            if made is not None:
                made.set_attributes({**labels, **more})
                made.end()
            labels = {**labels, **{key: more[key] for key in kind.labels if key in more}}
            self._durations[kind.name].record(time.perf_counter() - began, labels)

    def batch(self, name: str, labels: Mapping[str, Any], parents: Iterable[str], more: dict[str, Any]) -> Any:
        """A span linked to the traces that these headers are of; a part of the one where there is one only."""
        links = list(dict.fromkeys(parents))
        of_one = len({one[3:35] for one in links}) == 1
        return self.span(spans.BATCH, name, labels, links[0] if of_one else None, links[:LINKS_MAX], more=more)

    def tell(self) -> None:
        """Complete the commands of this thread that have ended."""
        self._told.now()

    def command(self, aggregate: str, decision: str, parent: str | None, name: str = "") -> CommandSpan | None:
        """A command's span, which is current until it is `ended`; None where there is nothing to be told of it."""
        if parent is None and self._drops(trace.get_current_span()) and not self._measures():
            return None  # as below, in a tenth of the time
        made, within = self._begun(name or f"{aggregate}.{decision}", parent)
        is_measured = self._measures()
        if made is None and within is None and not is_measured:
            return None
        token = None if within is None else context.attach(within)
        return CommandSpan(self._told, made, token, (aggregate, decision) if is_measured else None)

    def _drops(self, parent: trace.Span) -> bool:
        """Whether the sampler would drop whatever is beneath."""
        if not self._drops_unsampled:
            return False
        above = parent.get_span_context()
        return above.is_valid and not above.trace_flags & TraceFlags.SAMPLED

    def _begun(
        self, name: str, parent: str | None, kind: SpanKind = SpanKind.INTERNAL, links: Sequence[Link] = ()
    ) -> tuple[trace.Span | None, context.Context | None]:
        """A span, None where it is not recorded; and its context, None where that is the current one."""
        beneath = _beneath(parent)
        if self._drops(trace.get_current_span(beneath)):
            return None, beneath
        made = self._tracer.start_span(name, beneath, kind=kind, links=links)
        return made if made.is_recording() else None, trace.set_span_in_context(made)

    def _measures(self) -> bool:
        """Whether there is a `MeterProvider`; an application may set it at any time."""
        if not self._is_measured and (now := time.monotonic()) - self._looked_at >= _LOOK_S:
            self._looked_at, self._is_measured = now, _has_meter()
        return self._is_measured


def _beneath(parent: str | None) -> context.Context | None:
    """The current context, or that of `parent` where no span of its trace is current."""
    told = None if parent is None else _parsed(parent)
    if told is None or trace.get_current_span().get_span_context().trace_id == told.trace_id:
        return None
    return trace.set_span_in_context(NonRecordingSpan(told))


def _parsed(traceparent: str) -> SpanContext | None:
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    trace_id, span_id, flags = (int(one, 16) for one in match.groups())
    told = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return told if told.is_valid else None
