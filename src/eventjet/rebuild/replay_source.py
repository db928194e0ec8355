"""Where a job reads events: the log, and before it an archive, as if both were one log.

The archive is opened before anything is planned, and its files are checked before anything is made.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from eventjet.archive.manifest import Archive
from eventjet.archive.reading import ArchiveFiles, ArchiveReader
from eventjet.codec.envelope import MSG_ID, RawRecord, header
from eventjet.errors import ArchiveBroken
from eventjet.nats.api import StreamState, message_at
from eventjet.nats.connection import ask_once
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.ranges import read_range
from eventjet.rebuild.plan import Plan
from eventjet.rebuild.progress import Watch


@dataclass(frozen=True, slots=True)
class Log:
    """The log of one application as it was when a job began."""

    endpoint: Endpoint
    stream: str
    identity: str
    state: StreamState

    @property
    def first(self) -> int:
        """Position of the first event, or where it will be."""
        return max(self.state.first, 1)

    @property
    def last(self) -> int:
        """Position of the last event; 0 in an empty log."""
        return self.state.last if self.state.messages else 0


@dataclass(frozen=True, slots=True)
class ReplaySource:
    """The events of a job in the order of the log."""

    log: Log
    archive: ArchiveReader | None = None
    """Which holds the log's past, up to its own end."""

    @property
    def first(self) -> int:
        """Position of the first event there is."""
        return self.log.first if self.archive is None else self.archive.manifest.first

    @property
    def archived(self) -> int:
        """Position of the last event that is read from the archive; 0 without one."""
        return 0 if self.archive is None else self.archive.manifest.last

    def check(self, plan: Plan, watch: Watch) -> None:
        """Raise `ArchiveBroken` unless the files that the plan reads are what was sealed."""
        if self.archive is not None:
            with watch.phase("check"):
                self.archive.check(plan.first, plan.archived)

    def records(self, start: int, end: int, *, batch: int) -> Generator[list[RawRecord]]:
        """Those at `start` <= position < `end`, as `read_range` yields them."""
        if self.archive is not None and start <= self.archived:
            edge = min(end, self.archived + 1)
            yield from self.archive.records(start, edge, batch=batch)
            start = edge
        yield from read_range(self.log.endpoint, self.log.stream, start, end, batch=batch)


def archived_source(log: Log, files: ArchiveFiles) -> ReplaySource:
    """The log with its past from an archive; raises `ArchiveBroken` unless together they are all there is to read."""
    archive = ArchiveReader(files)
    manifest, state = archive.manifest, log.state
    check_same_past(log, manifest)
    if not state.messages:
        raise ArchiveBroken(manifest.url, "its log holds no event any more to go on from")
    if state.first < manifest.first:
        raise ArchiveBroken(manifest.url, f"it begins at position {manifest.first}, and the log at {state.first}")
    return ReplaySource(log, archive)


def check_same_past(log: Log, archive: Archive) -> None:
    """Raise `ArchiveBroken` unless the archive is of this log, with the same past, and the log goes on from it."""
    if not archive.segments:
        raise ArchiveBroken(archive.url, "nothing is in it")
    reason = _stranger(log, archive) or _broken_off(log.state, archive) or _another_end(log, archive)
    if reason is not None:
        raise ArchiveBroken(archive.url, reason)


def _stranger(log: Log, archive: Archive) -> str | None:
    newest = archive.segments[-1]
    if (newest.stream, newest.log) == (log.stream, log.identity):
        return None
    return (
        f"it is of the log {newest.log} of {newest.stream!r}, and the stream {log.stream!r} is the log {log.identity}"
    )


def _broken_off(state: StreamState, archive: Archive) -> str | None:
    if state.last < archive.last:
        return f"it ends at position {archive.last}, and the log at {state.last}, so the log has lost its end"
    if state.first > archive.last + 1:
        return f"it ends at position {archive.last}, and the log begins at {state.first}"
    return None


def _another_end(log: Log, archive: Archive) -> str | None:
    """Where the log still holds the archive's last event, it has to be the same one."""
    if log.state.first > archive.last:
        return None
    record = ask_once(log.endpoint, message_at(log.stream, archive.last))
    event_id = None if record is None else header(record[3], MSG_ID) or ""
    wanted = archive.segments[-1].last_id
    if event_id == wanted:
        return None
    found = "nothing" if event_id is None else f"the event {event_id or 'without an id'}"
    return f"it ends with the event {wanted} at position {archive.last}, and the log has {found} there"
