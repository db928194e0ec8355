"""`run_workers`: several projections in one process, until it is asked to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from eventjet.errors import UsageError
from eventjet.nats.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.projections.application import Application
from eventjet.projections.sql_projection import AnyResolved
from eventjet.settings import Settings
from eventjet.sql import locations
from eventjet.sql.database import Database
from eventjet.workers.context import WorkerContext, WorkerOptions
from eventjet.workers.health import HealthMonitor, serving
from eventjet.workers.lease import new_owner
from eventjet.workers.notify import Notifier
from eventjet.workers.projector import Projector
from eventjet.workers.reader import state_of_log

_log = logging.getLogger(__name__)


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
    """Keep the named projections (none means all) up to date until `stop` is set, then finish the batches in hand.

    `on_ready` is called once, when every projection works, waits as a standby, or is stopped by a fault. Raises
    `UsageError` for a name the app does not have, and `Unreachable` when the server, the stream, the database or its
    tables are missing at the start; later outages are waited out. At the address `http` health and metrics are told
    meanwhile.
    """
    chosen = _chosen(app, names)
    endpoint = Endpoint.of(settings)
    context = WorkerContext(
        app.name,
        app.catalog,
        Database(settings.database),
        endpoint,
        new_owner(),
        options or WorkerOptions(),
        Notifier(endpoint, app.name),
    )
    await _check(context, chosen)
    async with AsyncExitStack() as ending:
        ending.push_async_callback(asyncio.to_thread, context.notifier.close)
        if http is not None:
            await ending.enter_async_context(serving(http, HealthMonitor(app, settings, context, chosen)))
        await _work(context, chosen, stop, on_ready)


async def _work(
    context: WorkerContext, chosen: Sequence[AnyResolved], stop: asyncio.Event, on_ready: Callable[[], None] | None
) -> None:
    waiting = {one.durable for one in chosen}

    def ready(resolved: AnyResolved) -> None:
        if resolved.durable in waiting:
            waiting.discard(resolved.durable)
            if not waiting and on_ready is not None:
                on_ready()

    tasks = [
        asyncio.create_task(Projector(one, context, lambda one=one: ready(one)).run(stop), name=one.durable)
        for one in chosen
    ]
    try:
        await stop.wait()
        _, late = await asyncio.wait(tasks, timeout=context.options.drain_s)
        for task in late:
            _log.warning(
                "%s did not finish its batch within %g s and is cut off", task.get_name(), context.options.drain_s
            )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _chosen(app: Application, names: Sequence[str]) -> list[AnyResolved]:
    known = app.projections
    for name in names:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise UsageError(f"{app.name!r} has no projection {name!r}. It has: {listed}.")
    chosen = [known[name] for name in dict.fromkeys(names)] or list(known.values())
    if not chosen:
        raise UsageError(f"{app.name!r} declares no projections, so there is nothing to work on. List one in its App.")
    return chosen


async def _check(context: WorkerContext, chosen: Sequence[AnyResolved]) -> None:
    """Fail early, and in words, on what a person has to set up first."""
    engine = context.database.engine("eventjet worker").execution_options(**context.database.dialect.look_options)
    try:
        async with context.database.reaching(), engine.connect() as connection:
            await connection.run_sync(locations.check_tables, chosen)
    finally:
        await engine.dispose()

    def check_stream() -> None:
        with NatsConnection.open(context.endpoint) as connection:
            state_of_log(connection, context.stream)

    await asyncio.to_thread(check_stream)
