"""The overview: the log, and where each read model, reactor and process stands. Live."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from eventjet.ui.live import streams_of
from eventjet.ui.pages import page, rendered

_EVERY_S = 1.0


async def overview(request: Request) -> Response:
    """The page."""
    return page(request, "overview.html", **await _found(request))


async def overview_live(request: Request) -> Response:
    """Its moving part, once a second."""
    streams = streams_of(request)

    async def parts() -> AsyncGenerator[str]:
        while await streams.pause(_EVERY_S):
            yield rendered(request, "overview_now.html", **await _found(request))

    return streams.response(parts())


async def _found(request: Request) -> dict[str, Any]:
    beat = await request.app.state.pulse.beat()
    return {"beat": beat}


ROUTES: Mapping[str, Mapping[str, Any]] = {
    "overview": {"endpoint": overview},
    "overview_live": {"endpoint": overview_live},
}
