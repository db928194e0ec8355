"""`audit` reads the whole log once, checks it, and compares it with an archive if one is given; it changes nothing."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain

from eventjet.archive.reading import ArchiveReader
from eventjet.codec.headers import RawRecord
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.connection import NatsConnection, ask_once
from eventjet.jetstream.reader import read_range
from eventjet.log.integrity import accepted_missing, first_position
from eventjet.log.sweep import References, faults_of, has_bucket
from eventjet.log.topology import compare, stream_config
from eventjet.projections.app_ref import Application, AppRef
from eventjet.rebuild.job import EngineOptions, Job, in_job
from eventjet.rebuild.log_audit import MISSING, NOTES, LogAudit, LogFinding, side_by_side
from eventjet.rebuild.plan import EngineName
from eventjet.rebuild.progress import Report
from eventjet.rebuild.replay_source import check_archive_is_of
from eventjet.runtime import read_ahead, uncollected
from eventjet.settings import Settings

EXAMPLES = 5
"""The default number of places that a report names for each kind of finding."""
_RETENTION_SETTINGS = (
    "subjects",
    "retention",
    "discard",
    "max_msgs",
    "max_bytes",
    "max_age",
    "max_msgs_per_subject",
    "deny_delete",
    "deny_purge",
    "allow_rollup_hdrs",
    "allow_msg_ttl",
    "storage",
    "persist_mode",
    "subject_transform",
    "sources",
    "mirror",
)
"""Stream settings that keep the log complete; with other values it may lose events, or hold events nobody recorded."""
_REPORT_EVERY = 2_000


@dataclass(frozen=True, slots=True)
class AuditedArchive:
    """The archive with which a log was compared."""

    url: str
    first: int
    last: int
    compared: int
    """How many positions are in both; those whose events differ are among the findings."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The outcome of an audit."""

    stream: str
    log: str
    """The identity of the log."""
    first: int
    """Position of the first event; `last` + 1 in an empty log."""
    last: int
    events: int
    aggregates: int
    accepted: int
    """How many positions after the first event may be missing, as accepted with `init --accept-loss`."""
    archive: AuditedArchive | None
    findings: tuple[LogFinding, ...]
    """The findings by kind, the most urgent kind first; empty for a log without faults."""
    seconds: Mapping[str, float]
    """Wall time by phase."""

    @property
    def sound(self) -> bool:
        """Whether the log has no faults: the findings are notes, or missing positions that were accepted."""
        return all(
            finding.kind in NOTES or (finding.kind in MISSING and self.may_be_missing) for finding in self.findings
        )

    @property
    def may_be_missing(self) -> bool:
        """Whether no more positions are missing than were accepted."""
        return sum(finding.positions for finding in self.findings if finding.kind in MISSING) <= self.accepted


async def audit(
    app: Application | AppRef,
    settings: Settings,
    *,
    archive: str | None = None,
    engine: EngineName | EngineOptions = "spark",
    examples: int = EXAMPLES,
    progress: Report | None = None,
) -> AuditReport:
    """Check the log from its first event to its present end, and compare it with the archive at the URL `archive`.

    The audit checks that positions, versions and the chain of each aggregate are unbroken, that events can be decoded
    and are on the subjects of their aggregate, that each id is used once, that the object store has each large body
    with its digest, and that archive and log have the same events. It takes some 120 bytes of memory for each
    aggregate, and 300 for each body.

    The report counts all findings, and names `examples` places for each kind. `engine` matters only for an archive
    outside this machine's folders, which Spark reads. `progress` is called from another thread.

    Raises `ArchiveBroken` for an archive that is broken or of another log; `Unreachable`, `StoreUnavailable` and
    `UsageError`.
    """
    return await in_job(app, settings.for_log(), engine, lambda job: _audit(job, archive, examples), progress=progress)


def _audit(job: Job, url: str | None, examples: int) -> AuditReport:
    log, watch = job.log, job.watch
    first, last = first_position(log.state), log.state.last
    audit = LogAudit(job.app, first=first, last=last, examples=examples, skipped=job.catalog.skipped)
    for drift in compare(stream_config(log.stream, log.state.config["num_replicas"]), log.state.config):
        if drift.setting in _RETENTION_SETTINGS:
            audit.setting(f"{drift.setting} is {drift.actual!r}, declared is {drift.declared!r}")
    archive = None if url is None else _open_archive(job, url)
    with NatsConnection.open(log.endpoint) as link:
        references = References() if job.app.catalog.with_blobs or has_bucket(link, log.stream) else None
    _walk(audit, job, archive, references)
    if references:
        _check_bodies(audit, job, references)
    grown = ask_once(log.endpoint, stream_info(log.stream)).last > last
    audited_archive = None
    if archive is not None:
        manifest = archive.manifest
        audited_archive = AuditedArchive(manifest.url, manifest.first, manifest.last, audit.compared)
    return AuditReport(
        stream=log.stream,
        log=log.identity,
        first=log.first,
        last=log.state.last,
        events=audit.events,
        aggregates=audit.aggregates,
        accepted=accepted_missing(log.state),
        archive=audited_archive,
        findings=audit.finish(grown=grown),
        seconds=watch.seconds,
    )


def _open_archive(job: Job, url: str) -> ArchiveReader:
    """Open the archive and check its files; raises `ArchiveBroken`."""
    archive = ArchiveReader(job.engine.archive_files(url))
    manifest = archive.manifest
    check_archive_is_of(job.log, manifest)
    with job.watch.phase("check", manifest.events):
        archive.check(manifest.first, manifest.last)
    return archive


def _check_bodies(audit: LogAudit, job: Job, references: References) -> None:
    """Read every body that an event refers to, and compare it with its digest."""
    log, watch = job.log, job.watch
    with watch.phase("bodies", len(references)), NatsConnection.open(log.endpoint) as link:
        progress = partial(watch.report, "bodies", total=len(references))
        for reference, fault in faults_of(link, log.stream, references.values(), progress):
            audit.body(reference.position, f"{reference.type_name}: {reference.digest}: {fault}")


def _walk(audit: LogAudit, job: Job, archive: ArchiveReader | None, references: References | None) -> None:
    log, watch = job.log, job.watch
    end = max(log.last, 0 if archive is None else archive.manifest.last)
    logged: Generator[list[RawRecord]] = (batch for batch in ())
    if log.last:
        logged = read_range(log.endpoint, log.stream, log.first, log.last + 1, allow_holes=True)
    archived: Generator[list[RawRecord]] = (batch for batch in ())
    if archive is not None:
        archived = archive.records(archive.manifest.first, archive.manifest.last + 1)
    with (
        watch.phase("read", end),
        uncollected(),
        closing(read_ahead(logged, watch.check)) as log_batches,
        closing(read_ahead(archived, watch.check)) as archive_batches,
    ):
        pairs = side_by_side(chain.from_iterable(log_batches), chain.from_iterable(archive_batches))
        for number, (record, archived_record) in enumerate(pairs, 1):
            audit.take(record, archived_record)
            if references is not None and record is not None:
                references.take(record)
            if number % _REPORT_EVERY == 0:
                watch.report("read", (record or archived_record or (0,))[0], end)
        watch.report("read", end, end)
