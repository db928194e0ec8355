"""The log: its events page by page with filters, its end as it grows, and one event with its causes and effects."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, cast
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from eventjet.app import App
from eventjet.codec.headers import SKIP_NAME, RawRecord, metadata_of
from eventjet.console.live import LiveResponse
from eventjet.console.pages import page, query_number, query_text
from eventjet.console.sources import ANSWER_S, OpenLog, Sources
from eventjet.domain.blob import OCTETS
from eventjet.errors import CodecError, Refused
from eventjet.jet import Jet
from eventjet.jetstream.client import Client
from eventjet.operations.events import (
    NEAR,
    Cause,
    Node,
    RowsTouched,
    bodies_in,
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
    ends_of,
    page_before,
    page_from,
    page_of_log,
    skipped_among,
)
from eventjet.text import cut, cut_values

_EVERY_S = 0.5
_TEXT_MAX = 1_000
_AGGREGATE = re.compile(r"[a-z_][a-z0-9_]{0,62}")
"""A declared name, or a name of eventjet's own aggregates, which begins with `_`."""
_FILTERS = ("aggregate", "id", "type", "actor", "correlation", "command", "since", "until")


@dataclass(frozen=True, slots=True)
class LogQuery:
    """The filters and the part of the log that a query asks for."""

    filters: Mapping[str, str]
    """The filters as the query has them, for links and the form."""
    conditions: LogFilter
    since: datetime | None
    until: datetime | None
    before: int | None
    after: int | None
    at: int | datetime | None

    @property
    def is_live(self) -> bool:
        """Whether the query is about the end of the log, which moves."""
        return self.until is None and self.before is None and self.after is None and self.at is None


async def log(request: Request) -> dict[str, Any]:
    """Show one page of the log."""
    query = _query(request)
    sources: Sources = request.app.state.sources
    result = await sources.attempt("The NATS server", _look(sources, query))
    return {"view": result.value, "fault": result.fault, "is_live": query.is_live, **_shared(sources.app, query)}


async def log_live(request: Request) -> Response:
    """Stream the newest events of the log."""
    query = _query(request)
    if not query.is_live:
        raise HTTPException(400, "Only the end of the log is live. Leave `until` and positions out.")
    sources: Sources = request.app.state.sources
    shared, tail = _shared(sources.app, query), Tail(sources.app.name, query.conditions)

    async def step() -> None:
        log = await sources.log()
        if tail.next is None and query.since is not None:
            tail.begin = await log.jet.store.position_at(query.since)
        await tail.step(log.jet, log.client)

    async def values() -> dict[str, Any]:
        result = await sources.attempt("The NATS server", step())
        return {"rows": list(tail.rows), "fault": result.fault, "marked": None, **shared}

    return LiveResponse(request, "log_rows.html", values, _EVERY_S)


async def _look(sources: Sources, query: LogQuery) -> dict[str, Any]:
    """Return one page of the log with its place in the log."""
    opened = await sources.log()
    client, app, conditions = opened.client, sources.app.name, query.conditions
    store = opened.jet.store
    first, last = await ends_of(client, app)
    begin = first if query.since is None else max(first, await store.position_at(query.since))
    end = last + 1 if query.until is None else min(last + 1, await store.position_at(query.until))
    marked = await store.position_at(query.at) if isinstance(query.at, datetime) else query.at
    scans_on = ""
    """The direction in which there is more log to search for a full page."""
    if query.after is not None:
        log_page = await page_from(client, app, max(begin, query.after + 1), end - 1, conditions)
        if len(log_page.records) < ROWS and log_page.end < end:
            scans_on = "after"
    else:
        newest = end if query.before is None else min(end, query.before)
        newest = newest if marked is None else min(end, marked + 1)
        log_page = await page_before(client, app, max(begin, newest), begin, conditions)
        if len(log_page.records) < ROWS and log_page.start > begin:
            scans_on = "before"
    rows = await rows_of(opened.jet, client, log_page.records)
    return {
        "page": log_page,
        "rows": rows[::-1],
        "first": first,
        "last": last,
        "begin": begin,
        "end": end,
        "marked": marked,
        "scans_on": scans_on,
    }


def _shared(app: App, query: LogQuery) -> dict[str, Any]:
    return {
        "filters": query.filters,
        "types": sorted(kind.info.name for kind in app.catalog.kinds()),
        "aggregates": sorted(info.name for info in app.aggregates.values()),
        "preview": preview,
    }


def preview(data: Any) -> str:
    """Return an event's body in one line, cut."""
    if isinstance(data, str):
        return cut(data, 200)
    return cut(json.dumps(cut_values(data, 100), ensure_ascii=False, separators=(", ", ": "), default=str), 200)


def _query(request: Request) -> LogQuery:
    """Read the query; raises `HTTPException` 400 for invalid values."""
    texts = {name: query_text(request, name, _TEXT_MAX) for name in _FILTERS}
    filters = {name: value for name, value in texts.items() if value}
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
    conditions = LogFilter(
        types=() if name is None else next((group for group in names if name in group), (name,)),
        aggregate=aggregate,
        aggregate_id=filters.get("id"),
        actor=filters.get("actor"),
        correlation=filters.get("correlation"),
        command_id=filters.get("command"),
    )
    try:
        conditions.subject(app.name)
    except Refused as error:
        raise HTTPException(400, str(error)) from None
    at = query_text(request, "at", _TEXT_MAX)
    is_position = at.replace(",", "").strip().isdigit()
    return LogQuery(
        filters=filters,
        conditions=conditions,
        since=_time("since", texts["since"]),
        until=_time("until", texts["until"]),
        before=query_number(request, "before"),
        after=query_number(request, "after"),
        at=query_number(request, "at") if is_position else _time("at", at),
    )


def _time(name: str, text: str) -> datetime | None:
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text.strip())
        return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        wants = "a position or a time" if name == "at" else "a time"
        raise HTTPException(400, f"`{name}` is not {wants}. Write times as 2026-01-31T12:00, in UTC.") from None


TAIL_ROWS = 100
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

    def __init__(self, app: str, conditions: LogFilter) -> None:
        self.rows: deque[dict[str, Any]] = deque(maxlen=TAIL_ROWS)
        self.next: int | None = None
        """The next position to read; None before the first step."""
        self.begin = 1
        """The first position that may be shown."""
        self._app = app
        self._conditions = conditions

    async def step(self, jet: Jet, client: Client) -> None:
        """Read the new events. Raises `StoreUnavailable` and `Forbidden`, after which a step can be tried again."""
        if self.next is None:
            first, last = await ends_of(client, self._app)
            page = await page_before(
                client, self._app, last + 1, max(first, min(self.begin, last + 1)), self._conditions
            )
            self._take(await rows_of(jet, client, page.records))
            self.next = last + 1
            return
        subject = self._conditions.subject(self._app)
        records, remaining = await page_of_log(client, self._app, self.next, subject, _STEP_MAX)
        if remaining:
            await self._jump(jet, client, self.next)
            return
        if records:
            following = records[-1][0] + 1
            matching = [record for record in records if self._conditions.takes(record)]
            newest = matching[-TAIL_ROWS:]
            self._take(await rows_of(jet, client, newest))
            self.next = following

    async def _jump(self, jet: Jet, client: Client, start: int) -> None:
        """Go to the newest events, and skip those that came too fast for a reader."""
        _, last = await ends_of(client, self._app)
        page = await page_before(client, self._app, last + 1, start, self._conditions)
        rows = await rows_of(jet, client, page.records)
        if page.start > start:
            self.rows.appendleft({"passed": (start, page.start - 1)})
        self._take(rows)
        self.next = last + 1

    def _take(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            self.rows.appendleft(row)
            if row["aggregate"] == SKIP_NAME:
                body = cast("dict[str, Any]", row["data"]) if isinstance(row["data"], dict) else {}
                for shown_row in self.rows:
                    if str(shown_row.get("position")) == row["aggregate_id"]:
                        shown_row["skipped"] = str(body.get("reason", ""))


_BODIES_MAX = 100
"""The most large bodies of one event that its page lists."""
_LEVELS_MAX = 12
"""Levels of the tree of effects; deeper events are shown beside their causes."""


async def event(request: Request) -> dict[str, Any] | Response:
    """Show one event with its batch, its cause, its effects and the rows that it changes."""
    position = query_number(request, "position", least=1)
    after = query_number(request, "after") or 0
    if position is None:
        raise HTTPException(400, "Say which event: `position` is its place in the log.")
    sources: Sources = request.app.state.sources
    started = time.monotonic()

    async def look() -> tuple[OpenLog, RawRecord | None, int]:
        log = await sources.log()
        store = log.repositories.store
        record, state, _ = await asyncio.gather(store.at(position), store.state(), log.jet.skipped())
        return log, record, state.last

    result = await sources.attempt("The server", look())
    if result.value is None:
        return page(request, "event_none.html", 502, position=position, fault=result.fault, last=None)
    log, record, last = result.value
    if record is None:
        return page(request, "event_none.html", 404, position=position, fault="", last=last)
    remaining_s = max(ANSWER_S - (time.monotonic() - started), 0.2)
    store = log.repositories.store
    command_id, metadata = metadata_of(record[3])

    async def cause_of_event() -> Cause | None:
        return await cause_of(store, record, metadata.causation) if metadata.causation else None

    async def rows() -> list[RowsTouched]:
        try:
            recorded = log.jet.decode(record)
        except CodecError:
            return []  # the page says why the event cannot be read
        # In a thread, since this is the application's code and pages must be served meanwhile.
        return [] if recorded is None else await asyncio.to_thread(rows_touched, sources.app, recorded)

    batch, cause, effects, touched = await asyncio.gather(
        sources.attempt("The server", neighbours(store, record), remaining_s),
        sources.attempt("The server", cause_of_event(), remaining_s),
        sources.attempt("The server", effects_of(store, record, after), remaining_s),
        sources.attempt("The app", rows(), remaining_s),
    )
    skipped = log.repositories.catalog.skipped
    view = event_view(log.jet, record, skipped)
    trace = (metadata.traceparent or "").split("-")
    process, _, process_id = (metadata.correlation or "").partition(":")
    is_process = process_id and process in {info.name for info in sources.app.processes.values()}
    return {
        "event": view | {"logged_at": import_time(record)},
        "bodies": list(islice(bodies_in(view["data"]), _BODIES_MAX)),
        "headers": headers_of(record),
        "command_id": command_id,
        "metadata": metadata,
        "trace": trace[1] if len(trace) >= 4 else "",
        "last": last,
        "near": NEAR,
        "batch": batch,
        "batch_lines": [header_view(neighbour, skipped) for neighbour in batch.value or ()],
        "cause": cause,
        "cause_line": header_view(cause.value.record, skipped) if cause.value and cause.value.record else None,
        "effects": effects,
        "tree": _tree(effects.value.nodes, skipped, 1) if effects.value else [],
        "rows": touched,
        "correlated": (process, process_id) if is_process else None,
    }


async def body(request: Request) -> Response:
    """Offer a large body as a download, never to be shown, if the visitor may see the event that refers to it."""
    position, digest = query_number(request, "position", least=1), query_text(request, "digest", 100)
    sources: Sources = request.app.state.sources
    log = await sources.log()
    record = None if position is None else await log.repositories.store.at(position)
    await log.jet.skipped()
    shown = () if record is None else bodies_in(event_view(log.jet, record, log.repositories.catalog.skipped)["data"])
    reference = next((reference for reference in shown if reference["digest"] == digest), None)
    objects = log.repositories.store.objects
    size = None if reference is None else await objects.size(digest)
    if reference is None or size is None:
        raise HTTPException(404, "No event at this position refers to it, or the object store does not have it.")
    name = quote(reference["name"] or digest.removeprefix("sha256:"), safe="")
    headers = {
        "content-disposition": f"attachment; filename*=UTF-8''{name}",
        "content-length": str(size),
        "x-content-type-options": "nosniff",
    }
    chunks = () if request.method == "HEAD" else objects.chunks(digest)
    return StreamingResponse(chunks, media_type=OCTETS, headers=headers)


def _tree(nodes: Sequence[Node], skipped: Mapping[int, str], level: int) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for node in nodes:
        line, inner = header_view(node.record, skipped), _tree(node.effects, skipped, level + 1)
        if level < _LEVELS_MAX:
            lines.append(line | {"effects": inner})
        else:
            lines += [line | {"effects": []}, *inner]
    return lines
