"""`StatusPoller`: the status of the log and of its subscriptions, looked at once for all open pages.

Database, log and subscriptions are looked at separately, so that each shows while another is unavailable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from eventjet.console.sources import ANSWER_S, Sources, in_thread
from eventjet.doctor.report import Installation, Report
from eventjet.doctor.server import check_monitoring, greetings
from eventjet.errors import EventjetError, StoreUnavailable
from eventjet.findings import Finding
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.operations.log import LogStatus, log_now
from eventjet.operations.processes import Deadlines, deadlines_by_process
from eventjet.runtime import called
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.status import (
    CheckpointSnapshot,
    LogSnapshot,
    look_at_followers,
    look_at_projections,
    read_checkpoints,
    statuses_of,
)
from eventjet.subscriptions.work_status import PROJECTION, StatusHistory, StatusSnapshot, WorkStatus

T = TypeVar("T")

_EVERY_S = 0.4
_ANSWER_S = 1.2
"""Seconds that one look may take; with the pause before it, a fault shows within two seconds."""
_OLD_S = 5.0
_FRESH_S = 1.0
"""Age in seconds up to which a value is shown without waiting for the look that is under way."""
SLOW_S = 1.3
"""Seconds after which a look without an answer is reported as slow, and no page waits for it."""
_DEADLINES_S = 5.0
_MONITORING_S = 30.0
"""Seconds between two requests to the servers' monitoring endpoints."""
HISTORY_S = 120.0
_PACE_S = 10.0
_LOG = logging.getLogger("eventjet.console")


class Poll(Generic[T]):
    """A look at one source that pages share: taken when one of them asks, at most once in `every_s` seconds."""

    def __init__(self, source: str, look: Callable[[], Coroutine[Any, Any, T]], every_s: float) -> None:
        """Prepare a poll; `source` is its name in messages, such as "The NATS server"."""
        self.value: T | None = None
        """The value of the last successful look, kept after faults."""
        self.first = asyncio.Event()
        """Set when the first look has ended, with a value or a fault."""
        self._source = source
        self._look = look
        self._every_s = every_s
        self._fault = ""
        self._read_at: float | None = None
        self._began = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def fault(self) -> str:
        """Why there is no new value; empty without a fault."""
        slow_s = time.monotonic() - self._began if self._task is not None and not self._task.done() else 0.0
        if not self._fault and slow_s > SLOW_S:
            return f"{self._source} has not answered for {slow_s:.0f} s."
        return self._fault

    @property
    def age_s(self) -> float | None:
        """Age of the value in seconds; None while there is no value."""
        return None if self._read_at is None else time.monotonic() - self._read_at

    def begin(self) -> None:
        """Begin a look, unless one is under way or the last one began a moment ago."""
        now = time.monotonic()
        if self._task is None or (self._task.done() and now - self._began >= self._every_s):
            self._began = now
            self._task = asyncio.create_task(self._run())

    async def refresh(self) -> None:
        """Begin a look as `begin` does; where the value is old, wait for the look until it counts as slow."""
        self.begin()
        if self._task is not None and (self._fault or self.age_s is None or self.age_s > _FRESH_S):
            await asyncio.wait({self._task}, timeout=max(0.0, self._began + SLOW_S - time.monotonic()))

    def cancel(self) -> None:
        """Cancel the look that is under way."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            self.value = await called(self._look(), "A look")
        except (EventjetError, TimeoutError) as error:
            self._fault = str(error) or f"{self._source} did not answer in time."
        except Exception as error:  # noqa: BLE001 - reported, and the next look is taken all the same
            _LOG.exception("a look of the console failed")
            self._fault = f"This is a fault of eventjet's own ({type(error).__name__}); see the console's log."
        else:
            self._fault = ""
            self._read_at = time.monotonic()
        self.first.set()


class StatusPoller:
    """The newest known status of one console's app; each part has its value, its age and why nothing newer is known."""

    def __init__(self, sources: Sources, monitoring: Sequence[str]) -> None:
        """Prepare a poller; `monitoring` are checked URLs of the servers' monitoring endpoints."""
        self.monitoring = tuple(monitoring)
        self.statuses: list[WorkStatus] = []
        """Status of the projections, then of reactors, processes, publications and inboxes."""
        self.age_s: float | None = None
        """Age of `statuses` in seconds; None before the first look."""
        self.has_lag = False
        """Whether `statuses` contain lag and the log's last position; otherwise both are zero."""
        self.database = Poll("The database", self._look_at_database, _EVERY_S)
        self.log = Poll("The NATS server", self._look_at_log, _EVERY_S)
        self.subscriptions = Poll("The NATS server", self._look_at_subscriptions, _EVERY_S)
        self.deadlines = Poll("The NATS server", self._look_at_deadlines, _DEADLINES_S)
        self.durability = Poll("A monitoring endpoint", self._look_at_monitoring, _MONITORING_S)
        # Separate connections, since pages give up theirs whenever a look takes too long.
        self._sources = Sources(sources.app, sources.settings)
        self._app = sources.app
        self._declared = {(projection.name, projection.revision) for projection in self._app.projections.values()}
        self._declarations = declarations_of(self._app)
        self._endpoint = Endpoint.of(sources.settings).with_name("eventjet ui")
        self._connection: NatsConnection | None = None
        self._is_closed = False
        self.history = StatusHistory(HISTORY_S)
        self._ends: deque[tuple[float, int]] = deque()

    async def refreshed(self) -> StatusPoller:
        """Return this poller with the status as of now; a page waits at most two seconds for looks that are slow."""
        self.durability.begin()
        if any(process.has_deadlines for process in self._app.processes.values()):
            self.deadlines.begin()
        await asyncio.gather(self.database.refresh(), self.log.refresh(), self.subscriptions.refresh())
        last = self.history.last
        # A snapshot from before the first look at the database says nothing of read models.
        has_read_models = last is not None and any(status.kind == PROJECTION for status in last.projections)
        is_whole = has_read_models or not self._declared or self.database.value is None
        if last is not None and is_whole and not self.subscriptions.fault:
            ages = [age for age in (self.subscriptions.age_s, self.database.age_s) if age is not None]
            self.statuses, self.age_s, self.has_lag = self.history.statuses(), max(ages), True
        elif self.database.value is not None:
            # Without the server, what the database says is still true.
            self.statuses = statuses_of(self.database.value, LogSnapshot())
            self.age_s, self.has_lag = self.database.age_s, False
        return self

    @property
    def is_old(self) -> bool:
        """Whether `statuses` are so old that they say nothing of now."""
        return self.age_s is not None and self.age_s > _OLD_S

    @property
    def fault(self) -> str:
        """Why nothing newer is known of log, database and subscriptions, without repetition."""
        return " ".join(dict.fromkeys(filter(None, (self.log.fault, self.database.fault, self.subscriptions.fault))))

    @property
    def events_per_s(self) -> float | None:
        """Events appended to the log per second; None before the second look."""
        if len(self._ends) < 2 or self.log.fault:
            return None
        (began, first), (ended, last) = self._ends[0], self._ends[-1]
        return max(0, last - first) / (ended - began)

    async def close(self) -> None:
        """Cancel the looks that are under way and close the connections."""
        self._is_closed = True
        self._disconnect()
        for poll in (self.database, self.log, self.subscriptions, self.deadlines, self.durability):
            poll.cancel()
        await self._sources.close()

    async def _look_at_database(self) -> CheckpointSnapshot:
        if not self._declared:
            return CheckpointSnapshot()
        app, declared = self._app.name, self._declared
        look = self._sources.ask(lambda connection: read_checkpoints(connection, app, declared))
        return await self._sources.fetch("The database", look, _ANSWER_S)

    async def _look_at_log(self) -> LogStatus:
        async def look() -> LogStatus:
            return await log_now(await self._sources.client(), self._app.name, self.log.value, _ANSWER_S)

        status = await self._sources.fetch("The NATS server", look(), _ANSWER_S)
        now = time.monotonic()
        if self._ends and (self._ends[-1][1] > status.last or now - self._ends[-1][0] > _PACE_S):
            self._ends.clear()  # another log, or a long time without looks: no rate is measured across that
        self._ends.append((now, status.last))
        while self._ends[0][0] < now - _PACE_S:
            self._ends.popleft()
        return status

    async def _look_at_subscriptions(self) -> None:
        await self.database.first.wait()
        checkpoints = self.database.value or CheckpointSnapshot()
        statuses = await in_thread(lambda: self._look_at_server(checkpoints))
        self.history.add(StatusSnapshot(time.monotonic(), statuses))

    def _look_at_server(self, checkpoints: CheckpointSnapshot) -> list[WorkStatus]:
        """Return the statuses for these checkpoints and of each cursor; reconnects after an error."""
        try:
            if self._connection is None:
                self._connection = NatsConnection.open(self._endpoint, timeout_s=_ANSWER_S)
            if self._is_closed:
                raise StoreUnavailable("The log", "the console has ended")
            statuses, last = look_at_projections(self._connection, self._app.name, checkpoints)
            return [*statuses, *look_at_followers(self._connection, self._app, self._declarations, last)]
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _look_at_deadlines(self) -> dict[str, Deadlines]:
        async def look() -> dict[str, Deadlines]:
            return await deadlines_by_process(await self._sources.client(), self._app)

        return await self._sources.fetch("The NATS server", look())

    async def _look_at_monitoring(self) -> list[Finding]:
        """Check the monitoring endpoints as `eventjet doctor` does, and return the findings."""
        settings, report = self._sources.settings, Report("monitoring")
        installation = Installation(self._app, settings, self.monitoring, 2 * ANSWER_S, time.time)
        if self.monitoring:
            await in_thread(
                lambda: check_monitoring(installation, report, lambda: greetings(Endpoint.of(settings), ANSWER_S))
            )
        return report.findings
