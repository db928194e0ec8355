"""Use Spark with eventjet: a session with a JVM of its own, and the log as a data source and as DataFrames.

* `spark_session` starts a Spark session, or uses a running one
* `events` returns the log, or the events of one type, as a DataFrame
* `spark.read` and `spark.readStream` with `format("jetstream")` read raw records
* `AppRef` is a reference by which other processes import an app

pyspark is imported when one of these names is first used.
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
        "eventjet.projections.app_ref": "AppRef",
        "eventjet.spark.frames": "events",
        "eventjet.spark.session": "spark_session",
    },
)
