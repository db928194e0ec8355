"""`Exchanges`: requests over one inbox that wait for their answers, each for a bounded time. For one loop.

A loop stands still while something else has the process: a garbage collection of a large heap, or application code.
What could not be sent or read meanwhile is not the server's silence, so that time is given back. See ADR 0043.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from eventjet.errors import Forbidden, StoreUnavailable
from eventjet.nats.protocol import Frame

LOOK_S = 0.5
"""Between two looks at those that wait, or an eighth of what they wait: of a pause, so much at the most is counted."""
STILL_S = 0.1
"""A loop that is later than this stood still; below, it is merely busy."""
_OVERDUE_S = 0.01
"""Before an exchange ends for want of an answer: what has come is read in between."""
_subject_of = itemgetter(1)
_ANSWERED_MAX = 1_000
"""So many publishes are remembered after their answer: a second one says that somebody else answers, too."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One request, and what has come in answer to it."""

    reply: bytes
    subjects: Collection[str]
    """What was published for it: a violation on any of them ends it."""
    patience_s: float
    """How long its answer, or the next part of it, may take."""
    began: float
    until: float
    accepts: Callable[[Frame], bool] | None
    """Whether a frame is of whoever was asked, None where nobody else answers; others' frames give no more time."""
    is_overdue: bool = False
    fault: Exception | None = None
    """What ended it."""
    _frames: list[Frame] = field(default_factory=list[Frame])
    _wake: asyncio.Future[None] | None = None

    async def came(self) -> list[Frame]:
        """Return the next frames of the answer, at least one; raises what ended the exchange."""
        if not self._frames and self.fault is None:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if not self._frames and self.fault is not None:
            raise self.fault
        frames, self._frames = self._frames, []
        return frames

    def arrived(self, frames: list[Frame], now: float) -> None:
        """Take a part of the answer; what comes after the end is not one."""
        if self.accepts is not None:
            frames = list(filter(self.accepts, frames))
        if frames and self.fault is None:
            self._frames += frames
            self.until = now + self.patience_s
            self.is_overdue = False
            self._wake_up()

    def end(self, fault: Exception) -> None:
        """Let whoever waits raise `fault`: there will be no more frames."""
        if self.fault is None:
            self.fault = fault
            self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class Exchanges:
    """All exchanges over one inbox."""

    def __init__(self, inbox: str, on_late: Callable[[], object]) -> None:
        """`on_late` is called when a request had no answer in time."""
        self.inbox = inbox
        self._prefix = f"{inbox}.".encode()
        self._on_late = on_late
        self._timer: asyncio.TimerHandle | None = None
        self._count = 0
        self.waiting: dict[bytes, Exchange] = {}
        self._answered: dict[bytes, Callable[[Frame], bool]] = {}

    def begin(
        self, subjects: Collection[str], patience_s: float, accepts: Callable[[Frame], bool] | None = None
    ) -> Exchange:
        """Prepare for the answer to what is published on `subjects`; give the exchange to `forget` in the end.

        Where others may answer, too, `accepts` tells whose answers count. It sees those that come later as well.
        """
        now = asyncio.get_running_loop().time()
        self._count += 1
        exchange = Exchange(b"%b%d" % (self._prefix, self._count), subjects, patience_s, now, now + patience_s, accepts)
        self.waiting[exchange.reply] = exchange
        self._look_by(now + min(LOOK_S, patience_s / 8))
        return exchange

    def forget(self, exchange: Exchange) -> None:
        """Ignore whatever still comes in answer to it, but for who it is that answers."""
        self.waiting.pop(exchange.reply, None)
        if exchange.accepts is not None:
            self._answered[exchange.reply] = exchange.accepts
            if len(self._answered) > _ANSWERED_MAX:
                del self._answered[next(iter(self._answered))]

    def arrived(self, frames: list[Frame]) -> None:
        """Give messages of the inbox to the exchanges that they answer."""
        now = asyncio.get_running_loop().time()
        for reply, group in groupby(frames, _subject_of):
            exchange = self.waiting.get(reply)
            if exchange is not None:
                exchange.arrived(list(group), now)
            elif reply in self._answered:
                for frame in group:
                    self._answered[reply](frame)

    def denied(self, fault: Forbidden) -> bool:
        """End what was published on the subject of a violation; whether there was any."""
        concerned = [each for each in self.waiting.values() if fault.subject in each.subjects]
        for exchange in concerned:
            exchange.end(fault)
        return bool(concerned)

    def end_all(self, fault: Exception) -> None:
        """End every exchange with the same error."""
        for exchange in self.waiting.values():
            exchange.end(fault)

    def waits(self, reply: bytes, subject: bytes) -> bool:
        """Whether an answer with this reply subject is waited for, to what was asked on a subject."""
        exchange = self.waiting.get(reply)
        return exchange is not None and subject.decode("utf-8", "replace") in exchange.subjects

    def _look_by(self, at: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._look)

    def _look(self) -> None:
        """End what has waited too long."""
        assert self._timer is not None
        now = asyncio.get_running_loop().time()
        lateness_s, self._timer = now - self._timer.when(), None
        is_late = False
        for each in self.waiting.values():
            if each.fault is not None:
                continue
            if lateness_s > STILL_S:
                each.until += min(lateness_s, now - each.began)
            if each.until > now:
                self._look_by(min(each.until, now + min(LOOK_S, each.patience_s / 8)))
            elif not each.is_overdue:
                each.is_overdue = True
                self._look_by(now + _OVERDUE_S)
            else:
                reason = f"no answer within {each.patience_s:g} s"
                each.end(StoreUnavailable(next(iter(each.subjects)), reason))
                is_late = True
        if is_late:
            self._on_late()
