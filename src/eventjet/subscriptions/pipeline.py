"""`BatchPipeline`: one term's way from the log into the database, batch by batch, each in as few transactions as hold.

While the database commits a batch of a fold, the next one is folded. Whatever is read, folded or remembered ahead lives
here and in `FoldWriter` for one term only; the fence in each transaction decides whether it counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from sqlalchemy.exc import DBAPIError

from eventjet import failpoints
from eventjet.codec.reasons import reason_of
from eventjet.errors import CheckpointFenced, HandlerFailed
from eventjet.observability import logs, tracing
from eventjet.projections.sql_projection import AnyResolved
from eventjet.quarantine.fold import Offered
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.dialect import is_about_data
from eventjet.subscriptions.context import Session, WorkerOptions
from eventjet.subscriptions.reader import EventReader
from eventjet.subscriptions.retries import log_parked
from eventjet.subscriptions.terms import Backoff
from eventjet.writers.batch import Batch, Parts
from eventjet.writers.batch_fold import Prepared
from eventjet.writers.fold_writer import FoldWriter
from eventjet.writers.sql_writer import SqlWriter

_log = logging.getLogger(__name__)

_PART_FIRST = 500
"""Events in the first transaction, before anything is known of the handler."""


class Pace(Backoff):
    """What a projector has learnt of its handlers and its database; outlives terms."""

    def __init__(self, options: WorkerOptions) -> None:
        super().__init__(options.backoff_s)
        self._options = options
        self.part_max = min(_PART_FIRST, options.batch_max)
        """Events in one transaction, at most."""

    def committed(self, count: int, took_s: float) -> None:
        """Larger parts as long as a lease lasts for many of them: handlers may be slow."""
        options = self._options
        if took_s < options.lease_s / 10:
            self.part_max = min(2 * self.part_max, options.batch_max)
        elif took_s > options.lease_s / 4:
            self.part_max = max(1, count // 2)
        self.progressed()

    def failed(self, count: int) -> None:
        """Perhaps so many events were too many for the lease, or for the database's limits: fewer then."""
        self.part_max = max(1, count // 2)


class FoldCommitter:
    """Reads and folds, then writes; `overlaps` says whether the next batch is folded while this one is written."""

    def __init__(
        self,
        session: Session,
        writer: FoldWriter,
        held: Checkpoint,
        reader: EventReader,
        *,
        overlaps: bool,
        private: bool,
    ) -> None:
        self._is_private = private
        self._session = session
        self._writer = writer
        self._held = held
        self._reader = reader
        self._overlaps = overlaps
        self._ahead: Prepared | None = None

    async def commit(self, part: Batch) -> float:
        prepared, self._ahead = self._ahead, None
        if prepared is None or prepared.batch is not part:
            prepared = await self._session.read(self._writer.prepare, part)
        failpoints.reach("worker.batch_folded")
        began = time.perf_counter()
        writing = self._session.write(self._writer.commit, self._held, prepared)
        if self._overlaps:
            # In this order: by its first wait the transaction has sent its only statement, and the server works while
            # the loop folds.
            sent = asyncio.ensure_future(writing)
            folding = asyncio.ensure_future(self._fold_ahead(part.last))
            try:
                await sent
            finally:
                # It either has folded by now or waits for more of the log, which nobody should wait for.
                folding.cancel()
        else:
            await writing
        took_s = time.perf_counter() - began
        log_parked(self._held.name, prepared.changes.quarantine)
        return took_s

    async def _fold_ahead(self, after: int) -> None:
        """Fold the batch after that position if it is a whole one: with less to do nobody is in a hurry."""
        batch = await self._reader.peek_whole()
        if batch is None or batch.after != after:
            return  # the rest of a batch that was cut comes first
        try:
            self._ahead = self._writer.prepare_next(batch)
        except Exception as error:  # noqa: BLE001 - folded again in its turn, it raises this again
            reason = reason_of(error, private=self._is_private)
            logs.NOT_FOLDED_AHEAD.tell(_log, position=after, reason=reason)


class SqlCommitter:
    """Runs the handlers of SQL by hand within the transaction."""

    def __init__(self, session: Session, writer: SqlWriter, held: Checkpoint) -> None:
        self._session = session
        self._writer = writer
        self._held = held

    async def commit(self, part: Batch) -> float:
        began = time.perf_counter()
        async with self._session.transaction() as connection:
            await self._writer.write(connection, self._held, part)
        return time.perf_counter() - began


Committer: TypeAlias = FoldCommitter | SqlCommitter
"""How a part of a batch gets into the database: `commit` is one transaction, and returns how many seconds it took.

It raises `CheckpointFenced`, `HandlerFailed` with the event that cannot be taken, and what the database raises; then
nothing is written.
"""


class BatchPipeline:
    """For one term; `position` is what the checkpoint says.

    `on_commit` is told the position, the number of events and the seconds of each transaction.
    """

    def __init__(
        self,
        resolved: AnyResolved,
        held: Checkpoint,
        reader: EventReader,
        committer: Committer,
        pace: Pace,
        on_commit: Callable[[int, int, float], None],
    ) -> None:
        self._resolved = resolved
        self._reader = reader
        self._committer = committer
        self._pace = pace
        self._on_commit = on_commit
        self.position = held.position

    async def step(self, timeout_s: float) -> bool:
        """Commit the next batch; False when none came in time or reading was woken.

        Where an event cannot be taken, what precedes it is committed first. Raises `HandlerFailed`, `CodecError`,
        `CheckpointFenced`, what the database raises, and whatever ended the reading.
        """
        batch = await self._reader.take(timeout_s)
        if batch is None:
            return False
        failpoints.reach("worker.batch_taken")
        rest: Batch | None = batch
        while rest is not None:
            part, rest = rest.cut(self._pace.part_max)
            began = time.monotonic()
            await self._commit(part)
            self._pace.committed(len(part.events), time.monotonic() - began)
        return True

    async def _committed(self, part: Batch) -> float:
        resolved = self._resolved
        with tracing.batch(resolved.name, resolved.revision, len(part.events), part.last, lambda: _traces(part)):
            return await self._committer.commit(part)

    async def _commit(self, batch: Batch) -> None:
        parts = Parts(self._resolved.name, batch, private=self._resolved.is_private)
        for part in parts:
            try:
                took_s = await self._committed(part)
            except HandlerFailed as error:
                parts.failed(part, error)
            except CheckpointFenced:
                self._pace.failed(len(part.events))  # perhaps the lease ran out over a slow fold
                raise
            except DBAPIError as error:
                if not is_about_data(error):
                    self._pace.failed(len(part.events))
                parts.refused(part, error)
            else:
                failpoints.reach("worker.after_commit")
                self.position = part.last
                self._on_commit(part.last, len(part.events), took_s)


def _traces(part: Batch) -> list[str]:
    """The headers of the commands that its events came from."""
    events: Any = part.events
    recorded = [one.event if isinstance(one, Offered) else one for one in events]
    return [one.metadata.traceparent for one in recorded if one is not None and one.metadata.traceparent is not None]
