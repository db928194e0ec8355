"""`build_snapshots`: the snapshots of all aggregates of one type, from one reading of the log.

Commands go on meanwhile: a snapshot never replaces a newer one. Run again, it writes what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import cpu_count

from eventjet.codec.subjects import snapshot_bucket
from eventjet.errors import StreamMissing, Unreachable, UsageError
from eventjet.nats.api import stream_info
from eventjet.nats.connection import ask_once
from eventjet.projections.app_ref import AppRef, loaded
from eventjet.projections.application import Application
from eventjet.rebuild.engine import EngineOptions
from eventjet.rebuild.job import Job, in_thread, open_job
from eventjet.rebuild.plan import EngineName, plan_snapshots
from eventjet.rebuild.progress import Report, Watch
from eventjet.rebuild.snapshot_folding import Tally, aggregate_of
from eventjet.settings import Settings


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
    app: Application | AppRef,
    aggregate: str,
    settings: Settings,
    *,
    engine: EngineName | EngineOptions = "spark",
    min_events: int | None = None,
    progress: Report | None = None,
) -> SnapshotReport:
    """Write a snapshot of every aggregate of a type that has `min_events` (default: its `snapshot_every`).

    `progress` is called from another thread. The local engine holds the states of all aggregates, Spark those of one at
    a time. Raises `UsageError` for an aggregate that keeps no snapshots, `Unreachable` and `RebuildError`; the report
    names the histories that are broken.
    """

    def work(watch: Watch) -> SnapshotReport:
        _, info = aggregate_of(loaded(app), aggregate)
        least = info.snapshot_every if min_events is None else min_events
        assert least is not None
        if least < 1:
            raise UsageError(f"min_events is {least}. Give 1 or more.")
        with open_job(app, settings, watch, engine) as job:
            return _build(job, aggregate, least)

    return await in_thread(settings, progress, work)


def _build(job: Job, aggregate: str, least: int) -> SnapshotReport:
    with job.watch.phase("start"):
        _check_bucket(job)
    plan = plan_snapshots(job.extent(job.log.state.last), engine=job.engine.name, cores=cpu_count() or 1)
    tally = job.engine.fold_snapshots(job, plan, aggregate, least) if plan.events else Tally()
    return SnapshotReport(aggregate, plan.engine, plan.last, least, tally, job.watch.seconds)


def _check_bucket(job: Job) -> None:
    bucket = snapshot_bucket(job.app.name)
    try:
        ask_once(job.log.endpoint, stream_info(f"KV_{bucket}"))
    except StreamMissing:
        raise Unreachable(f"The bucket {bucket!r}", "it does not exist", "Run `eventjet init` once.") from None
