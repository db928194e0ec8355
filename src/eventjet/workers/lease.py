"""`Lease`: who may advance a projection. It avoids wasted work; the fence is the epoch in each batch's transaction."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress

from sqlalchemy import Connection, select

from eventjet.errors import CheckpointFenced, TableOccupied
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql import locations, transitions
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.dialect import dialect_of
from eventjet.sql.locations import located_tables
from eventjet.workers.context import Session, WorkerContext

_log = logging.getLogger(__name__)


def new_owner() -> str:
    """A name for this process, as `status` shows it."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


class Lease:
    """One worker's lease of one projection, for one term; made by `acquire`.

    Each method is one statement, and raises `CheckpointFenced` when another epoch has begun.
    """

    def __init__(self, session: Session, resolved: AnyResolved, ttl_s: float, held: Checkpoint) -> None:
        self.held = held
        """The checkpoint as it was when the lease was taken."""
        self._session = session
        self._resolved = resolved
        self._ttl_s = ttl_s

    @classmethod
    async def acquire(
        cls,
        session: Session,
        resolved: AnyResolved,
        context: WorkerContext,
        stop: asyncio.Event,
        on_standby: Callable[[], None],
        failed_at: int,
    ) -> Lease | None:
        """Wait until the lease is ours; None when `stop` is set first.

        What failed elsewhere, or in another process, is tried once here too: a newer deploy may know better. Where it
        `failed_at` the very position in this process, it is not.
        """
        name, revision, ttl_s = resolved.name, resolved.revision, context.options.lease_s

        def is_free(connection: Connection) -> bool:
            return transitions.is_free(connection, name, revision, context.owner, stumbled_at=failed_at)

        def take(connection: Connection) -> Checkpoint | None:
            locations.ensure(connection, resolved)
            return transitions.take(connection, name, revision, context.owner, ttl_s, stumbled_at=failed_at)

        while not stop.is_set():
            # A standby only reads: it must not wait for locks, nor make others wait.
            if await session.read(is_free):
                held = await session.write(take)
                if held is not None:
                    _log.info("%s: took the lease at position %d, epoch %d", held.name, held.position, held.epoch)
                    return cls(session, resolved, ttl_s, held)
            on_standby()
            await pause(stop, context.options.poll_s)
        return None

    async def check_unused(self) -> None:
        """Raise `TableOccupied` when a projection that has not begun could not begin with an empty table."""

        def check(connection: Connection) -> None:
            for table in located_tables(self._resolved, self.held.location, dialect_of(connection)):
                if connection.execute(select(1).select_from(table).limit(1)).first() is not None:
                    raise TableOccupied(self._resolved, f"{table.name} holds rows that no checkpoint knows of")

        await self._session.read(check)

    async def renew(self) -> None:
        """Extend it."""
        self._check(await self._session.write(lambda connection: transitions.renew(connection, self.held, self._ttl_s)))

    async def settle(self, state: str | None, reason: str | None = None) -> int:
        """Note a state (None keeps it) and a reason, at the position returned."""
        settled = await self._session.write(lambda sync: transitions.settle(sync, self.held, state, reason))
        self._check(settled is not None)
        return settled or 0

    async def adopt_log(self, log: str) -> None:
        """Remember which log it is made from."""
        self._check(await self._session.write(lambda sync: transitions.adopt_log(sync, self.held, log)))

    async def stand_back(self) -> None:
        """Give up wanting the declared location."""
        self._check(await self._session.write(lambda connection: transitions.stand_back(connection, self.held)))

    async def release(self) -> None:
        """Let a standby go on at once. Raises nothing about another epoch: then there is nothing to release."""
        await self._session.write(lambda connection: transitions.release(connection, self.held))

    def _check(self, kept: bool) -> None:
        if not kept:
            raise CheckpointFenced(self.held.name, f"its epoch is no longer {self.held.epoch}")


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait, or return as soon as `stop` is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
