"""`Lease`: which worker may advance a projection; `Promotion`: move its tables to the table slot that readers see.

A lease avoids wasted work; the fence is the epoch in each batch's transaction. A revision that builds beside another
revision is promoted to the declared table slot once it has caught up.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Concatenate

from sqlalchemy import Connection, select

from eventjet import failpoints
from eventjet.errors import CheckpointFenced, ProjectionStopped, PromotionRefused
from eventjet.observability import logs
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql import checkpoint as checkpoints
from eventjet.sql import locations
from eventjet.sql.checkpoint import Checkpoint, revisions
from eventjet.sql.database import dialect_of
from eventjet.sql.locations import holders, located_tables
from eventjet.sql.revisions import TAIL_MAX, TAIL_S, Promoted, attempt, freeze, lag
from eventjet.sql.table_moves import NotNow
from eventjet.subscriptions.context import P, Session, T, WorkerContext
from eventjet.subscriptions.retry import OwnerWatch

_log = logging.getLogger(__name__)

_PAUSE_S = (0.2, 2.0)
"""First and longest pause while others lock a table or a checkpoint, in seconds; each is twice the last."""
_TAIL_WAIT_S = 0.2
_REFUSED_S = 30.0
"""Pause after a refused promotion, whose cause does not end by itself, in seconds."""


def new_owner() -> str:
    """Return a unique name for this process, as `status` shows it: host, process id and a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


def silent_checkpoint(watch: OwnerWatch, checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Return the checkpoint that was just read if its owner is silent, else None.

    This process's clock decides: the database's clock may have been set back, and would let the lease live for hours.
    """
    if checkpoint is None or checkpoint.owner is None:
        watch.is_silent(None, 0.0)
        return None
    lease = (checkpoint.epoch, checkpoint.lease_until)
    return checkpoint if watch.is_silent(lease, checkpoint.lease_s) else None


class Lease:
    """One worker's lease of one projection, for one session; changes raise `CheckpointFenced` in another epoch."""

    def __init__(self, session: Session, resolved: AnyResolved, ttl_s: float, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        """The checkpoint as it was read when the lease was taken."""
        self._session = session
        self._resolved = resolved
        self._ttl_s = ttl_s

    @classmethod
    async def acquire(
        cls, session: Session, resolved: AnyResolved, context: WorkerContext, watch: OwnerWatch, failed_at: int
    ) -> Lease | None:
        """Take the lease if it is free; None while another worker has it.

        A projection that failed in another process is tried once in this process too: this deploy may be newer. It is
        not tried at a position where it already failed in this process (`failed_at`).
        """
        name, revision, ttl_s = resolved.name, resolved.revision, context.options.lease_s

        def silent_if_free(connection: Connection) -> tuple[bool, Checkpoint | None]:
            locations.check_owner(connection, name, resolved.app, context.log)
            silent = silent_checkpoint(watch, checkpoints.read(connection, name, revision))
            free = checkpoints.is_free(connection, name, revision, context.owner, failed_at=failed_at, silent=silent)
            return free, silent

        # A standby only reads: it must neither wait for locks nor make others wait.
        is_free, silent = await session.read(silent_if_free)
        if not is_free:
            return None

        def take(connection: Connection) -> Checkpoint | None:
            locations.ensure(connection, resolved, context.log)
            return checkpoints.take(
                connection,
                name,
                revision,
                context.owner,
                ttl_s,
                code=resolved.code,
                failed_at=failed_at,
                silent=silent,
            )

        checkpoint = await session.write(take)
        if checkpoint is None:
            return None
        logs.TOOK_LEASE.log(_log, name=checkpoint.name, position=checkpoint.position, epoch=checkpoint.epoch)
        return cls(session, resolved, ttl_s, checkpoint)

    async def check_unused(self) -> None:
        """Raise `ProjectionStopped` when a projection that has not begun has rows in its tables."""
        name = self._resolved.name

        def check(connection: Connection) -> None:
            for table in located_tables(self._resolved, self.checkpoint.location, dialect_of(connection)):
                if connection.execute(select(1).select_from(table).limit(1)).first() is not None:
                    raise ProjectionStopped(
                        name, f"{table.name} holds rows that no checkpoint knows of", f"Run `eventjet rebuild {name}`."
                    )

        await self._session.read(check)

    async def check_tables(self) -> None:
        """Raise `TableLost` if the tables are not those of the checkpoint, and `CheckpointFenced` in another epoch."""

        def check(connection: Connection) -> None:
            current = checkpoints.read(connection, self.checkpoint.name, self.checkpoint.revision)
            if current is None or current.epoch != self.checkpoint.epoch:
                raise self._fenced()
            locations.check_identity(connection, current)

        await self._session.read(check)

    async def renew(self) -> None:
        """Extend the lease to its full length from now on."""
        await self._change(checkpoints.renew, self._ttl_s)

    async def note_state(self, state: str | None, reason: str | None = None) -> int:
        """Note a state (None keeps it) and a reason; return the position of the checkpoint."""
        return await self._change(checkpoints.note_state, state, reason)

    async def adopt(self, log: str) -> None:
        """Note in the checkpoint the app, the identity of its log, and which tables are made from the log."""

        def change(connection: Connection, checkpoint: Checkpoint) -> bool:
            identities = locations.identities(connection, checkpoint.tables, checkpoint.location)
            return checkpoints.adopt(connection, checkpoint, self._resolved.app, log, identities)

        await self._change(change)

    async def are_tables_noted(self) -> bool:
        """Return whether the checkpoint names the tables it describes; after a restore from a dump it does not."""
        return await self._session.read(locations.are_noted, self.checkpoint)

    async def stand_back(self) -> None:
        """Note that this revision no longer wants the declared table slot."""
        await self._change(checkpoints.stand_back)

    async def release(self) -> None:
        """Release the lease for a standby; nothing is raised in another epoch, where there is nothing to release."""
        await self._session.write(checkpoints.release, self.checkpoint)

    async def _change(
        self, change: Callable[Concatenate[Connection, Checkpoint, P], T | None], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        outcome = await self._session.write(change, self.checkpoint, *args, **kwargs)
        if outcome is None or outcome is False:
            raise self._fenced()
        return outcome

    def _fenced(self) -> CheckpointFenced:
        return CheckpointFenced(self.checkpoint.name, f"its epoch is no longer {self.checkpoint.epoch}")


class Promotion:
    """One session's attempts to promote a revision to the declared table slot.

    `is_pending` is false for a revision that has the declared slot, or had it before.
    """

    def __init__(self, resolved: AnyResolved, context: WorkerContext, lease: Lease, session: Session) -> None:
        self.is_pending = lease.checkpoint.takes_over
        self._resolved = resolved
        self._context = context
        self._lease = lease
        self._session = session
        self._display_name = f"{resolved.name} revision {resolved.revision}"
        self._not_before = 0.0
        self._pause_s = _PAUSE_S[0]

    def is_due(self, remaining: int) -> bool:
        """Return whether to try with so many events left: a busy log always has some left."""
        return self.is_pending and remaining <= TAIL_MAX and time.monotonic() >= self._not_before

    async def attempt(self, step: Callable[[float], Awaitable[object]]) -> bool:
        """Try to promote the revision when `is_due`; True ends the session, since its tables have moved.

        Until an attempt succeeds the revision goes on building; a refused promotion is noted in its checkpoint. `step`
        writes the next batch, if one comes within so many seconds.
        """
        if await self._session.read(self._has_successor):
            await self._lease.stand_back()
            self.is_pending = False
            return False
        if await self._session.read(lag, self._resolved) > TAIL_MAX:
            self._postpone(self._pause_s)
            return False
        await self._lease.renew()
        try:
            promoted = await self._promote(step)
        except NotNow as reason:
            logs.TAKE_OVER_WAITS.log(_log, name=self._display_name, reason=reason)
            self._postpone(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])
            return False
        except PromotionRefused as error:
            logs.TAKE_OVER_REFUSED.log(_log, name=self._display_name, reason=error)
            await self._lease.note_state(None, str(error))
            self._postpone(_REFUSED_S)
            return False
        failpoints.reach("takeover.committed")
        previous = ", ".join(map(str, promoted.previous_revisions)) if promoted else ""
        logs.TOOK_OVER.log(_log, name=self._display_name, before=previous or "none")
        return True

    async def _promote(self, step: Callable[[float], Awaitable[object]]) -> Promoted | None:
        resolved, epoch = self._resolved, self._lease.checkpoint.epoch
        if not self._context.database.dialect.is_concurrent:
            # The database's single writer lock excludes other writers, and our own batch was just committed.
            return await self._session.write(attempt, resolved, epoch=epoch)
        # The freeze needs its own transaction, beside the session that writes the remaining events.
        async with (
            Session.open(self._context, f"takeover {resolved.durable}") as session,
            session.transaction() as connection,
        ):
            await connection.run_sync(freeze, resolved)
            deadline = time.monotonic() + TAIL_S
            while await self._session.read(lag, resolved) and time.monotonic() < deadline:
                await step(_TAIL_WAIT_S)
            return await connection.run_sync(attempt, resolved, epoch=epoch)

    def _postpone(self, seconds: float) -> None:
        self._not_before = time.monotonic() + seconds

    def _has_successor(self, connection: Connection) -> bool:
        other_holders = holders(revisions(connection, self._resolved.name), self._resolved)
        return any(holder.revision > self._resolved.revision for holder in other_holders)
