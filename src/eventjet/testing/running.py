"""`running`: an app with its workers on real servers of its own, for the duration of a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, nullcontext
from copy import copy
from typing import Any

from eventjet.dev.stack import running_stack
from eventjet.dev.streams import make_streams
from eventjet.jet import Jet, open_jet
from eventjet.projections.app_ref import Application
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.subscriptions.supervisor import chosen_of, run_workers


@asynccontextmanager
async def running(app: Application, *, postgres: bool = False, deps: Any = None) -> AsyncGenerator[Jet]:
    """Run an app on an embedded NATS server and a database, with workers of all that it declares.

    Needs the extra `dev`. The servers belong to this block alone and end with it, and so does their data. The database,
    at `jet.settings.database`, is a SQLite file, or with `postgres` a PostgreSQL server. Commands that the app serves
    are served, and the streams of its publications and inboxes are created. `deps` replaces what `App(deps=…)` opens;
    without `deps`, that is opened. Raises `Unreachable` when a server does not start, and the error that ended the
    workers.

    ```python
    async with running(bank) as jet:
        done = await jet.repository(Account).execute("a-1", Account.open, "ada")
        await jet.caught_up("balances", position=done.position, timeout_s=30)
    ```
    """
    if deps is not None:
        app = _with_deps(app, deps)
    async with AsyncExitStack() as ending:
        servers = ExitStack()
        ending.push_async_callback(asyncio.to_thread, servers.close)
        stack = await asyncio.to_thread(servers.enter_context, running_stack(postgres=postgres))
        settings = Settings(servers=(stack.servers,), database=stack.database)
        jet = await ending.enter_async_context(open_jet(app, settings))
        assert jet.client is not None
        await make_streams(jet.client, app)
        await jet.init()
        if app.projections:
            engine = Database(settings.database).sync_engine()
            await asyncio.to_thread(create_tables, engine, app.projections.values())
        if app.served:
            await ending.enter_async_context(jet.service())
        if chosen_of(app, ()).names:
            await ending.enter_async_context(_working(app, settings))
        yield jet


def _with_deps(app: Application, deps: Any) -> Application:
    """Return a copy of the app that gives its reactors these dependencies."""
    copied: Any = copy(app)
    copied.deps = lambda: nullcontext(deps)
    return copied


@asynccontextmanager
async def _working(app: Application, settings: Settings) -> AsyncGenerator[None]:
    """Run workers during the block; raises the error that ended them, before the block or at its end."""
    stop, ready = asyncio.Event(), asyncio.Event()
    worker = asyncio.create_task(run_workers(app, settings, stop=stop, on_ready=ready.set), name="eventjet running")
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({worker, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            yield
    finally:
        waiting.cancel()
        stop.set()
        await worker
