"""`Lease`: who may advance a projection. It avoids wasted work; the fence is the epoch in each batch's transaction."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable

from sqlalchemy import Connection, select

from eventjet.errors import CheckpointFenced, TableOccupied
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql import location_assignment, transitions
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.locations import located_tables
from eventjet.workers.context import WorkerContext
from eventjet.workers.session import Session

_log = logging.getLogger(__name__)


def new_owner() -> str:
    """A name for this process, as `status` shows it."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


class Lease:
    """One worker's side of one projection's lease, for one term.

    Whatever changes the checkpoint, but for `acquire`, is one statement.
    """

    def __init__(self, session: Session, resolved: AnyResolved, context: WorkerContext) -> None:
        self._session = session
        self._resolved = resolved
        self._context = context

    async def acquire(self, stop: asyncio.Event, on_standby: Callable[[], None], stumbled_at: int) -> Checkpoint | None:
        """Wait until the lease is ours; None when `stop` is set first.

        What failed elsewhere, or in another process, is tried once here too: a newer deploy may know better.
        """
        name, revision, context = self._resolved.name, self._resolved.revision, self._context

        def look(connection: Connection) -> bool:
            return transitions.is_free(connection, name, revision, context.owner, stumbled_at=stumbled_at)

        def take(connection: Connection) -> Checkpoint | None:
            location_assignment.ensure(connection, self._resolved)
            ttl_s = context.options.lease_s
            return transitions.take(connection, name, revision, context.owner, ttl_s, stumbled_at=stumbled_at)

        while not stop.is_set():
            if await self._session.read(look):
                held = await self._session.write(take)
                if held is not None:
                    _log.info("%s: took the lease at position %d, epoch %d", held.name, held.position, held.epoch)
                    return held
            on_standby()
            await pause(stop, context.options.poll_s)
        return None

    async def check_unused(self, held: Checkpoint) -> None:
        """Raise `TableOccupied` when a projection that has not begun could not begin with an empty table."""
        await self._session.read(lambda connection: _check_unused(connection, self._resolved, held.location))

    async def renew(self, held: Checkpoint) -> None:
        """Extend; raises `CheckpointFenced` when another epoch has begun."""
        ttl_s = self._context.options.lease_s
        self._kept(held, await self._session.write(lambda connection: transitions.renew(connection, held, ttl_s)))

    async def settle(self, held: Checkpoint, state: str | None, reason: str | None = None) -> int:
        """Note a state (None keeps it) and a reason, at the position returned.

        Raises `CheckpointFenced` when another epoch has begun.
        """
        position = await self._session.write(lambda connection: transitions.settle(connection, held, state, reason))
        self._kept(held, position is not None)
        return position or 0

    async def adopt_log(self, held: Checkpoint, log: str) -> None:
        """Remember which log it is made from; raises `CheckpointFenced` when another epoch has begun."""
        self._kept(held, await self._session.write(lambda connection: transitions.adopt_log(connection, held, log)))

    async def release(self, held: Checkpoint) -> None:
        """Let a standby go on at once."""
        await self._session.write(lambda connection: transitions.release(connection, held))

    @staticmethod
    def _kept(held: Checkpoint, kept: bool) -> None:
        if not kept:
            raise CheckpointFenced(held.name, f"its epoch is no longer {held.epoch}")


def _check_unused(connection: Connection, resolved: AnyResolved, location: str) -> None:
    for table in located_tables(resolved, location, connection.dialect.name):
        if connection.execute(select(1).select_from(table).limit(1)).first() is not None:
            raise TableOccupied(resolved, f"{table.name} holds rows that no checkpoint knows of")


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait, or return as soon as `stop` is set."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
