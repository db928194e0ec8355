"""The sources of pages: a connection to the server and sessions with the database, each opened when first needed.

A page waits two seconds for each of its parts, and then shows the other parts and says which source did not answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection
from starlette.exceptions import HTTPException

from eventjet.app import App
from eventjet.commands.repository import Repositories, open_repositories
from eventjet.errors import EventjetError, Unreachable
from eventjet.jet import Jet
from eventjet.jetstream.client import Client
from eventjet.operations.aggregates import TimeTravel
from eventjet.settings import Settings
from eventjet.sql.database import PAGE, Database
from eventjet.sql.dialect import READ_ONLY

T = TypeVar("T")

ANSWER_S = 2.0
"""Seconds that a page waits for one of its parts."""
_SESSIONS_MAX = 50
"""The most sessions with the database at once, including hung ones that no page waits for any more."""
_ABANDONED_MAX = 50
"""The most looks that have not ended and that no page waits for; at that number nothing new is asked."""


@dataclass(frozen=True, slots=True)
class Result(Generic[T]):
    """The result of a look: a value, or a fault as text."""

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
    """The connections of one console, shared by all requests of its loop and opened when first needed."""

    def __init__(self, app: App, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.database = Database(settings.database)
        self._engine = self.database.sync_engine("eventjet ui", PAGE, existing=True)
        self._sessions = threading.BoundedSemaphore(_SESSIONS_MAX)
        self._log: OpenLog | None = None
        self._opening = asyncio.Lock()
        self._ending = AsyncExitStack()
        self._abandoned: set[asyncio.Future[Any]] = set()

    async def close(self) -> None:
        """Close the connections; a later request opens them again."""
        for look in self._abandoned:
            look.cancel()
        self._log = None
        await self._ending.aclose()

    async def log(self) -> OpenLog:
        """Return the connection to the log, which reconnects by itself; raises `Unreachable`."""
        async with self._opening:
            if self._log is None:
                opened = await self._ending.enter_async_context(open_repositories(self.app, self.settings))
                repositories, client = opened
                jet = Jet(repositories, self.settings, client)
                self._ending.push_async_callback(jet.close)
                self._log = OpenLog(jet, repositories, client, TimeTravel(repositories, client))
        return self._log

    async def client(self) -> Client:
        """Return the connection to the server; raises `Unreachable`."""
        return (await self.log()).client

    async def ask(self, question: Callable[[Connection], T]) -> T:
        """Return the answer of a question to the database, asked over a read-only session; raises `Unreachable`.

        Each question has a thread and a session of its own, which are left alone when nobody waits for them any more: a
        hung session cannot be interrupted.
        """
        return await in_thread(partial(self._answer, question))

    def _answer(self, question: Callable[[Connection], T]) -> T:
        """Ask the question in this thread, which waits for the answer."""
        if not self._sessions.acquire(blocking=False):
            where = f"The database {self.database.shown}"
            raise Unreachable(where, f"{_SESSIONS_MAX} sessions wait for it already", "Look at source it is doing.")
        try:
            with self.database.reaching_sync(), self._engine.connect() as connection:
                return question(connection.execution_options(**{READ_ONLY: True}))
        finally:
            self._sessions.release()

    async def attempt(
        self,
        source: str,
        look: Coroutine[Any, Any, T],
        within_s: float = ANSWER_S,
        *,
        refusals: type[EventjetError] | tuple[()] = (),
    ) -> Result[T]:
        """Take a look; return its value, or a fault that begins with `source`. `refusals` become an HTTP 400."""
        try:
            return Result(await self.fetch(source, look, within_s))
        except refusals as error:
            raise HTTPException(400, str(error)) from None
        except (EventjetError, TimeoutError) as error:
            return Result(None, str(error) or f"{source} did not answer in time.")

    async def fetch(self, source: str, look: Coroutine[Any, Any, T], within_s: float = ANSWER_S) -> T:
        """Take a look; one that is late is cancelled, not waited for, and raises `TimeoutError` after `within_s`."""
        if len(self._abandoned) >= _ABANDONED_MAX:
            look.close()
            raise TimeoutError(f"{source} has not answered for a while, so it is not asked again yet.")
        task = asyncio.ensure_future(look)
        try:
            done, _ = await asyncio.wait({task}, timeout=within_s)
        except asyncio.CancelledError:
            self._abandon(task)
            raise
        if not done:
            self._abandon(task)
            raise TimeoutError(f"{source} did not answer within {within_s:g} s.")
        return task.result()

    def _abandon(self, look: asyncio.Task[Any]) -> None:
        look.cancel()
        self._abandoned.add(look)
        look.add_done_callback(self._ended)

    def _ended(self, look: asyncio.Future[Any]) -> None:
        self._abandoned.discard(look)
        if not look.cancelled():
            look.exception()


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread as `asyncio.to_thread` does, but the program's end does not wait for the thread."""
    result: Future[T] = Future()

    def run() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            outcome = partial(result.set_exception, error)
        else:
            outcome = partial(result.set_result, value)
        with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
            outcome()

    threading.Thread(target=run, name="eventjet ui look", daemon=True).start()
    return await asyncio.wrap_future(result)
