"""`rebuild`: read models made again from the log beside the live ones, then swapped in.

`preview`: what that would do and what would refuse it, found out without changing anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from eventjet import failpoints
from eventjet.errors import RebuildError, Unreachable, UsageError
from eventjet.projections.app_ref import Application, AppRef, projections_of
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.rebuild.catchup import catching_up, check_loaded, is_of_this_log, replaying, swap_in
from eventjet.rebuild.choice import EngineChoice
from eventjet.rebuild.job import EngineOptions, Job, in_job
from eventjet.rebuild.plan import EngineName, Plan, Route, route_of
from eventjet.rebuild.progress import Report
from eventjet.rebuild.runs import PURPOSE, Part
from eventjet.rebuild.shadow import Shadow, check_kept, shadow_of
from eventjet.rebuild.spaces import orphaned, remove_orphaned, space_kind
from eventjet.settings import Settings
from eventjet.sql import checkpoint, migrations
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.database import BULK, Database
from eventjet.sql.dialect import Fault


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """One read model that was swapped in."""

    projection: str
    revision: int
    rows: int
    """Rows as loaded, before the shadow caught up."""
    position: int
    generation: int
    location: str
    """Where its table is: empty where it is declared. Anywhere else, it is promoted later or not at all."""
    sequential: bool = False
    """SQL by hand, made by its handlers in this process, whatever the engine."""


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What a rebuild did."""

    engine: EngineName
    position: int
    """The pinned position: up to here the log was read in bulk."""
    first: int
    """Position of the first event that was read: 1, unless the log has lost its beginning."""
    events: int
    projections: tuple[Rebuilt, ...]
    seconds: Mapping[str, float]
    """Wall time by phase."""
    local_at_most_s: float | None = None
    """What the local engine would have taken at the most, from what was measured; None where that is not known."""

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.projections)


async def rebuild(
    app: Application | AppRef,
    names: Sequence[str],
    settings: Settings,
    *,
    engine: EngineChoice | EngineOptions = "auto",
    from_archive: str | None = None,
    progress: Report | None = None,
) -> RebuildReport:
    """Make read models again and swap them in, while workers, commands and readers go on.

    Cancelled or killed at any moment, it leaves the live tables as they are; the next run removes its remains.
    `from_archive` is the URL of an archive that the past is read from; `ArchiveBroken` is raised when it cannot be.
    `progress` is called from another thread. Raises `RebuildError`, `Unreachable`, `UsageError`, and what the
    application's own code raises about an event (`HandlerFailed`, `CodecError`).
    """
    return await in_job(
        app,
        settings,
        engine,
        lambda job: _rebuild(job, names),
        check=lambda app: _named(app, names),
        from_archive=from_archive,
        progress=progress,
    )


def _named(app: Application, names: Sequence[str]) -> list[AnyResolved]:
    if not names:
        raise UsageError(f"Name what to rebuild. {app.name!r} has {', '.join(app.projections) or 'no projections'}.")
    return projections_of(app, names)


def load(job: Job, plan: Plan, shadows: Sequence[Shadow[ResolvedProjection]]) -> list[Part]:
    """Carry out on its engine what a plan has for one, once the archive it reads from was checked."""
    job.source.check(plan, job.watch)
    folded = plan.folded()
    if not folded.passes:
        return []
    job.say_if_slow(folded)
    return job.engine.load(job, folded, [shadow.target for shadow in shadows])


def _rebuild(job: Job, names: Sequence[str]) -> RebuildReport:
    database, watch, resolved = job.database, job.watch, _named(job.app, names)
    with ExitStack() as stack:
        with watch.phase("start"):
            database.check_sessions()
            remove_orphaned(database)
            plan = job.plan(resolved, job.log.last)
            failpoints.reach("rebuild.planned")
            shadows = [
                stack.enter_context(shadow_of(database, one, job.log.identity, watch))
                for one in resolved
                if isinstance(one, ResolvedProjection)
            ]
            by_hand = [
                stack.enter_context(shadow_of(database, one, job.log.identity, watch))
                for one in resolved
                if isinstance(one, ResolvedSql)
            ]
            for shadow in shadows:
                # What was decided about another log says nothing about this one.
                if shadow.resolved.quarantines and is_of_this_log(job, shadow.live_checkpoint()):
                    shadow.take_over_quarantine()
        parts = load(job, plan, shadows)
        failpoints.reach("rebuild.loaded")
        made = [_finished(job, plan, shadow, parts) for shadow in shadows]
        made += [_replayed(job, plan, tables) for tables in by_hand]
    made.sort(key=lambda one: list(names).index(one.projection))
    return RebuildReport(
        plan.engine, plan.last, plan.first, plan.events, tuple(made), watch.seconds, watch.local_at_most_s()
    )


def _finished(job: Job, plan: Plan, shadow: Shadow[ResolvedProjection], parts: Sequence[Part]) -> Rebuilt:
    """One loaded shadow: indexed, checked, caught up and swapped in."""
    with job.watch.phase("index", 1):
        shadow.finish()
        rows = check_loaded(shadow, plan, parts)
        failpoints.reach("rebuild.indexed")
    parked = [one for part in parts if part.projection == shadow.resolved.name for one in part.parked]
    with catching_up(shadow, job, plan.last, parked) as follower:
        return _rebuilt(shadow.resolved, rows, swap_in(shadow, follower, job))


def _replayed(job: Job, plan: Plan, tables: Shadow[ResolvedSql]) -> Rebuilt:
    """SQL by hand: its handlers run over the log, then its tables are swapped in."""
    with replaying(tables, job) as follower:
        rows = follower.replay(plan)
        with job.watch.phase("index", 1):
            tables.finish()
            failpoints.reach("rebuild.indexed")
        return _rebuilt(tables.resolved, rows, swap_in(tables, follower, job))


def _rebuilt(resolved: AnyResolved, rows: int, swapped: Checkpoint) -> Rebuilt:
    by_hand = isinstance(resolved, ResolvedSql)
    return Rebuilt(
        resolved.name, resolved.revision, rows, swapped.position, swapped.generation, swapped.location, by_hand
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One projection that would be made again."""

    projection: str
    revision: int
    route: Route
    position: int | None
    """Of the live read model; None when there is none yet."""
    state: str | None
    refusal: str | None
    """Why a rebuild of it would end at once."""


@dataclass(frozen=True, slots=True)
class Preview:
    """A rebuild that did not take place."""

    plan: Plan
    master: str | None
    """Where Spark would run; None for the local engine."""
    database: str
    """Without its password."""
    location: str
    """Where the shadows would be."""
    candidates: tuple[Candidate, ...]
    upgrades: bool
    """Whether eventjet's own tables would be made, or brought up to date, first."""
    remains: tuple[str, ...]
    """What killed runs left behind, which would be removed first."""
    refusal: str | None
    """Why the engine could not run."""

    @property
    def refusals(self) -> list[str]:
        """Everything that would have to be fixed first."""
        return list(filter(None, [self.refusal, *(one.refusal for one in self.candidates)]))


async def preview(
    app: Application | AppRef,
    names: Sequence[str],
    settings: Settings,
    *,
    engine: EngineChoice | EngineOptions = "auto",
    from_archive: str | None = None,
) -> Preview:
    """Plan a rebuild and change nothing at all. Raises `ArchiveBroken`, `Unreachable` and `UsageError`."""
    return await in_job(
        app,
        settings,
        engine,
        lambda job: _preview(job, names),
        check=lambda app: _named(app, names),
        from_archive=from_archive,
    )


def _preview(job: Job, names: Sequence[str]) -> Preview:
    database, kind, resolved = job.database, space_kind(job.database), _named(job.app, names)
    plan = job.plan(resolved, job.log.last)
    with database.reaching_sync(), database.read_only(f"{PURPOSE} --dry-run", BULK) as connection:
        current = connection is not None and migrations.version(connection) == migrations.HEAD
        known = connection if current else None
        candidates = tuple(_candidate(database, one, job.log.identity, known) for one in resolved)
        left = () if connection is None else tuple(orphaned(connection, database))
    return Preview(
        plan=plan,
        master=job.engine.location(),
        database=database.shown,
        location=f"{kind.described(database)} each",
        candidates=candidates,
        upgrades=not current,
        remains=left,
        refusal=job.engine.obstacle(),
    )


def _candidate(database: Database, resolved: AnyResolved, log: str, connection: Connection | None) -> Candidate:
    held, refusal = None, None
    if connection is not None:
        held = checkpoint.read(connection, resolved.name, resolved.revision)
        try:
            if held is not None:
                check_kept(resolved, held)
            Shadow(database, resolved, log).check_swappable(connection)
        except (RebuildError, Unreachable) as error:
            refusal = str(error)
        except DBAPIError as error:
            if Fault.FORBIDDEN not in database.dialect.faults(error):
                raise
            # As it would be refused to the rebuild: both make tables as they are declared, to compare them.
            refusal = str(error.orig).partition("\n")[0]
    position, state = (held.position, held.state) if held is not None else (None, None)
    return Candidate(resolved.name, resolved.revision, route_of(resolved), position, state, refusal)
