"""`console`: the routes, the middleware before them, and the pages for errors."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eventjet.app import App
from eventjet.console.access import Access, Gate, Headers, read_only
from eventjet.console.action_kinds import ACTIONS
from eventjet.console.actions import Actions
from eventjet.console.live import Streams
from eventjet.console.pages import PATHS, page
from eventjet.console.screens import ENDPOINTS, POSTED
from eventjet.console.screens.read_models import Searches
from eventjet.console.sources import Sources
from eventjet.console.status_poller import StatusPoller
from eventjet.doctor.server import monitoring_url
from eventjet.errors import EventjetError
from eventjet.settings import Settings

_LOG = logging.getLogger("eventjet.console")


def console(
    app: App,
    *,
    access: Access = read_only,
    settings: Settings | None = None,
    monitoring: Sequence[str] | None = None,
) -> Starlette:
    """Return the console of an app as an ASGI app, to serve alone or to mount in your own.

    `access` says for each request what its sender may do and who that is; by default everybody may look and nobody act.
    `monitoring` are the servers' monitoring endpoints, `http://host:8222`, which alone tell whether servers sync data
    before they acknowledge it; the default are those of `EVENTJET_MONITORING`, separated by blanks. Connections are
    opened when pages need them. They are closed at the end of the ASGI lifespan, or with the process if the app around
    the console does not run its lifespan. Raises `UsageError` for settings that cannot be used.

    Behind a proxy, links follow the `root_path` of the ASGI scope, and the cookie is `Secure` if the scope's scheme is
    https: uvicorn takes that from `X-Forwarded-Proto` of a proxy that `--forwarded-allow-ips` names. The proxy must
    pass on the `Host` that the browser sent, with which the origin of forms is compared.

    ```python
    from eventjet.console import console
    from starlette.applications import Starlette
    from starlette.routing import Mount

    site = Starlette(routes=[Mount("/console", console(bank, access=lambda request: ("read_only", "")))])
    ```
    """
    sources = Sources(app, settings or Settings.load())
    endpoints = os.environ.get("EVENTJET_MONITORING", "").split() if monitoring is None else monitoring
    poller = StatusPoller(sources, [*dict.fromkeys(map(monitoring_url, endpoints))])

    actions = Actions(ACTIONS, sources)

    @asynccontextmanager
    async def lifespan(_site: Starlette) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            await actions.close()
            await poller.close()
            await sources.close()

    static = StaticFiles(directory=str(files("eventjet.console") / "static"))
    routes = [
        Route(PATHS[name], _endpoint(template, values), methods=["GET", "POST"] if name in POSTED else None)
        for name, (template, values) in ENDPOINTS.items()
    ]
    site = Starlette(
        routes=[Mount(PATHS["static"].rstrip("/"), static), *routes],
        middleware=[Middleware(Headers), Middleware(Gate, access=access), Middleware(_Front)],
        exception_handlers={HTTPException: _refused, EventjetError: _failed},
        lifespan=lifespan,
    )
    site.state.sources = sources
    site.state.poller = poller
    site.state.actions = actions
    site.state.streams = Streams()
    site.state.searches = Searches()
    return site


def _endpoint(
    template: str, values: Callable[[Request], Awaitable[dict[str, Any] | Response]]
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        shown = await values(request)
        return shown if isinstance(shown, Response) else page(request, template, **shown)

    return answer


class _Front:
    """Middleware that answers visitors who may not look, and unexpected errors, with a page."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visitor = scope.get("state", {}).get("visitor")
        if visitor is None:
            await self._app(scope, receive, send)
            return
        request, has_begun = Request(scope, receive), False

        async def answered(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        if visitor.level == "forbidden":
            explanation = "You may not look at this console. Ask whoever runs it; its `access` decides."
            await page(request, "fault.html", 403, title="Not allowed", explanation=explanation)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, answered)
        except Exception as error:
            if has_begun:
                raise
            _LOG.error("a page of the console failed: %s", type(error).__name__, exc_info=error)
            explanation = (
                f"This is a fault of eventjet's own ({type(error).__name__}). Its traceback is in the console's log."
            )
            await page(request, "fault.html", 500, title="A fault of eventjet's own", explanation=explanation)(
                scope, receive, send
            )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not hasattr(request.state, "visitor"):  # a request for styles and scripts, which everybody gets
        return PlainTextResponse(error.detail, error.status_code)
    explanation = "There is no such page." if error.status_code == 404 and error.detail == "Not Found" else error.detail
    return page(request, "fault.html", error.status_code, title=f"{error.status_code}", explanation=explanation)


async def _failed(request: Request, error: Exception) -> Response:
    return page(request, "fault.html", 502, title="It could not be shown", explanation=str(error))
