"""The simulated server behind its protocol, and the link of a process to it over an unreliable network."""

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
    """A server with its streams by name, each for the subjects that begin with its prefix."""

    def __init__(self, app: str, streams: Mapping[str, tuple[str, SimulatedStream]]) -> None:
        self._configs = {str(config["name"]): config for config in every_config(app, 1)}
        self._streams = {name: stream for name, (_, stream) in streams.items()}
        self._prefixes = dict(streams.values())

    def page(self, request: Request[Any]) -> list[Frame]:
        """Return the answer to a batched direct get."""
        name = request.subject[len(_DIRECT) :]
        return _page(name, self._streams[name], orjson.loads(request.payload))

    def answer(self, subject: str, payload: bytes, headers: bytes, before: Collection[tuple[str, bytes, bytes]]) -> Any:
        """Return the answer to a request as JSON values."""
        try:
            if subject.startswith(_GET):
                return _shown(self._streams[subject[len(_GET) :]], orjson.loads(payload))
            if subject.startswith(_PURGE):
                request = orjson.loads(payload)
                stream = self._streams[subject[len(_PURGE) :]]
                return {"success": True, "purged": stream.purge(request["filter"], request["seq"])}
            if subject.startswith(_INFO):
                return {"config": self._configs[subject[len(_INFO) :]], "state": dict.fromkeys(_STATE, 0)}
            stream = next(candidate for prefix, candidate in self._prefixes.items() if subject.startswith(prefix))
            messages = [Message(to, _pairs(block), body) for to, body, block in (*before, (subject, payload, headers))]
            return {"stream": "", "seq": stream.publish(messages)}
        except Refused as error:
            return {"error": {"code": error.status, "err_code": error.code, "description": "refused"}}


def _page(name: str, stream: SimulatedStream, request: Mapping[str, Any]) -> list[Frame]:
    """Return the answer to a batched direct get (ADR-31) of a replica that does not lag."""
    records: list[Stored] = []
    while len(records) < request["batch"]:
        record = stream.next(records[-1].sequence + 1 if records else request["seq"], request["next_by_subj"])
        if record is None:
            break
        records.append(record)
    ended = b"NATS/1.0 404 Message Not Found\r\n\r\n"
    if records:
        left = stream.next(records[-1].sequence + 1, request["next_by_subj"]) is not None
        fields = f"Nats-Num-Pending: {int(left)}\r\nNats-Last-Sequence: {records[-1].sequence}"
        ended = f"NATS/1.0 204 EOB\r\n{fields}\r\n\r\n".encode()
    return [*(_direct(name, record) for record in records), (b"1", b"", b"", ended, b"")]


def _direct(name: str, record: Stored) -> Frame:
    fields = (
        f"Nats-Stream: {name}\r\nNats-Subject: {record.subject}\r\nNats-Sequence: {record.sequence}\r\n"
        f"Nats-Time-Stamp: {_message(record)['time']}\r\n\r\n"
    )
    return b"1", b"", b"", (record.block or b"NATS/1.0\r\n\r\n")[:-2] + fields.encode(), record.body


def _shown(stream: SimulatedStream, request: Mapping[str, Any]) -> Any:
    if "last_by_subj" in request:
        record = stream.newest(request["last_by_subj"])
    else:
        record = stream.next(int(request["seq"]), request["next_by_subj"])
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
    """The state that all links of a schedule share."""

    loop: VirtualLoop
    random: Callable[[], float]
    weather: Weather
    rules: Rules
    sender: str = ""
    """The sender of the request that a server carries out."""
    sent_at: float = 0.0


class Link:
    """The link of a process to the servers: requests and answers are late, or lost."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.is_closed = False
        self.is_confirmed = True
        """Whether no connection was lost since the last look at the log."""
        self._open: dict[asyncio.Future[Any], None] = {}

    async def exchange(self, request: str, apply: Callable[[], T], timeout_s: float = REQUEST_S) -> T:
        """Return the result of `apply` at the server; raise `StoreUnavailable` if no answer comes."""
        if self.is_closed:
            raise ConnectionClosed
        network = self.network
        loop = network.loop
        there_s, back_s = network.weather.delays(loop.now, network.random)
        future: asyncio.Future[T] = loop.create_future()
        if there_s is not None:
            loop.after(there_s, self._arrive, apply, future, back_s, loop.now)
        if there_s is None or back_s is None or there_s + back_s >= timeout_s:
            loop.after(timeout_s, _expire, future, request)
        self._open[future] = None
        try:
            return await future
        finally:
            del self._open[future]

    def lose(self) -> None:
        """Break the connection: open requests get no answer."""
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


def _expire(future: asyncio.Future[Any], request: str) -> None:
    if not future.done():
        future.set_exception(StoreUnavailable(request, "no answer in time"))


class SimulatedClient(Client):
    """The product's client with requests over a link."""

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
    """Return an endpoint without a server."""
    return Endpoint.of(Settings())
