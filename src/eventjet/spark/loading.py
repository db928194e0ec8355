"""Shadows and snapshots on Spark: read ranges, shuffle by key, sort by position, fold and load whole partitions.

Tasks load into PostgreSQL themselves. SQLite has one writer, so there the rows come back to the driver as Arrow. What a
task finds wrong with events and rows comes back as a value: it would only fail again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it
from sqlalchemy import URL, make_url

from eventjet import failpoints
from eventjet.errors import RebuildError
from eventjet.projections.app_ref import AppRef
from eventjet.projections.row_codec import ColumnValues
from eventjet.rebuild.job import Job
from eventjet.rebuild.plan import Pass, Plan, Route
from eventjet.rebuild.run_space import Part, Target
from eventjet.rebuild.snapshots import SnapshotFold, Tally
from eventjet.rebuild.spaces import space_kind
from eventjet.spark.archiving import archived_frame, reading
from eventjet.spark.columns import pyarrow, records_of
from eventjet.spark.fold_tasks import KEYED, RESULT, FoldTask, KeyTask, unpack_rows
from eventjet.spark.options import LogOptions, seal
from eventjet.spark.running import following, provisions
from eventjet.spark.session import Started, is_remote
from eventjet.spark.source import log_frame
from eventjet.sql.database import Database
from eventjet.sql.statements import Parked

_TALLY = "tally string"
"""What a task that folds snapshots tells: its `Tally` as JSON."""


def load_on_spark(job: Job, plan: Plan, targets: Sequence[Target], started: Started, *, ship: bool) -> list[Part]:
    """Carry out a plan; returns what every part of every projection holds. Raises `RebuildError`."""
    frugal = nullcontext() if job.source.archive is None else reading(started.spark)
    with frugal, job.watch.phase("read", plan.events), provisions(job, started) as provided:
        by_name = {target.projection: target for target in targets}
        databases = {one: passwordless(one, provided.secrets) for one in {target.database for target in targets}}
        for_tasks = {name: replace(one, database=databases[one.database]) for name, one in by_name.items()}
        loading = _Loading(job, plan, provided.app(ship=ship), provided.options, started.spark)
        provided.send()
        share = plan.events // len(plan.passes)
        parts: list[Part] = []
        failpoints.reach("rebuild.engine_started")
        for number, one in enumerate(plan.passes):
            own = [by_name[step.projection] for step in one.steps]
            with following(started.spark, job.watch, "read", share * number, share, plan.events):
                parts += loading.run(one, own, tuple(for_tasks[target.projection] for target in own))
        return parts


def cores_of(started: Started) -> int | None:
    """How many tasks run at once on this machine; None when they run elsewhere, or the session does not tell."""
    if not started.local or is_remote(started.spark):
        return None
    return started.spark.sparkContext.defaultParallelism


@dataclass(frozen=True, slots=True)
class _Loading:
    """A plan on one session."""

    job: Job
    plan: Plan
    app: AppRef
    options: Mapping[str, str]
    """Of the source, without positions."""
    spark: Any

    def run(self, one: Pass, targets: Sequence[Target], for_tasks: tuple[Target, ...]) -> list[Part]:
        """Read the log once for the steps of one pass."""
        frame = self._frame(one, targets[0].database.dialect)
        keyed = one.route is Route.BY_KEY
        folded: Any = frame.mapInArrow(FoldTask(self.app, for_tasks, keyed), RESULT)
        if targets[0].database.dialect.is_concurrent:
            return list(_accounted(folded.collect(), {}))
        # One partition after the other: what is in the driver's memory is a partition's rows.
        by_name = {target.projection: target for target in targets}
        return list(_accounted(self._wanted(folded.toLocalIterator(prefetchPartitions=True)), by_name))

    def _frame(self, one: Pass, dialect: ColumnValues) -> Any:
        """The records of each partition, in the order of the log."""
        plan = self.plan
        frame = self._read()
        if one.route is Route.BY_AGGREGATE:
            # The id alone is the key, so the aggregates of one id have to meet.
            frame = frame.repartition(plan.partitions, F.substring_index("subject", ".", -1))
        elif one.route is Route.BY_KEY:
            task = KeyTask(self.app, one.steps[0].projection, dialect)
            frame = frame.mapInArrow(task, KEYED).repartition(plan.partitions, "token")
        else:
            return frame
        return frame.sortWithinPartitions("position")

    def _read(self) -> Any:
        """The records, the archived ones before those of the log: what each task reads is fixed by the plan."""
        plan, spark, archive = self.plan, self.spark, self.job.source.archive
        frames: list[Any] = []
        if archive is not None and plan.archived >= plan.first:
            frames.append(archived_frame(spark, archive.manifest, plan.first, plan.archived))
        if plan.ranges:
            frames.append(log_frame(spark, self.options, plan.ranges))
        return frames[0] if len(frames) == 1 else frames[0].union(frames[1])

    def _wanted(self, rows: Iterator[Any]) -> Iterator[Any]:
        for row in rows:
            self.job.watch.check()
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
            parked.setdefault(key, []).extend(Parked(*event) for event in unpack_rows(bytes(row.parked)))
            continue
        target = inserted_here.get(row.projection)
        if target is not None:
            handed = chain.from_iterable(map(unpack_rows, held.pop(key, [])))
            loaded = space_kind(target.database).load(target, row.part, handed)
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


@dataclass(frozen=True, slots=True)
class SnapshotTask:
    """Folds records that are sorted by subject and position."""

    app: AppRef
    aggregate: str
    least: int
    last: int
    options: Mapping[str, str]
    """Of the source: how to reach the server."""

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        endpoint = LogOptions.parse(self.options).endpoint()
        current: bytes | None = None
        with SnapshotFold(self.app.load(), self.aggregate, self.least, endpoint, self.last) as fold:
            for batch in batches:
                for subject, records in groupby(records_of(batch), key=itemgetter(2)):
                    if current not in (None, subject):
                        fold.finish(current)
                    current = subject
                    fold.take(subject, list(records))
            yield pyarrow().RecordBatch.from_pylist([{"tally": json.dumps(asdict(fold.done()))}])


def fold_on_spark(job: Job, plan: Plan, aggregate: str, least: int, started: Started, *, ship: bool) -> Tally:
    """Write the snapshots of one aggregate type; raises `RebuildError`."""
    with provisions(job, started) as provided:
        task = SnapshotTask(provided.app(ship=ship), aggregate, least, plan.last, provided.options)
        provided.send()
        reach = {"fromPosition": str(plan.first), "toPosition": str(plan.last), "partitions": str(len(plan.ranges))}
        frame: Any = started.spark.read.format("jetstream").options(**provided.options, **reach).load()
        own = frame.where(frame["subject"].startswith(f"{plan.stream}.{aggregate}."))
        histories = own.repartition(plan.partitions, "subject").sortWithinPartitions("subject", "position")
        tally = Tally()
        with (
            job.watch.phase("read", plan.events),
            following(started.spark, job.watch, "read", 0, plan.events, plan.events),
        ):
            for row in histories.mapInArrow(task, _TALLY).collect():
                tally.add(json.loads(row.tally))
    return tally
