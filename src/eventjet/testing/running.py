"""`running`: an app on real servers of its own, with its workers, for as long as a block lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, nullcontext
from copy import copy
from typing import Any

from eventjet.dev.stack import running_stack
from eventjet.jet import Jet, open_jet
from eventjet.projections.app_ref import Application
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.subscriptions.supervisor import chosen_of, run_workers


@asynccontextmanager
async def running(app: Application, *, postgres: bool = False, deps: Any = None) -> AsyncGenerator[Jet]:
    """An app on an embedded NATS server and a database, with workers of all that it declares; needs the extra `dev`.

    Nothing else uses these servers, and nothing of them outlives the block. The database is a SQLite file, or with
    `postgres` a PostgreSQL server; it is at `jet.settings.database`. What the app serves is served. `deps` stands in
    for what `App(deps=…)` opens, and without it that is opened. Raises `Unreachable` where a server does not start, and
    what ended the workers.

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
    """The same app, with something else for its reactors."""
    same: Any = copy(app)
    same.deps = lambda: nullcontext(deps)
    return same


@asynccontextmanager
async def _working(app: Application, settings: Settings) -> AsyncGenerator[None]:
    """Within the block workers run; raises what ended them, as soon as it begins or when it ends."""
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
