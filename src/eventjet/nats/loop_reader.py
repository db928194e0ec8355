"""`LoopReader`: long histories for a loop, over a connection of its own that reads many messages.

Reads repeat harmlessly: a connection that was lost is opened again by the next one. Through nats-py a message of a
batched get costs ten times as much (decision 56).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from eventjet.errors import ConnectionClosed, NoResponders, StoreError, StoreUnavailable, Unreachable
from eventjet.nats.api import Request
from eventjet.nats.connection import check_pages
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.loop_connection import LoopConnection
from eventjet.nats.protocol import Frame, nobody_listens

_CONNECT_S = 3.0
"""For each server of the cluster."""


class LoopReader:
    """For any number of tasks of one loop. Nothing is opened before it is first used."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._connection: LoopConnection | None = None
        self._opening: asyncio.Task[LoopConnection] | None = None
        self._closed = False

    async def stream(self, request: Request[Any]) -> AsyncGenerator[list[Frame]]:
        """The parts of a long answer as they come, for as long as whoever asks wants more.

        Raises `StoreUnavailable`, `NoResponders`, `SingleResponse`, `Forbidden` and `ConnectionClosed`.
        """
        connection = self._connection
        if connection is None or not connection.usable:
            connection = await self._opened(request.subject)
        subject, came = self._endpoint.routed(request.subject), 0
        exchange = connection.exchange((subject, request.subject), self._timeout_s)
        try:
            connection.publish(subject, request.payload, request.headers, exchange)
            while True:
                frames = await exchange.came()
                if nobody_listens(frames[-1]):
                    raise NoResponders(subject)
                came += len(frames)
                yield frames
        except StoreUnavailable as late:
            if came == 1 and type(late) is StoreUnavailable:
                await check_pages(self._endpoint, request)
            raise
        finally:
            connection.forget(exchange)

    async def close(self) -> None:
        """End the connection, and all that is read over it; any number of times."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.close(ConnectionClosed())

    async def _opened(self, what: str) -> LoopConnection:
        if self._closed:
            raise ConnectionClosed
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
        # Not awaited by itself: whoever gives up must not end the opening, which others wait for too.
        await asyncio.wait({self._opening})
        if self._opening.cancelled():
            raise ConnectionClosed
        try:
            return self._opening.result()
        except (StoreError, Unreachable) as error:
            raise StoreUnavailable(what, f"there is no connection ({error})") from error

    async def _open(self) -> LoopConnection:
        timeout_s = _CONNECT_S * (len(self._endpoint.servers) + len(self._endpoint.discovered))
        self._connection = await LoopConnection.open(self._endpoint, timeout_s, lambda _: None)
        return self._connection
