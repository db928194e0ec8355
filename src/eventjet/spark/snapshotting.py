"""Fold snapshots on Spark: read ranges, shuffle by subject, sort by subject and position, fold one aggregate at a time.

The shuffle has a row for each event, because Spark's own sort brings the events of an aggregate together, so that a
task keeps the state of only one aggregate. Tasks are pickled for Spark's Python workers, so they have only values,
names and references.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from eventjet.projections.app_ref import AppRef
from eventjet.rebuild.job import Job
from eventjet.rebuild.plan import Plan
from eventjet.rebuild.snapshots import SnapshotFold, SnapshotTally
from eventjet.spark.columns import pyarrow, records_of
from eventjet.spark.options import LogOptions
from eventjet.spark.running import following, provisions, send_files
from eventjet.spark.session import Started
from eventjet.spark.source import log_frame

_TALLY = "tally string"
"""The result of a task that folds snapshots: its `SnapshotTally` as JSON."""


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
            following(started.spark, job.watch, "read", 0, plan.events, plan.events),
        ):
            for row in histories.mapInArrow(task, _TALLY).collect():
                tally.add(json.loads(row.tally))
    return tally
