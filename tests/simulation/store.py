"""The product's JetStream store over the simulated stream: its own driver, requests answered without a network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from datetime import datetime
from typing import Any, cast

import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg

from eventjet.codec.envelope import RawRecord
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.requests import Lost, Requests
from eventjet.settings import Settings
from eventjet.store.jetstream import JetStreamStore, _record_of_reply
from eventjet.store.topology import IDENTITY
from tests.simulation.stream import Stream
from tests.simulation.wire import Wire, stored_at

NOTHING = {"Status": "404", "Description": "Message Not Found"}


class SimulatedClient:
    """As much of a connection as the store uses itself."""

    pending_data_size = 0

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def publish(self, subject: str, body: bytes, headers: dict[str, str]) -> None:
        self._wire.publish(subject, body, headers, time.monotonic())


class SimulatedRequests(Requests):
    """Answers from the simulated stream, one turn of the loop later."""

    wire: Wire

    async def ask(
        self,
        subject: str,
        payload: bytes = b"",
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
        *,
        also: Collection[str] = (),
    ) -> Msg:
        await asyncio.sleep(0)
        wire = self.wire
        name = wire.name
        if subject == f"$JS.API.STREAM.MSG.GET.{name}":
            return self._message(wire.get(orjson.loads(payload)))
        if subject == f"$JS.API.STREAM.INFO.{name}":
            return self._message(orjson.dumps(self._info()))
        if subject.startswith(f"$JS.API.DIRECT.GET.{name}"):
            return self._direct(subject, payload)
        if subject.startswith(f"{name}."):
            return self._message(wire.publish(subject, payload, headers or {}, time.monotonic()))
        raise Lost("no responders")

    async def gather(self, subject: str, payload: bytes) -> tuple[list[Msg], Msg]:
        await asyncio.sleep(0)
        asked = orjson.loads(payload)
        found = self.records(int(asked["seq"]), asked.get("next_by_subj"))
        if not found:
            return [], self._message(b"", NOTHING)
        batch = found[: int(asked["batch"])]
        ended = {
            "Status": "204",
            "Nats-Num-Pending": str(len(found) - len(batch)),
            "Nats-Last-Sequence": str(batch[-1]),
        }
        return [self._record(position) for position in batch], self._message(b"", ended)

    def records(self, start: int, subject: str | None) -> list[int]:
        """Positions from `start` on, of one subject or of all."""
        log = self.wire.stream.log
        first = max(start, 1)
        return [position for position in range(first, len(log) + 1) if subject in (None, log[position - 1].subject)]

    def _direct(self, subject: str, payload: bytes) -> Msg:
        prefix = f"$JS.API.DIRECT.GET.{self.wire.name}"
        if subject != prefix:
            position = self.wire.stream.last.get(subject[len(prefix) + 1 :], 0)
            return self._record(position) if position else self._message(b"", NOTHING)
        at = datetime.fromisoformat(orjson.loads(payload)["start_time"])
        for position in range(1, len(self.wire.stream.log) + 1):
            if datetime.fromisoformat(stored_at(position)) >= at:
                return self._record(position)
        return self._message(b"", NOTHING)

    def _record(self, position: int) -> Msg:
        message = self.wire.stream.log[position - 1]
        headers = {
            "Nats-Stream": self.wire.name,
            "Nats-Subject": message.subject,
            "Nats-Sequence": str(position),
            "Nats-Time-Stamp": stored_at(position),
        }
        for line in message.block.decode().split("\r\n")[1:-2]:
            name, _, value = line.partition(": ")
            headers[name] = value
        return self._message(message.body, headers)

    def _message(self, data: bytes, headers: dict[str, str] | None = None) -> Msg:
        return Msg(self.client, data=data, headers=headers)

    def _info(self) -> dict[str, Any]:
        state = {"first_seq": 1, "last_seq": len(self.wire.stream.log)}
        return {"config": {"metadata": {IDENTITY: "simulated"}}, "state": state}


class SimulatedLongReads:
    """The later pages of a history, without a socket."""

    def __init__(self, store: SimulatedStore) -> None:
        self._store = store

    async def pages(self, subject: str, start: int) -> AsyncIterator[list[RawRecord]]:
        while True:
            messages, final = await self._store.simulated.gather(
                "", orjson.dumps({"seq": start, "next_by_subj": subject, "batch": 250})
            )
            yield [_record_of_reply(message) for message in messages]
            headers = final.headers or {}
            if not int(headers.get("Nats-Num-Pending", "0")):
                return
            start = int(headers["Nats-Last-Sequence"]) + 1

    def close(self) -> None:
        pass


class SimulatedStore(JetStreamStore):
    """A store on a stream of its own."""

    def __init__(self, app: str, *, replicas: int = 1, save_timeout_s: float = 20.0) -> None:
        wire = Wire(app, Stream(replicas=replicas))
        client = cast("Client", SimulatedClient(wire))
        self.simulated = SimulatedRequests(client, 4.0)
        self.simulated.wire = wire
        super().__init__(app, client, self.simulated, Endpoint.of(Settings()), save_timeout_s=save_timeout_s)
        self._long_reads = cast("Any", SimulatedLongReads(self))
