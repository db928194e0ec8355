"""The Spark engine: read ranges, shuffle by key, sort by position, fold whole partitions, load from the tasks.

Tasks load into PostgreSQL themselves. SQLite has one writer, so there the rows come back to the driver as Arrow. What a
task finds wrong with events and rows comes back as a value: it would only fail again.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it
from sqlalchemy import URL, make_url

from eventjet import failpoints
from eventjet.archive.manifest import Archive
from eventjet.errors import RebuildError
from eventjet.projections.app_ref import AppRef
from eventjet.projections.row_codec import ColumnValues
from eventjet.rebuild.load import Part, Target, load_part
from eventjet.rebuild.plan import Pass, Plan, Route
from eventjet.rebuild.progress import Phase, Stopped, Watch
from eventjet.settings import Settings
from eventjet.spark.archive_frames import archived_frame, reading
from eventjet.spark.engine_tasks import KEYED, RESULT, FoldTask, KeyTask, unpack_parked, unpack_rows
from eventjet.spark.log_frames import log_frame
from eventjet.spark.options import connection_options
from eventjet.spark.packaging import send_files, ship
from eventjet.spark.scratch import scratch_folder
from eventjet.spark.sealed import seal
from eventjet.spark.session import Started
from eventjet.sql.database import Database
from eventjet.sql.quarantine_rows import Parked

_POLL_S = 0.25
_OURS = re.compile(r"^eventjet\.[\w.]+: (?P<told>.+)$", re.MULTILINE)
_RAISED = re.compile(r"^(?P<told>[A-Za-z_][\w.]*(?:Error|Exception|Failure)\b.*)$", re.MULTILINE)


def load_on_spark(
    plan: Plan,
    app: AppRef,
    settings: Settings,
    targets: Sequence[Target],
    started: Started,
    watch: Watch,
    *,
    ship_app: bool = True,
    archive: Archive | None = None,
) -> list[Part]:
    """Carry out a plan; returns what every part of every projection holds. Raises `RebuildError`.

    `archive` holds the positions that the plan does not read from the log.
    """
    if not plan.events:
        return []
    frugal = nullcontext() if archive is None else reading(started.spark)
    with scratch_folder() as scratch, frugal, watch.phase("read", plan.events):
        secrets = scratch / "secrets"
        secrets.mkdir()
        reference = ship(started, app, scratch) if ship_app else app
        job = _Job(plan, reference, connection_options(settings, secrets), started, watch, archive)
        by_name = {target.projection: target for target in targets}
        databases = {one: passwordless(one, secrets) for one in {target.database for target in targets}}
        for_tasks = {name: replace(one, database=databases[one.database]) for name, one in by_name.items()}
        send_files(secrets, started)
        share = plan.events // len(plan.passes)
        parts: list[Part] = []
        failpoints.reach("rebuild.engine_started")
        for number, one in enumerate(plan.passes):
            own = [by_name[step.projection] for step in one.steps]
            with following(started.spark, watch, "read", share * number, share, plan.events):
                try:
                    parts += job.run(one, own, tuple(for_tasks[target.projection] for target in own))
                except RebuildError:
                    raise
                except Exception as error:
                    watch.check()
                    raise RebuildError(f"Spark could not finish: {reason_of(error)}") from error
        return parts


def cores_of(started: Started) -> int | None:
    """How many tasks run at once on this machine; None when they run elsewhere, or the session does not tell."""
    spark: Any = started.spark
    if not started.local or "connect" in type(spark).__module__:
        return None
    return int(spark.sparkContext.defaultParallelism)


class _Job:
    """A plan on one session."""

    def __init__(
        self,
        plan: Plan,
        app: AppRef,
        connection: Mapping[str, str],
        started: Started,
        watch: Watch,
        archive: Archive | None,
    ) -> None:
        self._plan = plan
        self._app = app
        self._connection = connection
        self._started = started
        self._watch = watch
        self._archive = archive

    def run(self, one: Pass, targets: Sequence[Target], for_tasks: tuple[Target, ...]) -> list[Part]:
        """Read the log once for the steps of one pass."""
        frame = self._frame(one, targets[0].database.dialect)
        keyed = one.route is Route.BY_KEY
        folded: Any = frame.mapInArrow(FoldTask(self._app, for_tasks, keyed), RESULT)
        if targets[0].database.dialect.is_concurrent:
            return list(_accounted(folded.collect(), {}))
        # One partition after the other: what is in the driver's memory is a partition's rows.
        by_name = {target.projection: target for target in targets}
        return list(_accounted(self._wanted(folded.toLocalIterator(prefetchPartitions=True)), by_name))

    def _frame(self, one: Pass, dialect: ColumnValues) -> Any:
        """The records of each partition, in the order of the log."""
        plan = self._plan
        frame = self._read()
        if one.route is Route.BY_AGGREGATE:
            # The id alone is the key, so the aggregates of one id have to meet.
            frame = frame.repartition(plan.partitions, F.substring_index("subject", ".", -1))
        elif one.route is Route.BY_KEY:
            task = KeyTask(self._app, one.steps[0].projection, dialect)
            frame = frame.mapInArrow(task, KEYED).repartition(plan.partitions, "token")
        else:
            return frame
        return frame.sortWithinPartitions("position")

    def _read(self) -> Any:
        """The records, the archived ones before those of the log: what each task reads is fixed by the plan."""
        plan, spark = self._plan, self._started.spark
        frames: list[Any] = []
        if self._archive is not None and plan.archived >= plan.first:
            frames.append(archived_frame(spark, self._archive, plan.first, plan.archived))
        if plan.ranges:
            options = {**self._connection, "stream": plan.stream}
            frames.append(log_frame(spark, options, plan.ranges))
        return frames[0] if len(frames) == 1 else frames[0].union(frames[1])

    def _wanted(self, rows: Iterator[Any]) -> Iterator[Any]:
        for row in rows:
            self._watch.check()
            yield row


def _accounted(rows: Iterator[Any] | Sequence[Any], inserted_here: Mapping[str, Target]) -> Iterator[Part]:
    """The parts that tasks told of, after the rows they handed back are inserted."""
    held: dict[tuple[str, int], list[bytes]] = {}
    parked: dict[tuple[str, int], list[Parked]] = {}
    for row in rows:
        if row.fault is not None:
            raise RebuildError(row.fault)
        key = (row.projection, row.part)
        if row.payload is not None:
            held.setdefault(key, []).append(bytes(row.payload))
            continue
        if row.parked is not None:
            parked.setdefault(key, []).extend(unpack_parked(bytes(row.parked)))
            continue
        target = inserted_here.get(row.projection)
        if target is not None:
            handed = chain.from_iterable(map(unpack_rows, held.pop(key, [])))
            loaded = load_part(target, row.part, handed)
            if loaded != row.rows:
                raise RebuildError(f"A task folded {row.rows} rows and {loaded} arrived. Run the rebuild again.")
        yield Part(row.projection, row.part, row.events, row.rows, parked.pop(key, ()))


def passwordless(database: Database, secrets: Path) -> Database:
    """The same database for tasks, which find its password in a sealed file."""
    url = make_url(database.url)
    if url.password is None:
        return database
    bare = URL.create(url.drivername, url.username, None, url.host, url.port, url.database, url.query)
    sealed = seal(secrets, "pgpass", str(url.password))
    return Database(bare.update_query_dict({"passfile": sealed}).render_as_string(hide_password=False))


@contextmanager
def following(spark: Any, watch: Watch, phase: Phase, done: int, share: int, total: int) -> Generator[None]:
    """Report progress from a thread, and interrupt the job soon after it is not wanted any more.

    The job is `share` of the phase's `total`, after what was `done`.
    """
    ended = threading.Event()
    seen = _Stages()

    def follow() -> None:
        while not ended.wait(_POLL_S):
            try:
                watch.check()
                # A job does not fail because its progress cannot be told.
                with suppress(Exception):
                    watch.tell(phase, done + int(share * seen.fraction(spark)), total)
            except Stopped:
                with suppress(Exception):
                    spark.interruptAll()
                return

    thread = threading.Thread(target=follow, name="eventjet-spark-progress", daemon=True)
    thread.start()
    try:
        with seen.told_by(spark):
            yield
    finally:
        ended.set()
        thread.join()


class _Stages:
    """How much of the running jobs is done, in tasks: classic Spark is asked, a Spark Connect server tells."""

    def __init__(self) -> None:
        self._totals: dict[int, tuple[int, int]] = {}
        self._told = 0.0

    @contextmanager
    def told_by(self, spark: Any) -> Generator[None]:
        """Listen to a Spark Connect server meanwhile."""
        if not _is_remote(spark):
            yield
            return
        spark.registerProgressHandler(self._take)
        try:
            yield
        finally:
            spark.removeProgressHandler(self._take)

    def fraction(self, spark: Any) -> float:
        """0 while nothing is known; it never goes back when a job turns out to have more stages."""
        if not _is_remote(spark):
            self._ask(spark.sparkContext.statusTracker())
        totals = list(self._totals.values())
        total = sum(tasks for _, tasks in totals)
        done = sum(completed for completed, _ in totals) / total if total else 0.0
        self._told = max(self._told, done)
        return self._told

    def _ask(self, tracker: Any) -> None:
        for stage in tracker.getActiveStageIds():
            found = tracker.getStageInfo(stage)
            if found is not None:
                self._totals[stage] = (found.numCompletedTasks, found.numTasks)
        for stage in set(self._totals) - set(tracker.getActiveStageIds()):
            total = self._totals[stage][1]
            self._totals[stage] = (total, total)

    def _take(self, stages: Any, **_: Any) -> None:
        self._totals |= {one.stage_id: (one.num_completed_tasks, one.num_tasks) for one in stages or ()}


def _is_remote(spark: Any) -> bool:
    return "connect" in type(spark).__module__


def reason_of(error: Exception) -> str:
    """The innermost sentence of what a task raised, out of Spark's many lines."""
    text = str(error)
    found = _OURS.findall(text) or _RAISED.findall(text)
    return found[-1] if found else next((line for line in text.splitlines() if line.strip()), type(error).__name__)
