"""Quarantine: which events are quarantined, why, and which events they block."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from eventjet.console.actions import ActionRequest
from eventjet.console.pages import page
from eventjet.console.sources import Seen, Sources
from eventjet.errors import UsageError
from eventjet.operations.quarantine import QuarantinePage, names_with_quarantine, quarantine_page, quarantined_event
from eventjet.subscriptions.supervisor import chosen_of

_EACH_MAX = 20
"""The most events of each name on the page of all names."""
_PAGE = 100
_WAITING_MAX = 50


async def quarantine(request: Request) -> Response:
    """Show the quarantines of all names, or that of one name page by page."""
    sources: Sources = request.app.state.sources
    action_request = ActionRequest.of(
        [("name", request.query_params.get("name", "")), ("position", request.query_params.get("after", ""))]
    )
    names = list(action_request.names) or names_with_quarantine(sources.app)
    _check(sources, names)
    limit, after = (_PAGE if action_request.names else _EACH_MAX), next(iter(action_request.positions), 0)

    async def look(name: str) -> tuple[str, Seen[QuarantinePage]]:
        return name, await sources.see(
            f"The quarantine of {name}", partial(quarantine_page, sources, name, limit=limit, after=after)
        )

    quarantines = await asyncio.gather(*map(look, names))
    return page(
        request,
        "quarantine.html",
        found=quarantines,
        name=action_request.names[0] if action_request.names else "",
        after=after,
    )


async def parked(request: Request) -> Response:
    """Show one quarantined event: why it is quarantined, what is stored of it, and which events it blocks."""
    sources: Sources = request.app.state.sources
    action_request = ActionRequest.of((name, request.query_params.get(name, "")) for name in ("name", "position"))
    if len(action_request.names) != 1 or len(action_request.positions) != 1:
        raise HTTPException(400, "Name one quarantine and one position.")
    (name,), (position,) = action_request.names, action_request.positions
    _check(sources, [name])
    seen = await sources.see("The quarantine", partial(quarantined_event, sources, name, position, limit=_WAITING_MAX))
    if seen.value is None and not seen.fault:
        raise HTTPException(404, f"The event at position {position:,} is not in the quarantine of {name}.")
    return page(request, "parked.html", name=name, position=position, seen=seen)


def _check(sources: Sources, names: list[str]) -> None:
    try:
        chosen_of(sources.app, names)
    except UsageError as error:
        raise HTTPException(404, str(error)) from None
