"""Spans and their metrics, told to OpenTelemetry where the application has set it up; else nothing is done.

A trace goes on in the header `traceparent` (W3C trace context), through the log and through served commands.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventjet.observability.otel import Telemetry
    from eventjet.observability.spans import SpanType

_APIS = ("opentelemetry.trace", "opentelemetry.metrics")
_active: Telemetry | None = None


def active() -> Telemetry | None:
    """What tells OpenTelemetry, once the application has given it a provider; looked for until then."""
    global _active  # noqa: PLW0603 - found once in a process, as OpenTelemetry's own
    if _active is None and (_APIS[0] in sys.modules or _APIS[1] in sys.modules):
        from eventjet.observability.otel import found

        _active = found()
    return _active


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


def current_traceparent() -> str | None:
    """The `traceparent` of the current span; None without OpenTelemetry or without a span."""
    telemetry = active()
    return None if telemetry is None else telemetry.traceparent()
