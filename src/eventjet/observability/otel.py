"""What is told to OpenTelemetry, imported only where an application uses it (extra `otel`).

Spans carry types of errors, never what they say, and no value of an event. That of a command is completed in the
loop's next turn, while the server is at work with the next one.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from opentelemetry import context, metrics, trace
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from eventjet.errors import EventjetError
from eventjet.observability import spans
from eventjet.observability.spans import BUCKETS, COMMAND, ERROR, LINKS_MAX, OUTCOME, SPANS, SpanType

_SCOPE = "eventjet"
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_KINDS = {each.name: SpanKind[each.kind.upper()] for each in SPANS}


def found() -> Telemetry | None:
    """What tells the application's providers; None while it has set none."""
    has_tracer = not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    # Its placeholder is not public, and any other provider is the application's.
    has_meter = type(metrics.get_meter_provider()).__name__ != "_ProxyMeterProvider"
    return Telemetry.of(None, None) if has_tracer or has_meter else None


class Telemetry:
    """Safe for any number of tasks and threads."""

    def __init__(self, tracer: trace.Tracer, meter: metrics.Meter) -> None:
        self._tracer = tracer
        self._durations = {
            each.name: meter.create_histogram(
                each.metric, unit="s", description=each.help, explicit_bucket_boundaries_advisory=BUCKETS
            )
            for each in SPANS
        }
        self._conflicts = meter.create_counter(spans.CONFLICTS, unit="{conflict}", description=spans.CONFLICTS_HELP)

    @classmethod
    def of(cls, tracers: trace.TracerProvider | None, meters: metrics.MeterProvider | None) -> Telemetry:
        """Of these providers; None for the application's, which may still be set."""
        own = version("eventjet")
        return cls(trace.get_tracer(_SCOPE, own, tracers), metrics.get_meter(_SCOPE, own, meters))

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
        made = self._tracer.start_span(
            f"{kind.name} {name}".rstrip(),
            _beneath(parent),
            kind=_KINDS[kind.name],
            links=[Link(one) for one in map(_parsed, links) if one is not None],
        )
        token = context.attach(trace.set_span_in_context(made))
        try:
            yield more
        except BaseException as error:
            more[ERROR] = type(error).__qualname__
            made.set_status(_FAULT)
            raise
        finally:
            context.detach(token)
            made.set_attributes({**labels, **more})
            made.end()
            labels = {**labels, **{key: more[key] for key in kind.labels if key in more}}
            self._durations[kind.name].record(time.perf_counter() - began, labels)

    def batch(self, name: str, labels: Mapping[str, Any], parents: Iterable[str]) -> Any:
        """A span linked to the traces that these headers are of; a part of the one where there is one only."""
        links = list(dict.fromkeys(parents))
        of_one = len({one[3:35] for one in links}) == 1
        return self.span(spans.BATCH, name, labels, links[0] if of_one else None, links[:LINKS_MAX])

    def command(self, name: str, parent: str | None) -> CommandSpan:
        """A command's span, which is current until it is `ended`."""
        return CommandSpan(self._tracer.start_span(name, _beneath(parent)), self)

    def appended(self, seconds: float) -> None:
        """A save is stored: told of the command, or the step, that it belongs to. A span of its own costs too much."""
        trace.get_current_span().set_attribute(spans.APPEND_SECONDS, seconds)

    def commanded(self, made: trace.Span, seconds: float, labels: dict[str, str], more: dict[str, Any]) -> None:
        """A command has come to its end; its name says aggregate and decision, and an outcome is told if not `done`."""
        ended_ns = time.time_ns()

        def tell() -> None:
            if made.is_recording():
                outcome = labels[OUTCOME]
                made.set_attributes(more if outcome == "done" else {**more, OUTCOME: outcome})
                if outcome == "failed":
                    made.set_status(_FAULT)
                made.end(ended_ns)
            self._durations[COMMAND.name].record(seconds, labels)
            if conflicts := more.get(spans.LOST):
                self._conflicts.add(conflicts, {"eventjet.aggregate": labels["eventjet.aggregate"]})

        _soon(tell)


class CommandSpan:
    """Used by one task."""

    __slots__ = ("_began", "_made", "_telemetry", "_token", "conflicts")

    def __init__(self, made: trace.Span, telemetry: Telemetry) -> None:
        self._made = made
        self._telemetry = telemetry
        self._token = context.attach(trace.set_span_in_context(made))
        self._began = time.perf_counter()
        self.conflicts = 0

    def again(self, again: bool) -> bool:
        """Count a try after a lost race."""
        self.conflicts += again
        return again

    def ended(self, aggregate: str, decision: str, more: dict[str, Any], error: BaseException | None = None) -> None:
        """Tell what came of it."""
        context.detach(self._token)
        if error is None:
            outcome = "done" if more.get("eventjet.events", 1) else "nothing"
        else:
            outcome = "failed" if isinstance(error, EventjetError) or not isinstance(error, Exception) else "refused"
            more[ERROR] = type(error).__qualname__
        if self.conflicts:
            more[spans.LOST] = self.conflicts
        labels = {"eventjet.aggregate": aggregate, "eventjet.decision": decision, OUTCOME: outcome}
        self._telemetry.commanded(self._made, time.perf_counter() - self._began, labels, more)


_FAULT = Status(StatusCode.ERROR)


def _soon(tell: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(tell)


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
