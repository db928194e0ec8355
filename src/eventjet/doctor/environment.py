"""What is installed here: eventjet, Python, and what rebuilds on Spark take."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib.metadata import version

from eventjet.doctor.diagnosis import Diagnoses
from eventjet.errors import Unreachable
from eventjet.findings import Level
from eventjet.spark.jvm import find_java
from eventjet.urls import shown_master

_LOCAL = "`--engine local` rebuilds in one process, without Spark and Java"


def look_at_environment(told: Diagnoses) -> None:
    """Nothing is imported that is not light."""
    told.ok("python", f"eventjet {version('eventjet')} on Python {platform.python_version()}")
    if importlib.util.find_spec("pyspark") is None:
        fix = 'pip install "eventjet[spark]"'
        told.add("spark", Level.NOTE, "Spark is not installed", f"no rebuild on several cores; {_LOCAL}", fix)
        return
    remote = os.environ.get("SPARK_REMOTE")
    if remote:
        told.ok("spark", f"PySpark {version('pyspark')}, which works on {shown_master(remote)}")
        return
    try:
        java = find_java()
    except Unreachable as error:
        what = f"PySpark {version('pyspark')} has no Java: {error.reason}"
        told.add("java", Level.WARNING, what, f"rebuilds on Spark on this machine fail; {_LOCAL}", error.remedy)
        return
    told.ok("spark", f"PySpark {version('pyspark')} with Java {java.version} of {java.origin}")
