"""`LoopReader`: reads of many messages for a loop, over a connection of its own.

Reads repeat harmlessly: a connection that was lost is opened again by the next one. Through nats-py a message of a
batched get costs ten times as much (decision 56).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Self

from eventjet.codec.reasons import reason_of
from eventjet.errors import (
    ConnectionClosed,
    ConnectionLost,
    Forbidden,
    NoResponders,
    StoreError,
    StoreUnavailable,
    Unreachable,
)
from eventjet.nats.api import Request
from eventjet.nats.connection import check_pages
from eventjet.nats.dial import Session, Tries, greeting, tls_context
from eventjet.nats.endpoint import Address, Endpoint
from eventjet.nats.exchange import Exchange, Exchanges
from eventjet.nats.protocol import (
    Control,
    Frame,
    FrameParser,
    nobody_listens,
    publish_frame,
    server_fault,
    subscribe_frame,
)

_CONNECT_S = 3.0
"""For each server of the cluster."""


class LoopReader:
    """For any number of tasks of one loop. Nothing is opened before it is first used."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._link: _Link | None = None
        self._opening: asyncio.Task[_Link] | None = None
        self._closed = False

    async def stream(self, request: Request[Any]) -> AsyncGenerator[list[Frame]]:
        """The parts of a long answer as they come, for as long as whoever asks wants more.

        Raises `StoreUnavailable`, `NoResponders`, `SingleResponse`, `Forbidden` and `ConnectionClosed`.
        """
        link = self._link
        if link is None or link.exchanges is None:
            link = await self._opened(request.subject)
        assert link.exchanges is not None
        subject, came = self._endpoint.routed(request.subject), 0
        exchanges = link.exchanges
        exchange = exchanges.begin((subject, request.subject), self._timeout_s)
        try:
            link.ask(subject, request, exchange)
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
            exchanges.forget(exchange)

    async def close(self) -> None:
        """End the connection, and all that is read over it; any number of times."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        if self._link is not None:
            self._link.end(ConnectionClosed())

    async def _opened(self, what: str) -> _Link:
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

    async def _open(self) -> _Link:
        endpoint = self._endpoint
        tries = Tries(endpoint, _CONNECT_S * (len(endpoint.servers) + len(endpoint.discovered)))
        for address, until in tries:
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    self._link = await _Link.open(endpoint, address)
                    return self._link
            except (OSError, ValueError, StoreError) as error:
                tries.failed(address, error)
        raise tries.fault()


class _Link(asyncio.Protocol):
    """One connection, of which nothing is left once it is lost."""

    def __init__(self, peer: str) -> None:
        self.exchanges: Exchanges | None = None
        """Of those who read; None before the greeting and after the end."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._parser = FrameParser()
        self._peer = peer
        self._inbox = ""
        self._heard_at = 0.0
        self._greeting: asyncio.Queue[bytes] | None = asyncio.Queue()

    @classmethod
    async def open(cls, endpoint: Endpoint, address: Address) -> Self:
        """Connect to one server and be let in; raises as `dial` does for one."""
        loop = asyncio.get_running_loop()
        context = tls_context(endpoint) if endpoint.tls_first else None
        transport, link = await loop.create_connection(
            lambda: cls(address.peer),
            address.host,
            address.port,
            ssl=context,
            server_hostname=address.name if context else None,
        )
        try:
            await link._greet(endpoint, address)
        except BaseException:
            transport.abort()
            raise
        return link

    async def _greet(self, endpoint: Endpoint, address: Address) -> None:
        assert self._greeting is not None
        session = Session(address.peer)
        talk = greeting(session, endpoint, address)
        with suppress(StopIteration):
            step = next(talk)
            while True:
                data = b""
                if isinstance(step, bytes):
                    self._write(step)
                elif step is None:
                    data = await self._greeting.get()
                else:
                    await self._encrypt(step, address)
                step = talk.send(data)
        self._parser, self._greeting = session.parser, None
        self._inbox = f"{endpoint.inbox_prefix}.{secrets.token_hex(11)}"
        self.exchanges = Exchanges(self._inbox, self._late)
        self._write(subscribe_frame(f"{self._inbox}.*", b"1"))
        self._take([], session.controls)

    async def _encrypt(self, context: ssl.SSLContext, address: Address) -> None:
        assert self._transport is not None
        transport = await self._loop.start_tls(self._transport, self, context, server_hostname=address.name)
        assert transport is not None
        self._transport = transport
        self._greeting = asyncio.Queue()  # what came in the clear is forgotten

    def ask(self, subject: str, request: Request[Any], exchange: Exchange) -> None:
        """Send a request to a subject, to be answered in an exchange."""
        self._write(publish_frame(subject, request.payload, reply=exchange.reply, headers=request.headers))

    def end(self, fault: Exception) -> None:
        """Close it, and end all that is read over it."""
        exchanges, self.exchanges = self.exchanges, None
        if exchanges is not None:
            exchanges.end_all(fault)
        if self._transport is not None:
            self._transport.abort()

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if self._greeting is not None:
            self._greeting.put_nowait(data)
            return
        try:
            frames, controls = self._parser.feed(data)
        except ValueError as error:
            self._lost(f"it sent {error}")
        else:
            self._take(frames, controls)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._greeting is not None:
            self._greeting.put_nowait(b"")
        self._lost("it closed the connection" if exc is None else f"the connection broke ({reason_of(exc)})")

    # Helpers.

    def _take(self, frames: list[Frame], controls: list[Control]) -> None:
        # A violation comes before the answer to what was let through of the same batch.
        for verb, argument in controls:
            if verb == b"PING":
                self._write(b"PONG\r\n")
            elif verb == b"-ERR":
                self._failed(server_fault(argument.decode("utf-8", "replace"), self._peer))
        if self.exchanges is not None:
            for frame in frames:
                self.exchanges.arrived(frame)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _failed(self, fault: Exception) -> None:
        """Tell a violation to whoever reads there; anything else ends the connection."""
        if type(fault) is not Forbidden:
            self._lost(f"the server ended it ({fault})")
        elif fault.subject.startswith(self._inbox):
            self.end(fault)
        elif self.exchanges is not None:
            self.exchanges.denied(fault)

    def _lost(self, reason: str) -> None:
        self.end(ConnectionLost(f"NATS at {self._peer}", reason))

    def _late(self, began: float) -> None:
        """Leave a server that has said nothing since the late request was sent."""
        if self._heard_at < began:
            self._lost("it has been silent")
