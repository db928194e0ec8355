"""What a worker does about the quarantine at the start of a term: it carries out retries, then loads what is held.

While it holds the lease nobody else changes either: whoever decides about a parked event raises the epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from sqlalchemy.exc import DBAPIError

from eventjet.errors import HistoryBroken, StillHeld
from eventjet.nats.api import get_record
from eventjet.nats.connection import NatsConnection
from eventjet.projections.sql_projection import AnyResolved
from eventjet.quarantine import rows
from eventjet.quarantine.fold import PARKED, RETRIED, RETRY, AggregateKey, Held, Offered, Offering, Parked, Sorting
from eventjet.quarantine.rows import Waiting
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.database import is_about_data
from eventjet.workers.context import WorkerContext
from eventjet.workers.log_identity import check_log
from eventjet.workers.session import Session
from eventjet.writers.sql_writer import AnyWriter
from eventjet.writers.writer import Batch, Writer, changes_of

_log = logging.getLogger(__name__)

_EVENTS_MAX = 200
"""Events tried in one transaction: a lease lasts longer than that takes."""
_BYTES_MAX = 16 * 1024 * 1024
"""Their bodies; a single larger event still passes."""


async def carry_out(
    session: Session,
    writer: AnyWriter,
    context: WorkerContext,
    resolved: AnyResolved,
    at: Checkpoint,
    stop: asyncio.Event,
) -> None:
    """Try again what people asked to, until it is done or `stop` is set.

    Raises `CheckpointFenced`, `LogRolledBack`, `HistoryBroken`, and `UnknownEvent` for a schema of a newer deploy.
    """
    if resolved.quarantines and isinstance(writer, Writer):
        retries = _Retries(session, writer, context, resolved, at)
        if await retries.waiting():
            await asyncio.to_thread(check_log, context.endpoint, context.stream, at)
            await retries.run(stop)


async def load_held(session: Session, writer: AnyWriter, resolved: AnyResolved) -> None:
    """Tell the writer what is held back; raises `StillHeld`."""
    held_back = await session.read(lambda connection: rows.aggregates(connection, resolved.name, resolved.revision))
    if held_back and not resolved.quarantines:
        raise StillHeld(resolved, len(held_back))
    if isinstance(writer, Writer):
        writer.held = Held(held_back)


class _Retries:
    """Events that somebody asked to try again: aggregate by aggregate, a bounded number in one transaction."""

    def __init__(
        self, session: Session, writer: Writer, context: WorkerContext, resolved: AnyResolved, at: Checkpoint
    ) -> None:
        self._session = session
        self._writer = writer
        self._context = context
        self._resolved = resolved
        self._at = at
        self._size_max = min(context.options.batch_max, _EVENTS_MAX)
        self._size = self._size_max

    async def run(self, stop: asyncio.Event) -> None:
        """Each round takes events out of the quarantine, parks them anew, or is halved."""
        while not stop.is_set() and (waiting := await self.waiting()):
            offers = await asyncio.to_thread(self._offers, waiting[: self._size])
            try:
                await self._try(waiting, offers)
            except DBAPIError as error:
                self._writer.undone()
                if not is_about_data(error) or (len(offers) == 1 and offers[0].error is not None):
                    raise
                if len(offers) == 1:
                    await self._try(waiting, [offers[0].failed(error)])
                self._size = max(1, len(offers) // 2)
            else:
                self._size = min(2 * self._size, self._size_max)

    async def waiting(self) -> list[Waiting]:
        """What is next, and one more."""
        name, revision, limit = self._resolved.name, self._resolved.revision, self._size + 1
        return await self._session.read(lambda sync: rows.to_retry(sync, name, revision, limit))

    async def _try(self, waiting: Sequence[Waiting], offers: Sequence[Offered]) -> None:
        found = await self._session.read(lambda connection: self._writer.sort(connection, offers, Held()))
        failed = {(one.aggregate, one.aggregate_id): one for one in reversed(found.parked)}
        changes = changes_of(found.changed, _sorting(waiting, len(offers), failed))
        at = self._at
        unmoved = Batch(at.position, at.position, at.event_id, ())
        await self._session.write(lambda connection: self._writer.commit(connection, at, unmoved, changes))
        self._writer.committed()
        tell_parked(self._resolved.name, changes.sorting, "is parked again")

    def _offers(self, waiting: Sequence[Waiting]) -> list[Offered]:
        """Read them from the log; blocks. Fewer when they are large."""
        stream = self._context.stream
        offer = Offering(self._context.catalog, self._resolved.events, [one.position for one in waiting])
        found: list[Offered] = []
        size = 0
        with NatsConnection.open(self._context.endpoint.with_name(f"eventjet worker {self._resolved.durable}")) as link:
            for one in waiting:
                record = get_record(link, stream, one.position)
                if record is None:
                    raise HistoryBroken(stream, one.position, "a parked event is to be tried again and is not there")
                size += len(record[4])
                if found and size > _BYTES_MAX:
                    break
                made = offer(record)
                assert made is not None
                found.append(made)
        return found


def _sorting(waiting: Sequence[Waiting], tried: int, failed: Mapping[AggregateKey, Parked]) -> Sorting:
    """Of so many tried: what was parked and is taken stays as history, what waited behind it is forgotten.

    `failed` is the first of each aggregate that was not taken; the rest of that stays behind it. Where an aggregate has
    more than was tried, its next is to be.
    """
    taken = [
        one
        for one in waiting[:tried]
        if one.aggregate_key not in failed or one.position < failed[one.aggregate_key].position
    ]
    decided = [(one.position, RETRIED) for one in taken if one.has_failed]
    last = waiting[tried - 1].aggregate_key
    decided += [
        (one.position, RETRY) for one in waiting[tried : tried + 1] if one.aggregate_key == last and last not in failed
    ]
    return Sorting(
        parked=list(failed.values()),
        freed=[one.position for one in taken if not one.has_failed],
        decided=decided,
    )


def tell_parked(name: str, sorting: Sorting | None, how: str = "is parked") -> None:
    """Log what was just parked: one line a batch, whatever waits behind it."""
    heads = [one for one in sorting.parked if one.decision == PARKED] if sorting is not None else []
    if heads:
        more = f", and {len(heads) - 1} more" if len(heads) > 1 else ""
        reason = next(iter(heads[0].reason.splitlines()), "")
        _log.warning("%s: the event at position %d %s%s: %s", name, heads[0].position, how, more, reason)
