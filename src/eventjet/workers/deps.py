"""`Deps`: what the handlers of one process need, opened beside its work: nothing else waits for it, or ends with it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from eventjet.codec.reasons import reason_of
from eventjet.errors import Unreachable, UsageError
from eventjet.observability import logs
from eventjet.projections.app_ref import Application
from eventjet.reactions.following import opened_deps
from eventjet.workers.terms import Backoff, pause

_log = logging.getLogger(__name__)


class Deps:
    """`App(deps=…)`, opened by a task of its own and closed by the same one; opened anew until that succeeds."""

    def __init__(self, app: Application, backoff_s: tuple[float, float], *, private: bool) -> None:
        """Begins to open them. `private` where something personal is at hand."""
        self._app = app
        self._pace = Backoff(backoff_s)
        self._private = private
        self._tried, self._closing = asyncio.Event(), asyncio.Event()
        self._value: Any = None
        self._fault: Unreachable | None = None
        self.task = asyncio.create_task(self._keep(), name="deps")
        """Ends before `close` only where nothing could open them: with the `UsageError` that says so."""

    async def opened(self) -> Any:
        """What they gave, once that was tried; raises `Unreachable` while they cannot be opened."""
        await self._tried.wait()
        if self._fault is not None:
            raise self._fault
        return self._value

    async def close(self) -> None:
        """Close them, or end the opening; raises what closing raises."""
        self._closing.set()
        if not self._tried.is_set():
            self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task

    async def _keep(self) -> None:
        is_open = False
        while not self._closing.is_set():
            try:
                async with opened_deps(self._app) as self._value:
                    is_open, self._fault = True, None
                    self._tried.set()
                    await self._closing.wait()
            except UsageError:
                raise
            except Exception as error:
                if is_open:
                    raise
                reason = reason_of(error, private=self._private)
                what = f"The deps of the app {self._app.name!r}"
                self._fault = Unreachable(what, f"they could not be opened ({reason})", "See what they need.")
                if self._pace.failed_term(reason):
                    logs.TRYING_AGAIN.tell(_log, name="deps", reason=self._fault, trace="")
                self._tried.set()
                await pause(self._closing, self._pace.pause_s)
                self._pace.paused()
