"""`archive`: the log's past into sealed Parquet files, segment after segment, each proved before it counts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from eventjet.archive.manifest import Archive, Segment, cut
from eventjet.archive.reading import folder_of, read_manifest
from eventjet.errors import RebuildError, UsageError
from eventjet.nats.api import StreamState
from eventjet.projections.app_ref import AppRef
from eventjet.rebuild.progress import Report, Watch
from eventjet.rebuild.replay_source import check_past
from eventjet.rebuild.runner import in_thread, log_of
from eventjet.settings import Settings
from eventjet.spark.packaging import send_files
from eventjet.spark.scratch import scratch_folder
from eventjet.spark.session import Started, spark_session

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
    app: AppRef,
    url: str,
    settings: Settings,
    *,
    to: int | None = None,
    segment_events: int = SEGMENT_EVENTS,
    master: str | None = None,
    progress: Report | None = None,
) -> ArchiveReport:
    """Seal what the archive at `url` does not have yet, up to position `to` (default: the log's last one now).

    It may be cancelled or killed at any moment, and the next run goes on after the last segment that was sealed. One
    run at a time. `progress` is called from another thread. Raises `ArchiveBroken` when the archive is of another log,
    has another past or cannot go on where it ends, `RebuildError`, `Unreachable` and `UsageError`.
    """
    if segment_events < 1:
        raise UsageError(f"A segment of {segment_events} events cannot be. Give 1 or more.")
    watch = Watch(progress)
    return await in_thread(watch, lambda: _archive(app, url, settings, to, segment_events, master, watch), settings)


def _archive(
    ref: AppRef, url: str, settings: Settings, to: int | None, segment_events: int, master: str | None, watch: Watch
) -> ArchiveReport:
    app = ref.load()
    here = folder_of(url) is not None
    with ExitStack() as stack:

        def session() -> Started:
            return stack.enter_context(spark_session(master, bulk_only=True, interrupted_by=watch.interrupted_by))

        with watch.phase("start"):
            endpoint, log, state = log_of(app, settings)
            end = _end(app.name, state, to)
            started = None if here else session()
            held = read_manifest(url, None if started is None else started.spark)
            if held.segments:
                check_past(held, endpoint, app.name, log, state)
            first = held.last + 1 if held.segments else max(state.first, 1)
            # What is up to date needs no Spark to say so.
            started = session() if started is None and first <= end else started
        sealed: list[Segment] = []
        if started is not None and first <= end:
            todo = _Todo(url, app.name, log, first, end, segment_events, state.bytes / max(state.messages, 1))
            sealed = _seal_all(todo, settings, started, watch)
    whole = Archive(url, (*held.segments, *sealed))
    return ArchiveReport(url, app.name, log, whole.first, whole.last, whole.events, tuple(sealed), watch.seconds)


@dataclass(frozen=True, slots=True)
class _Todo:
    """What a run is to seal."""

    url: str
    stream: str
    log: str
    first: int
    last: int
    segment_events: int
    event_bytes: float


def _seal_all(todo: _Todo, settings: Settings, started: Started, watch: Watch) -> list[Segment]:
    # Only now is pyspark known to be there.
    from eventjet.spark.archive_write import Log, seal
    from eventjet.spark.engine import following, reason_of
    from eventjet.spark.options import connection_options

    total = todo.last - todo.first + 1
    sealed: list[Segment] = []
    with scratch_folder() as scratch, watch.phase("archive", total):
        secrets = scratch / "secrets"
        secrets.mkdir()
        log = Log(todo.stream, todo.log, connection_options(settings, secrets), todo.event_bytes)
        send_files(secrets, started)
        for first, last in cut(todo.first, todo.last, todo.segment_events):
            done = first - todo.first
            with following(started.spark, watch, "archive", done, last - first + 1, total):
                try:
                    sealed.append(seal(started.spark, todo.url, log, first, last))
                except RebuildError:
                    raise
                except Exception as error:
                    watch.check()
                    raise RebuildError(f"Spark could not finish: {reason_of(error)}") from error
        watch.tell("archive", total, total)
    return sealed


def _end(stream: str, state: StreamState, to: int | None) -> int:
    """The position to archive up to, fixed for this run."""
    last = state.last if state.messages else 0
    if to is None:
        return last
    if not 1 <= to <= last:
        raise UsageError(f"The log {stream!r} has no position {to:,}; it ends at {last:,}. Name one that it has.")
    return to
