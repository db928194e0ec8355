"""Give spans and their metrics to OpenTelemetry where the application has set it up; else do nothing.

A trace goes on in the header `traceparent` (W3C trace context), through the log and through served commands.
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
