"""The simulated server behind the protocol's own words, and one process's way to it over an unreliable network."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, TypeVar

import orjson

from eventjet.errors import ConnectionClosed, ConnectionLost, StoreUnavailable
from eventjet.jetstream.api import Request
from eventjet.jetstream.client import Client
from eventjet.log.topology import every_config
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import Frame
from eventjet.settings import Settings
from tests.simulation.reactions.loop import VirtualLoop
from tests.simulation.reactions.streams import NOT_FOUND, Message, Refused, Rules, SimulatedStream, Stored
from tests.simulation.reactions.weather import Weather

T = TypeVar("T")
REQUEST_S = 4.0
_GET, _PURGE, _DIRECT = "$JS.API.STREAM.MSG.GET.", "$JS.API.STREAM.PURGE.", "$JS.API.DIRECT.GET."
_INFO = "$JS.API.STREAM.INFO."
_STATE = ("first_seq", "last_seq", "messages", "bytes")


class Server:
    """Its streams by name, of which each takes the subjects that begin with its prefix."""

    def __init__(self, app: str, streams: Mapping[str, tuple[str, SimulatedStream]]) -> None:
        self._configs = {str(config["name"]): config for config in every_config(app, 1)}
        self._streams = {name: stream for name, (_, stream) in streams.items()}
        self._prefixes = dict(streams.values())

    def page(self, request: Request[Any]) -> list[Frame]:
        """The answer to a batched direct get."""
        name = request.subject[len(_DIRECT) :]
        return _page(name, self._streams[name], orjson.loads(request.payload))

    def answer(self, subject: str, payload: bytes, headers: bytes, before: Collection[tuple[str, bytes, bytes]]) -> Any:
        """What it answers, as JSON holds it."""
        try:
            if subject.startswith(_GET):
                return _shown(self._streams[subject[len(_GET) :]], orjson.loads(payload))
            if subject.startswith(_PURGE):
                asked = orjson.loads(payload)
                stream = self._streams[subject[len(_PURGE) :]]
                return {"success": True, "purged": stream.purge(asked["filter"], asked["seq"])}
            if subject.startswith(_INFO):
                return {"config": self._configs[subject[len(_INFO) :]], "state": dict.fromkeys(_STATE, 0)}
            stream = next(one for prefix, one in self._prefixes.items() if subject.startswith(prefix))
            messages = [Message(to, _pairs(block), body) for to, body, block in (*before, (subject, payload, headers))]
            return {"stream": "", "seq": stream.publish(messages)}
        except Refused as error:
            return {"error": {"code": error.status, "err_code": error.code, "description": "refused"}}


def _page(name: str, stream: SimulatedStream, asked: Mapping[str, Any]) -> list[Frame]:
    """A batched direct get (ADR-31), of a replica that does not lag."""
    found: list[Stored] = []
    while len(found) < asked["batch"]:
        record = stream.next(found[-1].sequence + 1 if found else asked["seq"], asked["next_by_subj"])
        if record is None:
            break
        found.append(record)
    ended = b"NATS/1.0 404 Message Not Found\r\n\r\n"
    if found:
        left = stream.next(found[-1].sequence + 1, asked["next_by_subj"]) is not None
        told = f"Nats-Num-Pending: {int(left)}\r\nNats-Last-Sequence: {found[-1].sequence}"
        ended = f"NATS/1.0 204 EOB\r\n{told}\r\n\r\n".encode()
    return [*(_direct(name, record) for record in found), (b"1", b"", b"", ended, b"")]


def _direct(name: str, record: Stored) -> Frame:
    told = (
        f"Nats-Stream: {name}\r\nNats-Subject: {record.subject}\r\nNats-Sequence: {record.sequence}\r\n"
        f"Nats-Time-Stamp: {_message(record)['time']}\r\n\r\n"
    )
    return b"1", b"", b"", (record.block or b"NATS/1.0\r\n\r\n")[:-2] + told.encode(), record.body


def _shown(stream: SimulatedStream, asked: Mapping[str, Any]) -> Any:
    if "last_by_subj" in asked:
        record = stream.newest(asked["last_by_subj"])
    else:
        record = stream.next(int(asked["seq"]), asked["next_by_subj"])
    if record is None:
        raise Refused(404, NOT_FOUND)
    return {"message": _message(record)}


@lru_cache(maxsize=256)
def _message(record: Stored) -> dict[str, Any]:
    at = datetime.fromtimestamp(record.time_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return {
        "subject": record.subject,
        "seq": record.sequence,
        "hdrs": base64.b64encode(record.block).decode(),
        "data": base64.b64encode(record.body).decode(),
        "time": f"{at}.{record.time_ns % 1_000_000_000:09d}Z",
    }


def _pairs(block: bytes) -> dict[str, str]:
    lines = (line.partition(": ") for line in block.decode().split("\r\n")[1:-2])
    return {name: value for name, _, value in lines}


@dataclass(slots=True)
class Network:
    """What all links of a schedule share."""

    loop: VirtualLoop
    random: Callable[[], float]
    weather: Weather
    rules: Rules
    sender: str = ""
    """Whose request a server is carrying out."""
    sent_at: float = 0.0


class Link:
    """One process's way to the servers: requests and answers are late, or lost."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.is_closed = False
        self.is_confirmed = True
        """Whether no connection was lost since the log was looked at."""
        self._open: dict[asyncio.Future[Any], None] = {}

    async def exchange(self, what: str, apply: Callable[[], T], timeout_s: float = REQUEST_S) -> T:
        """What `apply` gives, at the server; raises `StoreUnavailable` where no answer comes."""
        if self.is_closed:
            raise ConnectionClosed
        network = self.network
        loop = network.loop
        there_s, back_s = network.weather.delays(loop.now, network.random)
        future: asyncio.Future[T] = loop.create_future()
        if there_s is not None:
            loop.after(there_s, self._arrive, apply, future, back_s, loop.now)
        if there_s is None or back_s is None or there_s + back_s >= timeout_s:
            loop.after(timeout_s, _expire, future, what)
        self._open[future] = None
        try:
            return await future
        finally:
            del self._open[future]

    def lose(self) -> None:
        """The connection breaks: nobody answers what is under way."""
        self.is_confirmed = False
        for future in self._open:
            if not future.done():
                future.set_exception(ConnectionLost("the server", "the connection broke"))

    def close(self) -> None:
        self.is_closed = True
        self.lose()

    def _arrive(self, apply: Callable[[], T], future: asyncio.Future[T], back_s: float | None, sent_at: float) -> None:
        network = self.network
        network.sender, network.sent_at = self.name, sent_at
        answer = apply()
        if back_s is not None:
            network.loop.after(back_s, _answer, future, answer)


def _answer(future: asyncio.Future[T], answer: T) -> None:
    if not future.done():
        future.set_result(answer)


def _expire(future: asyncio.Future[Any], what: str) -> None:
    if not future.done():
        future.set_exception(StoreUnavailable(what, "no answer in time"))


class SimulatedClient(Client):
    """The product's client, whose requests go over a link."""

    def __init__(self, server: Server, link: Link) -> None:
        super().__init__(endpoint(), REQUEST_S)
        self._server = server
        self._link = link

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        headers: bytes = b"",
        timeout_s: float | None = None,
        earlier_messages: Collection[tuple[str, bytes, bytes]] = (),
        stream: str = "",
    ) -> Frame:
        answer = await self._link.exchange(
            subject,
            lambda: self._server.answer(subject, payload, headers, earlier_messages),
            timeout_s or self.timeout_s,
        )
        return b"1", b"", b"", b"", orjson.dumps(answer)

    async def stream(self, request: Request[Any], timeout_s: float | None = None) -> AsyncGenerator[list[Frame]]:
        yield await self._link.exchange(request.subject, lambda: self._server.page(request), self.timeout_s)


@lru_cache
def endpoint() -> Endpoint:
    """Of no server."""
    return Endpoint.of(Settings())
