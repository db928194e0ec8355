"""A TCP proxy that understands the NATS protocol: it loses, delays and cuts messages as a test chooses.

It stands between clients and one server. What it does to a publish is a `Fate`, chosen when the publish passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, Self
from urllib.parse import urlsplit

_LINE_MAX = 1 << 16
_OPEN_S = 5.0


@dataclass(frozen=True, slots=True)
class Publish:
    """A message that a client publishes."""

    subject: str
    reply: str
    headers: bytes


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to a publish and to its answer."""

    request: Literal["pass", "lose", "cut"] = "pass"
    """`lose`: it never reaches the server. `cut`: neither, and the connection breaks."""
    late_s: float = 0.0
    """How much later it reaches the server, in seconds."""
    answer: Literal["pass", "lose", "cut", "expire"] = "pass"
    """`lose`: it never reaches the client. `cut`: neither, and the connection breaks. `expire`: the server says instead
    that the credentials are no longer good, and ends the connection."""
    first: Callable[[], Awaitable[object]] | None = None
    """Awaited before the request goes on."""
    then: Callable[[], Awaitable[object]] | None = None
    """Awaited once the server has answered, before the client could know."""


PASS = Fate()


@dataclass(slots=True)
class NatsProxy:
    """A proxy on 127.0.0.1 with any number of connections, all with one choice of fates."""

    server_url: str
    choose: Callable[[Publish], Fate] = lambda publish: PASS
    connections: int = 0
    """How many clients have connected; one that reconnects counts again."""
    port: int = 0
    silent: bool = False
    """Nothing arrives any more, in neither direction, and every connection stays open. Set from any thread."""
    _server: asyncio.Server | None = None
    _links: set[asyncio.Task[object]] = field(default_factory=set[asyncio.Task[object]])
    _loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        """Return the URL for clients."""
        return f"nats://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """End all connections at once, from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(lambda: [link.cancel() for link in self._links])

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0, limit=_LINE_MAX)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task: asyncio.Task[object] = asyncio.ensure_future(self._serve(reader, writer))
        self._links.add(task)
        task.add_done_callback(self._links.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = urlsplit(self.server_url)
        try:
            async with asyncio.timeout(_OPEN_S):
                opened = await asyncio.open_connection(server.hostname, server.port, limit=_LINE_MAX)
            try:
                await _Link(self, writer, opened[1]).run(reader, opened[0])
            finally:
                opened[1].transport.abort()
        except OSError:
            pass  # the server is away; the client sees its connection break
        finally:
            # At once: what the client has not read yet is lost, as when a cable is pulled.
            writer.transport.abort()


@dataclass(slots=True)
class _Frame:
    verb: bytes
    arguments: list[bytes]
    raw: bytes
    payload: bytes = b""


@dataclass(slots=True)
class _Link:
    """A client's connection, and the one to the server that belongs to it."""

    proxy: NatsProxy
    to_client: asyncio.StreamWriter
    to_server: asyncio.StreamWriter
    fates: dict[str, Fate] = field(default_factory=dict[str, Fate])
    """Fates by the subject of the answer."""
    late: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    async def run(self, client: asyncio.StreamReader, server: asyncio.StreamReader) -> None:
        """Copy until either side goes away, or a fate cuts it."""
        pumps = {asyncio.ensure_future(self._from_client(client)), asyncio.ensure_future(self._from_server(server))}
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = (*pumps, *self.late)
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, OSError | EOFError):
                    raise result

    async def _from_client(self, reader: asyncio.StreamReader) -> None:
        async for frame in _frames(reader):
            if self.proxy.silent:
                continue
            fate = self._fate(frame)
            if fate.first is not None:
                await fate.first()
            if fate.request == "cut":
                return
            if fate.request == "lose":
                continue
            if fate.late_s:
                self.late.add(asyncio.ensure_future(self._later(fate.late_s, frame.raw)))
            else:
                self.to_server.write(frame.raw)
                await self.to_server.drain()

    async def _from_server(self, reader: asyncio.StreamReader) -> None:
        async for frame in _frames(reader):
            if self.proxy.silent:
                continue
            fate = self.fates.pop(frame.arguments[0].decode(), PASS) if frame.verb in (b"MSG", b"HMSG") else PASS
            if fate.then is not None:
                await fate.then()
            if fate.answer == "cut":
                return
            if fate.answer == "expire":
                self.to_client.write(b"-ERR 'User Authentication Expired'\r\n")
                await self.to_client.drain()
            elif fate.answer == "pass":
                self.to_client.write(frame.raw)
                await self.to_client.drain()

    async def _later(self, late_s: float, raw: bytes) -> None:
        await asyncio.sleep(late_s)
        self.to_server.write(raw)
        await self.to_server.drain()

    def _fate(self, frame: _Frame) -> Fate:
        if frame.verb not in (b"PUB", b"HPUB"):
            return PASS
        sizes = 2 if frame.verb == b"HPUB" else 1
        subject, *reply = (argument.decode() for argument in frame.arguments[:-sizes])
        headers = frame.payload[: int(frame.arguments[-2])] if sizes == 2 else b""
        publish = Publish(subject, reply[0] if reply else "", headers)
        fate = self.proxy.choose(publish)
        if publish.reply and fate is not PASS:
            self.fates[publish.reply] = fate
        return fate


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[_Frame]:
    """Yield the protocol's frames, until the end of the connection."""
    while True:
        line = await reader.readline()
        if not line.endswith(b"\r\n"):
            return
        verb, *arguments = line.split()
        frame = _Frame(verb.upper(), arguments, line)
        if frame.verb in (b"PUB", b"HPUB", b"MSG", b"HMSG"):
            frame.payload = await reader.readexactly(int(arguments[-1]))
            frame.raw = line + frame.payload + await reader.readexactly(2)
        yield frame
