"""Read models: the list, one read model with revisions and tables, and one row with the events that made it."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from dataclasses import replace
from typing import Any, TypeAlias, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from eventjet.console.pages import page, query_number, query_text
from eventjet.console.sources import Seen, Sources
from eventjet.console.status_poller import PolledStatus, StatusPoller
from eventjet.errors import UsageError
from eventjet.operations.rows import RowSearch, compared, live_row, why_not_told
from eventjet.operations.tables import TablesSeen, tables_seen
from eventjet.projections.resolve import ResolvedProjection
from eventjet.subscriptions.status import PROJECTION, WorkStatus

_NAME_MAX = 63
_REVISION_MAX = 2**31 - 1
_SHOWN_MAX = 500
"""The most projections in the list."""


async def models(request: Request) -> Response:
    """Show every projection that is declared or has a checkpoint."""
    polled = await request.app.state.poller.polled()
    projections = [status for status in polled.statuses if status.kind == PROJECTION]
    return page(
        request, "models.html", polled=polled, models=projections[:_SHOWN_MAX], more=len(projections) - _SHOWN_MAX
    )


async def model(request: Request) -> Response:
    """Show one read model at one revision."""
    sources: Sources = request.app.state.sources
    name = query_text(request, "name", _NAME_MAX)
    table, after = query_text(request, "table", 200), query_text(request, "after")
    start = query_text(request, "start")
    revision = query_number(request, "revision")
    poller: StatusPoller = request.app.state.poller
    declared = sources.app.projections.get(name)
    if revision is None:
        revision = declared.revision if declared is not None else _newest(_of_name(await poller.polled(), name))
    if revision > _REVISION_MAX:
        raise HTTPException(400, f"No revision has the number {revision:,}.")

    async def look() -> TablesSeen:
        try:
            return await sources.ask(
                lambda connection: tables_seen(
                    connection, sources.app, name, revision, table=table, after=after, start=start
                )
            )
        except UsageError as error:
            raise HTTPException(400, str(error)) from None

    polled, seen = await asyncio.gather(poller.polled(), sources.see("The database", look))
    revisions = _of_name(polled, name)
    if declared is None and not revisions and not polled.fault:
        raise HTTPException(404, f"The app has no read model {name!r}.")
    return page(
        request,
        "model.html",
        name=name,
        revision=revision,
        declared=declared,
        is_declared=declared is not None and declared.revision == revision,
        events=[] if declared is None else sorted(_wire(sources, event) for event in declared.events),
        polled=polled,
        revisions=revisions,
        here=_of(revisions, revision),
        seen=seen,
        start=start,
        after=after,
        not_told=why_not_told(sources.app, name),
    )


def _of_name(polled: PolledStatus, name: str) -> list[WorkStatus]:
    return [status for status in polled.statuses if status.kind == PROJECTION and status.name == name]


def _newest(revisions: list[WorkStatus]) -> int:
    return max((status.revision for status in revisions), default=1)


def _of(revisions: list[WorkStatus], revision: int) -> WorkStatus | None:
    return next((status for status in revisions if status.revision == revision), None)


def _wire(sources: Sources, event: type) -> str:
    return next((kind.info.name for kind in sources.app.catalog.kinds() if kind.event_type is event), event.__name__)


_KEPT_MAX = 4
_KEPT_S = 300.0
_Asked: TypeAlias = tuple[str, str, int | None, int | None, int | None]


class Searches:
    """Row searches to be continued by another request: at most 4, for 5 minutes, in this process alone."""

    def __init__(self) -> None:
        self._kept: OrderedDict[_Asked, tuple[float, RowSearch]] = OrderedDict()

    def take(self, asked: _Asked, read_to: int) -> RowSearch | None:
        """Remove and return the search that has read to this position; None if there is none."""
        at, search = self._kept.pop(asked, (0.0, None))
        fits = search is not None and search.read_to == read_to and time.monotonic() - at < _KEPT_S
        return search if fits else None

    def keep(self, asked: _Asked, search: RowSearch) -> None:
        """Keep a search, in place of the oldest if there are too many."""
        self._kept[asked] = time.monotonic(), search
        while len(self._kept) > _KEPT_MAX:
            self._kept.popitem(last=False)


async def row(request: Request) -> Response:
    """Show one row of a read model with the events that made it, as far as they were found in time."""
    sources: Sources = request.app.state.sources
    name, key = query_text(request, "name", _NAME_MAX), query_text(request, "key")
    at, number, until = (query_number(request, parameter) for parameter in ("at", "n", "until"))
    resolved = sources.app.projections.get(name)
    if resolved is None:
        raise HTTPException(404, f"The app has no read model {name!r}.")
    shown_key, key = _key_shown(key)
    values = {"name": name, "key": key, "shown_key": shown_key, "at": at, "until": until}
    if not isinstance(resolved, ResolvedProjection):
        return page(
            request, "row.html", **values, why=why_not_told(sources.app, name), seen=Seen(None), begun_anew=False
        )
    search_key = name, key, at, number, until
    read_to = query_number(request, "read_to")
    search = None if read_to is None else request.app.state.searches.take(search_key, read_to)
    begun_anew = read_to is not None and search is None

    async def look() -> RowSearch:
        row_search = search or await _begin_search(sources, resolved, search_key)
        await row_search.go_on()
        return row_search

    seen = await sources.see("The server or the database", look)
    if seen.value is not None and not seen.value.done:
        request.app.state.searches.keep(search_key, seen.value)
    shown = None if seen.value is None else _row_shown(seen.value)
    return page(request, "row.html", **values, why="", seen=replace(seen, value=shown), begun_anew=begun_anew)


def _key_shown(key: str) -> tuple[str, str]:
    """Return a key as `verify` writes it, its parts separated by commas, and as ASCII JSON."""
    try:
        parts = json.loads(key)
    except (ValueError, RecursionError):
        return key, key
    text = ", ".join(map(str, cast("list[Any]", parts))) if isinstance(parts, list) else key
    return text, json.dumps(parts)


async def _begin_search(sources: Sources, resolved: ResolvedProjection, asked: _Asked) -> RowSearch:
    _, key_text, at, number, until = asked
    try:
        key, live = await sources.ask(lambda connection: live_row(connection, resolved, key_text))
    except UsageError as error:
        raise HTTPException(400, str(error)) from None
    log = await sources.log()
    catalog = log.repositories.catalog
    return RowSearch(log.jet, log.client, catalog, sources.app, resolved, key, live, at, number, until)


def _row_shown(search: RowSearch) -> dict[str, Any]:
    """Return the values of a search for the template."""
    chosen = search.chosen
    is_equal = search.is_equal if search.done and not search.fault else None
    return {
        "search": search,
        "held": search.live.held,
        "exists": search.live.row is not None,
        "is_equal": is_equal,
        "since": search.missed_since or search.first,
        "fields": compared(search.live.row, search.expected),
        "live": compared(search.live.row, search.live.row),
        "then": [] if chosen is None else compared(chosen.before, chosen.after),
        "chosen": None if chosen is None else chosen.step,
        "steps": list(search.steps),
        "older": search.steps[0].position if search.steps and search.steps[0].number > 1 else None,
    }
