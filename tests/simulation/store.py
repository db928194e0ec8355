"""The product's JetStream store over the simulated stream, with requests answered without a network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection
from datetime import datetime
from typing import Any

import orjson

from eventjet.errors import NoResponders
from eventjet.jetstream.api import Request
from eventjet.jetstream.client import Client
from eventjet.log.integrity import StreamIdentity
from eventjet.log.jetstream import JetStreamStore, PageReader
from eventjet.log.publish import Sender
from eventjet.log.topology import IDENTITY, stream_config
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import Frame
from eventjet.settings import Settings
from tests.simulation.stream import Stream
from tests.simulation.wire import Wire, fits, stored_at

NOTHING = b"NATS/1.0 404 Message Not Found\r\n\r\n"
PAGE = 250


class SimulatedClient(Client):
    """A client that answers from the simulated stream, one turn of the loop later."""

    def __init__(self, wire: Wire, timeout_s: float) -> None:
        super().__init__(Endpoint.of(Settings()), timeout_s)
        self.wire = wire

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        headers: bytes = b"",
        timeout_s: float | None = None,
        earlier_messages: Collection[tuple[str, bytes, bytes]] = (),
        stream: str = "",
    ) -> Frame:
        await asyncio.sleep(0)
        wire = self.wire
        name = wire.name
        for earlier in earlier_messages:
            wire.publish(earlier[0], earlier[1], _pairs(earlier[2]), time.monotonic())
        if subject == f"$JS.API.STREAM.MSG.GET.{name}":
            return frame(wire.get(orjson.loads(payload)))
        if subject == f"$JS.API.STREAM.INFO.{name}":
            return frame(orjson.dumps(self._info()))
        if subject.startswith(f"$JS.API.DIRECT.GET.{name}"):
            return self._direct(subject, payload)
        if subject.startswith(f"{name}."):
            return frame(wire.publish(subject, payload, _pairs(headers), time.monotonic()))
        raise NoResponders(subject)

    async def stream(self, request: Request[Any], timeout_s: float | None = None) -> AsyncGenerator[list[Frame]]:
        await asyncio.sleep(0)
        query = orjson.loads(request.payload)
        positions = self._positions(int(query.get("seq", 1)), query.get("next_by_subj"))
        if "multi_last" in query:
            last = sorted(self.wire.last(subject) for subject in query["multi_last"])
            positions = [position for position in last if position and position in positions]
        batch = positions[: min(PAGE, int(query["batch"]))]
        ended = NOTHING
        if batch:
            fields = f"Nats-Num-Pending: {len(positions) - len(batch)}\r\nNats-Last-Sequence: {batch[-1]}"
            ended = f"NATS/1.0 204 EOB\r\n{fields}\r\n\r\n".encode()
        yield [*(self._record(position) for position in batch), frame(b"", ended)]

    def _positions(self, start: int, subject: str | None) -> list[int]:
        """Return the positions from `start` on, of the subjects that match a filter or of all."""
        log = self.wire.stream.log
        first = max(start, 1)
        return [
            position
            for position in range(first, len(log) + 1)
            if subject is None or fits(subject, log[position - 1].subject)
        ]

    def _direct(self, subject: str, payload: bytes) -> Frame:
        prefix = f"$JS.API.DIRECT.GET.{self.wire.name}"
        if subject != prefix:
            position = self.wire.last(subject[len(prefix) + 1 :])
            return self._record(position) if position else frame(b"", NOTHING)
        at = datetime.fromisoformat(orjson.loads(payload)["start_time"])
        for position in range(1, len(self.wire.stream.log) + 1):
            if datetime.fromisoformat(stored_at(position)) >= at:
                return self._record(position)
        return frame(b"", NOTHING)

    def _record(self, position: int) -> Frame:
        message = self.wire.stream.log[position - 1]
        fields = (
            f"Nats-Stream: {self.wire.name}\r\nNats-Subject: {message.subject}\r\n"
            f"Nats-Sequence: {position}\r\nNats-Time-Stamp: {stored_at(position)}\r\n\r\n"
        )
        return frame(message.body, (message.block or b"NATS/1.0\r\n\r\n")[:-2] + fields.encode())

    def _info(self) -> dict[str, Any]:
        last = len(self.wire.stream.log)
        state = {"first_seq": 1, "last_seq": last, "messages": last, "bytes": 0}
        return {"config": {**stream_config(self.wire.name, 1), "metadata": {IDENTITY: "simulated"}}, "state": state}


def frame(body: bytes, headers: bytes = b"") -> Frame:
    """Return a frame with an answer."""
    return b"1", b"", b"", headers, body


def _pairs(block: bytes) -> dict[str, str]:
    lines = (line.partition(": ") for line in block.decode().split("\r\n")[1:-2])
    return {name: value for name, _, value in lines}


class SimulatedStore(JetStreamStore):
    """A store on a stream of its own."""

    def __init__(self, app: str, *, replicas: int = 1, save_timeout_s: float = 20.0) -> None:
        self.wire = Wire(app, Stream(replicas=replicas))
        super().__init__(app, SimulatedClient(self.wire, 4.0), save_timeout_s=save_timeout_s)
        self.reach(self._client)

    def reach(self, client: Client) -> None:
        """Continue through another client."""
        self._client = self._reader = client
        self.stream = StreamIdentity(self.app, client)
        self._sender = Sender(self.app, client)
        self._page_reader = PageReader(self.app, client, self._retry_policy)
