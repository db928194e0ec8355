"""What pages are made from: a connection to the server and one to the database, each opened when first asked for.

A page waits two seconds for any of it and then says what did not answer; the rest of the page is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from eventjet.app import App
from eventjet.errors import EventjetError, Unreachable
from eventjet.jet import Jet
from eventjet.nats.client import Client
from eventjet.operations.time_travel import TimeTravel
from eventjet.repository.repositories import Repositories, open_repositories
from eventjet.settings import Settings
from eventjet.sql.database import PAGE, READ_ONLY, Database

T = TypeVar("T")

ANSWER_S = 2.0
"""How long a page waits for one of its parts."""
_SESSIONS = 5
"""With the database at once."""
_USED_S = 20.0
"""So long at the most is waited for whoever uses a session of an engine that is to be closed."""
_ABANDONED_MAX = 50
"""Looks that a page no longer waits for and that have not ended; from here on nothing new is asked."""


@dataclass(frozen=True, slots=True)
class Seen(Generic[T]):
    """What a look came to: a value, or a fault in words."""

    value: T | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class OpenLog:
    """An open connection to the log."""

    jet: Jet
    repositories: Repositories
    client: Client
    travel: TimeTravel


class Sources:
    """Of one console, for any number of requests of one loop. Nothing is connected before it is asked for."""

    def __init__(self, app: App, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.database = Database(settings.database)
        self._engine: AsyncEngine | None = None
        self._log: OpenLog | None = None
        self._opening = asyncio.Lock()
        self._ending = AsyncExitStack()
        self._abandoned: set[asyncio.Future[Any]] = set()
        self._reading: set[asyncio.Task[Any] | None] = set()
        """Tasks that have a session with the database, or wait for one."""
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Let go of the connections; they are opened anew for whoever asks later."""
        for look in self._abandoned:
            look.cancel()
        self._log = None
        self._forget_engine()
        if self._closing:
            await asyncio.wait(self._closing, timeout=2 * ANSWER_S)
        await self._ending.aclose()

    async def log(self) -> OpenLog:
        """The connection to the log; raises `Unreachable`. Once it is open it opens itself anew whenever it is lost."""
        async with self._opening:
            if self._log is None:
                opened = await self._ending.enter_async_context(open_repositories(self.app, self.settings))
                repositories, client = opened
                jet = Jet(repositories, self.settings, client)
                self._ending.push_async_callback(jet.close)
                self._log = OpenLog(jet, repositories, client, TimeTravel(repositories, client))
        return self._log

    @asynccontextmanager
    async def rows(self) -> AsyncGenerator[AsyncConnection]:
        """A connection to the database that only reads; raises `Unreachable`."""
        if self._engine is None:
            self._engine = self.database.engine("eventjet ui", PAGE, pool_size=_SESSIONS)
        task = asyncio.current_task()
        self._reading.add(task)
        try:
            async with self.database.reaching(), self._engine.connect() as connection:
                await connection.execution_options(**{READ_ONLY: True})
                yield connection
        except Unreachable:
            self._forget_engine()
            raise
        finally:
            self._reading.discard(task)

    async def see(self, what: str, look: Callable[[], Coroutine[Any, Any, T]], within_s: float = ANSWER_S) -> Seen[T]:
        """What a look comes to, within its time; `what` is asked, as "The database", is said of one that did not."""
        try:
            return Seen(await self.seen(what, look, within_s))
        except (EventjetError, TimeoutError) as error:
            return Seen(None, str(error) or f"{what} did not answer in time.")

    async def seen(self, what: str, look: Callable[[], Coroutine[Any, Any, T]], within_s: float = ANSWER_S) -> T:
        """As `see`, where a fault is raised: `TimeoutError`, and what the look raises.

        Whatever is still going on then is left alone: an answer that never comes would keep the page, too.
        """
        if len(self._abandoned) >= _ABANDONED_MAX:
            raise TimeoutError(f"{what} has not answered for a while, so it is not asked again yet.")
        task = asyncio.ensure_future(look())
        try:
            done, _ = await asyncio.wait({task}, timeout=within_s)
        except asyncio.CancelledError:
            self._abandon(task)
            raise
        if not done:
            self._abandon(task)
            raise TimeoutError(f"{what} did not answer within {within_s:g} s.")
        return task.result()

    def _abandon(self, look: asyncio.Task[Any]) -> None:
        if look in self._reading:
            self._forget_engine()
        look.cancel()
        self._abandoned.add(look)
        look.add_done_callback(self._ended)

    def _ended(self, look: asyncio.Future[Any]) -> None:
        self._abandoned.discard(look)
        if not look.cancelled():
            look.exception()

    def _forget_engine(self) -> None:
        """The next page connects anew: sessions that hang are not handed on."""
        engine, self._engine = self._engine, None
        if engine is not None:
            closing = asyncio.create_task(_closed(engine, {task for task in self._reading if task is not None}))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


async def _closed(engine: AsyncEngine, users: set[asyncio.Task[Any]]) -> None:
    """Close its sessions once nobody uses one: one that came back later would stay open."""
    users.discard(cast("asyncio.Task[Any]", asyncio.current_task()))
    if users:
        await asyncio.wait(users, timeout=_USED_S)
    await engine.dispose()
