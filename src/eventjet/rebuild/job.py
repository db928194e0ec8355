"""`Job` is one bulk job over one log; `Engine` is the interface of what reads, folds and loads for it.

Engines are imported by name when a job needs them, so nothing in this package imports Spark.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from importlib.util import find_spec
from os import cpu_count
from pkgutil import resolve_name
from typing import Any, Protocol, TypeVar

import psycopg
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError

from eventjet.archive.reading import ArchiveFiles, Segment, folder_of
from eventjet.codec.catalog import Catalog
from eventjet.errors import RebuildError, RowsRefused, UsageError
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.integrity import checking_same_log
from eventjet.log.mirror import readable_log
from eventjet.log.predecessors import PredecessorReader
from eventjet.log.skip_markers import reading_skip_markers
from eventjet.log.topology import identity_of
from eventjet.nats.endpoint import Endpoint
from eventjet.observability import spans, tracing
from eventjet.projections.app_ref import Application, AppRef, loaded
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild.plan import CHOICES, EngineChoice, EngineName, Plan, choose_engine, make_plan
from eventjet.rebuild.progress import Report, Watch
from eventjet.rebuild.replay_source import Log, ReplaySource, archived_source
from eventjet.rebuild.runs import Part, Target, redacted
from eventjet.settings import Settings
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.database import Database
from eventjet.sql.dialect import Fault
from eventjet.urls import shown_master

T = TypeVar("T")

STOP_TIMEOUT_S = 15.0
"""How long the caller of a cancelled job waits for the job to clean up."""

MIRROR_S = 60.0
"""How long a job waits at most for a mirror to reach the position of a read model."""

SNAPSHOT_FAULTS_MAX = 20
"""The maximum number of broken histories that are named; all are counted."""


@dataclass(slots=True)
class SnapshotTally:
    """The number of aggregates for each outcome of `build_snapshots`."""

    events: int = 0
    aggregates: int = 0
    written: int = 0
    newer: int = 0
    """Aggregates that already had a snapshot of the same or of a later event."""
    few: int = 0
    """Aggregates with fewer events than `min_events`."""
    too_large: int = 0
    """Aggregates whose snapshot is larger than a snapshot may be."""
    unkept: int = 0
    """Aggregates whose state does not survive a round trip through JSON."""
    broken: int = 0
    """Aggregates whose history is broken."""
    faults: list[str] = field(default_factory=list[str])
    """Messages about the first broken histories."""

    def add(self, tally: Mapping[str, Any]) -> None:
        """Add the tally of another part, given as a mapping of the fields."""
        for name, value in tally.items():
            setattr(self, name, getattr(self, name) + value)
        self.faults = sorted(self.faults)[:SNAPSHOT_FAULTS_MAX]


_FACTORIES: Mapping[EngineName, str] = {
    "spark": "eventjet.spark.engine:spark_engine",
    "local": "eventjet.rebuild.local:local_engine",
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine of a job, and where it runs."""

    name: EngineChoice = "spark"
    master: str | None = None
    """URL of the Spark master. Without it: the running session, else `SPARK_REMOTE`, else all cores of this machine."""
    ship: bool = True
    """Whether the application's package is sent to tasks on other machines; otherwise it has to be installed there."""


@dataclass(frozen=True, slots=True)
class Job:
    """One bulk job: an application, its log as it was when the job began, and the engine."""

    app: Application
    ref: AppRef | None
    """The caller's reference to the application; None when the caller gave the application itself."""
    settings: Settings
    engine: Engine
    source: ReplaySource
    watch: Watch
    catalog: Catalog
    """The application's events, and the positions with a skip marker when the job began."""

    @property
    def log(self) -> Log:
        """The log as it was when the job began."""
        return self.source.log

    @property
    def database(self) -> Database:
        """The database of the read models."""
        return Database(self.settings.database)

    def reference(self) -> AppRef:
        """Return the reference by which other processes import the application; raises `UsageError`."""
        return self.ref or AppRef.of(self.app)

    def earlier(self) -> PredecessorReader:
        """Return a reader that looks up the event before a given event of an aggregate; the caller closes it."""
        return PredecessorReader(self.log.endpoint, self.log.stream)

    def check_same_log(self, checkpoint: Checkpoint) -> None:
        """Raise `LogRolledBack` where a checkpoint was made from another past than this log's."""
        with NatsConnection.open(Endpoint.of(self.settings)) as connection:
            connection.run(checking_same_log(self.log.stream, checkpoint))

    def plan(self, resolved: Sequence[AnyResolved], last: int) -> Plan:
        """Return a plan from the first event to `last`, for this engine and machine; raises `LogIncomplete`."""
        source, state = self.source, self.log.state
        source.check_integrity(state)
        return make_plan(
            self.app.name,
            source.first,
            last,
            resolved,
            engine=self.engine.name,
            cores=cpu_count() or 1,
            keys=state.subjects,
            archived=source.archived,
        )


class Engine(Protocol):
    """One engine for the length of one job; every method blocks, and raises `Unreachable` when it cannot start."""

    @property
    def name(self) -> EngineName: ...

    def location(self) -> str | None:
        """Return the URL of the Spark master that would be used; None for this process."""
        ...

    def obstacle(self) -> str | None:
        """Return what the engine lacks on this machine, without starting it; None when nothing is missing."""
        ...

    def archive_files(self, url: str) -> ArchiveFiles:
        """Return the files of an archive; raises `UsageError` for a file system that the engine cannot read."""
        ...

    def load(self, job: Job, plan: Plan, targets: Sequence[Target]) -> list[Part]:
        """Fold the plan's events and load the rows into the shadows; return the loaded parts of each projection."""
        ...

    def fold_snapshots(self, job: Job, plan: Plan, aggregate: str, min_events: int) -> SnapshotTally:
        """Write snapshots of the aggregates of one type that have at least `min_events` events."""
        ...

    def seal(self, job: Job, url: str, ranges: Sequence[tuple[int, int]]) -> list[Segment]:
        """Archive the ranges of positions (first, last), one segment each; they begin where the archive ends."""
        ...


def options_of(engine: EngineChoice | EngineOptions) -> EngineOptions:
    """Return options as they are, or the default options of a named engine; raises `UsageError` for other names."""
    options = engine if isinstance(engine, EngineOptions) else EngineOptions(engine)
    if options.name not in CHOICES:
        raise UsageError(f"There is no engine {options.name!r}. Use {', '.join(CHOICES[:-1])} or {CHOICES[-1]}.")
    return options


def open_engine(name: EngineName, options: EngineOptions, watch: Watch) -> AbstractContextManager[Engine]:
    """Return a context manager whose `with` block may use the engine."""
    factory: Callable[[EngineOptions, Watch], AbstractContextManager[Engine]] = resolve_name(_FACTORIES[name])
    return factory(options, watch)


def _engine_for(log: Log, options: EngineOptions, watch: Watch, from_archive: str | None) -> EngineName:
    """Return the chosen engine; for `auto`, choose it by the size of the log, and report the choice and its reason."""
    if options.name != "auto":
        return options.name
    state, configured = log.state, options.master or os.environ.get("SPARK_REMOTE")
    name, reason = choose_engine(
        max(0, state.last if from_archive else state.last - state.first + 1),
        cluster=shown_master(configured) if configured else None,
        installed=find_spec("pyspark") is not None,
        remote_archive=from_archive is not None and folder_of(from_archive) is None,
    )
    watch.say(reason)
    return name


@contextmanager
def open_job(
    app: Application | AppRef,
    settings: Settings,
    watch: Watch,
    engine: EngineChoice | EngineOptions,
    from_archive: str | None = None,
) -> Generator[Job]:
    """Yield a job whose engine is open in the block; raises `Unreachable`, `UsageError` and `ArchiveBroken`."""
    application, options = loaded(app), options_of(engine)
    with watch.phase("start"):
        endpoint, state = readable_log(settings, application.name, "eventjet-rebuild")
        log = Log(endpoint, application.name, identity_of(state), state)
        with NatsConnection.open(Endpoint.of(settings).with_name("eventjet-rebuild")) as connection:
            catalog = application.catalog.of_log(connection.run(reading_skip_markers(application.name)))
        name = _engine_for(log, options, watch, from_archive)
    with open_engine(name, options, watch) as running_engine:
        source = ReplaySource(log)
        if from_archive is not None:
            with watch.phase("start"):
                source = archived_source(log, running_engine.archive_files(from_archive))
        ref = app if isinstance(app, AppRef) else None
        yield Job(application, ref, settings, running_engine, source, watch, catalog)


def await_position(job: Job, position: int) -> None:
    """Wait until the log or its mirror has a position where it is read; raises `RebuildError` after `MIRROR_S`."""
    deadline = time.monotonic() + MIRROR_S
    while (last := job.log.now().last) < position:
        if time.monotonic() > deadline:
            raise RebuildError(
                f"The mirror that EVENTJET_READ_FROM names ends at position {last:,}, and the read model is at "
                f"{position:,}. `eventjet mirror status` says what keeps it; unset EVENTJET_READ_FROM to read the log."
            )
        job.watch.wait(0.1)


async def in_job(
    app: Application | AppRef,
    settings: Settings,
    engine: EngineChoice | EngineOptions,
    work: Callable[[Job], T],
    *,
    check: Callable[[Application], object] = lambda _: None,
    from_archive: str | None = None,
    progress: Report | None = None,
) -> T:
    """Call `check`, then open a job and run its blocking work in a thread; raises as these and `open_job`."""

    def run(watch: Watch) -> T:
        check(loaded(app))
        with open_job(app, settings, watch, engine, from_archive) as job:
            try:
                return work(job)
            except RowsRefused as error:
                redacted_error = redacted(error, job.app)
                if redacted_error is error:
                    raise
                raise redacted_error from None

    return await in_thread(settings, progress, run)


async def in_thread(settings: Settings, report: Report | None, work: Callable[[Watch], T]) -> T:
    """Run blocking work in a thread; a cancellation stops the work, and waits until it has cleaned up."""
    watch = Watch(report)

    def run() -> T:
        with tracing.span(spans.REBUILD), _translated(Database(settings.database)):
            return work(watch)

    future = asyncio.get_running_loop().run_in_executor(None, copy_context().run, run)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        # Nobody awaits the future any more. Reading its exception, whenever it comes, keeps asyncio from logging it.
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await asyncio.to_thread(watch.stop)
        await asyncio.wait([future], timeout=STOP_TIMEOUT_S)
        raise


@contextmanager
def _translated(database: Database) -> Generator[None]:
    try:
        yield
    except (OperationalError, InterfaceError, psycopg.OperationalError, sqlite3.OperationalError) as error:
        raise database.unreachable(error) from error
    except (SQLAlchemyError, psycopg.Error, sqlite3.Error) as error:
        if Fault.DAMAGED in database.dialect.faults(error):
            raise database.unreachable(error) from error
        cause = error.orig if isinstance(error, DBAPIError) else error
        reason = next(iter(str(cause).splitlines()), type(error).__name__)
        raise RebuildError(
            f"The database refused a step of the rebuild: {reason}. The live table is untouched; run it again."
        ) from error
