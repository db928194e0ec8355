"""`archive` seals the log's past in Parquet files; `restore` publishes an archive into an empty stream.

An archive grows segment by segment, and each segment is read back and compared before the manifest names it. After a
restore, everything that depends on the log can go on: positions, ids, versions and times are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from eventjet.archive import republish
from eventjet.archive.bodies import NO_BODIES, ArchivedBodies, CopiedBodies, archive_bodies, restore_bodies
from eventjet.archive.reading import Archive, ArchiveReader, Segment, folder_of, nothing_in, segment_ranges
from eventjet.archive.republish import Restored
from eventjet.codec.headers import BATCH_ID, event_id_of, header, save_of, unfinished_save
from eventjet.errors import ArchiveBroken, UsageError
from eventjet.jetstream.api import create_stream, message_at, update_stream
from eventjet.jetstream.connection import NatsConnection
from eventjet.jetstream.reader import read_range
from eventjet.log.store import BATCH_MAX
from eventjet.log.sweep import References, has_bucket
from eventjet.log.topology import IDENTITY, finding_stream, objects_config
from eventjet.nats.endpoint import Endpoint
from eventjet.projections.app_ref import Application, AppRef, loaded
from eventjet.rebuild.job import EngineOptions, Job, in_job, in_thread, open_engine, options_of
from eventjet.rebuild.plan import EngineName
from eventjet.rebuild.progress import Report, Watch
from eventjet.rebuild.replay_source import Log, check_same_past
from eventjet.settings import Settings

SEGMENT_EVENTS = 1_000_000
"""The number of positions in a segment, which goes on to the end of a save."""


@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """The contents of an archive, and the segments that this run added."""

    url: str
    stream: str
    log: str
    """The identity of the log."""
    first: int
    """Position of the archive's first event; 0 when the archive is empty."""
    last: int
    events: int
    sealed: tuple[Segment, ...]
    """The segments that this run sealed; empty when the archive was up to date."""
    seconds: Mapping[str, float]
    """Wall time by phase."""
    bodies: CopiedBodies = NO_BODIES
    """The large bodies of all events up to `last`, of which this run copied those that the archive lacked."""


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
    """Add the events that the archive at `url` lacks, up to position `to` (default: the log's last position now).

    The job may be cancelled or killed at any moment; the next run goes on after the last sealed segment. Only one run
    may write to an archive at a time, and only Spark writes archives.

    `url` is a local folder, or a URL of any Hadoop file system. A segment has `segment_events` positions, and more up
    to the end of a save. The large bodies of all events are looked for first, and copied where the archive lacks them,
    so that a body that was missing once comes with a later run; the report names those that the object store does not
    have. `progress` is called from another thread.

    Raises `ArchiveBroken` when the archive is of another log, has another past or cannot go on where it ends;
    `RebuildError`, `Unreachable` and `UsageError`.
    """
    if segment_events < 1:
        raise UsageError(f"A segment of {segment_events} events cannot be. Give 1 or more.")
    folder_of(url)  # raises for a URL that no archive can have
    return await in_job(app, settings, engine, lambda job: _archive(job, url, to, segment_events), progress=progress)


def _archive(job: Job, url: str, to: int | None, segment_events: int) -> ArchiveReport:
    log, watch = job.log, job.watch
    end = log.last if to is None else to
    with watch.phase("start"):
        if to is not None and not 1 <= to <= log.last:
            raise UsageError(
                f"The log {log.stream!r} has no position {to:,}; it ends at {log.last:,}. Name one that it has."
            )
        manifest = ArchiveReader(job.engine.archive_files(url)).manifest
        if manifest.segments:
            check_same_past(log, manifest)
        first = manifest.last + 1 if manifest.segments else log.first
        ranges = _ranges(log, first, end, segment_events, to) if first <= end else []
    bodies = _archive_bodies(job, url, ranges[-1][1] if ranges else end)
    # The engine is not started for an archive that is up to date.
    sealed = job.engine.seal(job, url, ranges) if ranges else []
    whole = Archive(url, (*manifest.segments, *sealed))
    return ArchiveReport(
        url, log.stream, log.identity, whole.first, whole.last, whole.events, tuple(sealed), watch.seconds, bodies
    )


def _ranges(log: Log, first: int, end: int, segment_events: int, to: int | None) -> list[tuple[int, int]]:
    """Return the positions of each segment to seal, which ends where a save ends.

    An archive that ended within a save would restore a part of what was decided together. Raises `UsageError` for a
    position `to` within a save.
    """
    with NatsConnection.open(log.endpoint) as link:

        def end_of_save(position: int) -> int:
            """Return the last position of the save that has a position, as far as the log has it."""
            record = link.ask(message_at(log.stream, position))
            while record is not None and (batch := unfinished_save(record[3])) is not None:
                record = link.ask(message_at(log.stream, position + 1))
                if record is None or header(record[3], BATCH_ID) != batch:
                    break  # the log itself does not have the end of it
                position += 1
            return position

        if to is not None and (save_end := end_of_save(to)) > to:
            raise UsageError(
                f"Position {to:,} is within a save, which ends at {save_end:,}: half of it would be in the archive. "
                f"Name {save_end:,}, or one before the save."
            )
        return list(segment_ranges(first, end, segment_events, end_of_save))


def _archive_bodies(job: Job, url: str, last: int) -> CopiedBodies:
    """Copy the large bodies of all events that the archive lacks, before the events are sealed."""
    log, watch, references = job.log, job.watch, References()
    with NatsConnection.open(log.endpoint) as link:
        if not log.last or not (job.app.catalog.with_blobs or has_bucket(link, log.stream)):
            return NO_BODIES
    with watch.phase("bodies"), NatsConnection.open(log.endpoint) as link:
        for batch in read_range(log.endpoint, log.stream, log.first, last + 1, allow_holes=True):
            for record in batch:
                references.take(record)
            watch.check()
        progress = partial(watch.report, "bodies", total=len(references))
        return archive_bodies(link, log.stream, ArchivedBodies(url), references.values(), progress)


def _restore_bodies(app: Application, archive: ArchiveReader, settings: Settings, watch: Watch) -> CopiedBodies:
    """Store the large bodies of an archive's events, before the events are published; make the bucket if necessary."""
    manifest, references = archive.manifest, References()
    bodies = ArchivedBodies(manifest.url)
    # Where Arrow cannot look, the events tell whether there are bodies.
    with suppress(ArchiveBroken):
        if not app.catalog.with_blobs and not bodies.exist():
            return NO_BODIES
    for batch in archive.records(manifest.first, manifest.last + 1):
        for record in batch:
            references.take(record)
        watch.check()
    if not references:
        return NO_BODIES
    bodies.exist()  # raises where Arrow cannot look, before anything is written
    with watch.phase("bodies"), NatsConnection.open(Endpoint.of(settings).with_name("eventjet-restore")) as link:
        config = objects_config(app.name, settings.replicas)
        state, note = link.run(finding_stream(config["name"])), {IDENTITY: manifest.log}
        if state is None:
            link.ask(create_stream({**config, "metadata": note}))
        elif state.metadata.get(IDENTITY) != manifest.log:
            link.ask(update_stream({**state.config, "metadata": {**state.metadata, **note}}))
        progress = partial(watch.report, "bodies", total=len(references))
        return restore_bodies(link, app.name, bodies, references.values(), progress)


async def restore(
    app: Application | AppRef,
    url: str,
    settings: Settings,
    *,
    engine: EngineName | EngineOptions = "spark",
    progress: Report | None = None,
) -> Restored:
    """Publish the archive at `url` into the stream of an app, then compare the stream with the archive.

    The large bodies of its events are stored first; the report names those that the archive does not have, and says
    whether its last events are only a part of a save. The job may be cancelled or killed at any moment; the next run
    goes on after the last stored batch. Spark is started only for an archive outside this machine's folders. `progress`
    is called from another thread.

    Raises `ArchiveBroken` for an archive that is broken, and `UsageError` for an archive of another app, both before
    anything is written. Raises `Refused` for a stream with other events and when somebody else writes, `ArchiveBroken`
    when an event does not follow its predecessor, `HistoryBroken` when the stored events differ from the archive, and
    `StoreUnavailable` or `Unreachable` when the server does not answer.
    """

    def work(watch: Watch) -> Restored:
        stream = loaded(app).name
        options = options_of(engine)
        with open_engine("local" if options.name == "local" else "spark", options, watch) as running_engine:
            archive = ArchiveReader(running_engine.archive_files(url))
            torn = _check(stream, archive, watch)
            restoring = republish.Restore(
                Endpoint.of(settings).with_name("eventjet-restore"),
                archive,
                replicas=settings.replicas,
                progress=watch.report,
                wait=watch.wait,
                timeout_s=settings.request_timeout_s,
            )
            restoring.check()
            bodies = _restore_bodies(loaded(app), archive, settings, watch)
            return replace(restoring.run(), bodies=bodies, torn=torn)

    return await in_thread(settings, progress, work)


def _check(stream: str, archive: ArchiveReader, watch: Watch) -> int:
    """Check an archive, and return how many of its last events belong to a save of which it does not have the end.

    Raises `ArchiveBroken` unless the files are as they were sealed, and `UsageError` for another stream's archive.
    """
    manifest = archive.manifest
    if not manifest.segments:
        raise nothing_in(manifest.url)
    if manifest.stream != stream:
        raise UsageError(
            f"The archive {manifest.url} is of {manifest.stream!r}, and the app is {stream!r}. Name the app it is of."
        )
    watch.report("check", 0, manifest.events)
    archive.check(manifest.first, manifest.last)
    last, last_id = archive.record(manifest.last), manifest.segments[-1].last_id
    if event_id_of(last) != last_id:
        raise ArchiveBroken(manifest.url, f"its last event is not {last_id}, which its manifest names")
    watch.report("check", manifest.events, manifest.events)
    if unfinished_save(last[3]) is None:
        return 0
    ending = archive.records(max(manifest.first, manifest.last - BATCH_MAX + 1), manifest.last + 1)
    return sum(save_of(record[3]) == save_of(last[3]) for page in ending for record in page)
