"""`Subscription`: runs one subscription of any kind in one process, session after session.

A session begins once this process has the lease of the subscription's position: a checkpoint in SQL, or a cursor in
the key-value bucket. It ends when the process is to stop, when another process took the position over or an operator
decided about it (the session is *fenced*), or at a fault. After faults of connections, leases and locks another session
begins. Faults of events and of the log stop the subscription with their reason, until somebody acts or another process
tries it. See decision 55.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol, TypeAlias

from sqlalchemy.exc import SQLAlchemyError

from eventjet.codec.reasons import reason_of, traceback_of
from eventjet.errors import (
    CheckpointFenced,
    CodecError,
    CursorDamaged,
    CursorFenced,
    EventjetError,
    HandlerFailed,
    HistoryBroken,
    LogIncomplete,
    LogRolledBack,
    ProjectionStopped,
    ReactionFailed,
    RowUnreadable,
    TableLost,
    UnexpectedExit,
)
from eventjet.observability import logs
from eventjet.observability.metrics import FollowerMeter, Meter
from eventjet.runtime import called
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.retry import Backoff, pause

_log = logging.getLogger(__name__)

_FENCED = (CheckpointFenced, CursorFenced)
_STOPS = (
    CodecError,
    CursorDamaged,
    HandlerFailed,
    HistoryBroken,
    LogIncomplete,
    LogRolledBack,
    ProjectionStopped,
    ReactionFailed,
    RowUnreadable,
    TableLost,
)
"""Errors that stop a subscription: another session would meet them again."""
_EXPECTED = (EventjetError, SQLAlchemyError, OSError, TimeoutError)
"""Expected faults; any other is logged with its traceback."""


class SubscriptionSession(Protocol):
    """One session: the right of this process to move one position, and the work that moves it.

    Every write names the epoch of the checkpoint or the sequence of the cursor that the session began with or wrote
    last, and raises `CheckpointFenced` or `CursorFenced` once it is another.
    """

    async def run(self, stop: asyncio.Event) -> None:
        """Handle events until `stop`, finish those in progress, and write the progress."""
        ...

    async def note(self, reason: str) -> None:
        """Note with the position what the subscription waits for; progress clears it."""
        ...

    async def fail(self, error: EventjetError) -> int:
        """Note that the error stops the subscription, and return the position; raises it where it does not stop it."""
        ...

    async def end(self) -> None:
        """Give up what the session has, after `run` or `fail`, whatever they raised."""
        ...


Acquire: TypeAlias = Callable[[int], Awaitable[SubscriptionSession | None]]
"""Take the lease if it is free, and return the session; None while another process has it.

A subscription that failed in another process is tried in this one too, which may run a newer release; but not at the
position where it failed in this process, which is the argument.
"""


class Subscription:
    """A projection, or a reactor partition, process, publication or inbox, as one process runs it."""

    def __init__(
        self,
        name: str,
        options: WorkerOptions,
        backoff: Backoff,
        meter: Meter | FollowerMeter,
        on_ready: Callable[[], None],
        *,
        private: bool,
    ) -> None:
        """Prepare a subscription, which calls `on_ready`, perhaps often, once it works or waits for the lease."""
        self.name = name
        self.options = options
        self.backoff = backoff
        self.on_ready = on_ready
        self._ends = meter.terms
        self._is_private = private
        self._failed_at = -1

    def opened(self) -> AbstractAsyncContextManager[Acquire]:
        """Open what one session needs before it has the lease."""
        raise NotImplementedError

    async def run(self, stop: asyncio.Event) -> None:
        """Run session after session until `stop`, with a pause after each fault.

        A repeated fault is logged once. After several faults in a row `on_ready` is called, so that others do not wait
        for this subscription.
        """
        private, backoff = self._is_private, self.backoff
        while not stop.is_set():
            try:
                await called(self._run_session(stop))
            except _FENCED as error:
                self._ends["fenced"] += 1
                logs.FENCED.log(_log, name=self.name, reason=error)
            except Exception as error:  # noqa: BLE001 - others go on, and so does this one, at a bounded rate
                self._ends["fault"] += 1
                unforeseen = not isinstance(error, _EXPECTED) or isinstance(error, UnexpectedExit)
                trace = f"\n{traceback_of(error, private=private)}" if unforeseen else ""
                reason = reason_of(error, private=private)
                if backoff.failed(reason):
                    logs.TRYING_AGAIN.log(_log, name=self.name, reason=reason, trace=trace)
                if backoff.is_lasting:
                    self.on_ready()
                await backoff.wait(stop)

    async def _run_session(self, stop: asyncio.Event) -> None:
        """Wait for the lease, and run one session; an error that stops the subscription is written to its position."""
        async with self.opened() as acquire:
            while (session := await acquire(self._failed_at)) is None:
                self.on_ready()
                await pause(stop, self.options.poll_s)
                if stop.is_set():
                    return
            try:
                if self.backoff.waits is not None:  # the session before ended in a fault
                    with suppress(EventjetError, SQLAlchemyError, OSError):
                        await session.note(self.backoff.waits)
                await session.run(stop)
                self._ends["drained"] += 1
            except _STOPS as error:
                self._failed_at = await session.fail(error)
                logs.STOPPED.log(_log, name=self.name, reason=error)
                self._ends["failed"] += 1
            finally:
                await session.end()
