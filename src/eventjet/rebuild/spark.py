"""The Spark engine: read ranges, shuffle by key, sort by position, fold whole partitions, load from the tasks.

Tasks load into PostgreSQL themselves. SQLite has one writer, so there the rows come back to the driver as Arrow. What a
task finds wrong with events and rows comes back as a value: it would only fail again.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it
from sqlalchemy import URL, make_url

from eventjet.errors import RebuildError
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.database import Database
from eventjet.projections.quarantine import Parked
from eventjet.rebuild.load import Part, Target, load_part
from eventjet.rebuild.plan import Pass, Plan, Route
from eventjet.rebuild.progress import Stopped, Watch
from eventjet.rebuild.tasks import KEYED, RESULT, FoldTask, KeyTask, unpack_parked, unpack_rows
from eventjet.settings import Settings
from eventjet.spark.scratch import scratch_folder
from eventjet.spark.session import Started
from eventjet.spark.ship import AppRef, ship
from eventjet.spark.source import connection_options, write_secret

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
) -> list[Part]:
    """Carry out a plan; returns what every part of every projection holds. Raises `RebuildError`."""
    if not plan.events:
        return []
    with scratch_folder() as scratch, watch.phase("read", plan.events):
        secrets = scratch / "secrets"
        secrets.mkdir()
        reference = ship(started, app, scratch) if ship_app else app
        job = _Job(plan, reference, connection_options(settings, secrets), started, watch)
        by_name = {target.projection: target for target in targets}
        databases = {one: passwordless(one, secrets) for one in {target.database for target in targets}}
        for_tasks = {name: replace(one, database=databases[one.database]) for name, one in by_name.items()}
        _send(secrets, started)
        parts: list[Part] = []
        for number, one in enumerate(plan.passes):
            own = [by_name[step.projection] for step in one.steps]
            with _following(started.spark, plan, number, watch):
                try:
                    parts += job.run(one, own, tuple(for_tasks[target.projection] for target in own))
                except RebuildError:
                    raise
                except Exception as error:
                    watch.check()
                    raise RebuildError(f"Spark could not finish: {_reason(error)}") from error
        return parts


class _Job:
    """A plan on one session."""

    def __init__(self, plan: Plan, app: AppRef, connection: Mapping[str, str], started: Started, watch: Watch) -> None:
        self._plan = plan
        self._app = app
        self._connection = connection
        self._started = started
        self._watch = watch

    def run(self, one: Pass, targets: Sequence[Target], for_tasks: tuple[Target, ...]) -> list[Part]:
        """Read the log once for the steps of one pass."""
        frame = self._frame(one, targets[0].database.dialect)
        keyed = one.route is Route.BY_KEY
        folded: Any = frame.mapInArrow(FoldTask(self._app, for_tasks, keyed), RESULT)
        if targets[0].database.dialect == POSTGRESQL:
            return list(_accounted(folded.collect(), {}))
        # One partition after the other: what is in the driver's memory is a partition's rows.
        by_name = {target.projection: target for target in targets}
        return list(_accounted(self._wanted(folded.toLocalIterator(prefetchPartitions=True)), by_name))

    def _frame(self, one: Pass, dialect: str) -> Any:
        """The records of each partition, in the order of the log."""
        plan = self._plan
        options = {
            **self._connection,
            "stream": plan.stream,
            "fromPosition": str(plan.first),
            "toPosition": str(plan.last),
            "partitions": str(len(plan.ranges)),
        }
        frame: Any = self._started.spark.read.format("jetstream").options(**options).load()
        if one.route is Route.BY_AGGREGATE:
            # The id alone is the key, so the aggregates of one id have to meet.
            frame = frame.repartition(plan.partitions, F.substring_index("subject", ".", -1))
        elif one.route is Route.BY_KEY:
            task = KeyTask(self._app, one.steps[0].projection, dialect)
            frame = frame.mapInArrow(task, KEYED).repartition(plan.partitions, "token")
        else:
            return frame
        return frame.sortWithinPartitions("position")

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
    """The same database for tasks, which find its password in a file as libpq has it."""
    url = make_url(database.url)
    if url.password is None:
        return database
    bare = URL.create(url.drivername, url.username, None, url.host, url.port, url.database, url.query)
    escaped = str(url.password).replace("\\", "\\\\").replace(":", "\\:")
    file = write_secret(secrets, "pgpass", f"*:*:*:*:{escaped}\n")
    return Database(bare.update_query_dict({"passfile": str(file)}).render_as_string(hide_password=False))


def _send(secrets: Path, started: Started) -> None:
    """Give the tasks of a cluster the files of secrets: in neither plan nor log, and gone with the session."""
    spark: Any = started.spark
    for file in sorted(secrets.iterdir()) if not started.local else ():
        spark.addArtifacts(str(file), file=True)


@contextmanager
def _following(spark: Any, plan: Plan, number: int, watch: Watch) -> Generator[None]:
    """Report progress from a thread, and interrupt the job soon after it is not wanted any more."""
    done = threading.Event()
    share = plan.events // len(plan.passes)
    seen = _Stages()

    def follow() -> None:
        while not done.wait(_POLL_S):
            try:
                watch.check()
                # A job does not fail because its progress cannot be told.
                with suppress(Exception):
                    watch.tell("read", int(share * (number + seen.fraction(spark))), plan.events)
            except Stopped:
                with suppress(Exception):
                    spark.interruptAll()
                return

    thread = threading.Thread(target=follow, name="eventjet-spark-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class _Stages:
    """How much of the running jobs is done, in tasks; classic Spark only, Spark Connect has another way to tell."""

    def __init__(self) -> None:
        self._totals: dict[int, tuple[int, int]] = {}

    def fraction(self, spark: Any) -> float:
        """0 while nothing is known."""
        if "connect" in type(spark).__module__:
            return 0.0
        tracker = spark.sparkContext.statusTracker()
        for stage in tracker.getActiveStageIds():
            found = tracker.getStageInfo(stage)
            if found is not None:
                self._totals[stage] = (found.numCompletedTasks, found.numTasks)
        for stage in set(self._totals) - set(tracker.getActiveStageIds()):
            total = self._totals[stage][1]
            self._totals[stage] = (total, total)
        total = sum(tasks for _, tasks in self._totals.values())
        return sum(completed for completed, _ in self._totals.values()) / total if total else 0.0


def _reason(error: Exception) -> str:
    """The innermost sentence of what a task raised, out of Spark's many lines."""
    text = str(error)
    found = _OURS.findall(text) or _RAISED.findall(text)
    return found[-1] if found else next((line for line in text.splitlines() if line.strip()), type(error).__name__)
