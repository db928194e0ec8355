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

from eventjet.errors import RebuildError, UsageError
from eventjet.projections.bound import BoundProjection
from eventjet.projections.database import Database
from eventjet.rebuild.cutover import check_loaded, cut_over, is_our_past
from eventjet.rebuild.load import Part
from eventjet.rebuild.local import load_locally
from eventjet.rebuild.places import clear_abandoned, shadow_of
from eventjet.rebuild.plan import EngineName, Plan, make_plan
from eventjet.rebuild.progress import Report, Watch
from eventjet.rebuild.runs import new_run
from eventjet.rebuild.shadow import Shadow
from eventjet.settings import Settings
from eventjet.spark.ship import AppRef, Wired
from eventjet.wire import Endpoint, Link
from eventjet.wire.stream import StreamState
from eventjet.workers.identity import state_of_log

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
    place: str
    """Where its table is: empty where it is declared. In a place of its own, it takes over later or not at all."""


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
    progress: Report | None = None,
) -> RebuildReport:
    """Make read models again and swap them in, while workers, commands and readers go on.

    Cancelled or killed at any moment, it leaves the live tables as they are; the next run removes its remains.
    `progress` is called from another thread. Raises `RebuildError`, `Unreachable`, `UsageError`, and what the
    application's own code raises about an event (`HandlerFailed`, `CodecError`).
    """
    watch = Watch(progress)
    return await in_thread(watch, lambda: _rebuild(app, names, settings, engine, master, ship, watch), settings)


def _rebuild(
    ref: AppRef,
    names: Sequence[str],
    settings: Settings,
    engine: EngineName,
    master: str | None,
    ship: bool,
    watch: Watch,
) -> RebuildReport:
    app = ref.load()
    bound = bound_of(app, names)
    database = Database(settings.database)
    with ExitStack() as stack:
        with watch.phase("start"):
            endpoint, log, state = log_of(app, settings)
            clear_abandoned(database)
            runs = [new_run() for _ in bound]
            plan = plan_for(app, bound, runs, engine, state, last=state.last if state.messages else 0)
            shadows = [
                stack.enter_context(shadow_of(database, one, run, watch)) for one, run in zip(bound, runs, strict=True)
            ]
            for shadow in shadows:
                # What was decided about another past says nothing about this one.
                if shadow.bound.quarantines and is_our_past(endpoint, app.name, shadow.live_checkpoint()):
                    shadow.remember()
        parts = load(plan, ref, app, settings, shadows, master, ship, watch)
        made: list[Rebuilt] = []
        for shadow in shadows:
            with watch.phase("index", 1):
                shadow.finish()
                rows = check_loaded(shadow, plan, parts)
            parked = [one for part in parts if part.projection == shadow.bound.name for one in part.parked]
            swapped = cut_over(shadow, app, endpoint, plan, log, watch, parked)
            one = (shadow.bound.name, shadow.bound.revision, rows)
            made.append(Rebuilt(*one, swapped.position, swapped.generation, swapped.place))
    return RebuildReport(engine, plan.last, plan.events, tuple(made), watch.seconds)


def load(
    plan: Plan,
    ref: AppRef,
    app: Wired,
    settings: Settings,
    shadows: Sequence[Shadow],
    master: str | None,
    ship: bool,
    watch: Watch,
) -> list[Part]:
    """Carry out a plan on its engine."""
    targets = [shadow.target for shadow in shadows]
    if plan.engine == "local":
        return load_locally(plan, app, Endpoint.of(settings).with_name("eventjet-rebuild"), targets, watch)
    from eventjet.spark.session import spark_session

    with ExitStack() as stack:
        with watch.phase("start"):
            started = stack.enter_context(spark_session(master, interrupted_by=watch.interrupted_by))
        # Only now is pyspark known to be there.
        from eventjet.rebuild.spark import load_on_spark

        return load_on_spark(plan, ref, settings, targets, started, watch, ship_app=ship)


def bound_of(app: Wired, names: Sequence[str]) -> list[BoundProjection]:
    """The projections of these names, once each; raises `UsageError`."""
    unknown = [name for name in names if name not in app.projections]
    if unknown or not names:
        known = ", ".join(app.projections) or "none"
        what = f"no projection {unknown[0]!r}" if unknown else "nothing to do without a projection's name"
        raise UsageError(f"There is {what} in {app.name!r}. It has: {known}.")
    return [app.projections[name] for name in dict.fromkeys(names)]


def log_of(app: Wired, settings: Settings) -> tuple[Endpoint, str, StreamState]:
    """(where the log is, its identity, its bounds)."""
    endpoint = Endpoint.of(settings).with_name("eventjet-rebuild")
    with Link.open(endpoint) as link:
        log, state = state_of_log(link, app.name)
    return endpoint, log, state


def plan_for(
    app: Wired, bound: Sequence[BoundProjection], runs: Sequence[str], engine: EngineName, state: StreamState, last: int
) -> Plan:
    """A plan from the log's first event to `last`, for this machine."""
    return make_plan(
        app.name,
        bound,
        runs,
        first=max(state.first, 1),
        last=last,
        keys=state.subjects,
        engine=engine,
        cores=cpu_count() or 1,
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
