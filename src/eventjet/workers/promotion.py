"""`Takeover`: a revision that builds beside another one takes the declared location once it has caught up."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from eventjet import failpoints
from eventjet.errors import CannotMove, CheckpointFenced
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql.checkpoint import Checkpoint, revisions
from eventjet.sql.location_assignment import holders
from eventjet.sql.promotion import TAIL_MAX, TAIL_S, Exchanged, NotNow, attempt, behind, freeze
from eventjet.sql.transitions import stand_back
from eventjet.workers.context import WorkerContext
from eventjet.workers.lease import Lease
from eventjet.workers.session import Session

_log = logging.getLogger(__name__)

_PAUSE_S = (0.2, 2.0)
"""First and longest pause while others hold a table or a checkpoint; each is twice the one before."""
_TAIL_WAIT_S = 0.2
_REFUSED_S = 30.0
"""Pause after something that does not pass by itself."""


class Takeover:
    """One term's attempts. `wanted` is false for whoever is in the declared location, or was there."""

    def __init__(self, resolved: AnyResolved, context: WorkerContext, held: Checkpoint) -> None:
        self.wanted = held.takes_over
        self._resolved = resolved
        self._context = context
        self._held = held
        self._not_before = 0.0
        self._pause_s = _PAUSE_S[0]

    def is_due(self, left: int) -> bool:
        """Whether to try it with so many events left: a log that never rests has always some."""
        return self.wanted and left <= TAIL_MAX and time.monotonic() >= self._not_before

    async def attempt(self, session: Session, lease: Lease, advance: Callable[[float], Awaitable[object]]) -> bool:
        """Whether the term is over because the revision has another place now. For when `is_due`.

        Until it succeeds the revision goes on building; what hinders it lastingly is noted in its checkpoint. `advance`
        writes the next batch, if one comes in so many seconds.
        """
        if await session.read(
            lambda connection: _has_successor(revisions(connection, self._resolved.name), self._resolved)
        ):
            return await self._stand_back(session)
        if await self._behind(session) > TAIL_MAX:
            self._later(self._pause_s)
            return False
        await lease.renew(self._held)
        try:
            done = await self._exchange(session, advance)
        except NotNow as later:
            _log.info("%s revision %d waits to take over: %s", self._resolved.name, self._resolved.revision, later)
            self._later(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])
            return False
        except CannotMove as error:
            _log.warning("%s", error)
            await lease.settle(self._held, None, str(error))
            self._later(_REFUSED_S)
            return False
        failpoints.reach("takeover.committed")
        left = ", ".join(map(str, done.left)) if done else ""
        _log.info(
            "%s revision %d took over from revision %s", self._resolved.name, self._resolved.revision, left or "none"
        )
        return True

    async def _exchange(self, session: Session, advance: Callable[[float], Awaitable[object]]) -> Exchanged | None:
        resolved, epoch = self._resolved, self._held.epoch
        if self._context.database.dialect.name != POSTGRESQL:
            # Its one writer lock lets nobody write meanwhile, and is asked for right after a batch of ours.
            return await session.write(lambda connection: attempt(connection, resolved, epoch=epoch))
        async with Session.open(self._context, f"takeover {resolved.durable}") as own, own.transaction() as steps:
            await steps.run_sync(lambda connection: freeze(connection, resolved))
            deadline = time.monotonic() + TAIL_S
            while await self._behind(session) and time.monotonic() < deadline:
                await advance(_TAIL_WAIT_S)
            return await steps.run_sync(lambda connection: attempt(connection, resolved, epoch=epoch))

    async def _behind(self, session: Session) -> int:
        return await session.read(lambda connection: behind(connection, self._resolved))

    async def _stand_back(self, session: Session) -> bool:
        if not await session.write(lambda connection: stand_back(connection, self._held)):
            raise CheckpointFenced(self._held.name, f"its epoch is no longer {self._held.epoch}")
        self.wanted = False
        return False

    def _later(self, seconds: float) -> None:
        self._not_before = time.monotonic() + seconds


def _has_successor(found: list[Checkpoint], resolved: AnyResolved) -> bool:
    return any(one.revision > resolved.revision for one in holders(found, resolved))
