"""Shadows and snapshots on Spark: read ranges, shuffle by key, sort by position, fold and load whole partitions.

Tasks are pickled for Spark's Python workers: they hold values, names and references only. They load into PostgreSQL
themselves; SQLite has one writer, so there the rows come back to the driver as Arrow. What a task finds wrong with
events and rows comes back as a value: it would only fail again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it
from sqlalchemy import URL, make_url

from eventjet import failpoints
from eventjet.codec.chain import chained
from eventjet.codec.envelope import RawRecord
from eventjet.collecting import uncollected
from eventjet.domain.parked import Parked
from eventjet.errors import CodecError, ProjectionError, RebuildError, RowsRefused
from eventjet.projections.app_ref import AppRef
from eventjet.projections.row_codec import ColumnValues
from eventjet.rebuild.folding import Folding, Foldings, Tokens, fold_of
from eventjet.rebuild.job import Job
from eventjet.rebuild.plan import Pass, Plan, Route
from eventjet.rebuild.runs import Part, Target
from eventjet.rebuild.snapshots import SnapshotFold, Tally
from eventjet.rebuild.spaces import space_kind
from eventjet.rebuild.sqlite import CHUNK
from eventjet.spark.archiving import archived_frame, reading
from eventjet.spark.columns import (
    SCHEMA,
    STORED,
    arrow_batch,
    arrow_schema,
    pack_rows,
    pyarrow,
    records_of,
    unpack_rows,
)
from eventjet.spark.options import LogOptions, is_sealed, seal, unseal
from eventjet.spark.running import following, provisions, send_files
from eventjet.spark.session import Started, is_remote
from eventjet.spark.source import log_frame
from eventjet.sql.database import Database
from eventjet.store.earlier import EarlierRecords

_KEYED = f"token string, {SCHEMA}"
"""A record with the token of one key it touches; without a subject it tells what a task read, or why it could not."""

_RESULT_COLUMNS = {
    "projection": "string",
    "part": "bigint",
    "events": "bigint",
    "rows": "bigint",
    "payload": "binary",
    "parked": "binary",
    "fault": "string",
}
_RESULT = ", ".join(f"{name} {ddl}" for name, ddl in _RESULT_COLUMNS.items())
"""What became of a part; rows that the driver has to insert come before it as `payload`, and so do `parked` events."""

_PARTS_STRIDE = 100_000
"""A task that loads entries in several transactions numbers them this far apart."""
_PARKED_CHUNK = 500
"""Parked events in one message to the driver."""

_TOKENS_HELD_MAX = 2_000
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
        send_files(provided.secrets, started)
        share = plan.events // len(plan.passes)
        parts: list[Part] = []
        failpoints.reach("rebuild.engine_started")
        for number, one in enumerate(plan.passes):
            own = [by_name[name] for name in one.projections]
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
    job: Job
    plan: Plan
    app: AppRef
    options: Mapping[str, str]
    """Of the source, without positions."""
    spark: Any

    def run(self, one: Pass, targets: Sequence[Target], for_tasks: tuple[Target, ...]) -> list[Part]:
        frame = self._frame(one, targets[0].database.dialect)
        keyed = one.route is Route.BY_KEY
        task = FoldTask(self.app, for_tasks, keyed, self.options, self.job.catalog.voids)
        folded: Any = frame.mapInArrow(task, _RESULT)
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
            task = KeyTask(self.app, one.projections[0], dialect, self.options, self.job.catalog.voids)
            frame = frame.mapInArrow(task, _KEYED).repartition(plan.partitions, "token")
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
        yield Part(row.projection, row.events, row.rows, parked.pop(key, ()))


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
    voids: Mapping[int, str]

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        endpoint = LogOptions.parse(self.options).endpoint()
        current: bytes | None = None
        with SnapshotFold(self.app.load(), self.aggregate, self.least, endpoint, self.last, self.voids) as fold:
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
        task = SnapshotTask(provided.app(ship=ship), aggregate, least, plan.last, provided.options, job.catalog.voids)
        send_files(provided.secrets, started)
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


@dataclass(frozen=True, slots=True)
class KeyTask:
    """Gives each record the tokens of the keys its event touches, once for each."""

    app: AppRef
    projection: str
    dialect: ColumnValues
    options: Mapping[str, str]
    """Of the source: how to reach the log."""
    voids: Mapping[int, str]

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        with LogOptions.parse(self.options).earlier() as earlier:
            yield from self._keyed(batches, earlier)

    def _keyed(self, batches: Iterator[Any], earlier: EarlierRecords) -> Iterator[Any]:
        app = self.app.load()
        resolved = fold_of(app, self.projection)
        decode = chained(app.catalog.of_log(self.voids), resolved.events, earlier)
        tokens_of = Tokens(resolved, self.dialect)
        seen = 0
        for batch in batches:
            seen += batch.num_rows
            keyed: list[tuple[str, RawRecord]] = []
            try:
                records = list(records_of(batch))
                decode.expect(records)
                for record in records:
                    event = decode(record)
                    if event is not None:
                        keyed += [(token, record) for token in tokens_of(event)]
            except (CodecError, ProjectionError) as error:
                yield _keyed_batch([("", (0, 0, b"", b"", str(error).encode()))])
                return
            remaining = iter(keyed)
            while chunk := list(islice(remaining, _TOKENS_HELD_MAX)):
                yield _keyed_batch(chunk)
        yield _keyed_batch([("", (seen, 0, b"", b"", b""))])


@dataclass(frozen=True, slots=True)
class FoldTask:
    """Folds a whole partition for every target and loads it, or hands the rows back to the driver."""

    app: AppRef
    targets: tuple[Target, ...]
    keyed: bool
    """Whether the records come from `KeyTask`, which has held each to the one before it."""
    options: Mapping[str, str]
    """Of the source: how to reach the log."""
    voids: Mapping[int, str]

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        failpoints.reach("task.begun")
        context = TaskContext.get()
        assert context is not None
        part = context.partitionId()  # the same when the task is tried again
        here = replace(self, targets=tuple(map(_at_hand, self.targets)))
        try:
            with uncollected(), LogOptions.parse(self.options).earlier() as earlier:
                yield from here._fold(batches, part, None if self.keyed else earlier)
        except (CodecError, ProjectionError, RowsRefused, _ToldError) as error:
            yield _result(self.targets[0].projection, part, fault=str(error))

    def _fold(self, batches: Iterator[Any], part: int, earlier: EarlierRecords | None) -> Iterator[Any]:
        foldings = Foldings(self.app.load(), self.targets, self.voids, earlier)
        outlets = [_Outlet(target, folding, part) for target, folding in zip(self.targets, foldings.each, strict=True)]
        events = 0
        for batch in batches:
            if self.keyed:
                tallied, records = _keyed_records(batch)
                events += tallied
                foldings.take_keyed(records)
            else:
                events += batch.num_rows
                foldings.take(list(records_of(batch)))
            for outlet in outlets:
                yield from outlet.flush()
        failpoints.reach("task.folded")
        for outlet in outlets:
            yield from outlet.finish(events)


class _Outlet:
    """Where the rows of one projection go from one task."""

    def __init__(self, target: Target, folding: Folding, part: int) -> None:
        self._target = target
        self._folding = folding
        self._part = part
        self._chunks = 0

    def flush(self) -> Iterator[Any]:
        """Let entries go when there are many: no later event changes them."""
        if self._folding.is_due():
            yield from self._load(self._folding.drain(), 0)

    def finish(self, events: int) -> Iterator[Any]:
        parked = iter(self._folding.parked)
        while chunk := list(islice(parked, _PARKED_CHUNK)):
            yield _result(self._target.projection, self._part, parked=pack_rows([astuple(event) for event in chunk]))
        yield from self._load(self._folding.rows(), events)

    def _load(self, rows: Iterable[Sequence[Any]], events: int) -> Iterator[Any]:
        number = self._chunks * _PARTS_STRIDE + self._part
        self._chunks += 1
        name = self._target.projection
        if self._target.database.dialect.is_concurrent:
            count = space_kind(self._target.database).load(self._target, number, rows)
        else:
            count = 0
            remaining = iter(rows)
            while chunk := list(islice(remaining, CHUNK)):
                count += len(chunk)
                yield _result(name, number, payload=pack_rows(chunk))
        yield _result(name, number, events=events, rows=count)


def _at_hand(target: Target) -> Target:
    """The target with its password, where that is sealed."""
    url = make_url(target.database.url)
    reference = url.query.get("passfile")
    if not isinstance(reference, str) or not is_sealed(reference):
        return target
    url = url.set(password=unseal(reference)).difference_update_query(["passfile"])
    return replace(target, database=Database(url.render_as_string(hide_password=False)))


class _ToldError(Exception):
    """A fault that an earlier task met and passed on."""


def _keyed_records(batch: Any) -> tuple[int, list[tuple[str, RawRecord]]]:
    """(how many records the tallies among them stand for, the others with their tokens)."""
    tallied = 0
    keyed: list[tuple[str, RawRecord]] = []
    for token, record in zip(batch.column(0).to_pylist(), records_of(batch.select(STORED)), strict=True):
        position, _, subject, _, body = record
        if subject:
            keyed.append((token, record))
        elif body:
            raise _ToldError(body.decode())
        else:
            tallied += position
    return tallied, keyed


def _keyed_batch(keyed: Sequence[tuple[str, RawRecord]]) -> Any:
    arrow = pyarrow()
    tokens = arrow.array([token for token, _ in keyed], arrow.string())
    records = arrow_batch([record for _, record in keyed])
    return arrow.RecordBatch.from_arrays([tokens, *records.columns], names=["token", *STORED])


def _result(projection: str, part: int, **told: int | str | bytes) -> Any:
    """One row of `_RESULT`; what is not told is null."""
    row = {**dict.fromkeys(_RESULT_COLUMNS), "projection": projection, "part": part, **told}
    assert row.keys() == _RESULT_COLUMNS.keys(), told
    return pyarrow().RecordBatch.from_pylist([row], schema=arrow_schema(_RESULT_COLUMNS))
