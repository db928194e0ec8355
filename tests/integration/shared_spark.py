"""One Spark session for all files that ask for `spark`, one after the other: most of what each test on a session of its
own would cost is a JVM that starts and gets warm.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from eventjet.spark.session import Started, spark_session


class SharedSpark:
    """Starts at its first use, and again after it was closed."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.running: Started | None = None

    def started(self, mounted: Path) -> Started:
        """Return the session; it knows the folder `mounted` as `viewfs://archives/there`."""
        if self.running is None:
            link = {"spark.hadoop.fs.viewfs.mounttable.archives.link./there": f"file://{mounted}"}
            self.running = self._stack.enter_context(spark_session("local[2]", conf=link))
        return self.running

    def close(self) -> None:
        self.running = None
        self._stack.close()


@contextmanager
def configured(started: Started, settings: Mapping[str, str]) -> Generator[Any]:
    """Yield the session with settings that are removed at the end of the test file."""
    for name, value in settings.items():
        started.spark.conf.set(name, value)
    try:
        yield started.spark
    finally:
        for name in settings:
            started.spark.conf.unset(name)
