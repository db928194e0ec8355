"""The spans and metrics that an application's exporter receives within a block, by providers of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Sampler

from eventjet.observability import spans, tracing
from eventjet.observability.otel import Telemetry


@contextmanager
def traced(
    sampler: Sampler = DEFAULT_ON,
) -> Iterator[tuple[InMemorySpanExporter, InMemoryMetricReader, TracerProvider]]:
    """Collect what is reported within the block; commands are when their connection is closed."""
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(sampler=sampler), MeterProvider([reader])
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    with tracing.reporting_to(Telemetry.of(tracers, meters)):
        yield exporter, reader, tracers
    tracers.shutdown()
    meters.shutdown()


def of(exporter: InMemorySpanExporter, kind: spans.SpanType) -> list[ReadableSpan]:
    """Return the finished spans of a kind; a command's span is named after its decision."""
    finished = exporter.get_finished_spans()
    if kind is spans.COMMAND:
        return [span for span in finished if span.name in ("cup.fill", "cup.wash")]
    return [span for span in finished if span.name.partition(" ")[0] == kind.name]


def ids(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def metrics_of(reader: InMemoryMetricReader) -> dict[str, int]:
    """Return how often each metric was recorded, or what it counted."""
    data = reader.get_metrics_data()
    assert data is not None
    counts: dict[str, int] = {}
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                points: Any = metric.data.data_points
                counts[metric.name] = sum(
                    getattr(point, "count", None) or getattr(point, "value", 0) for point in points
                )
    return counts
