"""`Lease`: who may advance a projection. It avoids wasted work; the fence is the epoch in each batch's transaction."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable

from sqlalchemy import Connection, select

from eventjet.errors import CheckpointFenced, ProjectionError
from eventjet.projections import checkpoint, places_given
from eventjet.projections.bound import BoundProjection
from eventjet.projections.checkpoint import Checkpoint
from eventjet.projections.places import placed, tables_of
from eventjet.workers.session import Session
from eventjet.workers.workplace import Workplace

_log = logging.getLogger(__name__)


def new_owner() -> str:
    """A name for this process, as `status` shows it."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


class TableOccupied(ProjectionError):
    """A projection that has not begun finds its table in use."""

    def __init__(self, bound: BoundProjection, reason: str) -> None:
        self.projection = bound.name
        self.reason = reason
        super().__init__(
            f"Revision {bound.revision} of projection {bound.name!r} cannot begin in the table {bound.table.name!r}: "
            f"{reason}. Run `eventjet rebuild {bound.name}`."
        )


class Lease:
    """One worker's side of one projection's lease, for one term.

    Whatever changes the checkpoint, but for `acquire`, is one statement.
    """

    def __init__(self, session: Session, bound: BoundProjection, place: Workplace) -> None:
        self._session = session
        self._bound = bound
        self._place = place

    async def acquire(self, stop: asyncio.Event, on_standby: Callable[[], None], stumbled_at: int) -> Checkpoint | None:
        """Wait until the lease is ours; None when `stop` is set first.

        What failed elsewhere, or in another process, is tried once here too: a newer deploy may know better.
        """
        name, revision, place = self._bound.name, self._bound.revision, self._place

        def look(connection: Connection) -> bool:
            return checkpoint.is_free(connection, name, revision, place.owner, stumbled_at=stumbled_at)

        def take(connection: Connection) -> Checkpoint | None:
            places_given.ensure(connection, self._bound)
            ttl_s = place.options.lease_s
            return checkpoint.take(connection, name, revision, place.owner, ttl_s, stumbled_at=stumbled_at)

        while not stop.is_set():
            if await self._session.read(look):
                held = await self._session.write(take)
                if held is not None:
                    _log.info("%s: took the lease at position %d, epoch %d", held.name, held.position, held.epoch)
                    return held
            on_standby()
            await pause(stop, place.options.poll_s)
        return None

    async def check_unused(self, held: Checkpoint) -> None:
        """Raise `TableOccupied` when a projection that has not begun could not begin with an empty table."""
        await self._session.read(lambda connection: _check_unused(connection, self._bound, held.place))

    async def renew(self, held: Checkpoint) -> None:
        """Extend; raises `CheckpointFenced` when another epoch has begun."""
        ttl_s = self._place.options.lease_s
        self._kept(held, await self._session.write(lambda connection: checkpoint.renew(connection, held, ttl_s)))

    async def settle(self, held: Checkpoint, state: str | None, reason: str | None = None) -> int:
        """Note a state (None keeps it) and a reason, at the position returned.

        Raises `CheckpointFenced` when another epoch has begun.
        """
        position = await self._session.write(lambda connection: checkpoint.settle(connection, held, state, reason))
        self._kept(held, position is not None)
        return position or 0

    async def adopt_log(self, held: Checkpoint, log: str) -> None:
        """Remember which log it is made from; raises `CheckpointFenced` when another epoch has begun."""
        self._kept(held, await self._session.write(lambda connection: checkpoint.adopt_log(connection, held, log)))

    async def release(self, held: Checkpoint) -> None:
        """Let a standby go on at once."""
        await self._session.write(lambda connection: checkpoint.release(connection, held))

    @staticmethod
    def _kept(held: Checkpoint, kept: bool) -> None:
        if not kept:
            raise CheckpointFenced(held.name, f"its epoch is no longer {held.epoch}")


def _check_unused(connection: Connection, bound: BoundProjection, place: str) -> None:
    for table in tables_of(bound):
        found = placed(table, place, connection.dialect.name)
        if connection.execute(select(1).select_from(found).limit(1)).first() is not None:
            raise TableOccupied(bound, "it holds rows that no checkpoint knows of")


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait, or return as soon as `stop` is set."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
