"""Server-sent events (WHATWG HTML, 9.2): parts of open pages that are rendered again and again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from eventjet.console.access import may_still_look

STREAMS_MAX = 100
"""The most live pages of one console at once."""
_LASTS_S = 600.0
"""Seconds that a stream lasts; the browser then opens another."""
_ASKED_AGAIN_S = 5.0
"""Seconds between checks that the visitor of a stream may still look."""


class Streams:
    """The open streams of one console."""

    def __init__(self) -> None:
        self.open = 0
        self.stopped = asyncio.Event()

    def end(self) -> None:
        """End all streams, so that the server can stop."""
        self.stopped.set()


class Stream:
    """One stream of server-sent events, for one request."""

    def __init__(self, streams: Streams, request: Request) -> None:
        self._streams = streams
        self._request = request
        self._until = self._asked = asyncio.get_running_loop().time()
        self._until += _LASTS_S

    def response(self, parts: AsyncIterator[str]) -> StreamingResponse:
        """Return a response that sends each part as one message, or 503 when too many streams are open."""
        return _LiveResponse(self._streams, self._sent(parts))

    async def pause(self, seconds: float) -> bool:
        """Wait this many seconds; return False when the stream must end."""
        try:
            await asyncio.wait_for(self._streams.stopped.wait(), seconds)
        except TimeoutError:
            return await self._goes_on()
        return False

    async def _goes_on(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._streams.stopped.is_set() or now > self._until:
            return False
        if now - self._asked >= _ASKED_AGAIN_S:
            self._asked = now
            return await may_still_look(self._request)
        return True

    async def _sent(self, parts: AsyncIterator[str]) -> AsyncGenerator[str]:
        yield "retry: 2000\n\n"
        async for part in parts:
            if not await self._goes_on():
                return
            yield "".join(f"data: {line}\n" for line in part.splitlines()) + "\n"


class _LiveResponse(StreamingResponse):
    """A response that counts as open while it is sent, not from its creation."""

    def __init__(self, streams: Streams, parts: AsyncIterator[str]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(parts, media_type="text/event-stream", headers=headers)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._streams.open >= STREAMS_MAX:
            raise HTTPException(503, f"{STREAMS_MAX} live pages are open at once; close one and load this one again.")
        self._streams.open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.open -= 1


def stream_of(request: Request) -> Stream:
    """Return a stream of this console for this request."""
    return Stream(request.app.state.streams, request)
