"""Bring a shadow from the pinned position to the end of the log, with the live writer's own code."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from eventjet.codec.envelope import MSG_ID, RawRecord, header
from eventjet.errors import VerificationFailed
from eventjet.nats.api import message_at
from eventjet.nats.connection import ask_once
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.ranges import read_range
from eventjet.projections.resolve import ResolvedProjection
from eventjet.quarantine import rows
from eventjet.quarantine.fold import BlockedAggregates, reader
from eventjet.rebuild.job import Job
from eventjet.rebuild.prefetch import read_ahead
from eventjet.rebuild.shadow import Shadow, begin, begun
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.dialect import dialect_of
from eventjet.sql.quarantine_rows import Parked
from eventjet.writers.batch import Batch, Parts
from eventjet.writers.fold_writer import FoldWriter

BATCH = 2_000


class CatchUp:
    """One shadow's writer with its connection; made by `catching_up`."""

    def __init__(
        self, shadow: Shadow[ResolvedProjection], job: Job, first: int, connection: Connection, held: Checkpoint
    ) -> None:
        self._job = job
        self._first = first
        self._connection = connection
        self._held = held
        self._resolved = shadow.resolved
        self._decode = reader(job.app.catalog, shadow.resolved, shadow.target.known)
        blocked: BlockedAggregates | None = None
        if shadow.resolved.quarantines:
            blocked = BlockedAggregates(
                rows.blocked_aggregates(connection, held.name, held.revision, held.position), shadow.target.known
            )
            connection.rollback()
        self._writer = FoldWriter(
            shadow.resolved, dialect_of(connection), lease_s=0, table=shadow.tables[0], blocked=blocked
        )
        self.position = held.position

    def to(self, position: int) -> None:
        """Write what is missing up to a position of the log, batch by batch."""
        start, total = self.position, position - self.position
        begin = max(start + 1, self._first)
        if begin > position:
            return
        log, watch = self._job.log, self._job.watch
        batches = read_range(log.endpoint, log.stream, begin, position + 1, batch=BATCH)
        with closing(read_ahead(batches, watch)) as ahead:
            for records in ahead:
                self._write(records)
                watch.tell("catch up", self.position - start, total)

    def _write(self, records: list[RawRecord]) -> None:
        events = [event for record in records if (event := self._decode(record)) is not None]
        last = records[-1]
        parts = Parts(self._resolved.name, Batch(self.position, last[0], header(last[3], MSG_ID) or "", events))
        for part in parts:
            try:
                with self._connection.begin():
                    self._writer.write(self._connection, self._held, part)
            except DBAPIError as error:
                parts.refused(part, error)
        self.position = last[0]


@contextmanager
def catching_up(
    shadow: Shadow[ResolvedProjection], job: Job, first: int, position: int, parked: Sequence[Parked] = ()
) -> Generator[CatchUp]:
    """Give the loaded shadow its checkpoint, its quarantine and a writer.

    `first` is the log's, `position` the pinned one; `parked` is what could not be taken up to there.
    """
    log = job.log
    held = begun(shadow.resolved, position, event_id_at(log.endpoint, log.stream, position), log.identity)
    with shadow.engine().connect() as connection:
        with connection.begin():
            begin(connection, held)
            rows.park(connection, held.name, held.revision, parked)
        yield CatchUp(shadow, job, first, connection, held)


def event_id_at(endpoint: Endpoint, stream: str, position: int) -> str:
    """The id of the event there; empty for position 0."""
    if position == 0:
        return ""
    record = ask_once(endpoint, message_at(stream, position))
    if record is None:
        raise VerificationFailed(stream, f"the log has no event at position {position}, where the rebuild was pinned")
    return header(record[3], MSG_ID) or ""
