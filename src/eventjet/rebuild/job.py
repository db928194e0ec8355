"""`Job`: one bulk job over one log, with all that its steps share; built once by the command that runs it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import cpu_count
from typing import TypeVar

import psycopg
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError

from eventjet.errors import RebuildError
from eventjet.nats.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.projections.app_ref import AppRef, loaded
from eventjet.projections.application import Application
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild.engine import Engine, EngineOptions, open_engine
from eventjet.rebuild.plan import EngineName, Extent, Plan, make_plan
from eventjet.rebuild.progress import Report, Watch
from eventjet.rebuild.replay_source import Log, ReplaySource, archived_source
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.workers.reader import state_of_log

T = TypeVar("T")

STOP_TIMEOUT_S = 15.0
"""How long a cancelled job may take to clear up before its caller goes on without it."""


@dataclass(frozen=True, slots=True)
class Job:
    """An application, its log at the moment the job began, and what carries the job out."""

    app: Application
    ref: AppRef | None
    """How the caller named the application; None for one that was given itself."""
    settings: Settings
    engine: Engine
    source: ReplaySource
    watch: Watch

    @property
    def log(self) -> Log:
        """The log as it was when the job began."""
        return self.source.log

    @property
    def database(self) -> Database:
        """Where the read models are."""
        return Database(self.settings.database)

    def reference(self) -> AppRef:
        """What other processes import the application by; raises `UsageError`."""
        return self.ref or AppRef.of(self.app)

    def extent(self, last: int) -> Extent:
        """Everything there is to read up to a position."""
        return Extent(self.app.name, self.source.first, last, self.source.archived)

    def plan(self, resolved: Sequence[AnyResolved], runs: Sequence[str], last: int) -> Plan:
        """A plan from the first event to `last`, for this machine."""
        keys, cores = self.log.state.subjects, cpu_count() or 1
        return make_plan(self.extent(last), resolved, runs, keys=keys, engine=self.engine.name, cores=cores)


@contextmanager
def open_job(
    app: Application | AppRef,
    settings: Settings,
    watch: Watch,
    engine: EngineName | EngineOptions,
    from_archive: str | None = None,
) -> Generator[Job]:
    """A job until the end of a `with`; raises `Unreachable`, `UsageError` and `ArchiveBroken`.

    `from_archive` is the URL of an archive that the past is read from.
    """
    application = loaded(app)
    with open_engine(engine, watch) as chosen:
        with watch.phase("start"):
            log = _log_of(application, settings)
            files = None if from_archive is None else chosen.archive_files(from_archive)
            source = ReplaySource(log) if files is None else archived_source(log, files)
        yield Job(application, app if isinstance(app, AppRef) else None, settings, chosen, source, watch)


async def in_thread(settings: Settings, report: Report | None, work: Callable[[Watch], T]) -> T:
    """Run blocking work beside the loop; a cancellation stops it, and waits until it has cleared up."""
    watch = Watch(report)

    def run() -> T:
        with _translated(Database(settings.database)):
            return work(watch)

    future = asyncio.get_running_loop().run_in_executor(None, run)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.to_thread(watch.stop)
        await asyncio.wait([future], timeout=STOP_TIMEOUT_S)
        # Nobody waits for what it raised; asking for it keeps asyncio from logging that nobody did.
        future.exception() if future.done() and not future.cancelled() else None
        raise


def _log_of(app: Application, settings: Settings) -> Log:
    endpoint = Endpoint.of(settings).with_name("eventjet-rebuild")
    with NatsConnection.open(endpoint) as connection:
        return Log(endpoint, app.name, *state_of_log(connection, app.name))


@contextmanager
def _translated(database: Database) -> Generator[None]:
    """Turn what the database's drivers raise into errors of eventjet."""
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
