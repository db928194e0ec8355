"""Snapshots on Spark: read ranges, shuffle by subject, sort by subject and position, fold one aggregate at a time.

What is shuffled has a row for each event: only Spark's own sort puts the events of an aggregate together without
holding the state of any other. Tasks are pickled for Spark's Python workers: they hold values, names and references
only.
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
"""What a task that folds snapshots tells: its `SnapshotTally` as JSON."""


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


def fold_on_spark(job: Job, plan: Plan, aggregate: str, least: int, started: Started, *, ship: bool) -> SnapshotTally:
    """Write the snapshots of one aggregate type; raises `RebuildError`."""
    with provisions(job, started) as provided:
        task = SnapshotTask(provided.app(ship=ship), aggregate, least, plan.last, provided.options, job.catalog.voids)
        send_files(provided.secrets, started)
        frame: Any = log_frame(started.spark, provided.options, plan.ranges)
        own = frame.where(frame["subject"].startswith(f"{plan.stream}.{aggregate}."))
        histories = own.repartition(plan.partitions, "subject").sortWithinPartitions("subject", "position")
        tally = SnapshotTally()
        with (
            job.watch.phase("read", plan.events),
            following(started.spark, job.watch, "read", 0, plan.events, plan.events),
        ):
            for row in histories.mapInArrow(task, _TALLY).collect():
                tally.add(json.loads(row.tally))
    return tally
