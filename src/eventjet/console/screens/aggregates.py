"""Aggregates: found by type and id, or by the beginning of the id; and those that changed last."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from eventjet.codec.subjects import is_name
from eventjet.console.asked import ID_MAX, text_asked
from eventjet.console.pages import page
from eventjet.console.sources import ANSWER_S, Seen, Sources
from eventjet.operations.aggregates import AggregateFound, IdsFound, changed_last, ids_beginning, looked_up
from eventjet.shown import cut, printable


async def aggregates(request: Request) -> Response:
    """The page: with `type`, what was found; without, what changed last."""
    sources: Sources = request.app.state.sources
    kind, wanted = text_asked(request, "type", ID_MAX), text_asked(request, "id", ID_MAX)
    after = text_asked(request, "after", ID_MAX)
    types = sorted(info.name for info in sources.app.aggregates.values())
    values: dict[str, Any] = {"types": types, "kind": kind, "wanted": wanted, "after": after, "problem": ""}
    if kind and not is_name(kind):
        return page(
            request, "aggregates.html", 400, **values | _none(f"{_told(kind)} is not the name of an aggregate.")
        )
    if kind:
        return page(request, "aggregates.html", **values | await _searched(sources, kind, wanted, after))
    last = await sources.see("The server", lambda: _last(sources))
    problem = "Choose a type as well: ids of different types may be the same." if wanted else ""
    return page(request, "aggregates.html", **values | _none(problem) | {"last": last})


async def _last(sources: Sources) -> list[AggregateFound]:
    return await changed_last((await sources.log()).repositories.store)


async def _searched(sources: Sources, kind: str, wanted: str, after: str) -> dict[str, Any]:
    """The aggregate of this id, and those whose ids begin so, which the log is asked about last."""

    async def by_index() -> IdsFound:
        return await sources.ask(lambda one: ids_beginning(sources.app, one, kind, wanted, after))

    exact, index = await asyncio.gather(
        sources.see(
            "The server",
            lambda: _looked_up(sources, kind, [wanted] if wanted and not after else []),
            ANSWER_S / 2,
        ),
        sources.see("The database", by_index, ANSWER_S / 2),
    )
    begun: Seen[list[AggregateFound]] = Seen([])
    ids = [one for one in index.value.ids if one != wanted] if index.value is not None else []
    if ids and not exact.fault:
        begun = await sources.see("The server", lambda: _looked_up(sources, kind, ids), ANSWER_S / 2)
    found = [*(exact.value or ()), *(begun.value or ())]
    return {"found": found, "index": index, "fault_told": exact.fault or begun.fault, "problem": "", "last": None}


async def _looked_up(sources: Sources, kind: str, ids: list[str]) -> list[AggregateFound]:
    return await looked_up((await sources.log()).repositories.store, kind, ids)


def _none(problem: str) -> dict[str, Any]:
    return {"found": [], "index": None, "fault_told": "", "problem": problem, "last": None}


def _told(kind: str) -> str:
    return repr(printable(cut(kind, 60)))


ROUTES: Mapping[str, Mapping[str, Any]] = {"aggregates": {"endpoint": aggregates}}
