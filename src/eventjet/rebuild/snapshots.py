"""`build_snapshots`: the snapshots of all aggregates of one type, from one reading of the log.

Commands go on meanwhile: a snapshot is never put in the place of a newer one. Run again, it writes what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from os import cpu_count
from typing import Any

from eventjet.codec.subjects import snapshot_bucket
from eventjet.errors import RebuildError, StreamMissing, Unreachable, UsageError
from eventjet.nats.api import StreamState, stream_info
from eventjet.nats.connection import ask_once
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.position_ranges import range_count, split
from eventjet.nats.ranges import read_range
from eventjet.projections.app_ref import AppRef
from eventjet.projections.application import Application
from eventjet.rebuild.folding import uncollected
from eventjet.rebuild.plan import PARTITIONS_MAX, EngineName, Pass, Plan, Route
from eventjet.rebuild.progress import Report, Watch
from eventjet.rebuild.runner import in_thread, log_of
from eventjet.rebuild.snapshot_folding import TALLY, SnapshotFold, SnapshotTask, Tally, aggregate_of, by_subject
from eventjet.settings import Settings
from eventjet.spark.packaging import send_files, ship
from eventjet.spark.scratch import scratch_folder
from eventjet.spark.session import Started

EVENTS_PER_PARTITION = 1_000_000
"""What one task sorts; it holds the state of one aggregate at a time."""


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """What a build did."""

    aggregate: str
    engine: EngineName
    position: int
    """Up to here the log was read."""
    min_events: int
    tally: Tally
    seconds: Mapping[str, float]
    """Wall time by phase."""


async def build_snapshots(
    app: AppRef,
    aggregate: str,
    settings: Settings,
    *,
    engine: EngineName = "spark",
    master: str | None = None,
    min_events: int | None = None,
    ship: bool = True,
    progress: Report | None = None,
) -> SnapshotReport:
    """Write a snapshot of every aggregate of a type that has `min_events` (default: its `snapshot_every`).

    `progress` is called from another thread. The local engine holds the states of all aggregates, Spark those of one at
    a time. Raises `UsageError` for an aggregate that keeps no snapshots, `Unreachable` and `RebuildError`; a history
    that is broken is told in the report.
    """
    watch = Watch(progress)
    job = _Job(app, aggregate, settings, engine, master, min_events, ship, watch)
    return await in_thread(watch, job.run, settings)


@dataclass(frozen=True, slots=True)
class _Job:
    ref: AppRef
    aggregate: str
    settings: Settings
    engine: EngineName
    master: str | None
    min_events: int | None
    ship: bool
    watch: Watch

    def run(self) -> SnapshotReport:
        app = self.ref.load()
        _, info = aggregate_of(app, self.aggregate)
        least = info.snapshot_every if self.min_events is None else self.min_events
        assert least is not None
        if least < 1:
            raise UsageError(f"min_events is {least}. Give 1 or more.")
        with self.watch.phase("start"):
            endpoint, _, state = log_of(app, self.settings)
            _check_bucket(endpoint, app.name)
        plan = self._plan(app, state)
        if not plan.events:
            tally = Tally()
        elif self.engine == "local":
            tally = self._locally(plan, app, endpoint, least)
        else:
            tally = self._on_spark(plan, least)
        return SnapshotReport(self.aggregate, self.engine, plan.last, least, tally, self.watch.seconds)

    def _plan(self, app: Application, state: StreamState) -> Plan:
        first, last, cores = max(state.first, 1), state.last, cpu_count() or 1
        events = max(0, last - first + 1)
        ranges = split(first, last, range_count(events, at_least=cores))
        partitions = min(max(cores, -(-events // EVENTS_PER_PARTITION)), PARTITIONS_MAX)
        return Plan(app.name, self.engine, first, last, 0, ranges, partitions, (Pass(Route.BY_AGGREGATE, ()),))

    def _locally(self, plan: Plan, app: Application, endpoint: Endpoint, least: int) -> Tally:
        subjects = f"{app.name}.{self.aggregate}.*"
        with SnapshotFold(app, self.aggregate, least, endpoint, plan.last) as fold, uncollected():
            with self.watch.phase("read", plan.events):
                batches = read_range(endpoint, plan.stream, plan.first, plan.last + 1, filter_subject=subjects)
                with closing(batches):
                    for records in batches:
                        for subject, own in by_subject(records).items():
                            fold.take(subject, own)
                        self.watch.tell("read", records[-1][0] - plan.first + 1, plan.events)
            with self.watch.phase("load", len(fold)):
                return fold.done(lambda done, total: self.watch.tell("load", done, total))

    def _on_spark(self, plan: Plan, least: int) -> Tally:
        from eventjet.spark.session import spark_session

        with ExitStack() as stack:
            with self.watch.phase("start"):
                session = spark_session(self.master, bulk_only=True, interrupted_by=self.watch.interrupted_by)
                started = stack.enter_context(session)
            # Only now is pyspark known to be there.
            from eventjet.spark.engine import following, reason_of
            from eventjet.spark.options import connection_options

            scratch = stack.enter_context(scratch_folder())
            secrets = scratch / "secrets"
            secrets.mkdir()
            reference = ship(started, self.ref, scratch) if self.ship else self.ref
            options = {**connection_options(self.settings, secrets), "stream": plan.stream}
            send_files(secrets, started)
            stack.enter_context(self.watch.phase("read", plan.events))
            stack.enter_context(following(started.spark, self.watch, "read", 0, plan.events, plan.events))
            task = SnapshotTask(reference, self.aggregate, least, options, plan.last)
            try:
                return _summed(
                    _sorted_records(started, plan, options, self.aggregate).mapInArrow(task, TALLY).collect()
                )
            except Exception as error:
                self.watch.check()
                raise RebuildError(f"Spark could not finish: {reason_of(error)}") from error


def _sorted_records(started: Started, plan: Plan, options: Mapping[str, str], aggregate: str) -> Any:
    """The records of one aggregate type, each history whole in one partition and in order."""
    reach = {"fromPosition": str(plan.first), "toPosition": str(plan.last), "partitions": str(len(plan.ranges))}
    frame: Any = started.spark.read.format("jetstream").options(**options, **reach).load()
    own = frame.where(frame["subject"].startswith(f"{plan.stream}.{aggregate}."))
    return own.repartition(plan.partitions, "subject").sortWithinPartitions("subject", "position")


def _summed(rows: Sequence[Any]) -> Tally:
    found = Tally()
    for row in rows:
        found.add(json.loads(row.tally))
    return found


def _check_bucket(endpoint: Endpoint, app: str) -> None:
    bucket = snapshot_bucket(app)
    try:
        ask_once(endpoint, stream_info(f"KV_{bucket}"))
    except StreamMissing:
        raise Unreachable(f"The bucket {bucket!r}", "it does not exist", "Run `eventjet init` once.") from None
