"""Server-sent events (WHATWG HTML, 9.2): parts of a page made again and again for whoever has it open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import StreamingResponse

STREAMS_MAX = 100
"""Pages of one console that are kept current at once."""
_LASTS_S = 600.0
"""One stream; the browser opens another one then, and whoever may not look any more is found out."""


class Streams:
    """Of one console."""

    def __init__(self) -> None:
        self._open = 0
        self._stop = asyncio.Event()

    def end(self) -> None:
        """Let all of them end, so that the server can."""
        self._stop.set()

    def response(self, parts: AsyncIterator[str]) -> StreamingResponse:
        """Sends each part as one message. Raises `HTTPException` 503 where too many are open."""
        if self._open >= STREAMS_MAX:
            raise HTTPException(503, f"{STREAMS_MAX} live pages are open at once; close one and load this one again.")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._sent(parts), media_type="text/event-stream", headers=headers)

    async def pause(self, seconds: float) -> bool:
        """Let time pass; False when the streams are to end."""
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return True
        return False

    async def _sent(self, parts: AsyncIterator[str]) -> AsyncGenerator[str]:
        self._open += 1
        loop = asyncio.get_running_loop()
        until = loop.time() + _LASTS_S
        try:
            yield "retry: 2000\n\n"
            async for part in parts:
                yield "".join(f"data: {line}\n" for line in part.splitlines()) + "\n"
                if self._stop.is_set() or loop.time() > until:
                    return
        finally:
            self._open -= 1


def streams_of(request: Request) -> Streams:
    """Those of the console that was asked."""
    return request.app.state.streams
