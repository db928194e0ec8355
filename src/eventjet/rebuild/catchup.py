"""A shadow brought along the log with the live writer's own code, and swapped in. Until the swap nothing live changes.

A fold is loaded up to the pinned position and goes on from there. The handlers of SQL by hand take one event after the
other from the first one on, so loading and catching up are the same thing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from eventjet import failpoints
from eventjet.codec.headers import MSG_ID, RawRecord, header
from eventjet.domain.parked import Parked
from eventjet.errors import LogRolledBack, RebuildError, VerificationFailed
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.connection import NatsConnection, ask_once
from eventjet.log.stream_check import check_same_log
from eventjet.projections.fold import BlockedAggregates, Reader, reader
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.rebuild.job import Job
from eventjet.rebuild.plan import Plan
from eventjet.rebuild.progress import Phase
from eventjet.rebuild.replay_source import read_ahead
from eventjet.rebuild.runs import Part
from eventjet.rebuild.shadow import Shadow
from eventjet.sql import quarantine
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.dialect import dialect_of
from eventjet.sql.table_moves import NotNow
from eventjet.writers.batch import Batch, Parts
from eventjet.writers.fold_writer import FoldWriter
from eventjet.writers.sql_writer import SqlWriter

BATCH, BATCH_BY_HAND = 2_000, 1_000
"""Events in one transaction, at most: of a fold, and of handlers, whose statements take longer."""
PATIENCE_S = 60.0
"""How long a swap is tried while others hold the table."""

_BACKOFF_S = (0.05, 2.0)


class Follower:
    """Brings one shadow further along the log, batch by batch."""

    def __init__(
        self,
        shadow: Shadow[AnyResolved],
        job: Job,
        position: int,
        decode: Reader,
        commit: Callable[[Batch], None],
    ) -> None:
        self.position = position
        self._shadow = shadow
        self._job = job
        self._decode = decode
        self._commit = commit

    def replay(self, plan: Plan) -> int:
        """Write what a plan reads, up to the pinned position; return how many rows there are then."""
        name = self._shadow.resolved.name
        with self._job.watch.phase("sequential", plan.events):
            if plan.events:
                self.to(plan.last, "sequential")
                if self.position != plan.last:
                    reason = f"the handlers came to position {self.position}, and the plan ends at {plan.last}"
                    raise VerificationFailed(name, reason)
        return self._shadow.count()

    def to(self, position: int, phase: Phase = "catch up") -> None:
        """Write what is missing up to a position of the log; raises `HandlerFailed`."""
        source, watch = self._job.source, self._job.watch
        start, total = self.position, position - self.position
        first = max(start + 1, source.first)
        if first > position:
            return
        batch = BATCH_BY_HAND if isinstance(self._shadow.resolved, ResolvedSql) else BATCH
        with closing(read_ahead(source.records(first, position + 1, batch=batch), watch)) as ahead:
            for records in ahead:
                self._write(records)
                failpoints.reach("rebuild.batch_read")
                watch.tell(phase, self.position - start, total)

    def _write(self, records: list[RawRecord]) -> None:
        self._decode.expect(records)
        events = [event for record in records if (event := self._decode(record)) is not None]
        last = records[-1]
        batch = Batch(self.position, last[0], header(last[3], MSG_ID) or "", events)
        parts = Parts(self._shadow.resolved.name, batch, private=self._shadow.resolved.is_private)
        for part in parts:
            try:
                self._commit(part)
                self.position = part.last
            except DBAPIError as error:
                parts.refused(part, error)


@contextmanager
def catching_up(
    shadow: Shadow[ResolvedProjection], job: Job, position: int, parked: Sequence[Parked] = ()
) -> Generator[Follower]:
    """Give the loaded shadow of a fold its checkpoint, its quarantine and a writer.

    `position` is the pinned one; `parked` is what could not be taken up to there.
    """
    log, resolved, known = job.log, shadow.resolved, shadow.target.known
    event_id = log.event_id(position) if position else ""
    if event_id is None:
        raise VerificationFailed(
            log.stream, f"the log has no event at position {position}, where the rebuild was pinned"
        )
    with shadow.space.engine().connect() as connection, job.earlier() as earlier:
        with connection.begin():
            shadow.begin(connection, position, event_id, log.identity)
            quarantine.park(connection, resolved.name, resolved.revision, parked)
            waiting = quarantine.blocked_aggregates(connection, resolved.name, resolved.revision, position)
        held = shadow.checkpoint()
        blocked = BlockedAggregates(waiting, known)
        writer = FoldWriter(resolved, dialect_of(connection), lease_s=0, table=shadow.tables[0], blocked=blocked)

        def commit(part: Batch) -> None:
            with connection.begin():
                writer.write(connection, held, part)

        yield Follower(shadow, job, position, reader(job.catalog, resolved, known, earlier), commit)


@contextmanager
def replaying(shadow: Shadow[ResolvedSql], job: Job) -> Generator[Follower]:
    """The handlers of SQL by hand, and a connection to the empty shadow."""
    engine = shadow.space.handlers_engine()
    connection = engine.connect()
    writer, held = SqlWriter(shadow.resolved, lease_s=0), shadow.checkpoint()

    async def write(part: Batch) -> None:
        await connection.begin()
        try:
            await writer.write(connection, held, part)
            await connection.run_sync(shadow.check_confined)
            await connection.commit()
        except BaseException:
            with suppress(SQLAlchemyError):
                await connection.rollback()
            raise

    async def end() -> None:
        with suppress(SQLAlchemyError, OSError):
            await connection.close()
        await engine.dispose()

    with asyncio.Runner() as runner, job.earlier() as earlier:
        runner.run(connection.start())
        try:
            decode = reader(job.catalog, shadow.resolved, earlier=earlier)
            yield Follower(shadow, job, 0, decode, lambda part: runner.run(write(part)))
        finally:
            runner.run(end())


def check_loaded(shadow: Shadow[AnyResolved], plan: Plan, parts: Sequence[Part]) -> int:
    """Compare what was read, what was acknowledged and what is there; raises `VerificationFailed`."""
    name = shadow.resolved.name
    own = [part for part in parts if part.projection == name]
    events = sum(part.events for part in own)
    if events != plan.events:
        raise VerificationFailed(name, f"{events} events were folded, and the log holds {plan.events}")
    rows = sum(part.rows for part in own)
    found = shadow.count()
    if found != rows:
        raise VerificationFailed(name, f"{rows} rows were loaded, and the shadow holds {found}")
    return rows


def swap_in(shadow: Shadow[AnyResolved], follower: Follower, job: Job) -> Checkpoint:
    """Catch the finished shadow up and swap it in; raises `RebuildError` when that could not be done in time."""
    log, watch = job.log, job.watch
    deadline = time.monotonic() + PATIENCE_S
    backoff_s = _BACKOFF_S[0]
    same_past = is_of_this_log(job, shadow.live_checkpoint())
    while True:
        with watch.phase("catch up"):
            state = ask_once(log.endpoint, stream_info(log.stream))
            job.source.check_whole(state)
            if state.messages:
                follower.to(state.last)
            failpoints.reach("rebuild.caught_up")
        with watch.phase("swap"):
            failpoints.reach("rebuild.before_swap")
            try:
                swapped = shadow.swap(log.identity, follower.to if same_past else None)
                failpoints.reach("rebuild.after_swap")
                return swapped
            except NotNow as later:
                if time.monotonic() > deadline:
                    raise _no_swap(shadow, later) from later
        watch.wait(backoff_s)
        backoff_s = min(2 * backoff_s, _BACKOFF_S[1])


def is_of_this_log(job: Job, live: Checkpoint | None) -> bool:
    """Whether the live read model was made from this log, so that its position may not be fallen short of."""
    try:
        if live is not None:
            with NatsConnection.open(job.log.endpoint) as connection:
                check_same_log(connection, job.log.stream, live)
    except LogRolledBack:
        return False
    return True


def _no_swap(shadow: Shadow[AnyResolved], later: NotNow) -> RebuildError:
    return RebuildError(
        f"The rebuilt {shadow.resolved.name!r} could not be swapped in within {PATIENCE_S:g} s: {later}. "
        "The live table is untouched. End the transactions that stay open on it, then run the rebuild again."
    )
