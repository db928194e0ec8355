"""Report spans and their metrics to OpenTelemetry if the application has set it up; else do nothing.

The header `traceparent` (W3C trace context) carries a trace through the log and through served commands.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from eventjet.observability.spans import SpanType

if TYPE_CHECKING:
    from eventjet.observability.otel import Telemetry

_APIS = ("opentelemetry.trace", "opentelemetry.metrics")
_CHECK_INTERVAL_S = 0.1
"""Seconds between two checks for a provider while there is none: at each check the API reads the environment."""
_active: Telemetry | None = None
_checked_at = 0.0


def active() -> Telemetry | None:
    """Return the `Telemetry` in use; None while the application has set no provider, which is checked every 0.1 s."""
    global _active, _checked_at
    if _active is None and (_APIS[0] in sys.modules or _APIS[1] in sys.modules):
        now = time.monotonic()
        if now - _checked_at >= _CHECK_INTERVAL_S:
            from eventjet.observability.otel import telemetry_of_application

            _checked_at, _active = now, telemetry_of_application()
    return _active


@contextmanager
def connected() -> Generator[None]:
    """Check for a provider now, and report the commands that have ended when the connection of the block is closed."""
    global _checked_at  # noqa: PLW0603 - as above
    _checked_at = 0.0
    try:
        yield
    finally:
        if (telemetry := active()) is not None:
            telemetry.report()


@contextmanager
def reporting_to(telemetry: Telemetry) -> Generator[None]:
    """Use this `Telemetry` within the block, instead of the application's."""
    global _active  # noqa: PLW0603 - as above
    previous, _active = _active, telemetry
    try:
        yield
    finally:
        _active = previous


def span(
    kind: SpanType,
    name: str = "",
    labels: Mapping[str, Any] | None = None,
    attributes: dict[str, Any] | None = None,
    *,
    parent: str | None = None,
) -> AbstractContextManager[dict[str, Any]]:
    """Return a context manager for a span around the block, which yields a dictionary for further attributes.

    `attributes` and the yielded dictionary have attributes beside `labels`; those that the kind declares as labels are
    in the histogram too. `name` is appended to the name of the kind. `parent` is the `traceparent` of the cause, which
    counts if no span of its trace is current.
    """
    telemetry = active()
    return (
        nullcontext({})
        if telemetry is None
        else telemetry.span(kind, name, labels or {}, parent, attributes=attributes)
    )


def batch(
    projection: str, revision: int, events: int, position: int, parents: Callable[[], Iterable[str]] = tuple
) -> AbstractContextManager[Any]:
    """Return a context manager for the span of a projection's transaction, of `events` events up to a position.

    The span is linked to the traces of the `traceparent` headers that `parents` returns; if all are of one trace, the
    span is a part of it.
    """
    telemetry = active()
    if telemetry is None:
        return nullcontext()
    labels = {"eventjet.projection": projection, "eventjet.revision": revision}
    attributes = {"eventjet.events": events, "eventjet.position": position}
    return telemetry.batch(projection, labels, parents(), attributes)


def current_traceparent() -> str | None:
    """Return the `traceparent` of the current span; None without OpenTelemetry or without a span."""
    telemetry = active()
    return None if telemetry is None else telemetry.traceparent()
