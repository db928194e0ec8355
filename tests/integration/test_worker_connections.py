"""A process of workers opens connections at its start and after failures, and none while nothing fails."""

from __future__ import annotations

import asyncio
import json
import threading
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
from eventjet.errors import StoreUnavailable, Unreachable
from eventjet.jetstream.api import create_stream
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from eventjet.subscriptions.status import StatusReader
from eventjet.subscriptions.supervisor import run_workers
from tests.integration.projecting import database_with
from tests.integration.reacting import PATIENT_S, Bell, Rung, Tower, eventually, working
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
    """A process with a single step, which counts in the tower."""

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
class BellRung:
    n: int


def app_of_everything(projections: int) -> App:
    """Return an app with one component of every kind and this number of projections; its streams have its name."""
    name = fresh_name()

    @reactor("counter", start="beginning")
    async def counter(event: Recorded[Rung], to: Reaction[Any]) -> None:
        await to.repository(Tower).execute("all", Tower.count, event.aggregate_id, event.data.n)

    @reactor("divided", start="beginning", partitions=3)
    async def divided(event: Recorded[Rung], to: Reaction[Any]) -> None:
        await to.repository(Tower).execute(event.aggregate_id, Tower.count, event.aggregate_id, event.data.n)

    @inbox("orders", stream=f"{name}-orders", subject=f"{name}-orders.>", start="beginning")
    async def orders(message: Incoming[Order], to: Reaction[Any]) -> None:
        await to.repository(Bell).execute(message.data.bell, Bell.polish)

    @publication("bells", stream=f"{name}-public", source="https://bells.example", start="beginning")
    def bells(event: Recorded[Rung]) -> BellRung:
        return BellRung(n=event.data.n)

    return App(
        name,
        aggregates=[Bell, Tower],
        projections=[rings_of(number) for number in range(projections)],
        reactors=[counter, divided, orders],
        processes=[Errand],
        publications=[bells],
    )


class WatchedServer:
    """A server, with counts of its connections and requests."""

    def __init__(self, server: NatsServer, jet: Jet) -> None:
        self._server = server
        self._jet = jet
        self.info_requests: Counter[str] = Counter()
        """Info requests for each consumer; a worker sends one at the end of each look at the log."""

    async def listen(self) -> None:
        assert self._jet.client is not None

        def count_request(frame: Any) -> None:
            self.info_requests[frame[1].decode().rpartition(".")[2]] += 1

        await self._jet.client.serve("$JS.API.CONSUMER.INFO.*.*", count_request)

    async def dialled(self) -> int:
        """Return the number of connections since the server's start."""
        return int((await asyncio.to_thread(self._read_monitor, "/varz"))["total_connections"])

    async def names(self) -> Counter[str]:
        """Return the names of the open connections."""
        report = await asyncio.to_thread(self._read_monitor, "/connz?limit=1000")
        return Counter(connection.get("name", "") for connection in report["connections"])

    async def wait_for_looks(self, durables: Sequence[str], times: int) -> None:
        """Wait until the worker of each consumer has finished this many more looks at the log."""
        before = Counter(self.info_requests)

        async def all_have() -> bool:
            return all(self.info_requests[name] - before[name] >= times for name in durables)

        await eventually(all_have)

    def _read_monitor(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._server.monitor_url}{path}", timeout=60) as answer:
            return json.load(answer)


@dataclass
class Scene:
    app: App
    jet: Jet
    settings: Settings
    server: NatsServer
    watched: WatchedServer
    reader: StatusReader

    @property
    def durables(self) -> list[str]:
        return [*(projection.durable for projection in self.app.projections.values()), *self.followers]

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
        """Record an event for every component."""
        assert self.jet.client is not None
        for bell in BELLS:
            await self.jet.repository(Bell).execute(bell, Bell.ring, n)
            await self.jet.client.request(f"{self.app.name}-orders.{bell}", json.dumps({"bell": bell}).encode())
        await self.jet.repository(Errand).execute(f"e-{n}", Errand.begin)

    async def caught_up(self, *names: str) -> None:
        """Wait until these components, or all of them, have an owner and no lag."""

        async def are_caught_up() -> bool:
            try:
                statuses = (await self.reader.read()).projections
            except (StoreUnavailable, Unreachable):
                return False  # the server is being restarted
            selected = [work_status for work_status in statuses if not names or work_status.name in names]
            return all(work_status.owner is not None and not work_status.lag_events for work_status in selected)

        await eventually(are_caught_up)

    @asynccontextmanager
    async def projecting(self) -> AsyncGenerator[None]:
        """Run a worker of the projections only within the block."""
        stop, ready = asyncio.Event(), asyncio.Event()
        names = list(self.app.projections)
        task = asyncio.create_task(run_workers(self.app, self.settings, names, stop=stop, on_ready=ready.set))
        waiting = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=PATIENT_S)
            assert ready.is_set()
            yield
        finally:
            stop.set()
            waiting.cancel()
            await asyncio.wait_for(task, PATIENT_S)


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
            resolved: Any = app.projections.values()
            await asyncio.to_thread(database_with, settings.database, *resolved)
            watched = WatchedServer(server, jet)
            await watched.listen()
            yield Scene(app, jet, settings, server, watched, reader)


@pytest.mark.slow
async def test_workers_open_no_connection_while_nothing_fails(tmp_path: Path) -> None:
    async with scene_of(tmp_path, 30) as scene:
        watched = scene.watched
        await scene.happens(1)
        async with working(scene.app, scene.settings):
            await scene.caught_up()
            await watched.wait_for_looks(scene.durables, 1)
            before = await watched.dialled()
            await watched.wait_for_looks(scene.durables, 2)
            await scene.happens(2)
            await scene.caught_up()
            await watched.wait_for_looks(scene.durables, 1)
            names = await watched.names()
            assert await watched.dialled() == before, names
            assert Counter(name for name in names if name.startswith("eventjet worker ")) == Counter(
                f"eventjet worker {durable}" for durable in scene.durables
            )
            assert names["eventjet"] == 3  # the test's two, and one of the workers
            assert names["eventjet histories"] <= 2


@pytest.mark.slow
async def test_a_worker_reads_predecessors_over_its_own_connections(
    tmp_path: Path,
) -> None:
    async with scene_of(tmp_path, 4) as scene:
        names = list(scene.app.projections)
        await scene.happens(1)
        async with scene.projecting():
            await scene.caught_up(*names)
        async with scene.projecting():
            await scene.caught_up(*names)
            await scene.watched.wait_for_looks([f"{name}-r1" for name in names], 1)
            before = await scene.watched.dialled()
            await scene.happens(2)  # events of aggregates that these workers have not read
            await scene.caught_up(*names)
            assert await scene.watched.dialled() == before, await scene.watched.names()


@pytest.mark.slow
async def test_workers_reconnect_after_a_restart_and_open_no_connection_afterwards(tmp_path: Path) -> None:
    async with scene_of(tmp_path, 4) as scene:
        await scene.happens(1)
        async with working(scene.app, scene.settings):
            await scene.caught_up()
            await scene.watched.wait_for_looks(scene.durables, 1)
            await asyncio.to_thread(scene.server.stop)
            await asyncio.to_thread(scene.server.start)
            await scene.watched.wait_for_looks(scene.durables, 1)
            await scene.happens(2)
            await scene.caught_up()
            await scene.watched.wait_for_looks(scene.durables, 1)
            before = await scene.watched.dialled()
            await scene.happens(3)
            await scene.caught_up()
            await scene.watched.wait_for_looks(scene.durables, 2)
            assert await scene.watched.dialled() == before, await scene.watched.names()


async def test_a_status_reader_closes_the_connection_of_a_cancelled_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene_of(tmp_path, 1) as scene:
        opening, may_open = threading.Event(), threading.Event()
        opened: list[NatsConnection] = []

        def open_slowly(endpoint: Endpoint) -> NatsConnection:
            opening.set()
            assert may_open.wait(PATIENT_S)
            opened.append(open_connection(endpoint.with_name("opened late")))
            return opened[0]

        open_connection = NatsConnection.open
        async with StatusReader(scene.app, scene.settings) as reader:
            monkeypatch.setattr(NatsConnection, "open", open_slowly)
            read = asyncio.create_task(reader.read())
            assert await asyncio.to_thread(opening.wait, PATIENT_S)
            read.cancel()
            await asyncio.wait({read})
        may_open.set()

        async def is_closed() -> bool:
            return bool(opened) and not (await scene.watched.names())["opened late"]

        await eventually(is_closed)


async def test_a_read_that_was_cancelled_takes_no_connection_from_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene_of(tmp_path, 1) as scene:
        opening, may_open, has_opened = threading.Event(), threading.Event(), threading.Event()

        def first_slowly(endpoint: Endpoint) -> NatsConnection:
            is_first = not opening.is_set()
            opening.set()
            assert not is_first or may_open.wait(PATIENT_S)
            connection = real(endpoint.with_name("of a status reader"))
            if is_first:
                has_opened.set()
            return connection

        async def is_one() -> bool:
            return (await scene.watched.names())["of a status reader"] == 1

        async def is_none() -> bool:
            return not (await scene.watched.names())["of a status reader"]

        real = NatsConnection.open
        async with StatusReader(scene.app, scene.settings) as reader:
            monkeypatch.setattr(NatsConnection, "open", first_slowly)
            read = asyncio.create_task(reader.read())
            assert await asyncio.to_thread(opening.wait, PATIENT_S)
            read.cancel()
            await asyncio.wait({read})
            assert (await reader.read()).projections
            may_open.set()
            assert await asyncio.to_thread(has_opened.wait, PATIENT_S)
            await eventually(is_one)
            assert (await reader.read()).projections
        await eventually(is_none)
