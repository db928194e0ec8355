"""`archive`: the log's past into sealed Parquet files, segment after segment, each proved before it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eventjet.archive.manifest import Archive, Segment, cut
from eventjet.archive.reading import ArchiveReader, folder_of
from eventjet.errors import UsageError
from eventjet.projections.app_ref import AppRef
from eventjet.projections.application import Application
from eventjet.rebuild.engine import EngineOptions
from eventjet.rebuild.job import Job, in_thread, open_job
from eventjet.rebuild.plan import EngineName
from eventjet.rebuild.progress import Report, Watch
from eventjet.rebuild.replay_source import Log, check_same_past
from eventjet.settings import Settings

SEGMENT_EVENTS = 1_000_000
"""Positions a segment holds at most."""


@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """What there is, and what this run added to it."""

    url: str
    stream: str
    log: str
    first: int
    """Position of the archive's first event; 0 when the log has none."""
    last: int
    events: int
    sealed: tuple[Segment, ...]
    """Of this run; empty when there was nothing to do."""
    seconds: Mapping[str, float]
    """Wall time by phase."""


async def archive(
    app: Application | AppRef,
    url: str,
    settings: Settings,
    *,
    engine: EngineName | EngineOptions = "spark",
    to: int | None = None,
    segment_events: int = SEGMENT_EVENTS,
    progress: Report | None = None,
) -> ArchiveReport:
    """Seal what the archive at `url` does not have yet, up to position `to` (default: the log's last one now).

    It may be cancelled or killed at any moment, and the next run goes on after the last segment that was sealed. One
    run at a time. `progress` is called from another thread. Only Spark writes archives. Raises `ArchiveBroken` when the
    archive is of another log, has another past or cannot go on where it ends, `RebuildError`, `Unreachable` and
    `UsageError`.
    """
    if segment_events < 1:
        raise UsageError(f"A segment of {segment_events} events cannot be. Give 1 or more.")

    def work(watch: Watch) -> ArchiveReport:
        folder_of(url)
        with open_job(app, settings, watch, engine) as job:
            return _archive(job, url, to, segment_events)

    return await in_thread(settings, progress, work)


def _archive(job: Job, url: str, to: int | None, segment_events: int) -> ArchiveReport:
    log, watch = job.log, job.watch
    with watch.phase("start"):
        end = _end(log, to)
        held = ArchiveReader(job.engine.archive_files(url)).manifest
        if held.segments:
            check_same_past(log, held)
        first = held.last + 1 if held.segments else log.first
    # What is up to date needs no engine to say so.
    sealed = job.engine.seal(job, url, list(cut(first, end, segment_events))) if first <= end else []
    whole = Archive(url, (*held.segments, *sealed))
    return ArchiveReport(
        url, log.stream, log.identity, whole.first, whole.last, whole.events, tuple(sealed), watch.seconds
    )


def _end(log: Log, to: int | None) -> int:
    """The position to archive up to, fixed for this run."""
    if to is None:
        return log.last
    if not 1 <= to <= log.last:
        raise UsageError(
            f"The log {log.stream!r} has no position {to:,}; it ends at {log.last:,}. Name one that it has."
        )
    return to
