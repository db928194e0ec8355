"""Load shadows and write snapshots on Spark: read ranges of the log, shuffle, then fold one partition in each task.

Shadows shuffle blocks of records by key. Snapshots shuffle a row for each event, because Spark's own sort brings the
events of an aggregate together, so that a task keeps the state of only one aggregate.

Tasks are pickled for Spark's Python workers, so they have only values, names and references. They load into PostgreSQL
themselves; SQLite has one writer, so its rows come back to the driver as Arrow. A task returns an error about events
and rows as a value, because another try would only fail again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import reduce
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import DataFrame
from sqlalchemy import URL, make_url

from eventjet import failpoints
from eventjet.archive.reading import folder_of
from eventjet.domain.quarantined import Quarantined
from eventjet.errors import CodecError, ProjectionError, RebuildError, RowsRefused
from eventjet.jetstream.reader import Range
from eventjet.log.predecessors import PredecessorReader
from eventjet.projections.app_ref import AppRef
from eventjet.projections.row_codec import ColumnValues
from eventjet.rebuild.folding import Folding, Foldings, fold_of, foldings_of
from eventjet.rebuild.job import Job
from eventjet.rebuild.plan import Pass, Plan, Route
from eventjet.rebuild.runs import Part, Target, redacted
from eventjet.rebuild.snapshots import SnapshotFold, SnapshotTally
from eventjet.rebuild.sqlite_workspace import CHUNK
from eventjet.rebuild.workspace import load_part
from eventjet.runtime import uncollected
from eventjet.spark.archiving import archived_frame, reading
from eventjet.spark.columns import arrow_schema, pack_rows, pyarrow, records_of, unpack_rows
from eventjet.spark.running import following, provisions, send_files
from eventjet.spark.session import Started, is_remote
from eventjet.spark.shuffle_blocks import (
    BLOCK_COLUMNS,
    CONF,
    PackByState,
    TaskFault,
    incoming,
    packing,
    shuffled,
)
from eventjet.spark.source import (
    LogOptions,
    Reader,
    ReadRanges,
    is_sealed,
    log_frame,
    ranges_frame,
    read_columns,
    seal,
    unseal,
)
from eventjet.sql.database import Database

_RESULT_COLUMNS = {
    "projection": "string",
    "part": "bigint",
    "events": "bigint",
    "rows": "bigint",
    "payload": "binary",
    "quarantined": "binary",
    "fault": "string",
}
_RESULT = ", ".join(f"{name} {ddl}" for name, ddl in _RESULT_COLUMNS.items())
"""The outcome of a part, in Spark's DDL. Before it come rows that the driver has to insert, as `payload`, and
quarantined events, as `quarantined`."""

_STATES = " states"
"""Follows the name of a projection in the outcome of a part of its table of states."""
_PARTS_STRIDE = 100_000
"""The distance between the part numbers of one task, which loads entries in several transactions."""
_QUARANTINE_CHUNK = 500
"""The maximum number of quarantined events in one message to the driver."""


def load_on_spark(job: Job, plan: Plan, targets: Sequence[Target], started: Started, *, ship: bool) -> list[Part]:
    """Carry out a plan and return the loaded parts of all projections; raises `RebuildError`."""
    with reading(started.spark, CONF), job.watch.phase("read", plan.events), provisions(job, started) as provided:
        by_name = {target.projection: target for target in targets}
        databases = {
            database: passwordless(database, provided.secrets) for database in {target.database for target in targets}
        }
        for_tasks = {name: replace(target, database=databases[target.database]) for name, target in by_name.items()}
        loading = _Loading(job, plan, provided.app(ship=ship), LogOptions.parse(provided.options), started)
        send_files(provided.secrets, started)
        share = plan.events // len(plan.passes)
        parts: list[Part] = []
        failpoints.reach("rebuild.engine_started")
        for number, log_pass in enumerate(plan.passes):
            names = log_pass.projections
            name = f"eventjet: fold {', '.join(names)} up to position {plan.last}"
            with following(started.spark, job.watch, "read", share * number, share, plan.events, name=name):
                parts += loading.run(
                    log_pass, [by_name[name] for name in names], tuple(for_tasks[name] for name in names)
                )
        return parts


def cores_of(started: Started) -> int | None:
    """Return how many tasks run at once on this machine; None when they run elsewhere, or the number is not known."""
    if not started.local or is_remote(started.spark):
        return None
    return started.spark.sparkContext.defaultParallelism


@dataclass(frozen=True, slots=True)
class _Loading:
    """The passes of one plan on one Spark session."""

    job: Job
    plan: Plan
    app: AppRef
    options: LogOptions
    """The options of the source `jetstream`, without positions."""
    started: Started

    def run(self, log_pass: Pass, targets: Sequence[Target], for_tasks: tuple[Target, ...]) -> list[Part]:
        """Run one pass and return its loaded parts; `for_tasks` are the targets with databases for tasks."""
        dialect = targets[0].database.dialect
        folded = self._folded(log_pass, dialect, for_tasks)
        if dialect.is_concurrent:
            return list(_loaded_parts(folded.collect(), {}))
        # The partitions are collected one after the other, so the driver's memory has the rows of one partition.
        by_name = {target.projection: target for target in targets}
        by_name |= {target.projection + _STATES: target.states for target in targets if target.states is not None}
        return list(_loaded_parts(self._until_stopped(folded.toLocalIterator(prefetchPartitions=True)), by_name))

    def _folded(self, log_pass: Pass, dialect: ColumnValues, for_tasks: tuple[Target, ...]) -> Any:
        """Return a frame of the results of the tasks that fold each partition in the order of the log."""
        plan, skipped = self.plan, self.job.catalog.skipped
        task = FoldTask(self.app, for_tasks, log_pass.route, plan.partitions, self.options, skipped)
        if log_pass.route is Route.UNSHUFFLED:
            folded = [frame.mapInArrow(replace(task, read=read), _RESULT) for frame, read in self._frames()]
            return reduce(DataFrame.union, folded)
        # Projections with a shuffle of their own have a pass of their own; the others are packed alike.
        resolved = fold_of(self.job.app, log_pass.projections[0])
        packed: list[DataFrame] = []
        for frame, read in self._frames():
            pack = packing(read, plan.partitions, self.app, resolved, dialect, self.options, skipped)
            packed.append(frame.mapInArrow(pack, BLOCK_COLUMNS))
        blocks = reduce(DataFrame.union, packed)
        if log_pass.route is Route.BY_STATE:
            by_state = PackByState(plan.partitions, self.app, resolved.name, dialect, self.options, skipped)
            blocks = shuffled(blocks, plan.partitions).mapInArrow(by_state, BLOCK_COLUMNS)
        return shuffled(blocks, plan.partitions).mapInArrow(task, _RESULT)

    def _frames(self) -> Iterator[tuple[Any, Reader]]:
        """Yield frames with the functions that make records of their rows; the plan fixes what each task reads.

        If the tasks and the archive are on this machine, the tasks read the archive's files themselves. Otherwise the
        archive is read through the file systems that the JVM knows.
        """
        plan, spark, archive = self.plan, self.started.spark, self.job.source.archive
        ranges = plan.ranges
        if archive is not None and plan.archived >= plan.first:
            if not self.started.local or folder_of(archive.manifest.url) is None:
                yield archived_frame(spark, archive.manifest, plan.first, plan.archived), read_columns
                archive = None
            else:
                files = archive.manifest.files(plan.first, plan.archived)
                ranges = (
                    *(Range(max(file.first, plan.first), min(file.last, plan.archived) + 1) for file in files),
                    *ranges,
                )
        if ranges:
            yield ranges_frame(spark, ranges), ReadRanges(self.options, ranges, archive, plan.archived)

    def _until_stopped(self, rows: Iterator[Any]) -> Iterator[Any]:
        for row in rows:
            self.job.watch.check()
            yield row


def _loaded_parts(rows: Iterator[Any] | Sequence[Any], driver_targets: Mapping[str, Target]) -> Iterator[Part]:
    """Yield the parts that tasks report, after loading rows for `driver_targets`; raises `RebuildError`."""
    payloads: dict[tuple[str, int], list[bytes]] = {}
    quarantined: dict[tuple[str, int], list[Quarantined]] = {}
    for row in rows:
        if row.fault is not None:
            raise RebuildError(row.fault)
        key = (row.projection, row.part)
        if row.payload is not None:
            payloads.setdefault(key, []).append(bytes(row.payload))
            continue
        if row.quarantined is not None:
            quarantined.setdefault(key, []).extend(Quarantined(*event) for event in unpack_rows(bytes(row.quarantined)))
            continue
        target = driver_targets.get(row.projection)
        if target is not None:
            task_rows = chain.from_iterable(map(unpack_rows, payloads.pop(key, [])))
            loaded = load_part(target, row.part, task_rows)
            if loaded != row.rows:
                raise RebuildError(f"A task folded {row.rows} rows and {loaded} arrived. Run the rebuild again.")
        name = row.projection.removesuffix(_STATES)
        yield Part(name, row.events, row.rows, quarantined.pop(key, ()), of_states=name != row.projection)


def passwordless(database: Database, secrets: Path) -> Database:
    """Return the database as tasks get it: without its password, which is in a sealed file in `secrets`."""
    url = make_url(database.url)
    if url.password is None:
        return database
    bare = URL.create(url.drivername, url.username, None, url.host, url.port, url.database, url.query)
    sealed = seal(secrets, "pgpass", str(url.password))
    return Database(bare.update_query_dict({"passfile": sealed}).render_as_string(hide_password=False))


@dataclass(frozen=True, slots=True)
class FoldTask:
    """A Spark task that folds a partition for every target and loads the rows, or returns them to the driver."""

    app: AppRef
    targets: tuple[Target, ...]
    route: Route
    """How the records came here: by key and by state, an earlier task has checked each event's predecessor."""
    partitions: int
    options: LogOptions
    """How to reach the log."""
    skipped: Mapping[int, str]
    read: Reader | None = None
    """The function that makes records of Spark's batches; without it the batches are shuffle blocks."""

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        failpoints.reach("task.begun")
        context = TaskContext.get()
        assert context is not None
        part = context.partitionId()  # the same when the task is tried again
        task = replace(self, targets=tuple(map(_with_password, self.targets)))
        try:
            with uncollected(), self.options.predecessors() as predecessors:
                is_checked = self.route in (Route.BY_KEY, Route.BY_STATE)
                yield from task._fold(batches, part, None if is_checked else predecessors)
        except RowsRefused as error:
            yield _result(self.targets[0].projection, part, fault=str(redacted(error, self.app.load())))
        except (CodecError, ProjectionError, TaskFault) as error:
            yield _result(self.targets[0].projection, part, fault=str(error))

    def _fold(self, batches: Iterator[Any], part: int, predecessors: PredecessorReader | None) -> Iterator[Any]:
        app = self.app.load()
        foldings = Foldings(foldings_of(app, self.targets), app.catalog.of_log(self.skipped), predecessors)
        loaders = [
            _TaskLoader(target, folding, part) for target, folding in zip(self.targets, foldings.each, strict=True)
        ]
        take = foldings.take_of(self.route)
        events = 0
        states: list[Sequence[Any]] = []
        for accounted, records in incoming(batches, self.route, self.read, self.partitions):
            events += accounted
            if self.route is Route.BY_STATE and records and records[0][0] is None:
                states += [row[1:] for _, row in records]
                continue
            take(records)
            for loader in loaders:
                yield from loader.flush()
        failpoints.reach("task.folded")
        for loader in loaders:
            yield from loader.finish(events, states)


class _TaskLoader:
    """The loader of one projection's rows in one task: into the database, or back to the driver."""

    def __init__(self, target: Target, folding: Folding, part: int) -> None:
        self._target = target
        self._folding = folding
        self._part = part
        self._chunks = 0

    def flush(self) -> Iterator[Any]:
        """Load the rows of entries when enough of them wait, because no later event changes them."""
        if self._folding.is_due():
            yield from self._load(self._folding.drain(), 0)

    def finish(self, events: int, states: Sequence[Sequence[Any]]) -> Iterator[Any]:
        """Yield the quarantined events, load the remaining rows and `states`, and account for the task's `events`."""
        events_left = iter(self._folding.quarantined)
        while chunk := list(islice(events_left, _QUARANTINE_CHUNK)):
            rows = pack_rows([astuple(event) for event in chunk])
            yield _result(self._target.projection, self._part, quarantined=rows)
        yield from self._load(self._folding.rows(), events)
        state_target = self._target.states
        if state_target is not None:
            yield from self._load(chain(states, self._folding.state_rows()), 0, state_target)

    def _load(self, rows: Iterable[Sequence[Any]], events: int, state_target: Target | None = None) -> Iterator[Any]:
        number = self._chunks * _PARTS_STRIDE + self._part
        self._chunks += 1
        name = self._target.projection if state_target is None else self._target.projection + _STATES
        if self._target.database.dialect.is_concurrent:
            count = load_part(state_target or self._target, number, rows)
        else:
            count = 0
            remaining = iter(rows)
            while chunk := list(islice(remaining, CHUNK)):
                count += len(chunk)
                yield _result(name, number, payload=pack_rows(chunk))
        yield _result(name, number, events=events, rows=count)


def _with_password(target: Target) -> Target:
    """Return the target with the database's password, if that is in a sealed file."""
    url = make_url(target.database.url)
    reference = url.query.get("passfile")
    if not isinstance(reference, str) or not is_sealed(reference):
        return target
    url = url.set(password=unseal(reference)).difference_update_query(["passfile"])
    return replace(target, database=Database(url.render_as_string(hide_password=False)))


def _result(projection: str, part: int, **values: int | str | bytes) -> Any:
    """Return an Arrow batch with one row of `_RESULT`; columns that are not given are null."""
    row = {**dict.fromkeys(_RESULT_COLUMNS), "projection": projection, "part": part, **values}
    assert row.keys() == _RESULT_COLUMNS.keys(), values
    return pyarrow().RecordBatch.from_pylist([row], schema=arrow_schema(_RESULT_COLUMNS))


@dataclass(frozen=True, slots=True)
class SnapshotTask:
    """A Spark task that folds records sorted by subject and position, and writes the snapshots."""

    app: AppRef
    aggregate: str
    least: int
    last: int
    options: Mapping[str, str]
    """The options of the source `jetstream` that say how to reach the server."""
    skipped: Mapping[int, str]

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        endpoint = LogOptions.parse(self.options).endpoint()
        current: bytes | None = None
        with SnapshotFold(self.app.load(), self.aggregate, self.least, endpoint, self.last, self.skipped) as fold:
            for batch in batches:
                for subject, records in groupby(records_of(batch), key=itemgetter(2)):
                    if current not in (None, subject):
                        fold.finish(current)
                    current = subject
                    fold.take(subject, list(records))
            yield pyarrow().RecordBatch.from_pylist([{"tally": json.dumps(asdict(fold.done()))}])


def fold_on_spark(
    job: Job, plan: Plan, aggregate: str, min_events: int, started: Started, *, ship: bool
) -> SnapshotTally:
    """Write the snapshots of one type's aggregates that have `min_events` events or more; raises `RebuildError`."""
    with provisions(job, started) as provided:
        task = SnapshotTask(
            provided.app(ship=ship), aggregate, min_events, plan.last, provided.options, job.catalog.skipped
        )
        send_files(provided.secrets, started)
        frame: Any = log_frame(started.spark, provided.options, plan.ranges)
        selected = frame.where(frame["subject"].startswith(f"{plan.stream}.{aggregate}."))
        histories = selected.repartition(plan.partitions, "subject").sortWithinPartitions("subject", "position")
        tally = SnapshotTally()
        with (
            job.watch.phase("read", plan.events),
            following(
                started.spark,
                job.watch,
                "read",
                0,
                plan.events,
                plan.events,
                name=f"eventjet: snapshots of {aggregate}",
            ),
        ):
            for row in histories.mapInArrow(task, "tally string").collect():
                tally.add(json.loads(row.tally))
    return tally
