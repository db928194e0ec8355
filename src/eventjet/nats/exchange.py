"""`Exchanges`: the requests of one event loop that wait for answers over one inbox, each for a bounded time.

A loop stands still while something else runs in its thread: a garbage collection of a large heap, or application code.
Nothing is sent or read meanwhile, which is not the server's silence, so waiting requests get that time back (ADR 0043).
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
"""How often waiting exchanges are checked, or eight times in their patience if that is shorter.

At most this much of a standstill counts against them.
"""
STILL_S = 0.1
"""A check that is later than this means that the loop stood still; below, the loop is merely busy."""
_OVERDUE_S = 0.01
"""How long an overdue exchange still waits, so that what the socket holds is read first."""
_subject_of = itemgetter(1)
_ANSWERED_MAX = 1_000
"""How many publishes are remembered after their answer: a second answer shows that somebody else answers, too."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One request, and the frames of its answer so far."""

    reply: bytes
    subjects: Collection[str]
    """Subjects of the published messages: a permission violation on any of them ends the exchange."""
    patience_s: float
    """How long the answer, or the next part of it, may take."""
    began: float
    until: float
    accepts: Callable[[Frame], bool] | None
    """Returns whether a frame is an answer that counts; None where every frame does. Others do not prolong the wait."""
    is_overdue: bool = False
    fault: Exception | None = None
    """The error that ended the exchange."""
    _frames: list[Frame] = field(default_factory=list[Frame])
    _wake: asyncio.Future[None] | None = None

    async def next_frames(self) -> list[Frame]:
        """Wait for the next frames of the answer, at least one; raises the error that ended the exchange."""
        if not self._frames and self.fault is None:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if not self._frames and self.fault is not None:
            raise self.fault
        frames, self._frames = self._frames, []
        return frames

    def add(self, frames: list[Frame], now: float) -> None:
        """Add frames to the answer; frames after the end are ignored."""
        if self.accepts is not None:
            frames = list(filter(self.accepts, frames))
        if frames and self.fault is None:
            self._frames += frames
            self.until = now + self.patience_s
            self.is_overdue = False
            self._wake_up()

    def end(self, fault: Exception) -> None:
        """End the exchange: `next_frames` raises `fault` once the frames so far are taken."""
        if self.fault is None:
            self.fault = fault
            self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class Exchanges:
    """The exchanges over one inbox."""

    def __init__(self, inbox: str, on_late: Callable[[], object]) -> None:
        """`on_late` is called when requests had no answer in time."""
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
        """Return a new exchange, to `forget` in the end; `accepts` tells which answers count, late ones among them."""
        now = asyncio.get_running_loop().time()
        self._count += 1
        exchange = Exchange(b"%b%d" % (self._prefix, self._count), subjects, patience_s, now, now + patience_s, accepts)
        self.waiting[exchange.reply] = exchange
        self._look_by(now + min(LOOK_S, patience_s / 8))
        return exchange

    def forget(self, exchange: Exchange) -> None:
        """Stop waiting for an exchange; late answers go only to its `accepts`, which notes who else answers."""
        self.waiting.pop(exchange.reply, None)
        if exchange.accepts is not None:
            self._answered[exchange.reply] = exchange.accepts
            if len(self._answered) > _ANSWERED_MAX:
                del self._answered[next(iter(self._answered))]

    def deliver(self, frames: list[Frame]) -> None:
        """Give messages of the inbox to the exchanges that they answer."""
        now = asyncio.get_running_loop().time()
        for reply, group in groupby(frames, _subject_of):
            exchange = self.waiting.get(reply)
            if exchange is not None:
                exchange.add(list(group), now)
            elif reply in self._answered:
                for frame in group:
                    self._answered[reply](frame)

    def denied(self, fault: Forbidden) -> bool:
        """End the exchanges that published on the subject of a violation; return whether there were any."""
        exchanges = [exchange for exchange in self.waiting.values() if fault.subject in exchange.subjects]
        for exchange in exchanges:
            exchange.end(fault)
        return bool(exchanges)

    def end_all(self, fault: Exception) -> None:
        """End every exchange with this error."""
        for exchange in self.waiting.values():
            exchange.end(fault)

    def waits(self, reply: bytes, subject: bytes) -> bool:
        """Return whether an exchange with this reply subject waits for the answer to a message on `subject`."""
        exchange = self.waiting.get(reply)
        return exchange is not None and subject.decode("utf-8", "replace") in exchange.subjects

    def _look_by(self, at: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._look)

    def _look(self) -> None:
        """End the exchanges that have waited too long, after giving back the time that the loop stood still."""
        assert self._timer is not None
        now = asyncio.get_running_loop().time()
        lateness_s, self._timer = now - self._timer.when(), None
        is_late = False
        for exchange in self.waiting.values():
            if exchange.fault is not None:
                continue
            if lateness_s > STILL_S:
                exchange.until += min(lateness_s, now - exchange.began)
            if exchange.until > now:
                self._look_by(min(exchange.until, now + min(LOOK_S, exchange.patience_s / 8)))
            elif not exchange.is_overdue:
                exchange.is_overdue = True
                self._look_by(now + _OVERDUE_S)
            else:
                reason = f"no answer within {exchange.patience_s:.3g} s"
                exchange.end(StoreUnavailable(next(iter(exchange.subjects)), reason))
                is_late = True
        if is_late:
            self._on_late()
