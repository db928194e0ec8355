"""One row: now, as it was, the events that made it, and since when it is not what the log says."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from eventjet.console.asked import number_asked, text_asked
from eventjet.console.pages import page
from eventjet.console.sources import Seen, Sources
from eventjet.errors import UsageError
from eventjet.operations.rows import RowSearch, compared, live_row, why_not_told
from eventjet.projections.resolve import ResolvedProjection

_NAME_MAX = 63
_KEPT_MAX = 4
_KEPT_S = 300.0
_Asked: TypeAlias = tuple[str, str, int | None, int | None, int | None]


class Searches:
    """Those that are not done, for whoever lets one go on: a few, for some minutes, in this process alone."""

    def __init__(self) -> None:
        self._kept: OrderedDict[_Asked, tuple[float, RowSearch]] = OrderedDict()

    def take(self, asked: _Asked, read_to: int) -> RowSearch | None:
        """The one that stands there; it is not kept any more."""
        at, found = self._kept.pop(asked, (0.0, None))
        fits = found is not None and found.read_to == read_to and time.monotonic() - at < _KEPT_S
        return found if fits else None

    def keep(self, asked: _Asked, search: RowSearch) -> None:
        self._kept[asked] = time.monotonic(), search
        while len(self._kept) > _KEPT_MAX:
            self._kept.popitem(last=False)


async def row(request: Request) -> Response:
    """The page."""
    sources: Sources = request.app.state.sources
    name, key = text_asked(request, "name", _NAME_MAX), text_asked(request, "key")
    at, number, until = (number_asked(request, each) for each in ("at", "n", "until"))
    resolved = sources.app.projections.get(name)
    if resolved is None:
        raise HTTPException(404, f"The app has no read model {name!r}.")
    shown_key, key = _key_shown(key)
    known = {"name": name, "key": key, "shown_key": shown_key, "at": at, "until": until}
    if not isinstance(resolved, ResolvedProjection):
        return page(
            request, "row.html", **known, why=why_not_told(sources.app, name), seen=Seen(None), begun_anew=False
        )
    asked = name, key, at, number, until
    read_to = number_asked(request, "read_to")
    search = None if read_to is None else request.app.state.searches.take(asked, read_to)
    begun_anew = read_to is not None and search is None

    async def look() -> RowSearch:
        found = search or await _begun(sources, resolved, asked)
        await found.go_on()
        return found

    seen = await sources.see("The server or the database", look)
    if seen.value is not None and not seen.value.done:
        request.app.state.searches.keep(asked, seen.value)
    found = None if seen.value is None else _shown(seen.value)
    return page(request, "row.html", **known, why="", seen=replace(seen, value=found), begun_anew=begun_anew)


def _key_shown(key: str) -> tuple[str, str]:
    """As `verify` writes it, the parts separated by commas; and as JSON of nothing but ASCII."""
    try:
        parts = json.loads(key)
    except (ValueError, RecursionError):
        return key, key
    text = ", ".join(map(str, cast("list[Any]", parts))) if isinstance(parts, list) else key
    return text, json.dumps(parts)


async def _begun(sources: Sources, resolved: ResolvedProjection, asked: _Asked) -> RowSearch:
    _, given, at, number, until = asked
    try:
        key, live = await sources.ask(lambda connection: live_row(connection, resolved, given))
    except UsageError as error:
        raise HTTPException(400, str(error)) from None
    log = await sources.log()
    catalog = log.repositories.catalog
    return RowSearch(log.jet, log.client, catalog, sources.app, resolved, key, live, at, number, until)


def _shown(search: RowSearch) -> dict[str, Any]:
    """What the page says of a search."""
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


ROUTES: Mapping[str, Mapping[str, Any]] = {"row": {"endpoint": row}}
