"""The log: its events page by page with filters, its end as it grows, and one event with its causes and effects."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from eventjet.app import App
from eventjet.codec.headers import CORRELATION, TRACEPARENT, RawRecord, metadata_of
from eventjet.console.live import stream_of
from eventjet.console.pages import page, query_number, rendered
from eventjet.console.sources import ANSWER_S, OpenLog, Sources
from eventjet.errors import CodecError, Refused
from eventjet.jet import Jet
from eventjet.jetstream.client import Client
from eventjet.operations.events import (
    NEAR,
    Cause,
    Effects,
    Node,
    RowsTouched,
    cause_of,
    effects_of,
    event_view,
    header_view,
    headers_of,
    import_time,
    neighbours,
    rows_touched,
)
from eventjet.operations.log import (
    ROWS,
    LogFilter,
    LogPage,
    ends_of,
    names_of,
    news_since,
    page_before,
    page_from,
    skipped_among,
)
from eventjet.text import cut, cut_values

_EVERY_S = 0.5
_TEXT_MAX = 1_000
_POSITION_MAX = 2**63 - 1
_AGGREGATE = re.compile(r"[a-z_][a-z0-9_]{0,62}")
"""A declared name, or a name of eventjet's own aggregates, which begins with `_`."""
_FILTERS = ("aggregate", "id", "type", "actor", "correlation", "command", "since", "until")


@dataclass(frozen=True, slots=True)
class LogQuestion:
    """The filters and the part of the log that a query asks for."""

    given: Mapping[str, str]
    """The filters as the query has them, for links and the form."""
    wanted: LogFilter
    since: datetime | None
    until: datetime | None
    before: int | None
    after: int | None
    at: int | datetime | None

    @property
    def is_live(self) -> bool:
        """Whether the query is about the end of the log, which moves."""
        return self.until is None and self.before is None and self.after is None and self.at is None


@dataclass(frozen=True, slots=True)
class LogView:
    """One page of the log, with its place in the log."""

    page: LogPage
    rows: list[dict[str, Any]]
    first: int
    last: int
    begin: int
    """The position at which `since` begins."""
    end: int
    """The position after the last of `until`."""
    marked: int | None
    """The position that the query jumped to."""
    scans_on: str
    """`before` or `after` if the page is not full and there is more log to search in that direction, else empty."""


async def log(request: Request) -> Response:
    """Show one page of the log."""
    question = _asked(request)
    sources: Sources = request.app.state.sources
    seen = await sources.see("The NATS server", lambda: _look(sources, question))
    return page(request, "log.html", found=seen.value, fault=seen.fault, **_shared(sources.app, question))


async def log_live(request: Request) -> Response:
    """Stream the newest events of the log."""
    question, streams = _asked(request), stream_of(request)
    if not question.is_live:
        raise HTTPException(400, "Only the end of the log is live. Leave `until` and positions out.")
    sources: Sources = request.app.state.sources
    shared = _shared(sources.app, question)

    async def parts() -> AsyncGenerator[str]:
        tail, sent = Tail(sources.app.name, question.wanted), ""

        async def step() -> None:
            opened = await sources.log()
            if tail.next is None and question.since is not None:
                tail.begin = await opened.jet.store.position_at(question.since)
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
    client, app, log_filter = opened.client, sources.app.name, asked.wanted
    store = opened.jet.store
    first, last = await ends_of(client, app)
    begin = first if asked.since is None else max(first, await store.position_at(asked.since))
    end = last + 1 if asked.until is None else min(last + 1, await store.position_at(asked.until))
    marked = await store.position_at(asked.at) if isinstance(asked.at, datetime) else asked.at
    if asked.after is not None:
        log_page = await page_from(client, app, max(begin, asked.after + 1), end - 1, log_filter)
        scans_on = "after" if len(log_page.records) < ROWS and log_page.end < end else ""
    else:
        newest = end if asked.before is None else min(end, asked.before)
        if marked is not None:
            newest = min(end, marked + 1)
        log_page = await page_before(client, app, max(begin, newest), begin, log_filter)
        scans_on = "before" if len(log_page.records) < ROWS and log_page.start > begin else ""
    rows = await rows_of(opened.jet, client, log_page.records)
    return LogView(log_page, rows[::-1], first, last, begin, end, marked, scans_on)


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
    """Return an event's body in one line, cut."""
    if isinstance(data, str):
        return cut(data, 200)
    return cut(json.dumps(cut_values(data, 100), ensure_ascii=False, separators=(", ", ": "), default=str), 200)


def _asked(request: Request) -> LogQuestion:
    """Read the query; raises `HTTPException` 400 for invalid values."""
    query = request.query_params
    filters = {name: query[name] for name in _FILTERS if query.get(name)}
    for name, value in filters.items():
        if len(value) > _TEXT_MAX:
            raise HTTPException(
                400, f"`{name}` has {len(value):,} characters; the longest there are have {_TEXT_MAX:,}."
            )
    app: App = request.app.state.sources.app
    aggregate, name = filters.get("aggregate"), filters.get("type")
    if "id" in filters and aggregate is None:
        raise HTTPException(400, "An id is one of an aggregate. Choose the aggregate as well.")
    if aggregate is not None and not _AGGREGATE.fullmatch(aggregate):
        raise HTTPException(400, "No aggregate can have this name: names are lower-case letters, digits and `_`.")
    kind = None if name is None else app.catalog.named(name)
    if aggregate is None and kind is not None:
        aggregate = kind.aggregate  # only its subjects carry the event, so the server can filter
    names = [(event_kind.info.name, *event_kind.info.formerly) for event_kind in app.catalog.kinds()]
    log_filter = LogFilter(
        types=() if name is None else names_of(names, name),
        aggregate=aggregate,
        aggregate_id=filters.get("id"),
        actor=filters.get("actor"),
        correlation=filters.get("correlation"),
        command_id=filters.get("command"),
    )
    try:
        log_filter.subject(app.name)
    except Refused as error:
        raise HTTPException(400, str(error)) from None
    at = query.get("at") or None
    return LogQuestion(
        given=filters,
        wanted=log_filter,
        since=_time("since", filters.get("since")),
        until=_time("until", filters.get("until")),
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


KEPT = 100
"""The most rows of a page that follows the log."""
_STEP_MAX = 200
"""The most records of one step; of more, the newest are shown and one row stands for the others."""


async def rows_of(jet: Jet, client: Client, records: Sequence[RawRecord]) -> list[dict[str, Any]]:
    """Return what a page shows of records; never raises for their contents."""
    skipped = await skipped_among(client, jet.name, records)
    return [event_view(jet, record, skipped) for record in records]


class Tail:
    """The newest events of one live page, newest first.

    The row `{"passed": (first, last)}` stands for positions that are not shown.
    """

    def __init__(self, app: str, wanted: LogFilter) -> None:
        self.rows: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.next: int | None = None
        """The next position to read; None before the first step."""
        self.begin = 1
        """The first position that may be shown."""
        self._app = app
        self._wanted = wanted

    async def step(self, jet: Jet, client: Client) -> None:
        """Read the new events. Raises `StoreUnavailable` and `Forbidden`, after which a step can be tried again."""
        if self.next is None:
            first, last = await ends_of(client, self._app)
            page = await page_before(client, self._app, last + 1, max(first, min(self.begin, last + 1)), self._wanted)
            self._take(await rows_of(jet, client, page.records))
            self.next = last + 1
            return
        records, remaining = await news_since(client, self._app, self.next, self._wanted, _STEP_MAX)
        if remaining:
            await self._jump(jet, client, self.next)
            return
        if records:
            following = records[-1][0] + 1
            matching = [record for record in records if self._wanted.takes(record)]
            newest = matching[-KEPT:]
            self._take(await rows_of(jet, client, newest))
            self.next = following

    async def _jump(self, jet: Jet, client: Client, start: int) -> None:
        """Go to the newest events, and skip those that came too fast for a reader."""
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
                body = cast("dict[str, Any]", row["data"]) if isinstance(row["data"], dict) else {}
                for shown_row in self.rows:
                    if str(shown_row.get("position")) == row["aggregate_id"]:
                        shown_row["void"] = str(body.get("reason", ""))


_LEVELS_MAX = 12
"""Levels of the tree of effects; deeper events are shown beside their causes."""


async def event(request: Request) -> Response:
    """Show one event with its batch, its cause, its effects and the rows that it changes."""
    position = query_number(request, "position", least=1)
    after = query_number(request, "after") or 0
    if position is None:
        raise HTTPException(400, "Say which event: `position` is its place in the log.")
    sources: Sources = request.app.state.sources
    started = time.monotonic()
    seen = await sources.see("The server", lambda: _at(sources, position))
    if seen.fault or seen.value is None:
        return page(request, "event_none.html", 502, position=position, fault=seen.fault, last=None)
    log, record, last = seen.value
    if record is None:
        return page(request, "event_none.html", 404, position=position, fault="", last=last)
    remaining_s = max(ANSWER_S - (time.monotonic() - started), 0.2)
    store = log.repositories.store
    command_id, metadata = metadata_of(record[3])
    batch, cause, effects, rows = await asyncio.gather(
        sources.see("The server", lambda: neighbours(store, record), remaining_s),
        sources.see("The server", lambda: _cause(log, record, metadata.causation), remaining_s),
        sources.see("The server", lambda: effects_of(store, record, after), remaining_s),
        sources.see("The app", lambda: _rows_touched(sources, log, record), remaining_s),
    )
    view = event_view(log.jet, record, log.repositories.catalog.skipped)
    trace = (metadata.traceparent or "").split("-")
    return page(
        request,
        "event.html",
        event=view | {"logged_at": import_time(record)},
        headers=headers_of(record),
        command_id=command_id,
        metadata=metadata,
        trace=trace[1] if len(trace) >= 4 else "",
        names=(CORRELATION, TRACEPARENT),
        last=last,
        near=NEAR,
        batch=batch,
        batch_told=[_line(log, neighbour) for neighbour in batch.value or ()],
        cause=cause,
        cause_told=_line(log, cause.value.record) if cause.value is not None and cause.value.record else None,
        effects=effects,
        tree=_tree(log, effects.value),
        rows=rows,
        correlated=_correlated(sources, metadata.correlation),
    )


async def _at(sources: Sources, position: int) -> tuple[OpenLog, RawRecord | None, int]:
    log = await sources.log()
    store = log.repositories.store
    record, state, _ = await asyncio.gather(store.at(position), store.state(), log.jet.skipped())
    return log, record, state.last


async def _cause(log: OpenLog, record: RawRecord, cause: str | None) -> Cause | None:
    return None if not cause else await cause_of(log.repositories.store, record, cause)


async def _rows_touched(sources: Sources, log: OpenLog, record: RawRecord) -> list[RowsTouched]:
    try:
        recorded = log.jet.decode(record)
    except CodecError:
        return []  # the page says why the event cannot be read
    # In a thread, since this is the application's code and pages must be served meanwhile.
    return [] if recorded is None else await asyncio.to_thread(rows_touched, sources.app, recorded)


def _line(log: OpenLog, record: RawRecord) -> dict[str, Any]:
    return header_view(record, log.repositories.catalog.skipped)


def _tree(log: OpenLog, effects: Effects | None) -> list[dict[str, Any]]:
    def drawn(nodes: Sequence[Node], level: int) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for node in nodes:
            inner = drawn(node.effects, level + 1)
            line = _line(log, node.record)
            if level < _LEVELS_MAX:
                lines.append(line | {"effects": inner})
            else:
                lines += [line | {"effects": []}, *inner]
        return lines

    return drawn(effects.nodes, 1) if effects is not None else []


def _correlated(sources: Sources, correlation: str | None) -> tuple[str, str] | None:
    """Return (name, id) of the process that a correlation id names, or None."""
    name, _, process_id = (correlation or "").partition(":")
    process_names = {info.name for info in sources.app.processes.values()}
    return (name, process_id) if process_id and name in process_names else None
