"""Runs of a script against a server and against the simulated server, and their answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Protocol

from eventjet.codec.headers import header_block
from eventjet.jetstream.client import Client, connect
from eventjet.settings import Settings
from tests.logs import fresh_name
from tests.simulation.scripts import Read, Script, Step
from tests.simulation.stream import Stream
from tests.simulation.wire import Wire
from tests.stores import declared

Answers = list[tuple[str, Any]]
"""(what was tried, the answer)."""


class Line(Protocol):
    """A connection to a server that answers steps."""

    async def step(self, step: Step) -> dict[str, Any] | None:
        """Return the answer as JSON, or None for a step that asks for none."""
        ...


class RealLine:
    """A real server; `name` is that of the stream and the first token of its subjects."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name
        self._before: list[tuple[str, bytes, bytes]] = []

    async def step(self, step: Step) -> dict[str, Any] | None:
        if isinstance(step, Read):
            subject, body, headers = f"$JS.API.STREAM.MSG.GET.{self._name}", json.dumps(_asked(self._name, step)), b""
            message = subject, body.encode(), headers
        else:
            message = f"{self._name}.{step.subject}", step.body, header_block(step.headers) if step.headers else b""
            if not step.asks:
                self._before.append(message)
                return None
        before, self._before = self._before, []
        reply = (await self._client.request(*message, earlier_messages=before))[4]
        return json.loads(reply) if reply else {}


class SimulatedLine:
    """The simulated server; `now` is its clock."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.now = 0.0

    async def step(self, step: Step) -> dict[str, Any] | None:
        if isinstance(step, Read):
            return json.loads(self._wire.get(_asked(self._wire.name, step)))
        answer = self._wire.publish(f"{self._wire.name}.{step.subject}", step.body, dict(step.headers), self.now)
        if not step.asks:
            return None
        return json.loads(answer) if answer else {}


async def recorded(line: Line, script: Script) -> Answers:
    """Return all answers, without the fields that differ between any two servers."""
    answers: Answers = []
    for operation, steps in script:
        for step in steps:
            answer = await line.step(step)
            if answer is not None:
                answers.append((operation, _comparable(answer)))
    return answers


async def answers_of_both(
    url: str, replicas: int, script: Script, *, afterwards: Script = (), after_s: float = 0.0
) -> tuple[Answers, Answers]:
    """Return the answers of a server at `url` on a new stream, and those of the simulator."""
    name = fresh_name()
    client = await connect(Settings(servers=(url,), replicas=replicas, request_timeout_s=60))
    try:
        await declared(client, name, replicas)
        line = RealLine(client, name)
        real = await recorded(line, script)
        if afterwards:
            await asyncio.sleep(after_s)
            real += await recorded(line, afterwards)
    finally:
        await client.close()
    simulated_line = SimulatedLine(Wire(name, Stream(replicas=replicas)))
    simulated = await recorded(simulated_line, script)
    simulated_line.now += after_s
    simulated += await recorded(simulated_line, afterwards)
    return real, simulated


def _asked(name: str, read: Read) -> dict[str, Any]:
    return {key: f"{name}.{value}" if isinstance(value, str) else value for key, value in read.body}


def _comparable(answer: dict[str, Any]) -> dict[str, Any]:
    comparable = {name: value for name, value in answer.items() if name != "stream"}
    if "message" in comparable:
        comparable["message"] = {name: comparable["message"].get(name, "") for name in ("seq", "hdrs", "data")}
    return comparable
