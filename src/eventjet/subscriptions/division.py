"""`Division`: whether and when a projection's events are folded by several processes.

Far behind they are; at the tip one process folds alone, so that what is new is not handed around first. Between the two
lies a distance, so that a worker does not go to and fro. Where several projections of a worker are far behind, they
take turns.
"""

from __future__ import annotations

import asyncio
import logging

from eventjet.errors import FoldProcessLost
from eventjet.observability import logs
from eventjet.parallel.process import FoldFailed
from eventjet.parallel.processes import FoldProcesses
from eventjet.projections.fold import BlockedAggregates
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.sql.checkpoint import Checkpoint
from eventjet.subscriptions.among import Among
from eventjet.subscriptions.context import WorkerContext
from eventjet.subscriptions.divided import DividedReader, NotDivided
from eventjet.subscriptions.reader import CHUNK_MAX, Source
from eventjet.subscriptions.retry import Pace
from eventjet.writers.fold_task import BatchFoldTask

_log = logging.getLogger(__name__)

_FOR_GOOD = 2**63
_DOUBLED_MAX = 20
FAR = 4
"""How many whole batches a worker is behind, at the least, when it divides the work."""
NEAR = CHUNK_MAX
"""At how many events, at the most, it goes on alone."""


class Division:
    """Of one projection, over all its terms: `open` when it `is_called_for`, `turns`, and `close` at a term's end."""

    def __init__(self, resolved: ResolvedProjection, context: WorkerContext, among: Among) -> None:
        self._resolved = resolved
        self._context = context
        self._among = among
        self._processes: FoldProcesses | None = None
        self._alone_until = 0
        self._lost_at = -1
        self._began_at = 0
        self._in_vain = 0
        """How often in a row they came to nothing."""

    @classmethod
    def of(cls, resolved: AnyResolved, context: WorkerContext) -> Division | None:
        """None where all is folded in this process; that is said where more were given."""
        among = context.among
        if among is None:
            return None
        if isinstance(resolved, ResolvedSql) or not resolved.is_divisible:
            kind = "it is SQL by hand" if isinstance(resolved, ResolvedSql) else "its key is not the aggregate's id"
            logs.NOT_DIVIDED.tell(_log, name=resolved.name, reason=kind)
            return None
        return cls(resolved, context, among)

    async def turns(self, is_divided: bool, left: int, position: int) -> bool:
        """Whether it is time to go on the other way, with so many events left after a position.

        Then the fold processes are there, or have to be ended.
        """
        options = self._context.options
        if is_divided:
            if position > self._began_at:
                self._in_vain = 0
                self._among.committed()
            return left <= min(NEAR, options.batch_max) or self._among.is_turn_over()
        if left < FAR * options.batch_max or position < self._alone_until:
            self._among.leave(self._resolved.durable)
            return False
        return await self._made(position)

    async def _made(self, position: int) -> bool:
        """Make the fold processes, when they are this projection's."""
        try:
            if not self._among.take(self._resolved.durable):
                return False
        except (FoldFailed, FoldProcessLost) as error:
            self._alone(None, str(error))
            return False
        try:
            self._processes = await asyncio.to_thread(self._among.processes)
        except (FoldFailed, FoldProcessLost, OSError) as error:
            self._among.leave(self._resolved.durable)
            self._alone(position, str(error))
            return False
        return True

    @property
    def is_called_for(self) -> bool:
        """Whether what comes next is to be divided."""
        return self._processes is not None

    def goes_on(self, position: int, error: Exception) -> bool:
        """Whether the term goes on, alone, after what ended the divided work there; False where it is over.

        A fold process that is lost ends the term. Where that comes again at the same position, the next one does
        without them for a while, and for twice as long each time that nothing comes of them.
        """
        if position > self._began_at:
            self._in_vain = 0
        if isinstance(error, NotDivided) or position == self._lost_at:
            self._alone(position, str(error))
        self._lost_at = position
        return isinstance(error, NotDivided)

    async def open(self, held: Checkpoint, blocked: BlockedAggregates, pace: Pace) -> DividedReader:
        """For when it is called for."""
        assert self._processes is not None
        context, resolved = self._context, self._resolved
        task = BatchFoldTask(
            self._among.app,
            context.endpoint.with_name(f"eventjet fold {resolved.durable}"),
            context.database,
            resolved.name,
            resolved.revision,
            held.location,
            held.position,
            dict(context.catalog.voids),
            frozenset(blocked.aggregates),
        )
        self._began_at = held.position
        source = Source(context.endpoint, context.stream, resolved.durable)
        logs.DIVIDED.tell(_log, name=resolved.name, position=held.position, processes=self._among.count)
        return await DividedReader.open(source, held.position, self._processes, task, pace)

    async def close(self) -> None:
        """End the fold processes, if there are any, and let another projection have some."""
        processes, self._processes = self._processes, None
        if processes is not None:
            await asyncio.to_thread(processes.close)
        self._among.leave(self._resolved.durable)

    def _alone(self, position: int | None, reason: str) -> None:
        """For good, or until it is far beyond a position."""
        far = FAR * self._context.options.batch_max << min(self._in_vain, _DOUBLED_MAX)
        self._in_vain += 1
        self._alone_until = _FOR_GOOD if position is None else position + far
        self._among.leave(self._resolved.durable)
        logs.FOLDED_ALONE.tell(_log, name=self._resolved.name, reason=reason)
