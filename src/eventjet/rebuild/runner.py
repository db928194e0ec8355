"""`rebuild`: read models made again from the log beside the live ones, then swapped in."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import cpu_count
from typing import TypeVar

import psycopg
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError

from eventjet import failpoints
from eventjet.errors import RebuildError, UsageError
from eventjet.nats.api import StreamState
from eventjet.nats.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.projections.app_ref import AppRef
from eventjet.projections.application import Application
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.rebuild.cutover import check_loaded, cut_over, is_our_past, swap_in
from eventjet.rebuild.load import Part
from eventjet.rebuild.local import load_locally
from eventjet.rebuild.orphaned_runs import remove_orphaned
from eventjet.rebuild.plan import EngineName, Plan, make_plan
from eventjet.rebuild.progress import Report, Watch
from eventjet.rebuild.replay_source import ReplaySource, past_of
from eventjet.rebuild.runs import new_run
from eventjet.rebuild.sequential import sequential_replay
from eventjet.rebuild.shadow import Shadow, Swapped, shadow_of
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.workers.log_identity import state_of_log

T = TypeVar("T")

STOP_TIMEOUT_S = 15.0
"""How long a cancelled rebuild may take to clear up before its caller goes on without it."""


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
    """Where its table is: empty where it is declared. In a place of its own, it takes over later or not at all."""
    sequential: bool = False
    """SQL by hand, made by its handlers in this process, whatever the engine."""


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What a rebuild did."""

    engine: EngineName
    position: int
    """The pinned position: up to here the log was read in bulk."""
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
    app: AppRef,
    names: Sequence[str],
    settings: Settings,
    *,
    engine: EngineName = "spark",
    master: str | None = None,
    ship: bool = True,
    from_archive: str | None = None,
    progress: Report | None = None,
) -> RebuildReport:
    """Make read models again and swap them in, while workers, commands and readers go on.

    Cancelled or killed at any moment, it leaves the live tables as they are; the next run removes its remains.
    `from_archive` is the URL of an archive that the past is read from; `ArchiveBroken` is raised when it cannot be.
    `progress` is called from another thread. Raises `RebuildError`, `Unreachable`, `UsageError`, and what the
    application's own code raises about an event (`HandlerFailed`, `CodecError`).
    """
    watch = Watch(progress)
    return await in_thread(
        watch, lambda: _rebuild(app, names, settings, engine, master, ship, from_archive, watch), settings
    )


def _rebuild(
    ref: AppRef,
    names: Sequence[str],
    settings: Settings,
    engine: EngineName,
    master: str | None,
    ship: bool,
    from_archive: str | None,
    watch: Watch,
) -> RebuildReport:
    app = ref.load()
    resolved = bound_of(app, names)
    database = Database(settings.database)
    with ExitStack() as stack:
        with watch.phase("start"):
            endpoint, log, state = log_of(app, settings)
            past = stack.enter_context(past_of(from_archive, app.name, endpoint, log, state, engine, master, watch))
            remove_orphaned(database)
            runs = {one.name: new_run() for one in resolved}
            last = state.last if state.messages else 0
            plan = plan_for(app, resolved, list(runs.values()), engine, state, last=last, past=past)
            failpoints.reach("rebuild.planned")
            shadows = [
                stack.enter_context(shadow_of(database, one, runs[one.name], watch))
                for one in resolved
                if isinstance(one, ResolvedProjection)
            ]
            by_hand = [
                stack.enter_context(shadow_of(database, one, runs[one.name], watch))
                for one in resolved
                if isinstance(one, ResolvedSql)
            ]
            for shadow in shadows:
                # What was decided about another past says nothing about this one.
                if shadow.resolved.quarantines and is_our_past(endpoint, app.name, shadow.live_checkpoint()):
                    shadow.take_over_quarantine()
        parts = load(plan, ref, app, settings, shadows, master, ship, watch, past)
        failpoints.reach("rebuild.loaded")
        made: list[Rebuilt] = []
        for shadow in shadows:
            with watch.phase("index", 1):
                shadow.finish()
                rows = check_loaded(shadow, plan, parts)
                failpoints.reach("rebuild.indexed")
            parked = [one for part in parts if part.projection == shadow.resolved.name for one in part.parked]
            swapped = cut_over(shadow, app, endpoint, plan, log, watch, parked)
            made.append(_rebuilt(shadow.resolved, rows, swapped))
        for tables in by_hand:
            with sequential_replay(tables, app, endpoint, plan.first, past) as follower:
                rows = follower.load(plan, watch)
                with watch.phase("index", 1):
                    tables.finish()
                    failpoints.reach("rebuild.indexed")
                swapped = swap_in(tables, follower, app, endpoint, log, watch)
            made.append(_rebuilt(tables.resolved, rows, swapped))
    in_order_of_names = sorted(made, key=lambda one: list(runs).index(one.projection))
    return RebuildReport(
        engine, plan.last, plan.events, tuple(in_order_of_names), watch.seconds, watch.local_at_most_s()
    )


def _rebuilt(resolved: AnyResolved, rows: int, swapped: Swapped) -> Rebuilt:
    by_hand = isinstance(resolved, ResolvedSql)
    return Rebuilt(
        resolved.name, resolved.revision, rows, swapped.position, swapped.generation, swapped.location, by_hand
    )


def load(
    plan: Plan,
    ref: AppRef,
    app: Application,
    settings: Settings,
    shadows: Sequence[Shadow[ResolvedProjection]],
    master: str | None,
    ship: bool,
    watch: Watch,
    past: ReplaySource | None = None,
) -> list[Part]:
    """Carry out on its engine what a plan has for one, after the archive it reads from was checked."""
    if past is not None:
        past.check(plan, watch)
    plan = plan.folded()
    if not plan.passes:
        return []
    targets = [shadow.target for shadow in shadows]
    if plan.engine == "local":
        return load_locally(plan, app, Endpoint.of(settings).with_name("eventjet-rebuild"), targets, watch, past)
    from eventjet.spark.session import spark_session

    with ExitStack() as stack:
        with watch.phase("spark"):
            session = spark_session(master, bulk_only=True, interrupted_by=watch.interrupted_by)
            started = stack.enter_context(session) if past is None or past.started is None else past.started
        # Only now is pyspark known to be there.
        from eventjet.spark.engine import cores_of, load_on_spark

        watch.cores = cores_of(started)
        return load_on_spark(plan, ref, settings, targets, started, watch, ship_app=ship, archive=past and past.archive)


def bound_of(app: Application, names: Sequence[str]) -> list[AnyResolved]:
    """The projections of these names, once each; raises `UsageError`."""
    unknown = [name for name in names if name not in app.projections]
    if unknown or not names:
        known = ", ".join(app.projections) or "none"
        what = f"no projection {unknown[0]!r}" if unknown else "nothing to do without a projection's name"
        raise UsageError(f"There is {what} in {app.name!r}. It has: {known}.")
    return [app.projections[name] for name in dict.fromkeys(names)]


def log_of(app: Application, settings: Settings) -> tuple[Endpoint, str, StreamState]:
    """(where the log is, its identity, its bounds)."""
    endpoint = Endpoint.of(settings).with_name("eventjet-rebuild")
    with NatsConnection.open(endpoint) as link:
        log, state = state_of_log(link, app.name)
    return endpoint, log, state


def plan_for(
    app: Application,
    resolved: Sequence[AnyResolved],
    runs: Sequence[str],
    engine: EngineName,
    state: StreamState,
    last: int,
    past: ReplaySource | None = None,
) -> Plan:
    """A plan from the log's first event, or the archive's, to `last`, for this machine."""
    return make_plan(
        app.name,
        resolved,
        runs,
        first=max(state.first, 1) if past is None else past.archive.first,
        last=last,
        keys=state.subjects,
        engine=engine,
        cores=cpu_count() or 1,
        archived=0 if past is None else past.archive.last,
    )


async def in_thread(watch: Watch, work: Callable[[], T], settings: Settings) -> T:
    """Run blocking work beside the loop; a cancellation stops it, and waits until it has cleared up."""

    def run() -> T:
        with _told(Database(settings.database)):
            return work()

    future = asyncio.get_running_loop().run_in_executor(None, run)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.to_thread(watch.stop)
        await asyncio.wait([future], timeout=STOP_TIMEOUT_S)
        # It has nothing more to say that anyone waits for.
        future.exception() if future.done() and not future.cancelled() else None
        raise


@contextmanager
def _told(database: Database) -> Generator[None]:
    """Turn what the database's drivers raise into errors of the tree."""
    try:
        yield
    except (OperationalError, InterfaceError, psycopg.OperationalError, sqlite3.OperationalError) as error:
        raise database.unreachable(error) from error
    except (SQLAlchemyError, psycopg.Error, sqlite3.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        reason = next(iter(str(cause).splitlines()), type(error).__name__)
        raise RebuildError(
            f"The database refused a step of the rebuild: {reason}. The live table is untouched; run it again."
        ) from error
