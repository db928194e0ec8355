"""`run_workers`: run projections and other subscriptions in one process until it is asked to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from eventjet.codec.reasons import reason_of, traceback_of
from eventjet.commands.repository import Repositories, open_repositories
from eventjet.errors import EventjetError, UnexpectedExit, Unreachable, UsageError
from eventjet.jetstream.client import connected
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.mirror import LogReader
from eventjet.log.public_stream import PublicStream
from eventjet.log.timers import JetStreamTimers
from eventjet.log.topology import drifts_of, identity_of, reading_log_state
from eventjet.log.unknown_events import LIST_S, LISTED_MAX, noted_unknown, unknown_aggregates, unknown_events
from eventjet.nats.endpoint import Endpoint
from eventjet.observability import logs
from eventjet.projections.app_ref import Application, projections_of
from eventjet.projections.sql_projection import AnyResolved
from eventjet.runtime import called
from eventjet.settings import Settings
from eventjet.sql import locations
from eventjet.sql.database import Database
from eventjet.subscriptions.context import Notices, WorkerContext, WorkerOptions
from eventjet.subscriptions.cursor_session import ReactionContext, ReactionSubscription
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.declarations import Declaration, declarations_of
from eventjet.subscriptions.event_source import LogSource, StreamSource
from eventjet.subscriptions.handlers import Deps, EventHandler, ProcessHandler, PublicationHandler, ReactorHandler
from eventjet.subscriptions.health import HealthMonitor, serving
from eventjet.subscriptions.lease import new_owner
from eventjet.subscriptions.loop_watch import LoopWatch
from eventjet.subscriptions.partitions import PartitionAssignment
from eventjet.subscriptions.process_steps import ProcessRunner
from eventjet.subscriptions.projection_session import ProjectionSubscription
from eventjet.subscriptions.retry import end
from eventjet.subscriptions.status import StatusReader
from eventjet.text import listed, suggestion

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The projections and other subscriptions that one process works on."""

    projections: Sequence[AnyResolved]
    followers: Sequence[Declaration]

    @property
    def names(self) -> list[str]:
        return [subscription.name for subscription in (*self.projections, *self.followers)]


def chosen_of(app: Application, names: Sequence[str]) -> Chosen:
    """Return the subscriptions with these names, each once; no names mean all that the app has.

    A name may be that of a reactor or that of one of its partitions. Raises `UsageError` for a name that the app does
    not have.
    """
    declared = declarations_of(app).values()
    all_names = list(dict.fromkeys([*app.projections, *(declaration.declared_as for declaration in declared)]))
    for name in names:
        if name not in all_names and not any(declaration.name == name for declaration in declared):
            near = suggestion(name, all_names)
            raise UsageError(f"The app {app.name!r} has no {name!r} to work on. {near}It has {listed(all_names)}.")
    chosen = set(names) or set(all_names)
    projection_names = [name for name in app.projections if name in chosen]
    followers = [declaration for declaration in declared if {declaration.name, declaration.declared_as} & chosen]
    return Chosen(projections_of(app, projection_names) if projection_names else [], followers)


async def run_workers(
    app: Application,
    settings: Settings,
    names: Sequence[str] = (),
    *,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    options: WorkerOptions | None = None,
    http: tuple[str, int] | None = None,
) -> None:
    """Run the named subscriptions (no names mean all) until `stop` is set, then finish the work in progress.

    `on_ready` is called once, when each subscription works, waits as a standby, or is kept from work by a fault. The
    address `http` serves health and metrics meanwhile.

    Raises `UsageError` for a name the app does not have, and `Unreachable` when the server or the log is missing at the
    start; later outages are waited out. When a cursor, the database, a table or another stream is missing for some
    subscriptions, the others work, and it is looked for again. When every named subscription lacks its cursor or its
    tables, the first of these errors is raised.
    """
    chosen = chosen_of(app, names)
    if not chosen.names:
        raise UsageError(f"{app.name!r} declares nothing to work on. List a projection or a reactor in its App.")
    options = options or WorkerOptions()
    workers = Workers(app, settings, options, _when_all(chosen.names, on_ready))
    async with AsyncExitStack() as exit_stack:
        log = await asyncio.to_thread(_check_stream, workers.endpoint, app)
        repositories = None
        if chosen.followers:
            repositories, client = await exit_stack.enter_async_context(open_repositories(app, settings))
        else:
            client = await exit_stack.enter_async_context(connected(settings))
        mirror = None
        if settings.read_from is not None:
            mirror = await exit_stack.enter_async_context(connected(settings.for_reads()))
        reader = LogReader(app.name, client, mirror)
        if chosen.projections:
            await workers.begin_projections(chosen.projections, log, reader)
        if repositories is not None:
            await workers.begin_followers(chosen.followers, repositories, reader, exit_stack)
        if len(workers.faults) == len(chosen.names):
            raise next(iter(workers.faults.values()))
        if http is not None:
            status_reader = StatusReader(app, settings, chosen.names)
            monitor = HealthMonitor(status_reader, workers.owner, workers.options, workers.subscriptions)
            await exit_stack.enter_async_context(serving(http, monitor))
            workers.add("the look at health", monitor.keep)
        await workers.run(stop)


class Workers:
    """The running subscriptions of one process and the resources that they share."""

    def __init__(
        self, app: Application, settings: Settings, options: WorkerOptions, ready: Callable[[str], None]
    ) -> None:
        self.options = options
        self.owner = new_owner()
        self.endpoint = Endpoint.of(settings)
        self.subscriptions: list[ProjectionSubscription | ReactionSubscription] = []
        self.faults: dict[str, EventjetError] = {}
        """The error that keeps a subscription from work at the start, by name: a missing cursor, database or table."""
        self._deps: Deps | None = None
        self._timers: JetStreamTimers | None = None
        self._app = app
        self._settings = settings
        self._ready = ready
        self._tasks: dict[str, Callable[[asyncio.Event], Coroutine[Any, Any, None]]] = {}

    async def begin_projections(self, chosen: Sequence[AnyResolved], log: str, reader: LogReader) -> None:
        """Prepare a runner for each projection, and note the faults that keep some from work."""
        client = reader.client
        notices = Notices(client, self._app.name)
        database = Database(self._settings.database)
        catalog = self._app.catalog.of_log()
        context = WorkerContext(
            self._app.name, log, catalog, database, client, reader, self.owner, self.options, notices
        )
        self.faults |= await _table_faults(database, chosen, log)
        for resolved in chosen:
            subscription = ProjectionSubscription(resolved, context, partial(self._ready, resolved.name))
            self.subscriptions.append(subscription)
            self._tasks[resolved.durable] = subscription.run

    async def begin_followers(
        self, chosen: Sequence[Declaration], repositories: Repositories, reader: LogReader, exit_stack: AsyncExitStack
    ) -> None:
        """Prepare a runner for each other subscription, and note the faults that keep some from work."""
        app = self._app
        cursors = Cursors(reader.client, app.name)
        faults = await asyncio.gather(*(_cursor_fault(cursors, declaration.name) for declaration in chosen))
        self.faults |= {
            declaration.name: fault for declaration, fault in zip(chosen, faults, strict=True) if fault is not None
        }
        handlers = {*app.reactors, *app.inboxes}
        if any(declaration.declared_as in handlers for declaration in chosen):
            self._deps = Deps(app, self.options, private=repositories.catalog.is_private)
            exit_stack.push_async_callback(self._deps.close)
        watch = LoopWatch(self.endpoint, app.name, self.owner, self.options.lease_s)
        await exit_stack.enter_async_context(watch.watching())
        context = ReactionContext(repositories, cursors, self.owner, self.options, watch)
        assignments: dict[str, PartitionAssignment] = {}
        for declaration in chosen:
            handler = self._handler(declaration, context, reader)
            assignment = assignments.setdefault(declaration.declared_as, PartitionAssignment(declaration.partitions))
            subscription = ReactionSubscription(handler, context, assignment, partial(self._ready, declaration.name))
            self.subscriptions.append(subscription)
            self._tasks[declaration.name] = subscription.run
            if declaration.partitions > 1:
                name = declaration.declared_as
                self._tasks[f"{name} share"] = partial(assignment.keep, cursors, name, self.owner, self.options.lease_s)

    def _handler(self, declaration: Declaration, context: ReactionContext, reader: LogReader) -> EventHandler:
        """Return the event handler of a declaration."""
        app, repositories, client = self._app, context.repositories, reader.client
        if declaration.name in app.inboxes:
            assert self._deps is not None
            inbox = app.inboxes[declaration.name]
            return ReactorHandler(declaration, StreamSource(inbox, client), inbox, repositories, self._deps)
        source = LogSource(repositories, reader, declaration)
        for cls, info in app.processes.items():
            if info.name == declaration.name:
                runner = ProcessRunner(repositories, cls, info)
                self._timers = self._timers or JetStreamTimers(client, app.name)
                return ProcessHandler(declaration, source, runner, self._timers)
        if declaration.name in app.publications:
            publication = app.publications[declaration.name]
            public = PublicStream(client, publication.stream, declaration.name)
            return PublicationHandler(declaration, source, publication, public)
        assert self._deps is not None
        return ReactorHandler(declaration, source, app.reactors[declaration.declared_as], repositories, self._deps)

    def add(self, name: str, run: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
        """Add a task that `run` starts with the others; the task must end once its event is set."""
        self._tasks[name] = run

    async def run(self, stop: asyncio.Event) -> None:
        """Run all tasks until `stop` is set; the error of a task that fails, before or after, is logged and raised."""
        tasks = [asyncio.create_task(called(run(stop), "A worker"), name=name) for name, run in self._tasks.items()]
        stopped = asyncio.create_task(stop.wait())
        drain_s = self.options.drain_s
        lasting = [*tasks, stopped] if self._deps is None else [*tasks, self._deps.task, stopped]
        try:
            ended, _ = await asyncio.wait(lasting, return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                raise [_logged_end(task) for task in ended][-1]
            _, late = await asyncio.wait(tasks, timeout=drain_s)
            for task in late:
                logs.CUT_OFF.log(_log, name=task.get_name(), seconds=drain_s)
            # A failure while stopping must not look like a clean end.
            failed = [task for task in tasks if task.done() and (task.cancelled() or task.exception() is not None)]
            if errors := [_logged_end(task) for task in failed]:
                raise errors[0]
        finally:
            await end([stopped, *tasks])


def _logged_end(task: asyncio.Task[Any]) -> BaseException:
    """Log and return why a task ended before `stop` was set, or failed while stopping."""
    error = None if task.cancelled() else task.exception()
    if error is None:
        error = UnexpectedExit(asyncio.CancelledError.__name__, f"The task {task.get_name()!r} of this worker")
    logs.TASK_ENDED.log(_log, name=task.get_name(), reason=reason_of(error), trace=f"\n{traceback_of(error)}")
    return error


def _when_all(names: Sequence[str], on_ready: Callable[[], None] | None) -> Callable[[str], None]:
    """Return a function that calls `on_ready` once it was called with each of the names."""
    waiting = set(names)

    def ready(name: str) -> None:
        if name in waiting:
            waiting.discard(name)
            if not waiting and on_ready is not None:
                on_ready()

    return ready


async def _cursor_fault(cursors: Cursors, name: str) -> EventjetError | None:
    try:
        await cursors.read(name)
    except EventjetError as error:
        return error
    return None


async def _table_faults(database: Database, chosen: Sequence[AnyResolved], log: str) -> dict[str, EventjetError]:
    """Return, by name, the error that keeps a projection from its tables; an unreachable database affects all."""
    engine = database.engine("eventjet worker", existing=True).execution_options(**database.dialect.look_options)
    faults: dict[str, EventjetError] = {}
    try:
        await asyncio.to_thread(database.check_sessions)
        async with database.reaching(), engine.connect() as connection:
            await connection.run_sync(locations.check_tables, ())
            for resolved in chosen:
                try:
                    await connection.run_sync(locations.check_tables, [resolved], log)
                except EventjetError as error:
                    faults[resolved.name] = error
    except Unreachable as error:
        return {resolved.name: error for resolved in chosen}
    finally:
        await engine.dispose()
    return faults


def _check_stream(endpoint: Endpoint, app: Application) -> str:
    """Return the log's identity, and log its drift and what this release cannot read; raises without one. Blocks."""
    with NatsConnection.open(endpoint) as connection:
        state = connection.run(reading_log_state(app.name))
        identity = identity_of(state)
        for drift in drifts_of(state):
            logs.LOG_DRIFTED.log(_log, drift=drift, remedy=drift.remedy)
        aggregates = app.catalog.aggregates
        if state.subjects <= LISTED_MAX:
            unknown = connection.run(unknown_aggregates(app.name, aggregates), LIST_S)
        else:
            unknown = connection.run(noted_unknown(state, aggregates))
        for error in (*unknown, *unknown_events(connection, state, app.catalog)):
            logs.LOG_UNREADABLE.log(_log, reason=error)
    return identity
