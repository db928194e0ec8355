"""The part of the log that comes out of an archive: read before anything is planned, checked before anything is made.

Positions up to the archive's end are read from its files, those after it from the log, as if all were the log's.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from eventjet.archive.manifest import Archive
from eventjet.archive.reading import archived_records, check_files, folder_of, read_manifest
from eventjet.codec.envelope import MSG_ID, RawRecord, header
from eventjet.errors import ArchiveBroken
from eventjet.nats.api import StreamState, message_at
from eventjet.nats.connection import ask_once
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.ranges import read_range
from eventjet.rebuild.plan import EngineName, Plan
from eventjet.rebuild.progress import Watch
from eventjet.spark.session import Started, spark_session


@dataclass(frozen=True, slots=True)
class ReplaySource:
    """An archive that the past is read from."""

    archive: Archive
    started: Started | None
    """The session that reaches it; None for a folder of this machine."""

    def check(self, plan: Plan, watch: Watch) -> None:
        """Raise `ArchiveBroken` unless the files that the plan reads are what was sealed."""
        with watch.phase("check"):
            check_files(self.archive, plan.first, plan.archived, self.started and self.started.spark)

    def records(self, start: int, end: int, batch: int) -> Generator[list[RawRecord]]:
        """Those at `start` <= position < `end`, in order, in lists of up to `batch`."""
        return archived_records(self.archive, start, end, batch=batch, spark=self.started and self.started.spark)


@contextmanager
def past_of(
    url: str | None,
    stream: str,
    endpoint: Endpoint,
    log: str,
    state: StreamState,
    engine: EngineName,
    master: str | None,
    watch: Watch,
) -> Generator[ReplaySource | None]:
    """The archive at `url`, if one is given, when the log goes on from it; raises `ArchiveBroken`.

    A session is started only for one that is not in a folder of this machine.
    """
    if url is None:
        yield None
        return
    with ExitStack() as stack:
        started = None
        if folder_of(url) is None and engine == "spark":
            started = stack.enter_context(spark_session(master, bulk_only=True, interrupted_by=watch.interrupted_by))
            stack.enter_context(watch.interrupted_by(partial(_interrupt, started)))
        archive = read_manifest(url, None if started is None else started.spark)
        check_past(archive, endpoint, stream, log, state)
        _check_whole(archive, state)
        yield ReplaySource(archive, started)


def check_past(archive: Archive, endpoint: Endpoint, stream: str, log: str, state: StreamState) -> None:
    """Raise `ArchiveBroken` unless the archive is of this log, with the same past, and the log goes on from it."""
    if not archive.segments:
        raise ArchiveBroken(archive.url, "nothing is in it")
    reason = _stranger(archive, stream, log) or _broken_off(archive, state)
    if reason is None and state.first <= archive.last:
        record = ask_once(endpoint, message_at(stream, archive.last))
        event_id = None if record is None else header(record[3], MSG_ID) or ""
        wanted = archive.segments[-1].last_id
        if event_id != wanted:
            found = "nothing" if event_id is None else f"the event {event_id or 'without an id'}"
            reason = f"it ends with the event {wanted} at position {archive.last}, and the log has {found} there"
    if reason is not None:
        raise ArchiveBroken(archive.url, reason)


def read_log(
    endpoint: Endpoint, stream: str, start: int, end: int, *, batch: int, past: ReplaySource | None
) -> Generator[list[RawRecord]]:
    """As `read_range`, with the positions that an archive has out of the archive."""
    if past is not None and start <= past.archive.last:
        edge = min(end, past.archive.last + 1)
        yield from past.records(start, edge, batch)
        start = edge
    yield from read_range(endpoint, stream, start, end, batch=batch)


def _interrupt(started: Started) -> None:
    with suppress(Exception):
        started.spark.interruptAll()


def _stranger(archive: Archive, stream: str, log: str) -> str | None:
    newest = archive.segments[-1]
    if (newest.stream, newest.log) == (stream, log):
        return None
    return f"it is of the log {newest.log} of {newest.stream!r}, and the stream {stream!r} is the log {log}"


def _broken_off(archive: Archive, state: StreamState) -> str | None:
    if state.last < archive.last:
        return f"it ends at position {archive.last}, and the log at {state.last}, so the log has lost its end"
    if state.first > archive.last + 1:
        return f"it ends at position {archive.last}, and the log begins at {state.first}"
    return None


def _check_whole(archive: Archive, state: StreamState) -> None:
    """Raise `ArchiveBroken` unless archive and log together are all that there is to read."""
    if not state.messages:
        raise ArchiveBroken(archive.url, "its log holds no event any more to go on from")
    if state.first < archive.first:
        raise ArchiveBroken(archive.url, f"it begins at position {archive.first}, and the log at {state.first}")
