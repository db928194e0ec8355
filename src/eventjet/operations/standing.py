"""Where a log stands now, and what waits in it for whatever follows it: looked at again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from eventjet.app import App
from eventjet.codec.subjects import stream_subjects
from eventjet.errors import StoreUnavailable, StreamMissing
from eventjet.jetstream.api import StreamState, last_message, stream_info
from eventjet.jetstream.client import Client
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.integrity import missing_range
from eventjet.log.timers import timers_due, timers_set
from eventjet.log.topology import identity_of, missing_stream
from eventjet.nats.endpoint import Endpoint
from eventjet.operations.inspection import Replica, replicas_of
from eventjet.settings import Settings
from eventjet.sql.checkpoint import Checkpoint
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.status import SeenLog, WorkStatus, look_at_followers, see_log

TIMERS_MAX = 100
"""Deadlines of one kind that are counted: each is a request."""


@dataclass(frozen=True, slots=True)
class LogNow:
    """A log as its leader told of it."""

    identity: str
    first: int
    last: int
    messages: int
    bytes: int
    replicas: int
    """Copies that its stream is to have."""
    others: tuple[Replica, ...]
    """The copies besides the leader's."""
    last_at: float | None
    """Seconds since 1970 when the server stored the last event; None for a log without any."""
    max_bytes: int | None
    """None where nothing but the disk limits it."""
    max_messages: int | None
    loss: str
    """What is gone from it, in words; empty for a whole one."""


async def log_now(client: Client, app: str, known: LogNow | None, timeout_s: float) -> LogNow:
    """Look at it; `known` is what the look before found. Raises `Unreachable`, `StoreUnavailable` and `Forbidden`."""
    try:
        state, others = await asyncio.gather(
            client.ask(stream_info(app), timeout_s), client.ask(replicas_of(app), timeout_s)
        )
    except StreamMissing:
        raise missing_stream(app) from None
    if known is not None and (known.last, known.identity) == (state.last, identity_of(state)):
        last_at = known.last_at
    else:
        record = await client.ask(last_message(app, stream_subjects(app)), timeout_s)
        last_at = None if record is None else record[1] / 1e9
    return LogNow(
        identity=identity_of(state),
        first=state.first,
        last=state.last,
        messages=state.messages,
        bytes=state.bytes,
        replicas=int(state.config.get("num_replicas") or 1),
        others=tuple(others),
        last_at=last_at,
        max_bytes=_limit(state, "max_bytes"),
        max_messages=_limit(state, "max_msgs"),
        loss=missing_range(state),
    )


def _limit(state: StreamState, name: str) -> int | None:
    value = int(state.config.get(name) or -1)
    return value if value > 0 else None


@dataclass(frozen=True, slots=True)
class DeadlineCounts:
    """The deadlines of one process type; `TIMERS_MAX` may stand for more."""

    process: str
    waiting: int
    due: int
    """Of them have come, and no worker has dealt with that yet."""


async def deadline_counts(client: Client, app: App) -> list[DeadlineCounts]:
    """Of every process type that has deadlines. Raises `StoreUnavailable` and `Forbidden`."""
    found: list[DeadlineCounts] = []
    for process in app.processes.values():
        if process.has_deadlines:
            waiting = await timers_set(client, app.name, process.name, TIMERS_MAX)
            due = await timers_due(client, app.name, process.name, TIMERS_MAX)
            found.append(DeadlineCounts(process.name, len(waiting), len(due)))
    return found


class Following:
    """What a log has for checkpoints and cursors, over one connection that a fault drops. For one thread; blocks."""

    def __init__(self, app: App, settings: Settings, timeout_s: float) -> None:
        self._app = app
        self._endpoint = Endpoint.of(settings).with_name("eventjet ui")
        self._timeout_s = timeout_s
        self._followers = declarations_of(app)
        self._connection: NatsConnection | None = None
        self._is_over = False

    def look(self, held: Sequence[Checkpoint]) -> tuple[SeenLog, list[WorkStatus]]:
        """Raises `Unreachable` and `StoreError`."""
        try:
            if self._connection is None:
                self._connection = NatsConnection.open(self._endpoint, timeout_s=self._timeout_s)
            if self._is_over:
                raise StoreUnavailable("The log", "the console has ended")
            seen = see_log(self._connection, self._app.name, held)
            return seen, look_at_followers(self._connection, self._app, self._followers, seen.last)
        except BaseException:
            self._let_go()
            raise

    def close(self) -> None:
        """Let go of the connection for good, from any thread: a look that is under way ends."""
        self._is_over = True
        self._let_go()

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def age_s(at: float | None) -> float | None:
    """How long ago a time was, by this machine's clock."""
    return None if at is None else max(0.0, time.time() - at)
