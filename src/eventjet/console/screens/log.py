"""The log: its events page by page, filtered, and its end as it grows."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from eventjet.app import App
from eventjet.console.live import streams_of
from eventjet.console.pages import page, rendered
from eventjet.console.screens.log_tail import Tail, rows_of
from eventjet.console.sources import OpenLog, Sources
from eventjet.errors import Refused
from eventjet.operations.log import ROWS, LogFilter, LogPage, ends_of, names_of, page_before, page_from
from eventjet.shown import cut, cut_values

_EVERY_S = 0.5
_TEXT_MAX = 1_000
_POSITION_MAX = 2**63 - 1
_AGGREGATE = re.compile(r"[a-z_][a-z0-9_]{0,62}")
"""A declared name, or one of eventjet's own, which begin with `_`."""
_FILTERS = ("aggregate", "id", "type", "actor", "correlation", "command", "since", "until")


@dataclass(frozen=True, slots=True)
class LogQuestion:
    """What the query asks for."""

    given: Mapping[str, str]
    """The filters as they were written, for links and the form."""
    wanted: LogFilter
    since: datetime | None
    until: datetime | None
    before: int | None
    after: int | None
    at: int | datetime | None

    @property
    def is_live(self) -> bool:
        """Whether it is about the end of the log, which moves."""
        return self.until is None and self.before is None and self.after is None and self.at is None


@dataclass(frozen=True, slots=True)
class LogView:
    """One page of the log."""

    page: LogPage
    rows: list[dict[str, Any]]
    first: int
    last: int
    begin: int
    """Where `since` begins."""
    end: int
    """One beyond where `until` ends."""
    marked: int | None
    """The position that was jumped to."""
    scans_on: str
    """`before` or `after` where it found less than a page and there is more to look at."""


async def log(request: Request) -> Response:
    """One page of it."""
    asked = _asked(request)
    sources: Sources = request.app.state.sources
    seen = await sources.see("The NATS server", lambda: _look(sources, asked))
    return page(request, "log.html", found=seen.value, fault=seen.fault, **_shared(sources.app, asked))


async def log_live(request: Request) -> Response:
    """Its newest events, as they come."""
    asked, streams = _asked(request), streams_of(request)
    if not asked.is_live:
        raise HTTPException(400, "Only the end of the log is live. Leave `until` and positions out.")
    sources: Sources = request.app.state.sources
    shared = _shared(sources.app, asked)

    async def parts() -> AsyncGenerator[str]:
        tail, sent = Tail(sources.app.name, asked.wanted), ""

        async def step() -> None:
            opened = await sources.log()
            if tail.next is None and asked.since is not None:
                tail.begin = await opened.jet.store.position_at(asked.since)
            await tail.step(opened.jet, opened.client)

        while await streams.pause(_EVERY_S):
            seen = await sources.see("The NATS server", step)
            now = rendered(request, "log_rows.html", rows=list(tail.rows), fault=seen.fault, marked=None, **shared)
            if now != sent:
                sent = now
                yield now

    return streams.response(parts())


async def _look(sources: Sources, asked: LogQuestion) -> LogView:
    opened: OpenLog = await sources.log()
    client, app, wanted = opened.client, sources.app.name, asked.wanted
    store = opened.jet.store
    first, last = await ends_of(client, app)
    begin = first if asked.since is None else max(first, await store.position_at(asked.since))
    end = last + 1 if asked.until is None else min(last + 1, await store.position_at(asked.until))
    marked = await store.position_at(asked.at) if isinstance(asked.at, datetime) else asked.at
    if asked.after is not None:
        found = await page_from(client, app, max(begin, asked.after + 1), end - 1, wanted)
        on = "after" if len(found.records) < ROWS and found.end < end else ""
    else:
        newest = end if asked.before is None else min(end, asked.before)
        if marked is not None:
            newest = min(end, marked + 1)
        found = await page_before(client, app, max(begin, newest), begin, wanted)
        on = "before" if len(found.records) < ROWS and found.start > begin else ""
    rows = await rows_of(opened.jet, client, found.records)
    return LogView(found, rows[::-1], first, last, begin, end, marked, on)


def _shared(app: App, asked: LogQuestion) -> dict[str, Any]:
    kinds = app.catalog.kinds()
    return {
        "asked": asked,
        "given": asked.given,
        "types": sorted(kind.info.name for kind in kinds),
        "aggregates": sorted(info.name for info in app.aggregates.values()),
        "rows_max": ROWS,
        "preview": preview,
    }


def preview(data: Any) -> str:
    """A body in one line, cut."""
    if isinstance(data, str):
        return cut(data, 200)
    return cut(json.dumps(cut_values(data, 100), ensure_ascii=False, separators=(", ", ": "), default=str), 200)


def _asked(request: Request) -> LogQuestion:
    """What the query says; raises `HTTPException` 400 for what nobody can have meant."""
    query = request.query_params
    given = {name: query[name] for name in _FILTERS if query.get(name)}
    for name, value in given.items():
        if len(value) > _TEXT_MAX:
            raise HTTPException(
                400, f"`{name}` has {len(value):,} characters; the longest there are have {_TEXT_MAX:,}."
            )
    app: App = request.app.state.sources.app
    aggregate, name = given.get("aggregate"), given.get("type")
    if "id" in given and aggregate is None:
        raise HTTPException(400, "An id is one of an aggregate. Choose the aggregate as well.")
    if aggregate is not None and not _AGGREGATE.fullmatch(aggregate):
        raise HTTPException(400, "No aggregate can have this name: names are lower-case letters, digits and `_`.")
    kind = None if name is None else app.catalog.named(name)
    if aggregate is None and kind is not None:
        aggregate = kind.aggregate  # whose subjects alone carry it, so the server selects
    names = [(each.info.name, *each.info.formerly) for each in app.catalog.kinds()]
    wanted = LogFilter(
        types=() if name is None else names_of(names, name),
        aggregate=aggregate,
        aggregate_id=given.get("id"),
        actor=given.get("actor"),
        correlation=given.get("correlation"),
        command_id=given.get("command"),
    )
    try:
        wanted.subject(app.name)
    except Refused as error:
        raise HTTPException(400, str(error)) from None
    at = query.get("at") or None
    return LogQuestion(
        given=given,
        wanted=wanted,
        since=_time("since", given.get("since")),
        until=_time("until", given.get("until")),
        before=_position("before", query.get("before") or None),
        after=_position("after", query.get("after") or None),
        at=_position("at", at) if at is None or at.replace(",", "").strip().isdigit() else _time("at", at),
    )


def _position(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    digits = text.replace(",", "").strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20 and int(digits) <= _POSITION_MAX):
        raise HTTPException(400, f"`{name}` is no position of a log. Positions are whole numbers: 1, 2, 3 and on.")
    return int(digits)


def _time(name: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text.strip())
        return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        wants = "a position or a time" if name == "at" else "a time"
        raise HTTPException(400, f"`{name}` is not {wants}. Write times as 2026-01-31T12:00, in UTC.") from None


ROUTES: Mapping[str, Mapping[str, Any]] = {
    "log": {"endpoint": log},
    "log_live": {"endpoint": log_live},
}
