"""`rebuild` makes read models again from the log and swaps them in; `preview` says what a rebuild would do.

A rebuild has five steps, and nothing live changes before the last one:

1. pin the end of the log, plan, and create an empty shadow of each read model
2. load the shadows of folded projections in bulk on the job's engine; run the handlers of SQL projections over the log
   from its first event
3. create indexes, and check that the counts of events read, rows loaded and rows stored agree
4. catch each shadow up with the log, using the live writer's code
5. lock the live tables, write the last events and swap
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from eventjet import failpoints
from eventjet.codec.headers import RawRecord, event_id_of
from eventjet.domain.quarantined import Quarantined
from eventjet.errors import LogRolledBack, RebuildError, Unreachable, UsageError, VerificationFailed
from eventjet.projections.app_ref import Application, AppRef, projections_of
from eventjet.projections.fold import BlockedAggregates, Reader, reader
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.rebuild.job import EngineOptions, Job, in_job
from eventjet.rebuild.plan import EngineChoice, EngineName, Plan, Route, route_of
from eventjet.rebuild.progress import Phase, Report
from eventjet.rebuild.runs import PURPOSE, Part
from eventjet.rebuild.shadow import Shadow, check_not_retired, shadow_of
from eventjet.rebuild.workspace import leftovers, remove_leftovers, workspace_of
from eventjet.runtime import loop_runner, read_ahead
from eventjet.settings import Settings
from eventjet.sql import checkpoint, migrations
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.database import BULK, Database, dialect_of
from eventjet.sql.dialect import Fault
from eventjet.sql.quarantine import blocked_aggregates, insert_events
from eventjet.sql.table_moves import NotNow
from eventjet.writers.batch import Batch, Parts
from eventjet.writers.fold_writer import FoldWriter
from eventjet.writers.sql_writer import SqlWriter

BATCH, BATCH_BY_HAND = 2_000, 1_000
"""The maximum number of events in one transaction: of a fold, and of SQL handlers, whose statements take longer."""
PATIENCE_S = 60.0
"""How long a swap is tried again while other transactions lock the table."""

_BACKOFF_S = (0.05, 2.0)


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """One read model that a rebuild swapped in."""

    projection: str
    revision: int
    rows: int
    """How many rows were loaded, before the shadow caught up."""
    position: int
    """Position of the read model when it was swapped in."""
    generation: int
    """How many rebuilds of the read model have been swapped in."""
    location: str
    """The table slot of its table; empty for the declared table. Another slot is promoted later, or not at all."""
    sequential: bool = False
    """Whether this is an SQL projection, whose handlers ran one by one in this process, whatever the engine."""


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """The outcome of a rebuild."""

    engine: EngineName
    position: int
    """The pinned position, up to which the log was read in bulk."""
    first: int
    """Position of the first event that was read: 1, unless the log begins later."""
    events: int
    """How many events were read in bulk."""
    projections: tuple[Rebuilt, ...]
    """The read models that were swapped in, in the order of their names in the call."""
    seconds: Mapping[str, float]
    """Wall time by phase."""
    local_at_most_s: float | None = None
    """Upper bound of the local engine's time, from this run's phases; None unless Spark ran on this machine."""

    @property
    def rows(self) -> int:
        """How many rows were loaded for all read models."""
        return sum(rebuilt.rows for rebuilt in self.projections)


async def rebuild(
    app: Application | AppRef,
    names: Sequence[str],
    settings: Settings,
    *,
    engine: EngineChoice | EngineOptions = "auto",
    from_archive: str | None = None,
    progress: Report | None = None,
) -> RebuildReport:
    """Make read models again from the log and swap them in, while workers, commands and readers go on.

    A rebuild that is cancelled or killed leaves the live tables as they are; the next run removes its leftovers.

    `names` are the projections to rebuild. `from_archive` is the URL of an archive from which the past is read.
    `progress` is called from another thread.

    Raises `ArchiveBroken` when the past cannot be read from the archive; `RebuildError`, `Unreachable`, `UsageError`;
    and the errors of the application's own code about an event (`HandlerFailed`, `CodecError`).
    """
    return await in_job(
        app,
        settings,
        engine,
        lambda job: _rebuild(job, names),
        check=lambda app: _named_projections(app, names),
        from_archive=from_archive,
        progress=progress,
    )


def _named_projections(app: Application, names: Sequence[str]) -> list[AnyResolved]:
    if not names:
        raise UsageError(f"Name what to rebuild. {app.name!r} has {', '.join(app.projections) or 'no projections'}.")
    return projections_of(app, names)


def load(job: Job, plan: Plan, shadows: Sequence[Shadow[ResolvedProjection]]) -> list[Part]:
    """Check the archive that a plan reads, then fold the events and load the shadows on the job's engine."""
    job.source.check(plan, job.watch)
    folded_plan = plan.folded()
    if not folded_plan.passes:
        return []
    return job.engine.load(job, folded_plan, [shadow.target for shadow in shadows])


def _rebuild(job: Job, names: Sequence[str]) -> RebuildReport:
    database, watch, resolved = job.database, job.watch, _named_projections(job.app, names)
    with ExitStack() as stack:
        with watch.phase("start"):
            database.check_sessions()
            remove_leftovers(database)
            plan = job.plan(resolved, job.log.last)
            failpoints.reach("rebuild.planned")
            shadows: list[Shadow[Any]] = [
                stack.enter_context(shadow_of(database, projection, job.log.identity, watch)) for projection in resolved
            ]
            folded = [shadow for shadow in shadows if isinstance(shadow.resolved, ResolvedProjection)]
            for shadow in folded:
                # Decisions about the events of another log do not apply to this log.
                if shadow.resolved.quarantines and is_of_this_log(job, shadow.live_checkpoint()):
                    shadow.take_over_quarantine()
        parts = load(job, plan, folded)
        failpoints.reach("rebuild.loaded")
        rebuilt = [_finish(job, plan, shadow, parts) for shadow in folded]
        rebuilt += [_replay(job, plan, shadow) for shadow in shadows if shadow not in folded]
    rebuilt.sort(key=lambda read_model: list(names).index(read_model.projection))
    return RebuildReport(
        plan.engine, plan.last, plan.first, plan.events, tuple(rebuilt), watch.seconds, watch.local_at_most_s()
    )


def _finish(job: Job, plan: Plan, shadow: Shadow[ResolvedProjection], parts: Sequence[Part]) -> Rebuilt:
    """Index, check, catch up and swap in one loaded shadow."""
    with job.watch.phase("index", 1):
        shadow.finish()
        rows = check_loaded(shadow, plan, parts)
        failpoints.reach("rebuild.indexed")
    quarantined = [event for part in parts if part.projection == shadow.resolved.name for event in part.quarantined]
    with catching_up(shadow, job, plan.last, quarantined) as writer:
        return _outcome(shadow.resolved, rows, swap_in(shadow, writer, job))


def _replay(job: Job, plan: Plan, shadow: Shadow[ResolvedSql]) -> Rebuilt:
    """Run the handlers of an SQL projection over the log and swap its tables in."""
    with replaying(shadow, job) as writer:
        rows = writer.replay(plan)
        with job.watch.phase("index", 1):
            shadow.finish()
            failpoints.reach("rebuild.indexed")
        return _outcome(shadow.resolved, rows, swap_in(shadow, writer, job))


def _outcome(resolved: AnyResolved, rows: int, swapped: Checkpoint) -> Rebuilt:
    is_sequential = isinstance(resolved, ResolvedSql)
    return Rebuilt(
        resolved.name, resolved.revision, rows, swapped.position, swapped.generation, swapped.location, is_sequential
    )


@dataclass(slots=True)
class ShadowWriter:
    """A writer of the log's next events to one shadow, batch by batch, with the live writer's code."""

    shadow: Shadow[AnyResolved]
    job: Job
    position: int
    decode: Reader
    commit: Callable[[Batch], None]

    def replay(self, plan: Plan) -> int:
        """Write the events up to the plan's pinned position, and return how many rows the shadow has then."""
        name = self.shadow.resolved.name
        with self.job.watch.phase("sequential", plan.events):
            if plan.events:
                self.to(plan.last, "sequential")
                if self.position != plan.last:
                    reason = f"the handlers came to position {self.position}, and the plan ends at {plan.last}"
                    raise VerificationFailed(name, reason)
        return self.shadow.count()

    def to(self, position: int, phase: Phase = "catch up") -> None:
        """Write the events up to a position of the log; raises `HandlerFailed`."""
        source, watch = self.job.source, self.job.watch
        start, total = self.position, position - self.position
        first = max(start + 1, source.first)
        if first > position:
            return
        batch = BATCH_BY_HAND if isinstance(self.shadow.resolved, ResolvedSql) else BATCH
        with closing(read_ahead(source.records(first, position + 1, batch=batch), watch.check)) as ahead:
            for records in ahead:
                self._write(records)
                failpoints.reach("rebuild.batch_read")
                watch.report(phase, self.position - start, total)

    def _write(self, records: list[RawRecord]) -> None:
        self.decode.expect(records)
        events = [event for record in records if (event := self.decode(record)) is not None]
        last = records[-1]
        batch = Batch(self.position, last[0], event_id_of(last), events)
        parts = Parts(self.shadow.resolved.name, batch, private=self.shadow.resolved.is_private)
        for part in parts:
            try:
                self.commit(part)
                self.position = part.last
            except DBAPIError as error:
                parts.refused(part, error)


@contextmanager
def catching_up(
    shadow: Shadow[ResolvedProjection], job: Job, position: int, quarantined: Sequence[Quarantined] = ()
) -> Generator[ShadowWriter]:
    """Give a loaded shadow its checkpoint at `position` and quarantine, and yield a writer for what follows."""
    log, resolved, resolutions = job.log, shadow.resolved, shadow.target.resolutions
    event_id = log.event_id(position) if position else ""
    if event_id is None:
        raise VerificationFailed(
            log.stream, f"the log has no event at position {position}, where the rebuild was pinned"
        )
    with shadow.workspace.engine().connect() as connection, job.earlier() as earlier:
        with connection.begin():
            shadow.begin(connection, position, event_id, log.identity)
            insert_events(connection, resolved.name, resolved.revision, quarantined)
            aggregates = blocked_aggregates(connection, resolved.name, resolved.revision, position)
        start = shadow.checkpoint()
        blocked = BlockedAggregates(aggregates, resolutions)
        writer = FoldWriter(resolved, dialect_of(connection), lease_s=0, tables=shadow.tables, blocked=blocked)

        def commit(part: Batch) -> None:
            with connection.begin():
                writer.write(connection, start, part)

        yield ShadowWriter(shadow, job, position, reader(job.catalog, resolved, resolutions, earlier), commit)


@contextmanager
def replaying(shadow: Shadow[ResolvedSql], job: Job) -> Generator[ShadowWriter]:
    """Yield a writer that runs the handlers of an SQL projection, from the first event on, on its empty shadow."""
    engine = shadow.workspace.handlers_engine()
    connection = engine.connect()
    writer, start = SqlWriter(shadow.resolved, lease_s=0), shadow.checkpoint()

    async def write(part: Batch) -> None:
        await connection.begin()
        try:
            await writer.write(connection, start, part)
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

    with loop_runner() as runner, job.earlier() as earlier:
        runner.run(connection.start())
        try:
            decode = reader(job.catalog, shadow.resolved, earlier=earlier)
            yield ShadowWriter(shadow, job, 0, decode, lambda part: runner.run(write(part)))
        finally:
            runner.run(end())


def check_loaded(shadow: Shadow[AnyResolved], plan: Plan, parts: Sequence[Part]) -> int:
    """Compare the planned, folded and stored numbers; return the rows without states. Raises `VerificationFailed`."""
    name = shadow.resolved.name
    own_parts = [part for part in parts if part.projection == name]
    events = sum(part.events for part in own_parts)
    if events != plan.events:
        raise VerificationFailed(name, f"{events} events were folded, and the log holds {plan.events}")
    rows = sum(part.rows for part in own_parts)
    stored = shadow.count()
    if stored != rows:
        raise VerificationFailed(name, f"{rows} rows were loaded, and the shadow holds {stored}")
    return sum(part.rows for part in own_parts if not part.of_states)


def swap_in(shadow: Shadow[AnyResolved], writer: ShadowWriter, job: Job) -> Checkpoint:
    """Catch the finished shadow up and swap it in; raises `RebuildError` when the swap was not possible in time."""
    log, watch = job.log, job.watch
    deadline = time.monotonic() + PATIENCE_S
    backoff_s = _BACKOFF_S[0]
    same_past = is_of_this_log(job, shadow.live_checkpoint())

    def tail(position: int) -> None:
        if job.settings.read_from is not None and (last := log.now().last) < position:
            raise NotNow(f"the live read model is at position {position:,}, and the mirror ends at {last:,}")
        writer.to(position)

    while True:
        with watch.phase("catch up"):
            state = log.now()
            job.source.check_integrity(state)
            if state.messages:
                writer.to(state.last)
            failpoints.reach("rebuild.caught_up")
        with watch.phase("swap"):
            failpoints.reach("rebuild.before_swap")
            try:
                swapped = shadow.swap(log.identity, tail if same_past else None)
                failpoints.reach("rebuild.after_swap")
                return swapped
            except NotNow as error:
                if time.monotonic() > deadline:
                    raise RebuildError(
                        f"The rebuilt {shadow.resolved.name!r} could not be swapped in within {PATIENCE_S:g} s: "
                        f"{error}. The live table is untouched. End the transactions that stay open on it, then run "
                        "the rebuild again."
                    ) from error
        watch.wait(backoff_s)
        backoff_s = min(2 * backoff_s, _BACKOFF_S[1])


def is_of_this_log(job: Job, live: Checkpoint | None) -> bool:
    """Tell whether the live read model was made from this log; then the shadow has to reach its position."""
    try:
        if live is not None:
            job.check_same_log(live)
    except LogRolledBack:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Candidate:
    """One projection that a rebuild would make again."""

    projection: str
    revision: int
    route: Route
    """How its events are brought to their rows."""
    position: int | None
    """Position of the live read model; None when there is none yet."""
    state: str | None
    """State of the live checkpoint; None when there is none yet."""
    refusal: str | None
    """Why a rebuild of this projection would be refused; None when it would not."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What a rebuild would do."""

    plan: Plan
    master: str | None
    """Where Spark would run; None for the local engine."""
    database: str
    """The URL of the database, without its password."""
    location: str
    """Where the shadows would be, in words."""
    candidates: tuple[Candidate, ...]
    upgrades: bool
    """Whether eventjet's own tables would first be created or migrated."""
    leftovers: tuple[str, ...]
    """The schemas or files of killed runs, which would be removed first."""
    refusal: str | None
    """Why the engine could not run; None when it could."""

    @property
    def refusals(self) -> list[str]:
        """All reasons why the rebuild would be refused."""
        return list(filter(None, [self.refusal, *(candidate.refusal for candidate in self.candidates)]))


async def preview(
    app: Application | AppRef,
    names: Sequence[str],
    settings: Settings,
    *,
    engine: EngineChoice | EngineOptions = "auto",
    from_archive: str | None = None,
) -> Preview:
    """Plan a rebuild without changing anything; the arguments are those of `rebuild`.

    Raises `ArchiveBroken`, `Unreachable` and `UsageError`.
    """
    return await in_job(
        app,
        settings,
        engine,
        lambda job: _preview(job, names),
        check=lambda app: _named_projections(app, names),
        from_archive=from_archive,
    )


def _preview(job: Job, names: Sequence[str]) -> Preview:
    database, resolved = job.database, _named_projections(job.app, names)
    plan = job.plan(resolved, job.log.last)
    with database.reaching_sync(), database.read_only(f"{PURPOSE} --dry-run", BULK) as connection:
        current = connection is not None and migrations.version(connection) == migrations.HEAD
        usable_connection = connection if current else None
        candidates = tuple(
            _candidate(database, projection, job.log.identity, usable_connection) for projection in resolved
        )
        leftover_names = () if connection is None else tuple(leftovers(connection, database))
    return Preview(
        plan=plan,
        master=job.engine.location(),
        database=database.shown,
        location=f"{workspace_of(database, '<run>').description} each",
        candidates=candidates,
        upgrades=not current,
        leftovers=leftover_names,
        refusal=job.engine.obstacle(),
    )


def _candidate(database: Database, resolved: AnyResolved, log: str, connection: Connection | None) -> Candidate:
    live, refusal = None, None
    if connection is not None:
        live = checkpoint.read(connection, resolved.name, resolved.revision)
        try:
            if live is not None:
                check_not_retired(resolved, live)
            Shadow(database, resolved, log).check_swappable(connection)
        except (RebuildError, Unreachable) as error:
            refusal = str(error)
        except DBAPIError as error:
            if Fault.FORBIDDEN not in database.dialect.faults(error):
                raise
            # The rebuild would be refused, too: both create tables as they are declared, to compare them.
            refusal = str(error.orig).partition("\n")[0]
    position, state = (live.position, live.state) if live is not None else (None, None)
    return Candidate(resolved.name, resolved.revision, route_of(resolved), position, state, refusal)
