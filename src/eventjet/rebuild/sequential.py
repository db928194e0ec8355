"""SQL by hand made again: its handlers, one event after the other, over tables beside the live ones.

The first batch follows position 0, so loading and catching up are the same thing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress

from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from eventjet import failpoints
from eventjet.codec.envelope import MSG_ID, Decoder, RawRecord, header
from eventjet.errors import VerificationFailed
from eventjet.projections.sql_projection import ResolvedSql
from eventjet.rebuild.job import Job
from eventjet.rebuild.plan import Plan
from eventjet.rebuild.prefetch import read_ahead
from eventjet.rebuild.progress import Phase
from eventjet.rebuild.shadow import Shadow, begun
from eventjet.writers.batch import Batch, Parts
from eventjet.writers.sql_writer import SqlWriter

BATCH = 1_000
"""Events in one transaction, at most."""


class SequentialReplay:
    """Brings one shadow further along the log; made by `sequential_replay`."""

    def __init__(
        self, shadow: Shadow[ResolvedSql], job: Job, first: int, runner: asyncio.Runner, connection: AsyncConnection
    ) -> None:
        self.position = 0
        self._shadow = shadow
        self._job = job
        self._first = first
        self._runner = runner
        self._connection = connection
        self._held = begun(shadow.resolved)
        self._decode = Decoder(job.app.catalog, shadow.resolved.events)
        self._writer = SqlWriter(shadow.resolved, lease_s=0)

    def load(self, plan: Plan) -> int:
        """Run the handlers up to the pinned position; return how many rows there are. Raises `HandlerFailed`."""
        with self._job.watch.phase("sequential", plan.events):
            if plan.events:
                self._runner.run(self._to(plan.last, "sequential"))
            if plan.events and self.position != plan.last:
                reason = f"the handlers came to position {self.position}, and the plan ends at {plan.last}"
                raise VerificationFailed(self._shadow.resolved.name, reason)
        return self._shadow.count()

    def to(self, position: int) -> None:
        """Run the handlers for what is missing up to a position of the log."""
        self._runner.run(self._to(position, "catch up"))

    async def _to(self, position: int, phase: Phase) -> None:
        watch = self._job.watch
        start, total = self.position, position - self.position
        begin = max(start + 1, self._first)
        batches = read_ahead(self._job.source.records(begin, position + 1, batch=BATCH), watch)
        ahead = asyncio.create_task(asyncio.to_thread(next, batches, None))
        try:
            while (records := await ahead) is not None:
                ahead = asyncio.create_task(asyncio.to_thread(next, batches, None))
                await self._write(records)
                failpoints.reach("rebuild.batch_read")
                watch.tell(phase, self.position - start, total)
        finally:
            await asyncio.wait([ahead])
            ahead.exception()
            await asyncio.to_thread(batches.close)

    async def _write(self, records: list[RawRecord]) -> None:
        events = [event for record in records if (event := self._decode(record)) is not None]
        last = records[-1]
        name = self._shadow.resolved.name
        parts = Parts(name, Batch(self.position, last[0], header(last[3], MSG_ID) or "", events))
        for part in parts:
            try:
                await self._commit(part)
            except DBAPIError as error:
                parts.refused(part, error)

    async def _commit(self, part: Batch) -> None:
        connection = self._connection
        await connection.begin()
        try:
            await self._writer.write(connection, self._held, part)
            await connection.run_sync(self._shadow.check_confined)
            await connection.commit()
        except BaseException:
            await self._undo()
            raise
        self.position = part.last

    async def _undo(self) -> None:
        with suppress(SQLAlchemyError):
            await self._connection.rollback()


@contextmanager
def sequential_replay(shadow: Shadow[ResolvedSql], job: Job, first: int) -> Generator[SequentialReplay]:
    """Handlers and a connection to the empty shadow; `first` is the first position there is to read."""
    with asyncio.Runner() as runner:
        engine = shadow.space.handlers_engine()
        connection = engine.connect()
        runner.run(_started(connection))
        try:
            yield SequentialReplay(shadow, job, first, runner, connection)
        finally:
            runner.run(_ended(connection, engine))


async def _started(connection: AsyncConnection) -> None:
    await connection.start()


async def _ended(connection: AsyncConnection, engine: AsyncEngine) -> None:
    with suppress(SQLAlchemyError, OSError):
        await connection.close()
    await engine.dispose()
