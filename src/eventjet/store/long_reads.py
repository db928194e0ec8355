"""Records of the log in pages, by batched direct get (ADR-31) over a connection of their own.

What a save waits for does not stand behind a long history there, and the pages are folded while they travel.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from eventjet.codec.envelope import RawRecord
from eventjet.errors import ConnectionLost, StoreUnavailable
from eventjet.nats.api import STATUS, direct_page, direct_record
from eventjet.nats.client import Client

REQUEST_MAX = 1_000
"""Records of one request: there is no flow control inside it."""
REQUEST_BYTES = 2_000_000
"""Bytes of one request, so that records of any size fit into memory."""
REQUESTS_MAX = 24
"""Requests at once: what all of them bring is less than the server keeps for a slow client (64 MB)."""


class LongReads:
    """Over a client of its own, which opens nothing before it is used. For one loop."""

    def __init__(self, stream: str, client: Client) -> None:
        self._stream = stream
        self._client = client
        self._room = asyncio.Semaphore(REQUESTS_MAX)

    async def pages(self, subject: str | None, start: int) -> AsyncIterator[list[RawRecord]]:
        """The records of one subject, or of all, from a position on; raises `StoreUnavailable` and `Forbidden`."""
        told = subject.encode() if subject is not None else None
        last, left = start - 1, 1
        has_been_lost = False
        while left:
            request = direct_page(self._stream, last + 1, subject, count=REQUEST_MAX, size=REQUEST_BYTES)
            came = 0
            async with self._room:
                parts = self._client.stream(request)
                try:
                    async for frames in parts:
                        final = frames.pop() if frames[-1][3].startswith(STATUS) else None
                        if frames:
                            page = [direct_record(frame, told) for frame in frames]
                            came = page[-1][0]
                            yield page
                        if final is not None:
                            last, left = request.parse(final) or (0, 0)
                            break
                except ConnectionLost:
                    # The connection was lost since it was used last: once more, over another one.
                    if came or has_been_lost:
                        raise
                    has_been_lost = True
                    continue
                finally:
                    await parts.aclose()
            if came != last:
                raise StoreUnavailable(request.what, f"records up to position {last} were lost on the way")

    async def close(self) -> None:
        """End the connection, and whoever waits for an answer."""
        await self._client.close()
