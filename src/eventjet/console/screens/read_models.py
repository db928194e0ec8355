"""Read models: the list, one read model with revisions and tables, and one row with the events that made it."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from functools import partial
from typing import Any, TypeAlias, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request

from eventjet.console.pages import query_number, query_text
from eventjet.console.sources import Result, Sources
from eventjet.console.status_poller import StatusPoller
from eventjet.errors import UsageError
from eventjet.lake import LakeStatus
from eventjet.lake import status as lake_status
from eventjet.operations.rows import RowSearch, compared, live_row, why_no_history
from eventjet.operations.tables import revision_tables
from eventjet.projections.resolve import ResolvedProjection
from eventjet.subscriptions.work_status import PROJECTION

_NAME_MAX = 63
_REVISION_MAX = 2**31 - 1
_SHOWN_MAX = 500
"""The most projections in the list."""


async def models(request: Request) -> dict[str, Any]:
    """Show every projection that is declared or has a checkpoint."""
    poller: StatusPoller = await request.app.state.poller.refreshed()
    sources: Sources = request.app.state.sources
    projections = [status for status in poller.statuses if status.kind == PROJECTION]
    lake = None if sources.settings.lake is None else await sources.attempt("The lake", _lake_of(sources))
    return {
        "lake": lake,
        "polled": poller,
        "models": projections[:_SHOWN_MAX],
        "more": len(projections) - _SHOWN_MAX,
        "has_none": not sources.app.projections,
    }


async def _lake_of(sources: Sources) -> LakeStatus:
    settings = sources.settings
    assert settings.lake is not None
    return await lake_status(
        sources.app, settings.lake, settings, table_format=settings.lake_format, catalog=settings.lake_catalog
    )


async def model(request: Request) -> dict[str, Any]:
    """Show one read model at one revision."""
    sources: Sources = request.app.state.sources
    name = query_text(request, "name", _NAME_MAX)
    table, after = query_text(request, "table", 200), query_text(request, "after")
    start = query_text(request, "start")
    revision = query_number(request, "revision", most=_REVISION_MAX)
    poller: StatusPoller = await request.app.state.poller.refreshed()
    revisions = [status for status in poller.statuses if status.kind == PROJECTION and status.name == name]
    declared = sources.app.projections.get(name)
    if declared is None and not revisions and not poller.fault:
        raise HTTPException(404, f"The app has no read model {name!r}.")
    if revision is None:
        newest = max((status.revision for status in revisions), default=1)
        revision = newest if declared is None else declared.revision
    ask = partial(revision_tables, app=sources.app, name=name, revision=revision, table=table, after=after, start=start)
    result = await sources.attempt("The database", sources.ask(ask), refusals=UsageError)
    wire_names = {kind.event_type: kind.info.name for kind in sources.app.catalog.kinds()}
    events = () if declared is None else declared.events
    return {
        "name": name,
        "revision": revision,
        "is_declared": declared is not None and declared.revision == revision,
        "events": sorted(wire_names.get(event, event.__name__) for event in events),
        "polled": poller,
        "revisions": revisions,
        "here": next((status for status in revisions if status.revision == revision), None),
        "result": result,
        "start": start,
        "after": after,
        "no_history": why_no_history(sources.app, name),
    }


_SEARCHES_MAX = 4
_SEARCH_S = 300.0
_SearchKey: TypeAlias = tuple[str, str, int | None, int | None, int | None]


class Searches:
    """Row searches to be continued by another request: at most 4, for 5 minutes, in this process alone."""

    def __init__(self) -> None:
        self._searches: OrderedDict[_SearchKey, tuple[float, RowSearch]] = OrderedDict()

    def take(self, key: _SearchKey, read_to: int) -> RowSearch | None:
        """Remove and return the search that has read to this position; None if there is none."""
        at, search = self._searches.pop(key, (0.0, None))
        fits = search is not None and search.read_to == read_to and time.monotonic() - at < _SEARCH_S
        return search if fits else None

    def keep(self, key: _SearchKey, search: RowSearch) -> None:
        """Keep a search, in place of the oldest if there are too many."""
        self._searches[key] = time.monotonic(), search
        while len(self._searches) > _SEARCHES_MAX:
            self._searches.popitem(last=False)


async def row(request: Request) -> dict[str, Any]:
    """Show one row of a read model with the events that made it, as far as they were read in time."""
    sources: Sources = request.app.state.sources
    searches: Searches = request.app.state.searches
    name, key = query_text(request, "name", _NAME_MAX), query_text(request, "key")
    at, number, until = (query_number(request, parameter) for parameter in ("at", "n", "until"))
    resolved = sources.app.projections.get(name)
    if resolved is None:
        raise HTTPException(404, f"The app has no read model {name!r}.")
    shown_key, key = _key_shown(key)
    values: dict[str, Any] = {"name": name, "key": key, "shown_key": shown_key, "at": at, "until": until}
    values |= {"why": why_no_history(sources.app, name), "result": Result(None), "begun_anew": False}
    if not isinstance(resolved, ResolvedProjection):
        return values
    search_key = name, key, at, number, until
    read_to = query_number(request, "read_to")
    search = None if read_to is None else searches.take(search_key, read_to)
    values["begun_anew"] = read_to is not None and search is None

    async def look() -> RowSearch:
        row_search = search
        if row_search is None:
            try:
                row_key, live = await sources.ask(lambda connection: live_row(connection, resolved, key))
            except UsageError as error:
                raise HTTPException(400, str(error)) from None
            log = await sources.log()
            opened = log.jet, log.client, log.repositories.catalog
            row_search = RowSearch(*opened, sources.app, resolved, row_key, live, at, number, until)
        await row_search.go_on()
        return row_search

    result = await sources.attempt("The server or the database", look())
    if result.value is not None and not result.value.done:
        searches.keep(search_key, result.value)
    return values | {"result": Result(None if result.value is None else _row_shown(result.value), result.fault)}


def _key_shown(key: str) -> tuple[str, str]:
    """Return a key as `verify` writes it, its parts separated by commas, and as ASCII JSON."""
    try:
        parts = json.loads(key)
    except (ValueError, RecursionError):
        return key, key
    text = ", ".join(map(str, cast("list[Any]", parts))) if isinstance(parts, list) else key
    return text, json.dumps(parts)


def _row_shown(search: RowSearch) -> dict[str, Any]:
    """Return the values of a search for the template."""
    step, before, after = search.chosen or (None, None, None)
    return {
        "search": search,
        "checkpoint": search.live.checkpoint,
        "exists": search.live.row is not None,
        "is_equal": search.is_equal if search.done and not search.fault else None,
        "since": search.missed_since or search.first,
        "fields": compared(search.live.row, search.expected),
        "live": compared(search.live.row, search.live.row),
        "chosen": step,
        "chosen_fields": compared(before, after),
        "steps": list(search.steps),
        "older": search.steps[0].position if search.steps and search.steps[0].number > 1 else None,
    }
