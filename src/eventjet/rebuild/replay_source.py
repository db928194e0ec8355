"""`ReplaySource` reads a job's events from an archive and then from the log, as if both were one log.

The archive is opened before the job is planned, and its files are checked before the job creates anything.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

from eventjet.archive.reading import Archive, ArchiveFiles, ArchiveReader, nothing_in
from eventjet.codec.headers import RawRecord, event_id_of
from eventjet.errors import ArchiveBroken
from eventjet.jetstream.api import StreamState, deleted_positions, message_at, stream_info
from eventjet.jetstream.connection import ask_once
from eventjet.jetstream.reader import read_range
from eventjet.log.integrity import check_integrity, earlier_logs, first_position, missing_range, succession_fault
from eventjet.log.topology import check_settings
from eventjet.nats.endpoint import Endpoint
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
        """Position of the first event, or of the next event in an empty log."""
        return max(self.state.first, 1)

    @property
    def last(self) -> int:
        """Position of the last event; 0 in an empty log."""
        return self.state.last if self.state.messages else 0

    def now(self) -> StreamState:
        """Return the log's state as it is now where it is read; its settings are those of when the job began."""
        state = ask_once(self.endpoint, stream_info(self.stream))
        return state if state.mirror is None else replace(state, config=self.state.config, metadata=self.state.metadata)

    def event_id(self, position: int) -> str | None:
        """Return the id of the event at a position now: empty if the event has no id, None if there is no event."""
        record = ask_once(self.endpoint, message_at(self.stream, position))
        return None if record is None else event_id_of(record)


@dataclass(frozen=True, slots=True)
class ReplaySource:
    """The events of a job in the order of the log."""

    log: Log
    archive: ArchiveReader | None = None
    """The archive of the log's past, which is read up to its last position."""

    @property
    def first(self) -> int:
        """Position of the first event: that of the archive, if there is one."""
        return self.log.first if self.archive is None else self.archive.manifest.first

    @property
    def archived(self) -> int:
        """Position of the last event that is read from the archive; 0 without an archive."""
        return 0 if self.archive is None else self.archive.manifest.last

    def check_integrity(self, state: StreamState) -> None:
        """Raise `LogIncomplete` unless log and archive have every event, and `LogDrifted` for dangerous settings."""
        if missing_range(state) and not self._covers_missing(state):
            check_integrity(state)
        check_settings(state)

    def _covers_missing(self, state: StreamState) -> bool:
        if self.archive is None or self.first > first_position(state) or self.archived + 1 < state.first:
            return False
        return not state.deleted or all(
            position <= self.archived for position in ask_once(self.log.endpoint, deleted_positions(self.log.stream))
        )

    def check(self, plan: Plan, watch: Watch) -> None:
        """Raise `ArchiveBroken` unless the files that the plan reads are as they were sealed."""
        if self.archive is not None:
            with watch.phase("check"):
                self.archive.check(plan.first, plan.archived)

    def records(self, start: int, end: int, *, batch: int = 2_000) -> Generator[list[RawRecord]]:
        """Yield the records at `start` <= position < `end` in order, in lists of up to `batch`; see `read_range`."""
        if self.archive is not None and start <= self.archived:
            edge = min(end, self.archived + 1)
            yield from self.archive.records(start, edge, batch=batch)
            start = edge
        yield from read_range(self.log.endpoint, self.log.stream, start, end, batch=batch)


def archived_source(log: Log, files: ArchiveFiles) -> ReplaySource:
    """Return a source that reads an archive and then the log; raises `ArchiveBroken` unless the log continues it."""
    archive = ArchiveReader(files)
    manifest, state = archive.manifest, log.state
    check_same_past(log, manifest)
    if not state.messages:
        raise ArchiveBroken(manifest.url, "its log holds no event any more to go on from")
    if state.first < manifest.first:
        raise ArchiveBroken(manifest.url, f"it begins at position {manifest.first}, and the log at {state.first}")
    return ReplaySource(log, archive)


def check_same_past(log: Log, archive: Archive) -> None:
    """Raise `ArchiveBroken` unless the archive has this log's past, and no event is missing between the two."""
    check_archive_is_of(log, archive)
    last_segment, state = archive.segments[-1], log.state
    if state.last < archive.last:
        reason = f"it ends at position {archive.last}, and the log at {state.last}, so the log has lost its end"
        raise ArchiveBroken(archive.url, reason, f"`eventjet restore {archive.url}` gives the log its end back.")
    if state.first > archive.last + 1:
        raise ArchiveBroken(archive.url, f"it ends at position {archive.last}, and the log begins at {state.first}")
    if state.first > archive.last:
        return
    # The position is still in the log, so both must have the same event there.
    event_id = log.event_id(archive.last)
    if event_id == last_segment.last_id:
        return
    log_event = "nothing" if event_id is None else f"the event {event_id or 'without an id'}"
    reason = (
        f"it ends with the event {last_segment.last_id} at position {archive.last}, and the log has {log_event} there"
    )
    raise ArchiveBroken(archive.url, reason, "`eventjet audit --archive` says where the two part, and what to do.")


def check_archive_is_of(log: Log, archive: Archive) -> None:
    """Raise `ArchiveBroken` unless the archive has events and names this log; the events themselves may differ."""
    if not archive.segments:
        raise nothing_in(archive.url)
    fault = succession_fault(log.state, archive.log, archive.last)
    if archive.stream != log.stream or fault:
        this_log = f"the stream {log.stream!r} is the log {log.identity}"
        reason = f"it is of the log {archive.log} of {archive.stream!r}, and {this_log}"
        raise ArchiveBroken(
            archive.url,
            fault if archive.log in earlier_logs(log.state) and fault else reason,
            "Name an archive of this log, or an empty folder; what is in this one comes back with `eventjet restore` "
            "on another server or account.",
        )
