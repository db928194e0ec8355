"""What a worker does about the quarantine at the start of its term: it carries out retries, then loads what is held.

While it holds the lease nobody else changes either: whoever decides about a parked event raises the epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from eventjet.errors import HistoryBroken, ProjectionError
from eventjet.projections import quarantine_rows
from eventjet.projections.bound import BoundProjection
from eventjet.projections.checkpoint import Checkpoint
from eventjet.projections.database import is_about_data
from eventjet.projections.quarantine import (
    BEHIND,
    PARKED,
    RETRIED,
    RETRY,
    Held,
    Offered,
    Offering,
    Parked,
    Sorting,
)
from eventjet.projections.quarantine_rows import Waiting
from eventjet.projections.statements import Changes
from eventjet.projections.writer import Batch, Writer, changes_of
from eventjet.wire import Link, get_record
from eventjet.workers.session import Session
from eventjet.workers.workplace import Workplace

_log = logging.getLogger(__name__)

_BYTES_MAX = 16 * 1024 * 1024
"""Bodies of one chunk; a single larger event still passes."""


class StillHeld(ProjectionError):
    """A projection that stops at bad events has aggregates that an earlier one, which quarantined, held back."""

    def __init__(self, bound: BoundProjection, count: int) -> None:
        self.projection = bound.name
        super().__init__(
            f"Projection {bound.name!r} stops at events it cannot take, and {count} aggregate(s) are held back in its "
            f'quarantine. Declare it on_error="quarantine" again, or run `eventjet rebuild {bound.name}`.'
        )


async def begin_term(
    session: Session, writer: Writer, place: Workplace, bound: BoundProjection, at: Checkpoint
) -> None:
    """Carry out what people decided, and tell the writer what is held back.

    Raises `CheckpointFenced`, `StillHeld`, `HistoryBroken`, and `UnknownEvent` for a schema of a newer deploy.
    """
    if bound.quarantines:
        await _Retries(session, writer, place, bound, at).run()
    places = await session.read(lambda connection: quarantine_rows.places(connection, bound.name, bound.revision))
    if places and not bound.quarantines:
        raise StillHeld(bound, len(places))
    writer.held = Held(places)


class _Retries:
    """Events that somebody asked to try again: aggregate by aggregate, a chunk a transaction."""

    def __init__(
        self, session: Session, writer: Writer, place: Workplace, bound: BoundProjection, at: Checkpoint
    ) -> None:
        self._session = session
        self._writer = writer
        self._place = place
        self._bound = bound
        self._at = at
        self._size_max = place.options.batch_max
        self._size = self._size_max

    async def run(self) -> None:
        """Each chunk takes an event out of the quarantine, parks one anew, or is halved."""
        while waiting := await self._session.read(self._waiting):
            if waiting[0].decision == PARKED:
                # What it waits for is not to be tried, so neither is this.
                again = [(one.position, BEHIND) for one in waiting if one.decision == RETRY]
                await self._commit(Changes(sorting=Sorting(decided=again)))
                continue
            offers = await asyncio.to_thread(self._offers, waiting[: self._size])
            try:
                await self._try(waiting, offers)
            except DBAPIError as error:
                self._writer.recent.forget()
                if not is_about_data(error) or (len(offers) == 1 and offers[0].error is not None):
                    raise
                if len(offers) == 1:
                    await self._try(waiting, [offers[0].failed(error)])
                self._size = max(1, len(offers) // 2)
            else:
                self._size = min(2 * self._size, self._size_max)

    def _waiting(self, connection: Connection) -> list[Waiting]:
        return quarantine_rows.to_retry(connection, self._bound.name, self._bound.revision, self._size + 1)

    async def _try(self, waiting: Sequence[Waiting], offers: Sequence[Offered]) -> None:
        found = await self._session.read(lambda connection: self._writer.sort(connection, offers, Held()))
        failed = found.parked[0] if found.parked else None
        sorting = _sorting(waiting[: len(offers)], failed, waiting[len(offers) :])
        await self._commit(changes_of(found.changed, sorting))
        if failed is not None:
            _log.warning("%s: the event at position %d is parked again", self._bound.name, failed.position)

    async def _commit(self, changes: Changes) -> None:
        at = self._at
        batch = Batch(at.position, at.position, at.event_id, ())
        await self._session.write(lambda connection: self._writer.commit(connection, at, batch, changes))
        self._writer.committed()

    def _offers(self, waiting: Sequence[Waiting]) -> list[Offered]:
        """Read them from the log; blocks. Fewer when they are large."""
        stream = self._place.stream
        offer = Offering(self._place.catalog, self._bound.events, [one.position for one in waiting])
        found: list[Offered] = []
        size = 0
        with Link.open(self._place.endpoint.with_name(f"eventjet worker {self._bound.durable}")) as link:
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


def _sorting(tried: Sequence[Waiting], failed: Parked | None, rest: Sequence[Waiting]) -> Sorting:
    """What was parked and is taken stays as history; what waited behind it is forgotten, and the next is tried."""
    end = failed.position if failed is not None else tried[-1].position + 1
    taken = [one for one in tried if one.position < end]
    decided = [(one.position, RETRIED) for one in taken if one.has_failed]
    if failed is None and rest and rest[0].decision == BEHIND:
        decided.append((rest[0].position, RETRY))
    return Sorting(
        parked=() if failed is None else (failed,),
        freed=[one.position for one in taken if not one.has_failed],
        decided=decided,
    )
