"""A process of workers dials at its start and where something failed; while nothing fails the server sees no more."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, String, Table

from eventjet import (
    App,
    Incoming,
    Jet,
    Projection,
    Reaction,
    Recorded,
    Step,
    do,
    event,
    inbox,
    process,
    projection,
    publication,
    reactor,
)
from eventjet.dev.nats import NatsServer
from eventjet.nats.api import create_stream
from eventjet.settings import Settings
from eventjet.workers.status import StatusReader
from tests.integration.projecting import made
from tests.integration.reacting import Bell, Rung, Tower, eventually, working
from tests.logs import fresh_name

BELLS = ("high", "low")


@dataclass(frozen=True, slots=True)
class Rings:
    bell: str
    count: int = 0


def rings_of(number: int) -> Projection[Any, Any]:
    columns = Column("bell", String(20), primary_key=True), Column("count", Integer, nullable=False)
    table = Table(f"rings_{number}", MetaData(), *columns)

    @projection(f"rings_{number}", table=table)
    def rings(row: Rings | None, event: Recorded[Rung]) -> Rings:
        row = row or Rings(event.aggregate_id)
        return replace(row, count=row.count + 1)

    return rings


@event("errand.begun")
class Begun:
    pass


@event("errand.done")
class Done:
    pass


@process("errand")
class Errand:
    """One step: it counts in the tower."""

    stage: str = ""

    def begin(self) -> Begun:
        return Begun()

    def finish(self) -> Done:
        return Done()

    def step(self) -> Step[Errand, Done] | None:
        return do(Tower, "errands", Tower.count, "errand", 1).then(Errand.finish) if self.stage == "begun" else None

    def evolve(self, event: Begun | Done) -> Errand:
        return replace(self, stage="begun" if isinstance(event, Begun) else "done")


class Order(BaseModel):
    bell: str


@event("bells.rung")
class Told:
    n: int


def app_of_everything(projections: int) -> App:
    """Of each kind of what workers work on something, and so many projections; its streams are of its name."""
    name = fresh_name()

    @reactor("counter", start="beginning")
    async def counter(event: Recorded[Rung], to: Reaction[None]) -> None:
        await to.repository(Tower).execute("all", Tower.count, event.aggregate_id, event.data.n)

    @reactor("divided", start="beginning", partitions=3)
    async def divided(event: Recorded[Rung], to: Reaction[None]) -> None:
        await to.repository(Tower).execute(event.aggregate_id, Tower.count, event.aggregate_id, event.data.n)

    @inbox("orders", stream=f"{name}-orders", subject=f"{name}-orders.>", start="beginning")
    async def orders(message: Incoming[Order], to: Reaction[None]) -> None:
        await to.repository(Bell).execute(message.data.bell, Bell.polish)

    @publication("bells", stream=f"{name}-public", source="https://bells.example", start="beginning")
    def bells(event: Recorded[Rung]) -> Told:
        return Told(n=event.data.n)

    return App(
        name,
        aggregates=[Bell, Tower],
        projections=[rings_of(number) for number in range(projections)],
        reactors=[counter, divided, orders],
        processes=[Errand],
        publications=[bells],
    )


class Watched:
    """A server, and what it says of its connections."""

    def __init__(self, server: NatsServer, jet: Jet) -> None:
        self._server = server
        self._jet = jet
        self.asked: Counter[str] = Counter()
        """How often the server was asked for each consumer, which is what each look of a worker ends with."""

    async def listen(self) -> None:
        assert self._jet.client is not None

        def heard(frame: Any) -> None:
            self.asked[frame[1].decode().rpartition(".")[2]] += 1

        await self._jet.client.serve("$JS.API.CONSUMER.INFO.*.*", heard)

    async def dialled(self) -> int:
        """Connections that were ever made."""
        return int((await asyncio.to_thread(self._told, "/varz"))["total_connections"])

    async def names(self) -> Counter[str]:
        """Of the connections there are."""
        found = await asyncio.to_thread(self._told, "/connz?limit=1000")
        return Counter(one.get("name", "") for one in found["connections"])

    async def looked(self, durables: Sequence[str], times: int) -> None:
        """Wait until the worker of each has looked so often from now on."""
        before = Counter(self.asked)

        async def all_have() -> bool:
            return all(self.asked[name] - before[name] >= times for name in durables)

        await eventually(all_have)

    def _told(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._server.monitor_url}{path}", timeout=60) as answer:
            return json.load(answer)


@dataclass
class Scene:
    app: App
    jet: Jet
    settings: Settings
    server: NatsServer
    watched: Watched
    reader: StatusReader

    @property
    def durables(self) -> list[str]:
        return [*(one.durable for one in self.app.projections.values()), *self.followers]

    @property
    def followers(self) -> list[str]:
        return [
            "counter",
            "divided-1-of-3",
            "divided-2-of-3",
            "divided-3-of-3",
            f"{self.app.name}-orders",
            "bells",
            "errand",
        ]

    async def happens(self, n: int) -> None:
        """Something for everyone."""
        assert self.jet.client is not None
        for bell in BELLS:
            await self.jet.repository(Bell).execute(bell, Bell.ring, n)
            await self.jet.client.request(f"{self.app.name}-orders.{bell}", json.dumps({"bell": bell}).encode())
        await self.jet.repository(Errand).execute(f"e-{n}", Errand.begin)

    async def caught_up(self) -> None:
        async def look() -> bool:
            statuses = (await self.reader.read()).projections
            return all(one.owner is not None and not one.lag_events for one in statuses)

        await eventually(look)


@asynccontextmanager
async def scene_of(tmp_path: Path, projections: int) -> AsyncGenerator[Scene]:
    app = app_of_everything(projections)
    with NatsServer(sync_interval="1m") as server:
        settings = Settings(servers=(server.url,), database=f"sqlite:///{tmp_path}/read.db")
        async with app.connect(settings) as jet, StatusReader(app, settings) as reader:
            assert jet.client is not None
            for kind in ("orders", "public"):
                stream = f"{app.name}-{kind}"
                await jet.client.ask(create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_atomic": True}))
            await jet.init()
            await asyncio.to_thread(made, settings.database, *app.projections.values())
            watched = Watched(server, jet)
            await watched.listen()
            yield Scene(app, jet, settings, server, watched, reader)


@pytest.mark.slow
@pytest.mark.parametrize("projections", [30])
async def test_workers_dial_nothing_while_nothing_fails(tmp_path: Path, projections: int) -> None:
    async with scene_of(tmp_path, projections) as scene:
        await scene.happens(1)
        async with working(scene.app, scene.settings):
            await scene.caught_up()
            await scene.watched.looked(scene.durables, 1)
            before, names = await scene.watched.dialled(), await scene.watched.names()
            await scene.watched.looked(scene.durables, 2)
            await scene.happens(2)
            await scene.caught_up()
            await scene.watched.looked(scene.durables, 1)
            assert await scene.watched.dialled() == before, await scene.watched.names() - names
