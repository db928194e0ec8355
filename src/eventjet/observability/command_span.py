"""The span and the metrics of a command, told while the server is at work with what the loop has sent since.

Nothing of it is done while the command's caller waits, but to make the span, whose id goes with the events.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextvars import Token
from typing import TYPE_CHECKING, Any

from opentelemetry import context
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from eventjet.errors import EventjetError, UnexpectedExit
from eventjet.observability.spans import ERROR, LOST, OUTCOME

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter, Histogram

BATCH = 16
DELAY_S = 0.1
_FAULT = Status(StatusCode.ERROR)
_NOWHERE = context.Context()


class Told(threading.local):
    """Commands of this thread's loop that have ended and are not told yet: `BATCH` at most, or those of one turn more.

    Many one after the other take half the processor time of each on its own, whose code is in no cache.
    """

    def __init__(self, durations: Histogram, conflicts: Counter) -> None:
        self.durations = durations
        self.conflicts = conflicts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[CommandSpan] = []

    def soon(self, ended: CommandSpan) -> None:
        """Tell it once there are `BATCH`, after `DELAY_S`, or when the connection is closed."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self.now()  # of a loop that ended first
            self._loop, self._timer = loop, None
        self._waiting.append(ended)
        if self._timer is None:
            self._timer = loop.call_later(DELAY_S, self._due)
        if len(self._waiting) == BATCH:
            # In its next turn the loop sends what tasks have written in this one; in the one after, the server works.
            loop.call_soon(loop.call_soon, self.now)

    def now(self) -> None:
        """Tell all that has ended."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            try:
                one.tell()
            except BaseException as raised:  # noqa: BLE001 - of the application's processors or readers; the others go on
                assert self._loop is not None
                error = UnexpectedExit.instead_of(raised)
                self._loop.call_exception_handler({"message": "a command could not be told", "exception": error})

    def _due(self) -> None:
        self._timer = None
        self.now()


class CommandSpan:
    """Used by one task."""

    __slots__ = (
        "_began",
        "_ended_ns",
        "_labels",
        "_made",
        "_outcome",
        "_seconds",
        "_token",
        "_told",
        "attributes",
        "conflicts",
    )

    def __init__(
        self, told: Told, made: Span | None, token: Token[context.Context] | None, labels: tuple[str, str] | None
    ) -> None:
        self._told = told
        self._made = made
        self._token = token
        self._labels = labels
        """Aggregate and decision; None where nothing is measured."""
        self.conflicts = 0
        """Races lost."""
        self.attributes: dict[str, Any] = {}
        """Attributes of the span."""
        self._began = time.perf_counter()

    def ended(self, events: int, error: BaseException | None = None) -> None:
        """Tell what came of it, when there is time."""
        if self._token is not None:
            context.detach(self._token)
        if self._made is None and self._labels is None:
            return
        self._seconds = time.perf_counter() - self._began
        self._ended_ns = time.time_ns()
        if error is None:
            self._outcome = "done" if events else "nothing"
            if events != 1:
                self.attributes["eventjet.events"] = events
        else:
            is_ours = isinstance(error, EventjetError) or not isinstance(error, Exception)
            self._outcome = "failed" if is_ours else "refused"
            self.attributes[ERROR] = type(error).__qualname__
        self._told.soon(self)

    def tell(self) -> None:
        """Complete the span, whose name says aggregate and decision, and record the metrics."""
        made, attributes, outcome = self._made, self.attributes, self._outcome
        if made is not None:
            if outcome != "done":
                attributes[OUTCOME] = outcome
            if self.conflicts:
                attributes[LOST] = self.conflicts
            made.set_attributes(attributes)
            if outcome == "failed":
                made.set_status(_FAULT)
            made.end(self._ended_ns)
        if self._labels is not None:
            aggregate, decision = self._labels
            labels = {"eventjet.aggregate": aggregate, "eventjet.decision": decision, OUTCOME: outcome}
            # The context is for exemplars, which name the span: its own, and not that of whoever is current now.
            within = _NOWHERE if made is None else set_span_in_context(made, _NOWHERE)
            self._told.durations.record(self._seconds, labels, within)
            if self.conflicts:
                self._told.conflicts.add(self.conflicts, {"eventjet.aggregate": aggregate}, within)
