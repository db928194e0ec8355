"""What a worker does about the quarantine at the start of a term: it carries out retries, then loads what is blocked.

While it holds the lease nobody else changes either: whoever decides about a parked event raises the epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from sqlalchemy.exc import DBAPIError

from eventjet.codec.headers import RawRecord
from eventjet.domain.parked import PARKED, RETRIED, RETRY, AggregateKey, Parked
from eventjet.errors import HistoryBroken, StillHeld
from eventjet.jetstream.api import message_at
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.integrity import check_same_log
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
from eventjet.writers.batch import Batch, Parts
from eventjet.writers.fold_writer import Prepared, changes_of

_log = logging.getLogger(__name__)

_EVENTS_MAX = 200
"""Events tried in one transaction: a lease lasts longer than that takes."""
_AT_ONCE = 20
_BYTES_MAX = 16 * 1024 * 1024
"""Their bodies; a single larger event still passes."""


async def load_blocked(session: Session, resolved: AnyResolved) -> BlockedAggregates:
    """The aggregates whose events wait; raises `StillHeld`."""
    blocked = await session.read(quarantine.blocked_aggregates, resolved.name, resolved.revision)
    if blocked and not resolved.quarantines:
        raise StillHeld(resolved, len(blocked))
    return BlockedAggregates(blocked)


async def carry_out_retries(
    session: Session, context: WorkerContext, resolved: AnyResolved, lease: Lease, stop: asyncio.Event
) -> None:
    """Try again what people asked to, until it is done or `stop` is set.

    Raises `CheckpointFenced`, `LogRolledBack`, `HistoryBroken`, `HandlerFailed` for an event that cannot even be
    parked, and `UnknownEvent` for a schema of a newer deploy.
    """
    if resolved.quarantines and not isinstance(resolved, ResolvedSql):
        await _Retries(session, context, resolved, lease).run(stop)


class _Retries:
    """Events that somebody asked to try again: aggregate by aggregate, a bounded number in one transaction."""

    def __init__(self, session: Session, context: WorkerContext, resolved: ResolvedProjection, lease: Lease) -> None:
        self._session = session
        self._writer = context.fold_writer(resolved, lease.checkpoint)
        self._context = context
        self._resolved = resolved
        self._lease = lease
        self._checkpoint = lease.checkpoint
        self._size = self._size_max = min(context.options.batch_max, _EVENTS_MAX)

    async def run(self, stop: asyncio.Event) -> None:
        """Each round takes events out of the quarantine, or parks them anew."""
        while not stop.is_set() and (waiting := await self.waiting()):
            reading = asyncio.to_thread(self._offers, waiting[: self._size])
            offers = await renewing(reading, self._lease.renew, self._context.options.lease_s / 3)
            parts = Parts(self._resolved.name, self._unmoved(offers), private=self._resolved.is_private)
            for part in parts:
                tried = cast("Sequence[Any]", part.events)
                try:
                    await self._try(waiting, tried)
                except DBAPIError as error:
                    parts.refused(part, error)
                    self._size = max(1, len(tried) // 2)
                else:
                    self._size = min(2 * self._size, self._size_max)
                    break  # what waits is another now

    async def waiting(self) -> list[WaitingEvent]:
        """What is next, and one more."""
        return await self._session.read(
            quarantine.to_retry, self._resolved.name, self._resolved.revision, self._size + 1
        )

    def _unmoved(self, offers: Sequence[Any] = ()) -> Batch:
        """A batch that leaves the checkpoint where it is."""
        return Batch(self._checkpoint.position, self._checkpoint.position, self._checkpoint.event_id, offers)

    async def _try(self, waiting: Sequence[WaitingEvent], offers: Sequence[Offered]) -> None:
        outcome = await self._session.read(self._writer.sort, offers)
        failed = {(parked.aggregate, parked.aggregate_id): parked for parked in reversed(outcome.parked)}
        changes = changes_of(outcome.changed, _sorting(waiting, len(offers), failed))
        prepared = Prepared(self._unmoved(), changes, outcome.changed)
        await self._session.write(self._writer.commit, self._checkpoint, prepared)
        log_parked(self._resolved.name, changes.quarantine, "is parked again")

    def _offers(self, waiting: Sequence[WaitingEvent]) -> list[Offered]:
        """Read them from the log that the rows were made from; blocks. Fewer when they are large."""
        context, stream = self._context, self._context.stream
        endpoint = context.endpoint.with_name(f"eventjet worker {self._resolved.durable}")
        offers: list[Offered] = []
        size = 0
        with NatsConnection.open(endpoint) as connection:
            check_same_log(connection, stream, self._checkpoint)
            earlier = PredecessorReader(connection, stream)
            offer = Offering(context.catalog, self._resolved.events, [event.position for event in waiting], earlier)
            for event, record in _read(connection, stream, waiting):
                if record is None:
                    raise HistoryBroken(stream, event.position, "a parked event is to be tried again and is not there")
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
    """Each with its record, asked for some at a time: a far server does not take as often as long."""
    for start in range(0, len(waiting), _AT_ONCE):
        some = waiting[start : start + _AT_ONCE]
        yield from zip(some, connection.ask_all([message_at(stream, one.position) for one in some]), strict=True)


def _sorting(waiting: Sequence[WaitingEvent], tried: int, failed: Mapping[AggregateKey, Parked]) -> QuarantineChanges:
    """Of so many tried: what was parked and is taken stays as history, what was blocked by it is forgotten.

    `failed` is the first of each aggregate that was not taken; the rest of that stays blocked. Where an aggregate has
    more than was tried, its next is to be.
    """
    taken = [
        event
        for event in waiting[:tried]
        if event.aggregate_key not in failed or event.position < failed[event.aggregate_key].position
    ]
    resolved = [(event.position, RETRIED) for event in taken if event.has_failed]
    last = waiting[tried - 1].aggregate_key
    if len(waiting) > tried and waiting[tried].aggregate_key == last and last not in failed:
        resolved.append((waiting[tried].position, RETRY))
    return QuarantineChanges(
        parked=list(failed.values()),
        freed=[event.position for event in taken if not event.has_failed],
        resolved=resolved,
    )


def log_parked(name: str, quarantine: QuarantineChanges | None, how: str = "is parked") -> None:
    """Log what was just parked: one line a batch, whatever it blocks."""
    heads = [event for event in quarantine.parked if event.resolution == PARKED] if quarantine is not None else []
    if heads:
        more = f", and {len(heads) - 1} more" if len(heads) > 1 else ""
        reason = next(iter(heads[0].reason.splitlines()), "")
        logs.PARKED.tell(_log, name=name, position=heads[0].position, how=how, more=more, reason=reason)
