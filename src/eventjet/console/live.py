"""Server-sent events (WHATWG HTML, 9.2): parts of open pages that are rendered again and again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from eventjet.console.access import may_still_look
from eventjet.console.pages import rendered

STREAMS_MAX = 100
"""The most live pages of one console at once."""
_LASTS_S = 600.0
"""Seconds that a stream lasts; the browser then opens another."""
_ACCESS_S = 5.0
"""Seconds between checks that the visitor of a stream may still look."""


class Streams:
    """The open streams of one console."""

    def __init__(self) -> None:
        self.open = 0
        self.stopped = asyncio.Event()

    def end(self) -> None:
        """End all streams, so that the server can stop."""
        self.stopped.set()


class LiveResponse(StreamingResponse):
    """A part of a page as server-sent events, whenever it has changed; 503 when too many streams are open.

    `values` returns what the template shows now. A response counts as open while it is sent, not from its creation.
    """

    def __init__(
        self, request: Request, template: str, values: Callable[[], Awaitable[dict[str, Any]]], every_s: float
    ) -> None:
        self._streams: Streams = request.app.state.streams
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        parts = self._parts(request, template, values, every_s)
        super().__init__(parts, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._streams.open >= STREAMS_MAX:
            raise HTTPException(503, f"{STREAMS_MAX} live pages are open at once; close one and load this one again.")
        self._streams.open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.open -= 1

    async def _parts(
        self, request: Request, template: str, values: Callable[[], Awaitable[dict[str, Any]]], every_s: float
    ) -> AsyncGenerator[str]:
        loop, sent = asyncio.get_running_loop(), ""
        checked = loop.time()
        until = checked + _LASTS_S
        yield "retry: 2000\n\n"
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._streams.stopped.wait(), every_s)
            if self._streams.stopped.is_set() or loop.time() > until:
                return
            part = rendered(request, template, **await values())
            if loop.time() - checked >= _ACCESS_S:
                checked = loop.time()
                if not await may_still_look(request):
                    return
            if part != sent:
                sent = part
                yield "".join(f"data: {line}\n" for line in part.splitlines()) + "\n"
