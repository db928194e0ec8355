"""`Lease`: who may advance a projection. It avoids wasted work; the fence is the epoch in each batch's transaction."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable

from sqlalchemy import Connection, select

from eventjet.errors import CheckpointFenced
from eventjet.projections import checkpoint
from eventjet.projections.bound import BoundProjection
from eventjet.projections.checkpoint import BUILDING, FAILED, NEW, RETIRED, Checkpoint
from eventjet.projections.tables import storage_table
from eventjet.workers.session import Session
from eventjet.workers.workplace import Workplace

_log = logging.getLogger(__name__)


def new_owner() -> str:
    """A name for this process, as `status` shows it."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


class Lease:
    """One worker's side of one projection's lease, for one term.

    But for `acquire`, every method is one statement.
    """

    def __init__(self, session: Session, bound: BoundProjection, place: Workplace) -> None:
        self._session = session
        self._bound = bound
        self._place = place

    async def acquire(self, stop: asyncio.Event, on_standby: Callable[[], None]) -> Checkpoint | None:
        """Wait until the lease is ours; None when `stop` is set first. Failed and paused projections are waited for."""
        while not stop.is_set():
            if await self._is_free():
                held = await self._session.write(self._take)
                if held is not None:
                    _log.info("%s: took the lease at position %d, epoch %d", held.name, held.position, held.epoch)
                    return held
            on_standby()
            await pause(stop, self._place.options.poll_s)
        return None

    async def reopen(self) -> None:
        """Let a failed projection be tried again."""
        name, revision = self._bound.name, self._bound.revision
        await self._session.write(lambda connection: checkpoint.reopen(connection, name, revision))

    async def renew(self, held: Checkpoint) -> None:
        """Extend; raises `CheckpointFenced` when another epoch has begun."""
        ttl_s = self._place.options.lease_s
        self._kept(held, await self._session.write(lambda connection: checkpoint.renew(connection, held, ttl_s)))

    async def settle(self, held: Checkpoint, state: str | None, reason: str | None = None) -> None:
        """Note a state (None keeps it) and a reason; raises `CheckpointFenced` when another epoch has begun."""
        self._kept(
            held, await self._session.write(lambda connection: checkpoint.settle(connection, held, state, reason))
        )

    async def adopt_log(self, held: Checkpoint, log: str) -> None:
        """Remember which log it is made from; raises `CheckpointFenced` when another epoch has begun."""
        self._kept(held, await self._session.write(lambda connection: checkpoint.adopt_log(connection, held, log)))

    async def release(self, held: Checkpoint) -> None:
        """Let a standby go on at once."""
        await self._session.write(lambda connection: checkpoint.release(connection, held))

    async def _is_free(self) -> bool:
        """Look without locking anything."""
        name, revision, owner = self._bound.name, self._bound.revision, self._place.owner

        return await self._session.read(lambda connection: checkpoint.is_free(connection, name, revision, owner))

    def _take(self, connection: Connection) -> Checkpoint | None:
        bound, place = self._bound, self._place
        checkpoint.ensure(connection, bound.name, bound.revision)
        held = checkpoint.take(connection, bound.name, bound.revision, place.owner, place.options.lease_s)
        if held is None or held.state != NEW:
            return held
        reason = _occupied(connection, bound)
        if reason is None:
            checkpoint.settle(connection, held, BUILDING)
            return checkpoint.read(connection, bound.name, bound.revision)
        _log.error("%s is stopped: %s", bound.name, reason)
        checkpoint.settle(connection, held, FAILED, reason)
        checkpoint.release(connection, held)
        return None

    @staticmethod
    def _kept(held: Checkpoint, kept: bool) -> None:
        if not kept:
            raise CheckpointFenced(held.name, f"its epoch is no longer {held.epoch}")


def _occupied(connection: Connection, bound: BoundProjection) -> str | None:
    """Why a new projection may not start to fill its table; None when it may."""
    remedy = f"Run `eventjet rebuild {bound.name}`."
    for other, _ in checkpoint.read_all(connection):
        if other.name == bound.name and other.revision != bound.revision and other.state != RETIRED:
            return (
                f"revision {other.revision} keeps the table {bound.table.name!r}, which revision {bound.revision} "
                f"cannot take over row by row. {remedy}"
            )
    table = storage_table(bound.table, connection.dialect.name)
    if connection.execute(select(1).select_from(table).limit(1)).first() is not None:
        return f"the table {bound.table.name!r} holds rows that no checkpoint knows of. {remedy}"
    return None


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait, or return as soon as `stop` is set."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
