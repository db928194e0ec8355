"""`Deps`: what the handlers of one process need, opened beside its work: nothing else waits for it, or ends with it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import Any

from eventjet.codec.reasons import reason_of
from eventjet.errors import DepsUnusable, Unreachable
from eventjet.observability import logs
from eventjet.projections.app_ref import Application
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.following import opened_deps
from eventjet.subscriptions.terms import Backoff, end, pause

_log = logging.getLogger(__name__)


class Deps:
    """`App(deps=…)`, opened by a task of its own and closed by the same one; opened anew until that succeeds."""

    def __init__(self, app: Application, options: WorkerOptions, *, private: bool) -> None:
        """Begins to open them. `private` where something personal is at hand."""
        self._app = app
        self._options = options
        self._pace = Backoff(options.backoff_s)
        self._private = private
        self._tried, self._closing = asyncio.Event(), asyncio.Event()
        self._is_open = False
        self._value: Any = None
        self._variables: dict[ContextVar[Any], Any] = {}
        self._fault = self._closed("they are not open yet")
        self.task = asyncio.create_task(self._keep(), name=f"the deps of the app {app.name!r}")
        """Ends before `close` only where nothing could open them: with the `DepsUnusable` that says so."""

    async def opened(self) -> Any:
        """What they gave, once they are open; the context variables that they set are set for the caller then.

        Raises `Unreachable` while they cannot be opened, or when the first try takes longer than a lease.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.lease_s):
                await self._tried.wait()
        if not self._is_open:
            raise self._fault
        for variable, value in self._variables.items():
            variable.set(value)
        return self._value

    async def close(self) -> None:
        """Close them, or end the opening; raises what closing raises. What hangs there is named, and given up."""
        self._closing.set()
        late_s = self._options.drain_s / 2 if self._is_open else 0.0
        await asyncio.wait({self.task}, timeout=late_s)
        if not self.task.done():
            if self._is_open:
                logs.GIVEN_UP.tell(_log, name=self.task.get_name(), seconds=late_s)
            await end([self.task])
        elif not self.task.cancelled():
            self.task.result()

    async def _keep(self) -> None:
        before = copy_context()
        while not self._closing.is_set():
            limit = asyncio.timeout(self._options.deps_s)
            try:
                async with limit, opened_deps(self._app) as self._value:
                    limit.reschedule(None)
                    self._variables = {
                        variable: value
                        for variable, value in copy_context().items()
                        if variable not in before or before[variable] is not value
                    }
                    self._is_open = True
                    self._tried.set()
                    await self._closing.wait()
            except DepsUnusable:
                raise
            except Exception as error:
                if self._is_open:
                    raise
                is_late = isinstance(error, TimeoutError) and limit.expired()
                late = f"that took longer than {self._options.deps_s:g} s"
                reason = late if is_late else reason_of(error, private=self._private)
                self._fault = self._closed(f"they could not be opened ({reason})")
                if self._pace.failed_term(reason):
                    logs.TRYING_AGAIN.tell(_log, name="deps", reason=reason_of(self._fault), trace="")
                self._tried.set()
                await pause(self._closing, self._pace.pause_s)
                self._pace.paused()

    def _closed(self, reason: str) -> Unreachable:
        return Unreachable(f"The deps of the app {self._app.name!r}", reason, "See what they need.")
