"""W3C trace context, taken from OpenTelemetry where the application uses it; nothing is imported for it."""

from __future__ import annotations

import sys
from typing import Any


def current_traceparent() -> str | None:
    """The `traceparent` of the current span; None without OpenTelemetry or without a span."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    propagate: Any = __import__("opentelemetry.propagate", fromlist=["inject"])
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent")
