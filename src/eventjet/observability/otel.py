"""Report spans and metrics to OpenTelemetry. Imported only if the application uses it (extra `otel`).

Spans have the types of errors, never their messages, and no value of an event. If a trace is not sampled, and the
sampler would drop the spans beneath it, no span is created: what would be beneath it is beneath its parent. A command's
span is completed later, while the server is at work: the caller waits only for the span's id. See ADR 0033.
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
_ERROR_STATUS = Status(StatusCode.ERROR)
_EMPTY_CONTEXT = context.Context()


class CommandReporter(threading.local):
    """Reports the commands of this thread's event loop that have ended.

    `BATCH` wait at most, and those of one more turn of the loop. Reporting many in a row takes half the processor
    time for each of them, since their code stays in the processor's cache.
    """

    def __init__(self, durations: Histogram, conflicts: Counter) -> None:
        self.durations = durations
        self.conflicts = conflicts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[CommandSpan] = []

    def soon(self, command: CommandSpan) -> None:
        """Report a command once `BATCH` have ended, after `DELAY_S` seconds, or when the connection is closed."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self.now()  # the commands of an earlier loop
            self._loop, self._timer = loop, None
        self._waiting.append(command)
        if self._timer is None:
            self._timer = loop.call_later(DELAY_S, self._due)
        if len(self._waiting) == BATCH:
            # The loop sends in its next turn what tasks have written in this turn; after that it waits for the server.
            loop.call_soon(loop.call_soon, self.now)

    def now(self) -> None:
        """Report all commands that have ended."""
        waiting, self._waiting = self._waiting, []
        for command in waiting:
            try:
                command.report()
            except BaseException as raised:  # noqa: BLE001 - of the application's processors or readers; the others go on
                assert self._loop is not None
                error = UnexpectedExit.instead_of(raised)
                self._loop.call_exception_handler({"message": "a command could not be reported", "exception": error})

    def _due(self) -> None:
        self._timer = None
        self.now()


class CommandSpan:
    """The span of one command and its metrics; used by one task."""

    __slots__ = (
        "_began",
        "_ended_ns",
        "_labels",
        "_outcome",
        "_reporter",
        "_seconds",
        "_span",
        "_token",
        "attributes",
        "conflicts",
    )

    def __init__(
        self,
        reporter: CommandReporter,
        span: Span | None,
        token: Token[context.Context] | None,
        labels: tuple[str, str] | None,
    ) -> None:
        self._reporter = reporter
        self._span = span
        self._token = token
        self._labels = labels
        """Aggregate and decision; None if no metrics are recorded."""
        self.conflicts = 0
        """Races that the command lost."""
        self.attributes: dict[str, Any] = {}
        """Attributes of the span."""
        self._began = time.perf_counter()

    def ended(self, events: int, error: BaseException | None = None) -> None:
        """End the command with its number of events, or an error; it is reported later."""
        if self._token is not None:
            context.detach(self._token)
        if self._span is None and self._labels is None:
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
        self._reporter.soon(self)

    def report(self) -> None:
        """Complete the span and record the metrics. The span's name says aggregate and decision already."""
        span, attributes, outcome = self._span, self.attributes, self._outcome
        if span is not None:
            if outcome != "done":
                attributes[OUTCOME] = outcome
            if self.conflicts:
                attributes[LOST] = self.conflicts
            span.set_attributes(attributes)
            if outcome == "failed":
                span.set_status(_ERROR_STATUS)
            span.end(self._ended_ns)
        if self._labels is not None:
            aggregate, decision = self._labels
            labels = {"eventjet.aggregate": aggregate, "eventjet.decision": decision, OUTCOME: outcome}
            # Exemplars take the span from the context: it must be the command's, and not the current span.
            exemplar_context = _EMPTY_CONTEXT if span is None else set_span_in_context(span, _EMPTY_CONTEXT)
            self._reporter.durations.record(self._seconds, labels, exemplar_context)
            if self.conflicts:
                self._reporter.conflicts.add(self.conflicts, {"eventjet.aggregate": aggregate}, exemplar_context)


_SCOPE = "eventjet"
_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks for a `MeterProvider`, while there is none."""
_DROPS_UNSAMPLED = re.compile(
    r"ParentBased\{.*,remoteParentNotSampled:AlwaysOffSampler,localParentSampled:[^,]*,localParentNotSampled:AlwaysOffSampler\}",
    re.DOTALL,
)
"""Description of a `ParentBased` sampler that drops spans of unsampled traces (OpenTelemetry's SDK specification)."""
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_KINDS = {span_type.name: SpanKind[span_type.kind.upper()] for span_type in SPANS}


def telemetry_of_application() -> Telemetry | None:
    """Return a `Telemetry` for the application's providers; None while the application has set none."""
    has_tracer = not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    return Telemetry.of(None, None) if has_tracer or _has_meter() else None


def _has_meter(meters: metrics.MeterProvider | None = None) -> bool:
    # OpenTelemetry's placeholder is not public, so it is recognized by name; any other provider is the application's.
    return type(meters or metrics.get_meter_provider()).__name__ not in ("_ProxyMeterProvider", "NoOpMeterProvider")


class Telemetry:
    """The spans and metrics of eventjet in OpenTelemetry; safe for any number of tasks and threads."""

    def __init__(self, tracer: trace.Tracer, meter: metrics.Meter, *, has_meter_provider: bool) -> None:
        self._tracer = tracer
        sampler = getattr(tracer, "sampler", None)  # only the SDK has it; another tracer is asked for every span
        self._drops_unsampled = sampler is not None and bool(_DROPS_UNSAMPLED.fullmatch(sampler.get_description()))
        self._has_meter_provider, self._checked_at = has_meter_provider, 0.0
        self._durations = {
            span_type.name: meter.create_histogram(
                span_type.metric, unit="s", description=span_type.help, explicit_bucket_boundaries_advisory=BUCKETS
            )
            for span_type in SPANS
        }
        conflicts = meter.create_counter(spans.CONFLICTS, unit="{conflict}", description=spans.CONFLICTS_HELP)
        self._reporter = CommandReporter(self._durations[COMMAND.name], conflicts)

    @classmethod
    def of(cls, tracers: trace.TracerProvider | None, meters: metrics.MeterProvider | None) -> Telemetry:
        """Return a `Telemetry` for these providers; None stands for the application's, which may be set later."""
        release = version("eventjet")
        return cls(
            trace.get_tracer(_SCOPE, release, tracers),
            metrics.get_meter(_SCOPE, release, meters),
            has_meter_provider=_has_meter(meters),
        )

    def traceparent(self) -> str | None:
        """Return the `traceparent` header of the current span; None if there is none."""
        span_context = trace.get_current_span().get_span_context()
        return (
            f"00-{span_context.trace_id:032x}-{span_context.span_id:016x}-{span_context.trace_flags:02x}"
            if span_context.is_valid
            else None
        )

    @contextmanager
    def span(
        self,
        kind: SpanType,
        name: str,
        labels: Mapping[str, Any],
        parent: str | None = None,
        links: Iterable[str] = (),
        *,
        attributes: dict[str, Any] | None = None,
    ) -> Generator[dict[str, Any]]:
        attributes = {} if attributes is None else attributes
        began = time.perf_counter()
        linked = [Link(link_context) for link_context in map(_parse_traceparent, links) if link_context is not None]
        span, active_context = self._start_span(f"{kind.name} {name}".rstrip(), parent, _KINDS[kind.name], linked)
        token = None if active_context is None else context.attach(active_context)
        try:
            yield attributes
        except BaseException as error:
            attributes[ERROR] = type(error).__qualname__
            if span is not None:
                span.set_status(_ERROR_STATUS)
            raise
        finally:
            if token is not None:
                context.detach(token)
            if span is not None:
                span.set_attributes({**labels, **attributes})
                span.end()
            labels = {**labels, **{key: attributes[key] for key in kind.labels if key in attributes}}
            self._durations[kind.name].record(time.perf_counter() - began, labels)

    def batch(self, name: str, labels: Mapping[str, Any], parents: Iterable[str], attributes: dict[str, Any]) -> Any:
        """Return a span linked to the traces of these `traceparent` headers; if they are of one trace, a part of it."""
        links = list(dict.fromkeys(parents))
        is_one_trace = len({traceparent[3:35] for traceparent in links}) == 1
        return self.span(
            spans.BATCH, name, labels, links[0] if is_one_trace else None, links[:LINKS_MAX], attributes=attributes
        )

    def report(self) -> None:
        """Report the commands of this thread that have ended."""
        self._reporter.now()

    def command(self, aggregate: str, decision: str, parent: str | None, name: str = "") -> CommandSpan | None:
        """Start a command's span, which is current until `ended` is called; None if nothing would be recorded."""
        if parent is None and self._drops(trace.get_current_span()) and not self._records_metrics():
            return None  # the same result as below, in a tenth of the time
        span, active_context = self._start_span(name or f"{aggregate}.{decision}", parent)
        is_measured = self._records_metrics()
        if span is None and active_context is None and not is_measured:
            return None
        token = None if active_context is None else context.attach(active_context)
        return CommandSpan(self._reporter, span, token, (aggregate, decision) if is_measured else None)

    def _drops(self, parent: trace.Span) -> bool:
        """Return whether the sampler would drop every span beneath this parent."""
        if not self._drops_unsampled:
            return False
        span_context = parent.get_span_context()
        return span_context.is_valid and not span_context.trace_flags & TraceFlags.SAMPLED

    def _start_span(
        self, name: str, parent: str | None, kind: SpanKind = SpanKind.INTERNAL, links: Sequence[Link] = ()
    ) -> tuple[trace.Span | None, context.Context | None]:
        """Start a span and return it with its context; None for a span not recorded, None for the current context."""
        parent_context = _parent_context(parent)
        if self._drops(trace.get_current_span(parent_context)):
            return None, parent_context
        span = self._tracer.start_span(name, parent_context, kind=kind, links=links)
        return span if span.is_recording() else None, trace.set_span_in_context(span)

    def _records_metrics(self) -> bool:
        """Return whether there is a `MeterProvider`; an application may set it at any time."""
        if not self._has_meter_provider and (now := time.monotonic()) - self._checked_at >= _CHECK_INTERVAL_S:
            self._checked_at, self._has_meter_provider = now, _has_meter()
        return self._has_meter_provider


def _parent_context(parent: str | None) -> context.Context | None:
    """Return the context of `parent`; None, for the current context, without one or if its trace is the current one."""
    span_context = None if parent is None else _parse_traceparent(parent)
    if span_context is None or trace.get_current_span().get_span_context().trace_id == span_context.trace_id:
        return None
    return trace.set_span_in_context(NonRecordingSpan(span_context))


def _parse_traceparent(traceparent: str) -> SpanContext | None:
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    trace_id, span_id, flags = (int(group, 16) for group in match.groups())
    span_context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return span_context if span_context.is_valid else None
