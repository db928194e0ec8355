"""`audit`: walk the whole log once, and compare it with an archive of it when one is given. Changes nothing."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

from eventjet.archive.reading import ArchiveReader
from eventjet.codec.headers import RawRecord
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.connection import ask_once
from eventjet.jetstream.reader import read_range
from eventjet.log.integrity import accepted_missing, first_position
from eventjet.log.topology import compare, stream_config
from eventjet.projections.app_ref import Application, AppRef
from eventjet.rebuild.job import EngineOptions, Job, in_job
from eventjet.rebuild.log_audit import MISSING, NOTES, LogAudit, LogFinding, side_by_side
from eventjet.rebuild.plan import EngineName
from eventjet.rebuild.progress import Report
from eventjet.rebuild.replay_source import check_archive_is_of, read_ahead
from eventjet.runtime import uncollected
from eventjet.settings import Settings

EXAMPLES = 5
"""Findings of each kind that a report holds, unless asked otherwise."""
_KEEPS_ALL = (
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
"""Settings of a stream without which it may lose events, or hold what nobody recorded."""
_REPORT_EVERY = 2_000


@dataclass(frozen=True, slots=True)
class AuditedArchive:
    """The archive that a log was compared with."""

    url: str
    first: int
    last: int
    compared: int
    """Positions that both have; those that are not the same are among the findings."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The outcome of an audit."""

    stream: str
    log: str
    first: int
    """Position of the first event there is; one past `last` when there is none."""
    last: int
    events: int
    aggregates: int
    accepted: int
    """Positions after the first one that may be missing, as accepted with `init --accept-loss`."""
    archive: AuditedArchive | None
    findings: tuple[LogFinding, ...]
    """By kind, what to do first before the others; empty for a log without fault."""
    seconds: Mapping[str, float]
    """Wall time by phase."""

    @property
    def sound(self) -> bool:
        """Whether there are only notes, and what may be missing."""
        return all(each.kind in NOTES or (each.kind in MISSING and self.may_be_missing) for each in self.findings)

    @property
    def may_be_missing(self) -> bool:
        """Whether no more is missing than somebody has accepted."""
        return sum(each.positions for each in self.findings if each.kind in MISSING) <= self.accepted


async def audit(
    app: Application | AppRef,
    settings: Settings,
    *,
    archive: str | None = None,
    engine: EngineName | EngineOptions = "spark",
    examples: int = EXAMPLES,
    progress: Report | None = None,
) -> AuditReport:
    """Walk the log up to its end as it is now, and the archive at the URL `archive` beside it.

    Positions, versions and chains have to be unbroken, events to be decodable and on the subjects of their aggregate,
    and ids to be used once; archive and log have to hold the same. `examples` findings of each kind are kept, all are
    counted. Takes some 120 bytes for each aggregate. The engine matters for an archive outside this machine's folders,
    which Spark reads. `progress` is called from another thread. Raises `ArchiveBroken` for an archive that is broken
    itself or of another log, `Unreachable`, `StoreUnavailable` and `UsageError`.
    """
    return await in_job(app, settings, engine, lambda job: _audit(job, archive, examples), progress=progress)


def _audit(job: Job, url: str | None, examples: int) -> AuditReport:
    log, watch = job.log, job.watch
    first, last = first_position(log.state), log.state.last
    audit = LogAudit(job.app, first=first, last=last, examples=examples, voids=job.catalog.voids)
    for drift in compare(stream_config(log.stream, log.state.config["num_replicas"]), log.state.config):
        if drift.setting in _KEEPS_ALL:
            audit.setting(f"{drift.setting} is {drift.actual!r}, declared is {drift.declared!r}")
    archive = None if url is None else _opened(job, url)
    _walk(audit, job, archive)
    grown = ask_once(log.endpoint, stream_info(log.stream)).last > last
    compared = None
    if archive is not None:
        sealed = archive.manifest
        compared = AuditedArchive(sealed.url, sealed.first, sealed.last, audit.compared)
    return AuditReport(
        stream=log.stream,
        log=log.identity,
        first=log.first,
        last=log.state.last,
        events=audit.events,
        aggregates=audit.aggregates,
        accepted=accepted_missing(log.state),
        archive=compared,
        findings=audit.finish(grown=grown),
        seconds=watch.seconds,
    )


def _opened(job: Job, url: str) -> ArchiveReader:
    """Open the archive and check its files; raises `ArchiveBroken`."""
    archive = ArchiveReader(job.engine.archive_files(url))
    manifest = archive.manifest
    check_archive_is_of(job.log, manifest)
    with job.watch.phase("check", manifest.events):
        archive.check(manifest.first, manifest.last)
    return archive


def _walk(audit: LogAudit, job: Job, archive: ArchiveReader | None) -> None:
    log, watch = job.log, job.watch
    first, last = log.first, log.state.last
    logged = (
        read_range(log.endpoint, log.stream, first, last + 1, allow_holes=True) if log.state.messages else _nothing()
    )
    total = last if archive is None else max(last, archive.manifest.last)
    with watch.phase("read", total), uncollected(), closing(read_ahead(logged, watch)) as records:
        if archive is None:
            for batch in records:
                for record in batch:
                    audit.take(record)
                watch.tell("read", batch[-1][0], total)
            return
        manifest = archive.manifest
        with closing(read_ahead(archive.records(manifest.first, manifest.last + 1), watch)) as archived:
            pairs = side_by_side(chain.from_iterable(records), chain.from_iterable(archived))
            for number, (record, other) in enumerate(pairs, 1):
                audit.take(record, other)
                if number % _REPORT_EVERY == 0:
                    watch.tell("read", (record or other or (0,))[0], total)


def _nothing() -> Generator[list[RawRecord]]:
    yield from ()
