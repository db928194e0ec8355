"""`preview`: what a rebuild would do and what would refuse it, found out without changing anything."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from eventjet.errors import RebuildError
from eventjet.projections.app_ref import AppRef, loaded
from eventjet.projections.application import Application
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild.engine import EngineOptions
from eventjet.rebuild.job import Job, open_job
from eventjet.rebuild.orphaned_runs import orphaned
from eventjet.rebuild.plan import EngineName, Plan, Route, route_of
from eventjet.rebuild.progress import Watch
from eventjet.rebuild.run_space import described, read_only
from eventjet.rebuild.runner import projections_of
from eventjet.rebuild.runs import new_run
from eventjet.rebuild.shadow import Shadow, check_kept
from eventjet.settings import Settings
from eventjet.sql import checkpoint, migrations
from eventjet.sql.database import Database


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
    engine: EngineName | EngineOptions = "spark",
    from_archive: str | None = None,
) -> Preview:
    """Plan a rebuild and change nothing at all. Raises `ArchiveBroken`, `Unreachable` and `UsageError`."""

    def work() -> Preview:
        resolved = projections_of(loaded(app), names)
        with open_job(app, settings, Watch(), engine, from_archive) as job:
            return _preview(job, resolved)

    return await asyncio.to_thread(work)


def _preview(job: Job, resolved: Sequence[AnyResolved]) -> Preview:
    database = job.database
    runs = [new_run() for _ in resolved]
    plan = job.plan(resolved, runs, job.log.last)
    with database.reaching_sync(), read_only(database) as connection:
        current = connection is not None and migrations.version(connection) == migrations.HEAD
        known = connection if current else None
        candidates = tuple(_candidate(database, one, run, known) for one, run in zip(resolved, runs, strict=True))
        left = () if connection is None else tuple(orphaned(connection, database))
    return Preview(
        plan=plan,
        master=job.engine.location(),
        database=database.shown,
        location=f"{described(database)} each",
        candidates=candidates,
        upgrades=not current,
        remains=left,
        refusal=job.engine.obstacle(),
    )


def _candidate(database: Database, resolved: AnyResolved, run: str, connection: Connection | None) -> Candidate:
    held, refusal = None, None
    if connection is not None:
        held = checkpoint.read(connection, resolved.name, resolved.revision)
        try:
            if held is not None:
                check_kept(resolved, held)
            Shadow(database, resolved, run).check_swappable(connection)
        except RebuildError as error:
            refusal = str(error)
    position, state = (held.position, held.state) if held is not None else (None, None)
    return Candidate(resolved.name, resolved.revision, route_of(resolved), position, state, refusal)
