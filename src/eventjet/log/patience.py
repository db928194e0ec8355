"""`Patience`: how long a read goes on asking a log that does not answer: as long as a save looks for its outcome.

A cluster takes 4 to 8 s to elect a leader, in which nobody answers. A read changes nothing, so it is asked again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from eventjet.errors import ConnectionClosed, NoResponders, StoreUnavailable

_FIRST_S = 0.05
_MAX_S = 1.0


class Patience:
    """Of one read."""

    def __init__(self, timeout_s: float, is_there: Callable[[], Awaitable[object]]) -> None:
        """`is_there` raises what is certain of a log at which nobody listens: that it does not exist, for instance."""
        self._timeout_s = timeout_s
        self._is_there = is_there
        self.progressed()

    def progressed(self) -> None:
        """Something came: all of the time begins again."""
        self._until = time.monotonic() + self._timeout_s
        self._pause_s = _FIRST_S

    async def wait(self, error: StoreUnavailable) -> None:
        """Return when it is time to ask again; raises `error` when its time is over or nothing will ever answer."""
        if isinstance(error, NoResponders):
            await self._is_there()
        left_s = self._until - time.monotonic()
        if left_s <= 0 or isinstance(error, ConnectionClosed):
            raise error
        await asyncio.sleep(min(left_s, self._pause_s * (0.5 + random.random())))  # noqa: S311  no secret
        self._pause_s = min(_MAX_S, 2 * self._pause_s)
