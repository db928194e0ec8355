"""The quarantine of a projection at the start of a session: carry out retries, then load the blocked aggregates.

While the worker has the lease nobody else changes the quarantine: resolving a quarantined event raises the epoch, which
fences the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from sqlalchemy.exc import DBAPIError

from eventjet.codec.headers import RawRecord
from eventjet.domain.quarantined import QUARANTINED, RETRIED, RETRY, AggregateKey, Quarantined
from eventjet.errors import HistoryBroken, ProjectionStopped
from eventjet.jetstream.api import message_at
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.integrity import checking_same_log
from eventjet.log.predecessors import PredecessorReader
from eventjet.observability import logs
from eventjet.projections.fold import BlockedAggregates, Offered, Offering
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.sql import quarantine
from eventjet.sql.quarantine import WaitingEvent
from eventjet.sql.statements import QuarantineChanges
from eventjet.subscriptions.context import Session, WorkerContext
from eventjet.subscriptions.lease import Lease
from eventjet.subscriptions.retry import renewing
from eventjet.text import counted
from eventjet.writers.batch import Batch, Parts
from eventjet.writers.fold_writer import Prepared, changes_of

_log = logging.getLogger(__name__)

_EVENTS_MAX = 200
"""Most events tried in one transaction, which must take less time than a lease lasts."""
_REQUESTS_AT_ONCE = 20
"""Records requested from the log at once."""
_BYTES_MAX = 16 * 1024 * 1024
"""Most bytes of bodies in one transaction; a single larger event still passes."""


async def load_blocked(session: Session, resolved: AnyResolved) -> BlockedAggregates:
    """Return the blocked aggregates; raises `ProjectionStopped` if the projection no longer quarantines."""
    blocked = await session.read(quarantine.blocked_aggregates, resolved.name, resolved.revision)
    if blocked and not resolved.quarantines:
        reason = f"it stops at errors, and its quarantine still blocks {counted(len(blocked), 'aggregate')}"
        remedy = f'Declare it on_error="quarantine" again, or run `eventjet rebuild {resolved.name}`.'
        raise ProjectionStopped(resolved.name, reason, remedy)
    return BlockedAggregates(blocked)


async def carry_out_retries(
    session: Session, context: WorkerContext, resolved: AnyResolved, lease: Lease, stop: asyncio.Event
) -> None:
    """Try the events again that operators asked to retry, until none is left or `stop` is set.

    Raises `CheckpointFenced`, `LogRolledBack`, `HistoryBroken`, `HandlerFailed` for an event that cannot even be
    quarantined, and `UnknownEvent` for a schema of a newer deploy.
    """
    if resolved.quarantines and not isinstance(resolved, ResolvedSql):
        await _Retries(session, context, resolved, lease).run(stop)


class _Retries:
    """Tries quarantined events again: aggregate by aggregate, a bounded number in one transaction."""

    def __init__(self, session: Session, context: WorkerContext, resolved: ResolvedProjection, lease: Lease) -> None:
        self._session = session
        self._writer = context.fold_writer(resolved, lease.checkpoint)
        self._context = context
        self._resolved = resolved
        self._lease = lease
        self._checkpoint = lease.checkpoint
        self._batch_size = self._batch_size_max = min(context.options.batch_max, _EVENTS_MAX)

    async def run(self, stop: asyncio.Event) -> None:
        """Run rounds until no retry waits; each round frees events from the quarantine or quarantines them again."""
        while not stop.is_set() and (waiting := await self._waiting()):
            reading = asyncio.to_thread(self._offers, waiting[: self._batch_size])
            offers = await renewing(reading, self._lease.renew, self._context.options.lease_s / 3)
            parts = Parts(self._resolved.name, self._unmoved_batch(offers), private=self._resolved.is_private)
            for part in parts:
                events = cast("Sequence[Any]", part.events)
                try:
                    await self._try(waiting, events)
                except DBAPIError as error:
                    parts.refused(part, error)
                    self._batch_size = max(1, len(events) // 2)
                else:
                    self._batch_size = min(2 * self._batch_size, self._batch_size_max)
                    break  # other events wait now

    async def _waiting(self) -> list[WaitingEvent]:
        """Return the next events to try, and one more."""
        return await self._session.read(
            quarantine.to_retry, self._resolved.name, self._resolved.revision, self._batch_size + 1
        )

    def _unmoved_batch(self, offers: Sequence[Any] = ()) -> Batch:
        """Return a batch that does not move the checkpoint."""
        return Batch(self._checkpoint.position, self._checkpoint.position, self._checkpoint.event_id, offers)

    async def _try(self, waiting: Sequence[WaitingEvent], offers: Sequence[Offered]) -> None:
        outcome = await self._session.read(self._writer.sort, offers)
        failed = {(event.aggregate, event.aggregate_id): event for event in reversed(outcome.quarantined)}
        changes = changes_of(outcome.changed, _changes_after_retry(waiting, len(offers), failed))
        prepared = Prepared(self._unmoved_batch(), changes, outcome.changed)
        await self._session.write(self._writer.commit, self._checkpoint, prepared)
        log_quarantined(self._resolved.name, changes.quarantine, "is quarantined again")

    def _offers(self, waiting: Sequence[WaitingEvent]) -> list[Offered]:
        """Read the events from the log that the rows were made from; fewer when they are large. Blocks."""
        context, stream = self._context, self._context.stream
        endpoint = context.client.endpoint.with_name(f"eventjet worker {self._resolved.durable}")
        offers: list[Offered] = []
        size = 0
        with NatsConnection.open(endpoint) as connection:
            connection.run(checking_same_log(stream, self._checkpoint))
            predecessors = PredecessorReader(connection, stream)
            offer = Offering(
                context.catalog, self._resolved.events, [event.position for event in waiting], predecessors
            )
            for event, record in _read(connection, stream, waiting):
                if record is None:
                    raise HistoryBroken(
                        stream, event.position, "a quarantined event is to be tried again and is not there"
                    )
                size += len(record[4])
                if offers and size > _BYTES_MAX:
                    break
                offered = offer(record)
                assert offered is not None
                offers.append(offered)
        return offers


def _read(
    connection: NatsConnection, stream: str, waiting: Sequence[WaitingEvent]
) -> Iterator[tuple[WaitingEvent, RawRecord | None]]:
    """Yield each event with its record; records are requested some at once, which saves round trips to the server."""
    for start in range(0, len(waiting), _REQUESTS_AT_ONCE):
        chunk = waiting[start : start + _REQUESTS_AT_ONCE]
        yield from zip(chunk, connection.ask_all([message_at(stream, event.position) for event in chunk]), strict=True)


def _changes_after_retry(
    waiting: Sequence[WaitingEvent], tried_count: int, failed: Mapping[AggregateKey, Quarantined]
) -> QuarantineChanges:
    """Return the changes of the quarantine after the first `tried_count` of the waiting events were tried.

    Quarantined events that were handled stay as history; blocked events that were handled are removed. `failed` has the
    first event of each aggregate that failed; the rest of that aggregate stays blocked. When an aggregate has more
    events than were tried, its next event is marked for retry.
    """
    handled = [
        event
        for event in waiting[:tried_count]
        if event.aggregate_key not in failed or event.position < failed[event.aggregate_key].position
    ]
    resolved = [(event.position, RETRIED) for event in handled if event.has_failed]
    last_key = waiting[tried_count - 1].aggregate_key
    if len(waiting) > tried_count and waiting[tried_count].aggregate_key == last_key and last_key not in failed:
        resolved.append((waiting[tried_count].position, RETRY))
    return QuarantineChanges(
        upserts=list(failed.values()),
        deletions=[event.position for event in handled if not event.has_failed],
        resolutions=resolved,
    )


def log_quarantined(name: str, quarantine: QuarantineChanges | None, how: str = "is quarantined") -> None:
    """Log the events that were just quarantined, one line for each batch."""
    heads = [event for event in quarantine.upserts if event.resolution == QUARANTINED] if quarantine is not None else []
    if heads:
        suffix = f", and {len(heads) - 1} more" if len(heads) > 1 else ""
        reason = next(iter(heads[0].reason.splitlines()), "")
        logs.QUARANTINED.log(_log, name=name, position=heads[0].position, how=how, more=suffix, reason=reason)
