"""Health and metrics of a worker process, served as `/healthz` and `/metrics` by threads of their own.

`HealthState` is pure: it judges successive snapshots of the status. `HealthMonitor` takes the snapshots and is read by
any thread. `serving` answers requests with the standard library's server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from eventjet.domain.position import FAILED, PAUSED, RETIRED, STATES
from eventjet.errors import EventjetError, Unreachable, UsageError
from eventjet.observability import logs, metrics
from eventjet.observability.metrics import CONTENT_TYPE, Sample, exposition
from eventjet.runtime import called
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.cursor_session import ReactionSubscription
from eventjet.subscriptions.projection_session import ProjectionSubscription
from eventjet.subscriptions.retry import pause
from eventjet.subscriptions.status import StatusReader
from eventjet.subscriptions.work_status import PROJECTION, WorkStatus

_log = logging.getLogger(__name__)

_LOOK_MAX_S = 20.0
_REQUESTS_MAX = 16
"""Requests answered at once; connections beyond that are closed."""
_REQUEST_S = 5.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """The answer of `/healthz`."""

    healthy: bool
    reason: str | None
    """Why the process is not healthy: the first of the reasons; None when it is healthy."""
    projections: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Subscription:
    status: WorkStatus
    """Its status in the last snapshot."""
    moved_at: float
    """When the subscription last moved or had nothing to do, by the monotonic clock."""


@dataclass(frozen=True, slots=True)
class HealthState:
    """The health after the snapshots so far; each snapshot gives a new value, so that any thread may read the last."""

    owner: str
    """Name of this process in leases."""
    stalled_s: float
    began_at: float
    looked_at: float | None = None
    fault: str | None = None
    """Why the last snapshot failed; None when it succeeded."""
    subscriptions: Mapping[tuple[str, int], _Subscription] = field(default_factory=dict[tuple[str, int], _Subscription])
    """The subscriptions in the last snapshot, by name and revision."""

    def after(self, now: float, statuses: Sequence[WorkStatus]) -> HealthState:
        """Return the health after a snapshot that succeeded."""
        subscriptions: dict[tuple[str, int], _Subscription] = {}
        for status in statuses:
            key = status.name, status.revision
            previous = self.subscriptions.get(key)
            moved_at = now
            if previous is not None and previous.status.position == status.position and self._has_to_move(status):
                moved_at = previous.moved_at
            subscriptions[key] = _Subscription(status, moved_at)
        return replace(self, looked_at=now, fault=None, subscriptions=subscriptions)

    def without(self, fault: str) -> HealthState:
        """Return the health after a snapshot that failed."""
        return replace(self, fault=fault)

    def status(self, now: float) -> HealthStatus:
        """Judge the process: unhealthy if a subscription failed or stands still, or while nothing can be looked at."""
        judged = [self._judge(subscription, now) for subscription in self.subscriptions.values()]
        reasons = [f"{projection['name']}: {projection['fault']}" for projection in judged if projection["fault"]]
        silent_s = now - (self.began_at if self.looked_at is None else self.looked_at)
        if silent_s > self.stalled_s:
            reasons.insert(0, f"nothing could be looked at for {silent_s:.0f} s: {self.fault or 'the process hangs'}")
        elif self.looked_at is None:
            reasons.insert(0, self.fault or "starting")
        return HealthStatus(not reasons, reasons[0] if reasons else None, judged)

    def samples(self, now: float) -> list[Sample]:
        """Return the gauges of the last snapshot."""
        samples: list[Sample] = [(metrics.HEALTHY, (), int(self.status(now).healthy))]
        if self.looked_at is not None:
            samples.append((metrics.LOOK_AGE, (), now - self.looked_at))
        statuses = [subscription.status for subscription in self.subscriptions.values()]
        for status in statuses:
            samples += _gauges(status, self.owner)
        if statuses:
            samples.append((metrics.LOG_POSITION, (), max(status.log_position for status in statuses)))
        return samples

    def _judge(self, subscription: _Subscription, now: float) -> dict[str, Any]:
        status, stood_s = subscription.status, now - subscription.moved_at
        fault: str | None = None
        if status.state == FAILED:
            fault = f"failed: {status.reason or 'without a reason'}"
        elif self._has_to_move(status) and stood_s > self.stalled_s:
            fault = status.reason
            if status.lag_events:
                fault = f"{status.lag_events} events behind at position {status.position} without progress for "
                fault += f"{stood_s:.0f} s" + (f": {status.reason}" if status.reason else "")
        return {
            "name": status.name,
            "revision": status.revision,
            "state": status.state,
            "held": status.owner == self.owner,
            "position": status.position,
            "lag_events": status.lag_events,
            "lag_s": status.lag_s,
            "fault": fault,
        }

    def _has_to_move(self, status: WorkStatus) -> bool:
        """Return whether a subscription lags or waits, is neither paused nor retired, and no other worker has it."""
        is_ours = status.state not in (PAUSED, RETIRED) and status.owner in (None, self.owner)
        return is_ours and (status.lag_events > 0 or bool(status.reason))


def _gauges(status: WorkStatus, owner: str) -> list[Sample]:
    if status.kind != PROJECTION:
        follower = (status.name, status.kind)
        return [
            (metrics.FOLLOWER_POSITION, follower, status.position),
            (metrics.FOLLOWER_LAG, follower, status.lag_events),
            (metrics.FOLLOWER_QUARANTINED, follower, status.quarantined),
            (metrics.HAS_CURSOR, follower, int(status.owner == owner)),
        ]
    labels = (status.name, str(status.revision))
    gauges: list[Sample] = [
        (metrics.POSITION, labels, status.position),
        (metrics.LAG_EVENTS, labels, status.lag_events),
        (metrics.QUARANTINED, labels, status.quarantined),
        (metrics.HAS_LEASE, labels, int(status.owner == owner)),
        *((metrics.STATE, (*labels, state), int(status.state == state)) for state in STATES),
    ]
    return gauges if status.lag_s is None else [*gauges, (metrics.LAG_SECONDS, labels, status.lag_s)]


class HealthMonitor:
    """Health and metrics of one worker, which is unhealthy after `stalled_s` without a look, as when it hangs."""

    def __init__(
        self,
        reader: StatusReader,
        owner: str,
        options: WorkerOptions,
        subscriptions: Collection[ProjectionSubscription | ReactionSubscription],
    ) -> None:
        """Create the monitor of the subscriptions that this process runs."""
        self._reader = reader
        self._options = options
        self._subscriptions = {subscription.name: subscription for subscription in subscriptions}
        self._state = HealthState(owner, options.stalled_s, time.monotonic())

    def status(self) -> HealthStatus:
        """Return the health now; may be called by any thread."""
        return self._state.status(time.monotonic())

    def metrics(self) -> str:
        """Return all metrics in the format of `/metrics`; may be called by any thread."""
        meters = [subscription.meter for subscription in self._subscriptions.values()]
        return exposition(self._state.samples(time.monotonic()), meters)

    async def keep(self, stop: asyncio.Event) -> None:
        """Take a snapshot every `look_s` until `stop`; an error is noted in the health, and the next one follows."""
        async with self._reader:
            while not stop.is_set():
                try:
                    async with asyncio.timeout(_LOOK_MAX_S):
                        snapshot = await called(self._reader.read(), "A look")
                    declared = [status for status in snapshot.projections if status.declared]
                    statuses = [self._with_reason(status) for status in declared if status.name in self._subscriptions]
                    self._state = self._state.after(time.monotonic(), statuses)
                except Exception as error:  # noqa: BLE001 - health tells of it, whatever it is
                    self._state = self._state.without(
                        str(error) if isinstance(error, EventjetError) else type(error).__name__
                    )
                await pause(stop, self._options.look_s)

    def _with_reason(self, status: WorkStatus) -> WorkStatus:
        """Return the status with this process's own reason to wait where none is stored, as in a full database."""
        return status if status.reason else replace(status, reason=self._subscriptions[status.name].backoff.waits)


def address_of(text: str) -> tuple[str, int]:
    """Return the host and port of `HOST:PORT`; raises `UsageError` for any other text."""
    host, separator, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise UsageError(f"{text!r} is not an address to listen at. Write HOST:PORT, for instance 127.0.0.1:8080.")
    return host, int(port)


@asynccontextmanager
async def serving(address: tuple[str, int], monitor: HealthMonitor) -> AsyncGenerator[tuple[str, int]]:
    """Answer requests at an address within the block, and yield it with its real port; raises `Unreachable`."""
    host, port = address
    try:
        resolved = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, socket_address = resolved[0]
        # In this thread: if another one made it for a task that is cancelled, nobody would close it.
        server = _Server(socket_address, family, monitor)
    except OSError as error:
        reason = f"nothing can listen there ({error.strerror or error})"
        remedy = "Choose another with --http HOST:PORT, or end what listens there."
        raise Unreachable(f"The address {host}:{port}", reason, remedy) from None
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="eventjet http", daemon=True)
    thread.start()
    try:
        bound_host, bound_port = server.server_address[:2]
        display_host = f"[{bound_host!s}]" if server.address_family == socket.AF_INET6 else str(bound_host)
        logs.HTTP.log(_log, address=f"{display_host}:{bound_port}")
        yield str(bound_host), bound_port
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: Any, family: int, monitor: HealthMonitor) -> None:
        self.address_family = family
        self.monitor = monitor
        self._room = threading.BoundedSemaphore(_REQUESTS_MAX)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # skips HTTPServer's, which asks DNS for a name that is not needed
        self.server_name, self.server_port = "eventjet", int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  as it is called
        logs.REQUEST_BROKE_OFF.log(_log, client=client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server_version = "eventjet"
    sys_version = ""
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]  the one that made it

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            status = self.server.monitor.status()
            self._answer(200 if status.healthy else 503, "application/json", json.dumps(asdict(status)) + "\n")
        elif path == "/metrics":
            self._answer(200, CONTENT_TYPE, self.server.monitor.metrics())
        else:
            self._answer(404, "text/plain; charset=utf-8", "There are /healthz and /metrics.\n")

    do_HEAD = do_GET  # noqa: N815  the name the server calls

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  as it is called
        """Log nothing: probes are not worth a line each."""

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
