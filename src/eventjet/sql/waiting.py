"""`Waiting` lets tasks read their own writes: they wait until a projection reaches a position of the log.

One background task reads the checkpoints for all that wait, with one SQL query on one connection. It does so when a
task begins to wait, when a worker's notice says that a position was reached, and at intervals, since notices may be
lost. The position of the revision that has the declared table counts: while revision 2 builds beside it that is
revision 1, and after the change revision 2, so that both halves of a rolling deploy can read their writes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from sqlalchemy import case, false, select, true
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from eventjet.codec.subjects import notice_subject, read_notice
from eventjet.domain.position import FAILED, PAUSED, RETIRED
from eventjet.errors import NotCaughtUp, StoreError, Unreachable
from eventjet.errors.projection import ANOTHER_APP, ANOTHER_LOG, LOST_ROWS, NO_WORKER
from eventjet.nats.protocol import Frame
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql.database import Database
from eventjet.sql.own_tables import Clock, projections

FIRST_QUERY_S = 5.0
"""How long the first query may take, even with a shorter timeout; then the database counts as unreachable."""
_QUERY_MAX_S = 10.0
"""After this long a query is given up for another one, on a new connection."""
_SILENT_S = 2.0
"""If a query has taken longer than this when the timeout is over, the database counts as unreachable."""
_LAST_QUERY_S = 2.0
"""How long `close` waits for a query to end by itself."""
_POLL_S = (0.01, 0.2)
_STOPPED_STATES = (FAILED, PAUSED, RETIRED)
"""States in which the projection does not advance before a person acts."""

Listen = Callable[[str, Callable[[Frame], object]], Awaitable[object]]
"""Subscribes a callback to the messages of a subject; raises `StoreError`."""


@dataclass(frozen=True, slots=True)
class RevisionStatus:
    """The position and state of a revision of a projection, as its checkpoint has them."""

    revision: int
    position: int = 0
    state: str = ""
    reason: str | None = None
    location: str = ""
    log: str = ""
    """The identity of the log that it is made from; empty before its first event."""
    app: str = ""
    """The app that it belongs to; empty where that is not known yet."""
    has_worker: bool | None = None
    """Whether a worker has the lease; None if that is not known."""


def serving(statuses: Sequence[RevisionStatus], revision: int) -> RevisionStatus:
    """Return the revision that has the declared table, as seen by a process that declares `revision`."""
    declared = next((status for status in statuses if status.revision == revision), RevisionStatus(revision))
    if declared.state not in ("", RETIRED) and not declared.location:
        return declared
    candidates = [status for status in statuses if status.state != RETIRED and not status.location]
    return max(candidates, key=lambda status: status.revision, default=declared)


@dataclass(slots=True, eq=False)
class _Waiter:
    projection: str
    revision: int
    position: int
    timeout_s: float
    app: str
    log: str = ""
    """The identity of the log to which the position belongs; empty where that is not known."""
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Set when the position is reached, or cannot be reached."""
    began: float = field(default_factory=time.monotonic)
    status: RevisionStatus | None = None
    """The result of the last query that began after the waiter came; None before that."""

    def settle(self, statuses: Sequence[RevisionStatus]) -> None:
        self.status = status = serving(statuses, self.revision)
        if self.done.done():
            return
        if self.app and status.app not in ("", self.app):
            reason = f"in this database it belongs to the app {status.app!r}, and this is the app {self.app!r}"
            self.fail(self.late(ANOTHER_APP, reason))
        elif self.log and status.log not in ("", self.log):
            reason = f"its table is true for the log {status.log}, and the position is of the log {self.log}"
            self.fail(self.late(ANOTHER_LOG, reason))
        elif status.position >= self.position and LOST_ROWS not in (status.reason or ""):
            self.done.set_result(None)
        elif status.state in _STOPPED_STATES or time.monotonic() - self.began >= self.timeout_s:
            self.fail(self.late())

    def late(self, state: str = "", reason: str | None = None) -> NotCaughtUp:
        """Return the error for a position that is not reached, or cannot be in this `state`."""
        status = self.status or RevisionStatus(self.revision)
        state, reason = (state, reason) if state else (status.state, status.reason)
        if status.has_worker is False and state not in (*_STOPPED_STATES, ANOTHER_APP, ANOTHER_LOG):
            reason = reason or NO_WORKER
        return NotCaughtUp(self.projection, self.position, status.position, self.timeout_s, state, reason)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(slots=True)
class Waiting:
    """Waits for positions for the tasks of one event loop, and polls if it cannot `listen`; `close` it."""

    app: str
    query: Callable[[], Awaitable[Mapping[str, Sequence[RevisionStatus]]]]
    """Reads all checkpoints, by projection."""
    listen: Listen | None = None
    slow_s: float = 1.0
    """The interval of queries while there are notices: how long a lost notice may go unnoticed."""
    _waiters: set[_Waiter] = field(default_factory=set["_Waiter"])
    _subscribed: set[str] = field(default_factory=set[str])
    """Projections whose notices arrive."""
    _due: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None
    _began: float = 0.0
    """Since when queries have had no answer; 0 between queries."""
    _closed: bool = False

    async def caught_up(self, resolved: AnyResolved, position: int, timeout_s: float, log: str = "") -> None:
        """Wait until the declared table is valid up to `position`, of the log of the identity `log` if that is given.

        Raises `NotCaughtUp` after `timeout_s`, or at once where the projection failed, is paused or retired, or was
        made from another log; `Unreachable` when the database does not answer.
        """
        if self._closed:
            raise _closed()
        await self._subscribe(resolved.name)
        waiter = _Waiter(resolved.name, resolved.revision, position, timeout_s, resolved.app, log)
        self._waiters.add(waiter)
        self._due.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"eventjet caught_up {self.app}")
        try:
            await self._wait(waiter)
        finally:
            self._waiters.discard(waiter)
            if not waiter.done.cancel():
                waiter.done.exception()  # retrieved, so that asyncio does not log it if this task was just cancelled

    async def close(self) -> None:
        """Stop; tasks that still wait get `Unreachable`."""
        self._closed = True
        for waiter in self._waiters:
            waiter.fail(_closed())
        self._waiters = set()
        self._due.set()
        task, self._task = self._task, None
        if task is not None:
            # A query that is cancelled while it connects leaves a connection that nobody closes.
            try:
                await asyncio.wait({task}, timeout=_LAST_QUERY_S)
            except asyncio.CancelledError:
                await asyncio.wait({task}, timeout=_LAST_QUERY_S)
                raise
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _wait(self, waiter: _Waiter) -> None:
        await asyncio.wait({waiter.done}, timeout=max(0.0, waiter.timeout_s))
        if waiter.status is None:
            # The first query decides, as the timeout may be shorter than it takes.
            await asyncio.wait({waiter.done}, timeout=waiter.began + FIRST_QUERY_S - time.monotonic())
        if waiter.done.done():
            return waiter.done.result()
        silent_s = time.monotonic() - (self._began or waiter.began)
        if waiter.status is None or (self._began and silent_s > _SILENT_S):
            raise _silent(silent_s)
        raise waiter.late()

    async def _subscribe(self, projection: str) -> None:
        if self.listen is None or projection in self._subscribed:
            return
        self._subscribed.add(projection)
        try:
            await self.listen(notice_subject(self.app, projection), lambda frame: self._notice(projection, frame[4]))
        except StoreError:
            self._subscribed.discard(projection)  # the queries at intervals serve meanwhile

    def _notice(self, projection: str, payload: bytes) -> None:
        """Query soon if a task waits for this position. A task whose revision is not known yet waits for any."""
        notice = read_notice(payload)
        if notice is not None and any(
            waiter.projection == projection
            and waiter.position <= notice[1]
            and (waiter.status is None or waiter.status.revision == notice[0])
            for waiter in self._waiters
        ):
            self._due.set()

    async def _run(self) -> None:
        pause_s = _POLL_S[0]
        while self._waiters:
            self._due.clear()
            await self._query(list(self._waiters))
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s if self.listen is None else self.slow_s):
                    if self._waiters:
                        await self._due.wait()
            pause_s = min(pause_s * 1.5, _POLL_S[1])

    async def _query(self, waiters: Sequence[_Waiter]) -> None:
        """Query once for these waiters; a waiter who comes meanwhile causes another query."""
        self._began = self._began or time.monotonic()
        try:
            async with asyncio.timeout(_QUERY_MAX_S):
                statuses = await self.query()
        except TimeoutError:
            return  # its connection may be dead, and the next query opens another; who waits says so in the end
        except Exception as error:  # noqa: BLE001 - each of those who wait raises it
            for waiter in waiters:
                waiter.fail(_copied(error))
        else:
            for waiter in waiters:
                waiter.settle(statuses.get(waiter.projection, ()))
        self._began = 0.0
        self._waiters = {waiter for waiter in self._waiters if not waiter.done.done()}


@dataclass(slots=True)
class Checkpoints:
    """Reads the checkpoints on one connection, opened when it is first needed; `close` it."""

    url: str
    _engine: AsyncEngine | None = None

    async def __call__(self) -> Mapping[str, Sequence[RevisionStatus]]:
        """Read all checkpoints, by projection; raises `Unreachable`. A connection that broke is replaced once."""
        database = Database(self.url)
        async with database.reaching():
            try:
                return await self._read(database)
            except (OperationalError, InterfaceError):
                await self.close()
                return await self._read(database)

    async def close(self) -> None:
        """Close the connection; the next query opens another."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.dispose()

    async def _read(self, database: Database) -> Mapping[str, Sequence[RevisionStatus]]:
        if self._engine is None:
            engine = database.engine("eventjet caught_up", existing=True)
            self._engine = engine.execution_options(**database.dialect.look_options)
        statuses: dict[str, list[RevisionStatus]] = {}
        async with self._engine.connect() as connection:
            for name, *columns in await connection.execute(_QUERY):
                statuses.setdefault(name, []).append(RevisionStatus(*columns))
        return statuses


_QUERY = select(
    *projections.c["name", "revision", "position", "state", "reason", "location", "log", "app"],
    case((projections.c.owner.is_not(None) & (projections.c.lease_until >= Clock()), true()), else_=false()),
)


def _copied(error: Exception) -> Exception:
    """Return an error of each waiter's own where possible, since a traceback belongs to one task."""
    if isinstance(error, Unreachable):
        return Unreachable(error.component, error.reason, error.remedy)
    return error


def _silent(seconds: float) -> Unreachable:
    return Unreachable("The database", f"it has not answered for {seconds:.1f} s", "Look at what it is doing.")


def _closed() -> Unreachable:
    return Unreachable("The connection", "it is closed", "Wait within the block of `connect`.")
