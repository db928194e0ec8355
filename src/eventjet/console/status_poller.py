"""`StatusPoller`: the status of the log and of its subscriptions, polled once for all open pages.

Database, log and subscriptions are polled separately, so that each shows while another is unavailable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from eventjet.console.sources import ANSWER_S, Sources, in_thread
from eventjet.doctor.report import Installation, Report
from eventjet.doctor.server import check_monitoring, greetings
from eventjet.errors import EventjetError
from eventjet.findings import Finding
from eventjet.nats.endpoint import Endpoint
from eventjet.operations.log import DeadlineCounts, LogStatus, StatusReader, deadline_counts, log_now
from eventjet.runtime import called
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.status import (
    SeenCheckpoints,
    SeenLog,
    StatusSnapshot,
    WorkStatus,
    checkpoints_of,
    paced,
    see_checkpoints,
    statuses_of,
)

_EVERY_S = 0.4
_ANSWER_S = 1.2
"""Seconds that one look may take; with the pause before it, a fault shows within two seconds."""
_TIMERS_S = 5.0
_MONITORING_S = 30.0
"""Seconds between two requests to the servers' monitoring endpoints."""
KEPT_S = 120.0
_IDLE_S = 60.0
"""Seconds after the last request for a page until polling stops."""
_PACE_S = 10.0


@dataclass(slots=True)
class PolledStatus:
    """The newest known status, and for each of its parts the reason why nothing newer is known."""

    statuses: list[WorkStatus] = field(default_factory=list[WorkStatus])
    """Status of the projections, then of reactors, processes, publications and inboxes."""
    seen_s: float | None = None
    """Age of `statuses` in seconds; None before the first look."""
    is_log_known: bool = False
    """Whether `statuses` contain lag and the log's last position; otherwise both are zero."""
    log: LogStatus | None = None
    log_seen_s: float | None = None
    events_per_s: float | None = None
    """Events appended to the log per second; None before the second look."""
    deadlines: list[DeadlineCounts] = field(default_factory=list[DeadlineCounts])
    durability: list[Finding] = field(default_factory=list[Finding])
    log_fault: str = ""
    database_fault: str = ""
    following_fault: str = ""
    """Why the lag of projections, reactors and the like is not known."""
    deadlines_fault: str = ""

    @property
    def fault(self) -> str:
        """All reasons, without repetition."""
        return " ".join(dict.fromkeys(filter(None, (self.log_fault, self.database_fault, self.following_fault))))


@dataclass(frozen=True, slots=True)
class _SubscriptionStatus:
    """The status of all subscriptions after one look at the log with these checkpoints."""

    at: float
    checkpoints: SeenCheckpoints
    log: SeenLog
    followers: list[WorkStatus]


class StatusPoller:
    """The poller of one console, which runs from the first request for a page until a minute after the last."""

    def __init__(self, sources: Sources, monitoring: Sequence[str] = ()) -> None:
        """Prepare a poller; `monitoring` are checked URLs of the servers' monitoring endpoints."""
        self.monitoring = tuple(monitoring)
        # Separate connections, since pages give up theirs whenever a look takes too long.
        self._sources = Sources(sources.app, sources.settings)
        self._app = sources.app
        self._declared = {(projection.name, projection.revision) for projection in self._app.projections.values()}
        self._declarations = declarations_of(self._app)
        self._following = StatusReader(self._app, sources.settings, _ANSWER_S)
        self._asked = 0.0
        self._seen: deque[StatusSnapshot] = deque()
        self._ends: deque[tuple[float, int]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._checkpoints = Poll("The database", self._look_at_database, _EVERY_S)
        self._log = Poll("The NATS server", self._look_at_log, _EVERY_S)
        self._subscriptions = Poll("The NATS server", self._look_at_subscriptions, _EVERY_S)
        self._deadlines = Poll("The NATS server", self._look_at_deadlines, _TIMERS_S)
        self._durability = Poll("A monitoring endpoint", self._look_at_monitoring, _MONITORING_S)

    async def polled(self) -> PolledStatus:
        """Return the known status; the first page waits at most two seconds for the first looks."""
        self._asked = time.monotonic()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        first = asyncio.gather(*(poll.first.wait() for poll in (self._checkpoints, self._log, self._subscriptions)))
        await asyncio.wait({first}, timeout=ANSWER_S)
        first.cancel()
        statuses, seen_s, is_log_known = self._statuses()
        return PolledStatus(
            statuses=statuses,
            seen_s=seen_s,
            is_log_known=is_log_known,
            log=self._log.value,
            log_seen_s=self._log.seen_s,
            events_per_s=self._rate(),
            deadlines=self._deadlines.value or [],
            durability=self._durability.value or [],
            log_fault=self._log.fault,
            database_fault=self._checkpoints.fault if self._declared else "",
            following_fault=self._subscriptions.fault,
            deadlines_fault=self._deadlines.fault,
        )

    def positions(self, name: str, revision: int) -> list[tuple[float, int, int]]:
        """Return (seconds before now, position, the log's last position) for the last two minutes, oldest first."""
        now = time.monotonic()
        return [
            (now - snapshot.at, status.position, status.log_position)
            for snapshot in self._seen
            for status in snapshot.projections
            if (status.name, status.revision) == (name, revision)
        ]

    async def close(self) -> None:
        """Stop polling and close the connections."""
        self._following.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=2 * ANSWER_S)

    def _statuses(self) -> tuple[list[WorkStatus], float | None, bool]:
        """Return (statuses, their age, whether lag is known in them)."""
        followed, checkpoints = self._subscriptions.value, self._checkpoints.value
        if followed is not None and not self._subscriptions.fault:
            last = self._seen[-1]
            before = next((snapshot for snapshot in self._seen if snapshot.at >= last.at - _PACE_S), last)
            ages = [age for age in (self._subscriptions.seen_s, self._checkpoints.seen_s) if age is not None]
            return paced(before, last), max(ages), True
        if checkpoints is None:
            return [], None, False
        # Without the server, what the database says is still true.
        return statuses_of(checkpoints, self._declared, SeenLog()), self._checkpoints.seen_s, False

    def _rate(self) -> float | None:
        if len(self._ends) < 2 or self._log.fault:
            return None
        (began, first), (ended, last) = self._ends[0], self._ends[-1]
        return max(0, last - first) / (ended - began)

    async def _run(self) -> None:
        polls: list[Poll[Any]] = [self._checkpoints, self._log, self._subscriptions, self._durability]
        if any(process.has_deadlines for process in self._app.processes.values()):
            polls.append(self._deadlines)
        running = [asyncio.create_task(poll.run()) for poll in polls]
        try:
            while time.monotonic() - self._asked < _IDLE_S:  # noqa: ASYNC110 - pages only leave a time
                await asyncio.sleep(_EVERY_S)
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=ANSWER_S)
            await self._sources.close()

    async def _look_at_database(self) -> SeenCheckpoints:
        if not self._declared:
            return SeenCheckpoints([], {})

        async def look() -> SeenCheckpoints:
            app, declared = self._app.name, self._declared
            return await self._sources.ask(lambda connection: see_checkpoints(connection, app, declared))

        return await self._sources.seen("The database", look, _ANSWER_S)

    async def _look_at_log(self) -> LogStatus:
        async def look() -> LogStatus:
            client = (await self._sources.log()).client
            return await log_now(client, self._app.name, self._log.value, _ANSWER_S)

        status = await self._sources.seen("The NATS server", look, _ANSWER_S)
        now = time.monotonic()
        if self._ends and (self._ends[-1][1] > status.last or now - self._ends[-1][0] > _PACE_S):
            self._ends.clear()  # another log, or a long time without looks: no rate is measured across that
        self._ends.append((now, status.last))
        while self._ends[0][0] < now - _PACE_S:
            self._ends.popleft()
        return status

    async def _look_at_subscriptions(self) -> _SubscriptionStatus:
        await self._checkpoints.first.wait()
        checkpoints = self._checkpoints.value or SeenCheckpoints([], {})
        declared = self._declared if self._checkpoints.value is not None else set[tuple[str, int]]()
        all_checkpoints = checkpoints_of(checkpoints, declared)
        log, followers = await in_thread(lambda: self._following.look(all_checkpoints))
        status = _SubscriptionStatus(time.monotonic(), checkpoints, log, followers)
        statuses = [*statuses_of(checkpoints, declared, log), *followers]
        self._seen.append(StatusSnapshot(status.at, statuses))
        while self._seen[0].at < status.at - KEPT_S:
            self._seen.popleft()
        return status

    async def _look_at_deadlines(self) -> list[DeadlineCounts]:
        async def look() -> list[DeadlineCounts]:
            return await deadline_counts((await self._sources.log()).client, self._app)

        return await self._sources.seen("The NATS server", look)

    async def _look_at_monitoring(self) -> list[Finding]:
        """Check the monitoring endpoints as `eventjet doctor` does, and return the findings."""
        settings, report = self._sources.settings, Report("monitoring")
        installation = Installation(self._app, settings, self.monitoring, 2 * ANSWER_S, time.time)
        if self.monitoring:
            await in_thread(
                lambda: check_monitoring(installation, report, lambda: greetings(Endpoint.of(settings), ANSWER_S))
            )
        return report.found


T = TypeVar("T")

SLOW_S = 1.3
"""Seconds after which a look without an answer is reported as slow."""
_LOG = logging.getLogger("eventjet.console")


class Poll(Generic[T]):
    """A repeated look at one source, which goes on after any error."""

    def __init__(self, what: str, look: Callable[[], Coroutine[Any, Any, T]], every_s: float) -> None:
        """Prepare a poll; `what` names the source in messages, such as "The NATS server"."""
        self.value: T | None = None
        """The value of the last successful look, kept after faults."""
        self.first = asyncio.Event()
        """Set when the first look has ended, with a value or a fault."""
        self._what = what
        self._look = look
        self._every_s = every_s
        self._fault = ""
        self._seen_at: float | None = None
        self._began: float | None = None
        self._next = 0.0

    @property
    def fault(self) -> str:
        """Why there is no new value; empty without a fault."""
        slow_s = 0.0 if self._began is None else time.monotonic() - self._began
        if not self._fault and slow_s > SLOW_S:
            return f"{self._what} has not answered for {slow_s:.0f} s."
        return self._fault

    @property
    def seen_s(self) -> float | None:
        """Age of the value in seconds; None while there is no value."""
        return None if self._seen_at is None else time.monotonic() - self._seen_at

    async def run(self) -> None:
        """Look for ever, at most once in `every_s` seconds."""
        while True:
            await asyncio.sleep(max(0.0, self._next - time.monotonic()))
            self._began = time.monotonic()
            self._next = self._began + self._every_s
            try:
                self.value = await called(self._look(), "A look")
            except (EventjetError, TimeoutError) as error:
                self._fault = str(error) or f"{self._what} did not answer in time."
            except Exception as error:  # noqa: BLE001 - told, and the next look is taken all the same
                _LOG.exception("a look of the console failed")
                self._fault = f"This is a fault of eventjet's own ({type(error).__name__}); see the console's log."
            else:
                self._fault = ""
                self._seen_at = time.monotonic()
            finally:
                self._began = None
            self.first.set()
