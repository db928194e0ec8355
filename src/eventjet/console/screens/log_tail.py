"""The end of the log as one page follows it: the newest rows, and what went by too fast for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from eventjet.codec.headers import RawRecord
from eventjet.jet import Jet
from eventjet.jetstream.client import Client
from eventjet.operations.events import shown
from eventjet.operations.log_pages import LogFilter, ends_of, news_since, page_before, voids_among

KEPT = 100
"""Rows of a page that follows the log."""
_STEP_MAX = 200
"""Records of one step; where there are more, the newest are shown and the others are told of."""


async def rows_of(jet: Jet, client: Client, records: Sequence[RawRecord]) -> list[dict[str, Any]]:
    """What a page shows of records; never raises for what is in them."""
    voids = await voids_among(client, jet.name, records)
    return [shown(jet, record, voids) for record in records]


class Tail:
    """Of one page. Rows are the newest first; `{"passed": (first, last)}` stands for positions that are not shown."""

    def __init__(self, app: str, wanted: LogFilter) -> None:
        self.rows: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.next: int | None = None
        """The first position that was not looked at; None before the first step."""
        self.begin = 1
        """Nothing before it is shown."""
        self._app = app
        self._wanted = wanted

    async def step(self, jet: Jet, client: Client) -> None:
        """Take in what is new. Raises `StoreUnavailable` and `Forbidden`, after which it can be tried again."""
        if self.next is None:
            first, last = await ends_of(client, self._app)
            page = await page_before(client, self._app, last + 1, max(first, min(self.begin, last + 1)), self._wanted)
            self._take(await rows_of(jet, client, page.records))
            self.next = last + 1
            return
        records, left = await news_since(client, self._app, self.next, self._wanted, _STEP_MAX)
        if left:
            await self._jump(jet, client, self.next)
            return
        if records:
            following = records[-1][0] + 1
            taken = [record for record in records if self._wanted.takes(record)]
            newest = taken[-KEPT:]
            self._take(await rows_of(jet, client, newest))
            self.next = following

    async def _jump(self, jet: Jet, client: Client, start: int) -> None:
        """Go to the newest, past what nobody could read."""
        _, last = await ends_of(client, self._app)
        page = await page_before(client, self._app, last + 1, start, self._wanted)
        rows = await rows_of(jet, client, page.records)
        if page.start > start:
            self.rows.appendleft({"passed": (start, page.start - 1)})
        self._take(rows)
        self.next = last + 1

    def _take(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            self.rows.appendleft(row)
            if row["aggregate"] == "void":
                told = cast("dict[str, Any]", row["data"]) if isinstance(row["data"], dict) else {}
                for one in self.rows:
                    if str(one.get("position")) == row["aggregate_id"]:
                        one["void"] = str(told.get("reason", ""))
