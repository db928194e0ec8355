"""`SparkEngine`, whose session starts when it is needed. Importing this module does not import pyspark."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Literal

from eventjet.archive.reading import ArchiveFiles, FolderFiles, Segment, folder_of
from eventjet.errors import EventjetError
from eventjet.rebuild.job import EngineOptions, Job
from eventjet.rebuild.plan import Plan
from eventjet.rebuild.progress import Watch
from eventjet.rebuild.runs import Part, Target
from eventjet.rebuild.snapshots import SnapshotTally
from eventjet.spark.session import Started, find_java, not_installed, spark_session
from eventjet.urls import shown_master


@contextmanager
def spark_engine(options: EngineOptions, watch: Watch) -> Generator[SparkEngine]:
    """Yield the engine; its session ends with the `with` block."""
    with ExitStack() as stack:
        yield SparkEngine(options, watch, stack)


class SparkEngine:
    """The engine that runs on Spark; see `eventjet.rebuild.job.Engine`."""

    name: Literal["spark"] = "spark"

    def __init__(self, options: EngineOptions, watch: Watch, stack: ExitStack) -> None:
        self._options = options
        self._watch = watch
        self._stack = stack
        self._started: Started | None = None

    def location(self) -> str:
        return shown_master(self._options.master or os.environ.get("SPARK_REMOTE") or "local[*]")

    def obstacle(self) -> str | None:
        # Only a connection would show whether a cluster can be reached, so that is not checked.
        if importlib.util.find_spec("pyspark") is None:
            return str(not_installed("pyspark"))
        try:
            if self.location().startswith("local"):
                find_java()
        except EventjetError as error:
            return str(error)
        return None

    def archive_files(self, url: str) -> ArchiveFiles:
        if folder_of(url) is not None:
            return FolderFiles(url)
        spark = self._session().spark
        from eventjet.spark.archiving import SparkFiles
        from eventjet.spark.running import named

        tag = self._stack.enter_context(named(spark, f"eventjet: read the archive {url}"))

        def interrupt() -> None:
            with suppress(Exception):
                spark.interruptTag(tag)

        self._stack.enter_context(self._watch.interrupted_by(interrupt))
        return SparkFiles(spark, url)

    def load(self, job: Job, plan: Plan, targets: Sequence[Target]) -> list[Part]:
        with self._watch.phase("spark"):
            started = self._session()
        from eventjet.spark.loading import cores_of, load_on_spark

        self._watch.cores = cores_of(started)
        return load_on_spark(job, plan, targets, started, ship=self._options.ship) if plan.events else []

    def fold_snapshots(self, job: Job, plan: Plan, aggregate: str, min_events: int) -> SnapshotTally:
        with self._watch.phase("start"):
            started = self._session()
        from eventjet.spark.loading import fold_on_spark

        return fold_on_spark(job, plan, aggregate, min_events, started, ship=self._options.ship)

    def seal(self, job: Job, url: str, ranges: Sequence[tuple[int, int]]) -> list[Segment]:
        with self._watch.phase("start"):
            started = self._session()
        from eventjet.spark.archiving import seal_all

        return seal_all(job, self.archive_files(url), ranges, started)

    def _session(self) -> Started:
        """Return the session, which the first call starts; raises `Unreachable` without pyspark.

        Modules that import pyspark are imported after this call.
        """
        if self._started is None:
            self._started = self._stack.enter_context(spark_session(self._options.master, bulk_only=True))
        return self._started
