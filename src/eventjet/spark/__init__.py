"""The home of Spark: a session that brings its own JVM, and the log as a data source and as DataFrames.

`spark_session` starts or reaches Spark; `events` shows the log, or one event type of it, as a DataFrame;
`spark.read` and `readStream` with `format("jetstream")` read raw records; `AppRef` names an app for those that import
it elsewhere. pyspark is not imported before one of them is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventjet.projections.app_ref import AppRef
    from eventjet.spark.frames import events
    from eventjet.spark.session import spark_session

__all__ = ["AppRef", "events", "spark_session"]

_HOMES = {
    "AppRef": "eventjet.projections.app_ref",
    "events": "eventjet.spark.frames",
    "spark_session": "eventjet.spark.session",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'eventjet.spark' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
