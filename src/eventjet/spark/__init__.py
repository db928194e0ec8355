"""The home of Spark: a session that brings its own JVM, and the log as a data source and as DataFrames.

`spark_session` starts or reaches Spark; `events` shows the log, or one event type of it, as a DataFrame;
`spark.read` and `readStream` with `format("jetstream")` read raw records; `AppRef` names an app for those that import
it elsewhere. pyspark is not imported before one of them is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventjet.lazy import lazy

if TYPE_CHECKING:
    from eventjet.projections.app_ref import AppRef
    from eventjet.spark.frames import events
    from eventjet.spark.session import spark_session

__all__ = ["AppRef", "events", "spark_session"]

__getattr__ = lazy(
    __name__,
    {
        "eventjet.projections.app_ref": ("AppRef",),
        "eventjet.spark.frames": ("events",),
        "eventjet.spark.session": ("spark_session",),
    },
)
