"""`OpenRequest`: a request that waits for its answer; and `Lateness`: which of them have waited too long.

A loop stands still while something else has the process: a garbage collection of a large heap, or application code.
What was not sent meanwhile, or not read, is not the server's silence. So a request's time begins when it is sent, time
in which the loop stood still is given back, and what has come is read before anything is called late. See ADR 0043.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from eventjet.errors import StoreUnavailable
from eventjet.nats.protocol import Frame

LOOK_S = 0.5
"""Between two looks at those that wait, or an eighth of what they wait: of a pause, so much at the most is counted."""
STILL_S = 0.1
"""A loop that is later than this stood still; below, it is merely busy."""


class OpenRequest:
    """One request, and what has come in answer to it."""

    __slots__ = ("_frames", "_since", "_wake", "accepts", "fault", "patience_s", "reply", "subjects", "until")

    def __init__(
        self,
        reply: bytes,
        subjects: Collection[str],
        patience_s: float,
        until: float,
        now: float,
        accepts: Callable[[Frame], bool] | None,
    ) -> None:
        self.reply = reply
        self.accepts = accepts
        """Whether a frame is of whoever was asked, None where nobody else answers; others' frames give no more time."""
        self.subjects = subjects
        """What was published for it: a violation on any of them ends it."""
        self.patience_s = patience_s
        """How long its answer, or the next part of it, may take."""
        self.until = until
        """When that time ends, by the loop's clock."""
        self._since = now
        """When it was made, or sent."""
        self._frames: list[Frame] = []
        self.fault: Exception | None = None
        """What ended it."""
        self._wake: asyncio.Future[None] | None = None

    async def came(self) -> list[Frame]:
        """The next frames of the answer, at least one; raises what ended the exchange."""
        if not self._frames and self.fault is None:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if not self._frames and self.fault is not None:
            raise self.fault
        frames, self._frames = self._frames, []
        return frames

    def look_at(self, now: float) -> float:
        """When to look at it next."""
        return min(self.until, now + min(LOOK_S, self.patience_s / 8))

    def sent(self, now: float) -> None:
        """The socket has it: nobody could have answered before."""
        self.until += now - self._since
        self._since = now

    def stood_still(self, still_s: float, now: float) -> None:
        """The loop could not have heard an answer until now, for so long."""
        self.until += min(still_s, now - self._since)

    def arrived(self, frames: list[Frame], now: float) -> None:
        """Take a part of the answer; what comes after the end is not one."""
        if self.accepts is not None:
            frames = list(filter(self.accepts, frames))
        if frames and self.fault is None:
            self._frames += frames
            self.until = now + self.patience_s
            self._wake_up()

    def end(self, fault: Exception) -> None:
        """There will be no more."""
        self.fault = fault
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class Lateness:
    """Ends what waits too long on one connection. It has one timer: nearly every answer is there long before its time
    is over."""

    def __init__(
        self, waiting: Mapping[bytes, OpenRequest], read_on: Callable[[], object], on_late: Callable[[], object]
    ) -> None:
        """`read_on` takes what the socket holds; `on_late` is told that something waited too long."""
        self._loop = asyncio.get_running_loop()
        self._waiting = waiting
        self._read_on = read_on
        self._on_late = on_late
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, at: float) -> None:
        """Look at that time at the latest."""
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._look)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        assert self._timer is not None
        still_s, self._timer = stood_still_s(self._timer.when()), None
        waiting = [each for each in self._waiting.values() if each.fault is None]
        now = self._loop.time()
        if still_s:
            for each in waiting:
                each.stood_still(still_s, now)
        if any(each.until <= now for each in waiting):
            self._read_on()
        late = [each for each in waiting if each.fault is None and each.until <= now]
        for each in waiting:
            if each.fault is None and each.until > now:
                self.watch(each.look_at(now))
        for each in late:
            reason = f"no answer within {each.patience_s:g} s"
            each.end(StoreUnavailable(next(iter(each.subjects)), reason))
        if late:
            self._on_late()


def stood_still_s(due: float) -> float:
    """How long the running loop stood still, as the lateness of what was due at a time by its clock tells."""
    late_s = asyncio.get_running_loop().time() - due
    return late_s if late_s > STILL_S else 0.0
