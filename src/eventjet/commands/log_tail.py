"""`LogTail`: which events of the log in its order somebody asked for, and the reading of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from eventjet.codec.records import Decoder
from eventjet.domain.moment import check_moment
from eventjet.domain.recorded import Recorded
from eventjet.errors import UsageError
from eventjet.log.store import EventStore, LogState
from eventjet.shown import shown

_DELIVER = ("all", "last", "new")
_WINDOW_MAX = 1_000
"""Records that are asked for on account of a limit."""


@dataclass(frozen=True, slots=True)
class LogTail:
    """As `Jet.tail` has it."""

    deliver: str = "all"
    position: int | None = None
    since: datetime | None = None
    until: int | None = None
    limit: int | None = None
    follow: bool = False

    def check(self) -> None:
        """Raise `UsageError` for what is no beginning and no end."""
        if self.deliver not in _DELIVER:
            raise UsageError(f"`tail` cannot deliver {shown(self.deliver, 60)}. Give one of {', '.join(_DELIVER)}.")
        for given in (self.position, self.until):
            if given is not None and not isinstance(given, int):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(
                    f"{shown(given, 60)} is not a position. Give a whole number, such as `Recorded.position`."
                )
        if self.limit is not None and (not isinstance(self.limit, int) or self.limit < 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{shown(self.limit, 60)} is no limit of events. Give a whole number, 0 or more.")
        if self.since is not None:
            check_moment("`since` is", self.since, to_come=True)

    async def read(self, store: EventStore, decoder: Decoder) -> AsyncIterator[Recorded[Any]]:
        """The events; see `Jet.tail` for what it raises."""
        state = await store.state()
        start = await self._start(store, state)
        left = self.limit
        # With a limit the log is read in windows: what is void or retired does not count.
        window = _WINDOW_MAX if left is None else min(left, _WINDOW_MAX)
        while left != 0:
            end = self.until if left is None else start + window - 1
            if end is not None and self.until is not None:
                end = min(end, self.until)
            async for record in store.records(start=start, until=end, follow=self.follow):
                recorded = decoder(record)
                if recorded is not None:
                    yield recorded
                    left = None if left is None else left - 1
                    if left == 0:
                        return
            if end is None or end == self.until or (not self.follow and end >= state.last):
                return
            start, window = end + 1, min(2 * window, _WINDOW_MAX)

    async def _start(self, store: EventStore, state: LogState) -> int:
        if self.position is not None:
            return max(self.position, 1)
        if self.since is not None:
            return await store.position_at(self.since)
        return {"all": 1, "last": max(state.last, 1), "new": state.last + 1}[self.deliver]
