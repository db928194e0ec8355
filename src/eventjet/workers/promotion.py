"""`Promotion`: a revision that builds beside another one takes the declared location once it has caught up."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from sqlalchemy import Connection

from eventjet import failpoints
from eventjet.errors import PromotionRefused
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql.checkpoint import revisions
from eventjet.sql.exchange import NotNow
from eventjet.sql.locations import holders
from eventjet.sql.promotion import TAIL_MAX, TAIL_S, Promoted, attempt, freeze, lag
from eventjet.workers.context import Session, WorkerContext
from eventjet.workers.lease import Lease

_log = logging.getLogger(__name__)

_PAUSE_S = (0.2, 2.0)
"""First and longest pause while others hold a table or a checkpoint; each is twice the one before."""
_TAIL_WAIT_S = 0.2
_REFUSED_S = 30.0
"""Pause after something that does not pass by itself."""


class Promotion:
    """One term's attempts. `wanted` is false for a revision that is in the declared location, or was there."""

    def __init__(self, resolved: AnyResolved, context: WorkerContext, lease: Lease, session: Session) -> None:
        self.wanted = lease.held.takes_over
        self._resolved = resolved
        self._context = context
        self._lease = lease
        self._session = session
        self._shown = f"{resolved.name} revision {resolved.revision}"
        self._not_before = 0.0
        self._pause_s = _PAUSE_S[0]

    def is_due(self, left: int) -> bool:
        """Whether to try with so many events left: a log that never rests always has some."""
        return self.wanted and left <= TAIL_MAX and time.monotonic() >= self._not_before

    async def attempt(self, step: Callable[[float], Awaitable[object]]) -> bool:
        """Whether the term is over because the revision has the declared location now. For when `is_due`.

        Until it succeeds the revision goes on building; what hinders it lastingly is noted in its checkpoint. `step`
        writes the next batch, if one comes in so many seconds.
        """
        if await self._session.read(self._has_successor):
            await self._lease.stand_back()
            self.wanted = False
            return False
        if await self._lacks() > TAIL_MAX:
            self._later(self._pause_s)
            return False
        await self._lease.renew()
        try:
            done = await self._exchange(step)
        except NotNow as later:
            _log.info("%s waits to take over: %s", self._shown, later)
            self._later(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])
            return False
        except PromotionRefused as error:
            _log.warning("%s", error)
            await self._lease.settle(None, str(error))
            self._later(_REFUSED_S)
            return False
        failpoints.reach("takeover.committed")
        left = ", ".join(map(str, done.left)) if done else ""
        _log.info("%s took over from revision %s", self._shown, left or "none")
        return True

    async def _exchange(self, step: Callable[[float], Awaitable[object]]) -> Promoted | None:
        resolved, epoch = self._resolved, self._lease.held.epoch
        if not self._context.database.dialect.is_concurrent:
            # Its one writer lock lets nobody write meanwhile, and is asked for right after a batch of ours.
            return await self._session.write(lambda connection: attempt(connection, resolved, epoch=epoch))
        # The freeze needs a transaction of its own, beside the session that goes on writing what is left.
        async with Session.open(self._context, f"takeover {resolved.durable}") as own, own.transaction() as frozen:
            await frozen.run_sync(lambda connection: freeze(connection, resolved))
            deadline = time.monotonic() + TAIL_S
            while await self._lacks() and time.monotonic() < deadline:
                await step(_TAIL_WAIT_S)
            return await frozen.run_sync(lambda connection: attempt(connection, resolved, epoch=epoch))

    async def _lacks(self) -> int:
        return await self._session.read(lambda connection: lag(connection, self._resolved))

    def _later(self, seconds: float) -> None:
        self._not_before = time.monotonic() + seconds

    def _has_successor(self, connection: Connection) -> bool:
        known = holders(revisions(connection, self._resolved.name), self._resolved)
        return any(holder.revision > self._resolved.revision for holder in known)
