"""Quarantine: which events are quarantined, why, and which events they block."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from eventjet.console.pages import query_number, query_text
from eventjet.console.sources import Sources
from eventjet.errors import UsageError
from eventjet.operations.quarantine import ENTRIES_MAX, Quarantine, names_with_quarantine

_EACH_MAX = 20
"""The most events of each name on the page of all names."""
_PAGE = 100
_WAITING_MAX = 50
_NAME_MAX = 100
_TEXT_MAX = 200


async def quarantine(request: Request) -> dict[str, Any]:
    """Show the quarantines of all names, or that of one name page by page."""
    sources: Sources = request.app.state.sources
    name, after = query_text(request, "name", _NAME_MAX), query_number(request, "after") or 0
    quarantines = [_quarantine(sources, each) for each in ([name] if name else names_with_quarantine(sources.app))]
    limit, text = _PAGE if name else _EACH_MAX, query_text(request, "text", _TEXT_MAX)
    looks = [
        sources.attempt(f"The quarantine of {each.name}", each.listed(limit=limit, after=after, text=text))
        for each in quarantines
    ]
    results = await asyncio.gather(*looks)
    return {
        "quarantines": list(zip(quarantines, results, strict=True)),
        "name": name,
        "after": after,
        "text": text,
        "looked_max": ENTRIES_MAX,
    }


async def quarantined(request: Request) -> dict[str, Any]:
    """Show one quarantined event: why it is quarantined, what is stored of it, and which events it blocks."""
    sources: Sources = request.app.state.sources
    name, position = query_text(request, "name", _NAME_MAX), query_number(request, "position")
    if not name or position is None:
        raise HTTPException(400, "Name one quarantine and one position.")
    look = _quarantine(sources, name).event(position, waiting=_WAITING_MAX)
    result = await sources.attempt("The quarantine", look)
    if result.value is None and not result.fault:
        raise HTTPException(404, f"The event at position {position:,} is not in the quarantine of {name}.")
    return {"name": name, "position": position, "result": result}


def _quarantine(sources: Sources, name: str) -> Quarantine:
    try:
        return Quarantine(sources, name)
    except UsageError as error:
        raise HTTPException(404, str(error)) from None
