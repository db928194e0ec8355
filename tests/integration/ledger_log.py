"""Logs of ledger events for the tests of workers, and a bounded wait."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from uuid import uuid4

from eventjet.codec.catalog import Catalog
from eventjet.codec.records import Decoder
from eventjet.domain.recorded import Recorded
from eventjet.jetstream.api import stream_info, update_stream
from eventjet.jetstream.connection import NatsConnection
from eventjet.jetstream.reader import read_range
from eventjet.log.integrity import CONTINUES
from eventjet.log.topology import FIRST, IDENTITY
from eventjet.nats.endpoint import Endpoint
from eventjet.projections.resolve import ResolvedProjection
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.sql.sqlite import make_readable
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.status import status
from eventjet.subscriptions.supervisor import run_workers
from eventjet.subscriptions.work_status import WorkStatus
from tests import logs
from tests.caught_up import wait_caught_up
from tests.integration.projecting import BALANCES, CATALOG, MOVEMENTS, Added, Closed, Noted, Opened
from tests.logs import block, fresh_name
from tests.tables import execute


@dataclass
class Ledger:
    """An app and its log, with the attributes that workers need."""

    settings: Settings
    name: str = field(default_factory=fresh_name)
    catalog: Catalog = CATALOG
    projections: dict[str, ResolvedProjection] = field(
        default_factory=lambda: {"balances": BALANCES, "movements": MOVEMENTS}
    )
    aggregates: dict[Any, Any] = field(default_factory=dict[Any, Any])
    processes: dict[Any, Any] = field(default_factory=dict[Any, Any])
    reactors: dict[str, Any] = field(default_factory=dict[str, Any])
    publications: dict[str, Any] = field(default_factory=dict[str, Any])
    inboxes: dict[str, Any] = field(default_factory=dict[str, Any])
    served: tuple[Any, ...] = ()
    deps: None = None

    def __post_init__(self) -> None:
        for resolved in self.projections.values():
            for table in resolved.tables:
                make_readable(table)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.of(self.settings)

    @property
    def where(self) -> Database:
        return Database(self.settings.database)

    def create(self, identity: str | None = None) -> None:
        """Create the stream, with an identity."""
        logs.create(self.endpoint, self.name, metadata={IDENTITY: identity or str(uuid4())})

    def delete(self) -> None:
        with NatsConnection.open(self.endpoint) as link:
            link.api(f"STREAM.DELETE.{self.name}")

    def promote(self, end: int) -> None:
        """Give the stream the metadata of a promoted mirror that ended at a position."""
        with NatsConnection.open(self.endpoint) as link:
            config = link.ask(stream_info(self.name)).config
            noted = {IDENTITY: str(uuid4()), CONTINUES: f"{config['metadata'][IDENTITY]}@{end}"}
            link.ask(update_stream({**config, "metadata": {**config["metadata"], **noted}}))

    def lose_before(self, first: int) -> None:
        """Purge the stream's beginning, and accept that it begins at `first` from now on."""
        with NatsConnection.open(self.endpoint) as link:
            link.api(f"STREAM.PURGE.{self.name}", {"seq": first})
            config = link.ask(stream_info(self.name)).config
            link.ask(update_stream({**config, "metadata": {**config["metadata"], FIRST: str(first)}}))

    def append(self, events: Iterable[tuple[str, Any]]) -> int:
        """Store (aggregate id, event) pairs; returns the last position."""
        encoded = ((aggregate_id, self.catalog.encode(data)) for aggregate_id, data in events)
        return self.append_raw(
            (aggregate_id, block(encoded_event.type_name, encoded_event.schema), encoded_event.body)
            for aggregate_id, encoded_event in encoded
        )

    def append_raw(self, records: Iterable[tuple[str, bytes, bytes]]) -> int:
        """Store (aggregate id, header block, body) triples; returns the last position."""
        subjects = ((f"ledger.{aggregate_id}", headers, body) for aggregate_id, headers, body in records)
        return logs.append(self.endpoint, self.name, subjects)

    def recorded(self, last: int) -> list[Recorded[Any]]:
        """Return the events of the log up to a position."""
        decode = Decoder(self.catalog)
        events = [decode(record) for batch in read_range(self.endpoint, self.name, 1, last + 1) for record in batch]
        return [event for event in events if event is not None]

    def init(self) -> list[str]:
        """Create the tables as `eventjet init` does; return the names of new tables."""
        return create_tables(self.where.sync_engine(), self.projections.values())

    def execute(self, *statements: str) -> list[Any]:
        """Execute statements in a transaction on the database; return the rows of the last statement."""
        return execute(self.settings.database, *statements)

    async def status(self, name: str | None = None) -> WorkStatus:
        """Return the status of a projection, by default of the first."""
        wanted = name or next(iter(self.projections))
        return next(shown for shown in await status(self, self.settings) if shown.name == wanted)

    async def failed(self) -> WorkStatus:
        """Wait until the first projection has failed, and return its status."""

        async def is_failed() -> bool:
            return (await self.status()).state == "failed"

        await eventually(is_failed, "the projection to fail")
        return await self.status()

    async def caught_up(self, position: int, resolved: ResolvedProjection = BALANCES, timeout_s: float = 90) -> None:
        await wait_caught_up(self.settings.database, resolved, position, timeout_s)

    @asynccontextmanager
    async def working(
        self, *names: str, options: WorkerOptions | None = None, http: tuple[str, int] | None = None
    ) -> AsyncGenerator[None]:
        """Run a worker in this process, yield once it is ready, and drain it at the end.

        It has its own event loop: a test that waits for a database lock must not keep the worker from releasing it.
        """
        stop, ready = asyncio.Event(), threading.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        async def work() -> None:
            loops.append(asyncio.get_running_loop())
            await run_workers(self, self.settings, names, stop=stop, on_ready=ready.set, options=options, http=http)

        worker = asyncio.create_task(asyncio.to_thread(asyncio.run, work()))
        try:
            async with asyncio.timeout(90):
                while not (ready.is_set() or worker.done()):
                    await asyncio.sleep(0.005)
            if worker.done():
                worker.result()
            yield
        finally:
            with suppress(RuntimeError):  # its loop is closed when it has ended by itself
                loops[0].call_soon_threadsafe(stop.set)
            async with asyncio.timeout(90):
                await worker


def history(count: int, accounts: int = 50, seed: int = 7) -> list[tuple[str, Any]]:
    """Random (aggregate id, event) pairs: accounts are opened, added to, closed, and opened again."""
    chance = random.Random(seed)
    pairs: list[tuple[str, Any]] = []
    for number in range(count):
        kind = chance.random()
        data: Any = Added(amount=Decimal(chance.randrange(-10_000, 10_000)) / 100)
        if kind < 0.1:
            data = Opened(owner=f"o-{number}")
        elif kind < 0.15:
            data = Closed()
        elif kind < 0.2:
            data = Noted(text="x" * chance.randrange(50))
        pairs.append((f"a-{chance.randrange(accounts)}", data))
    return pairs


async def eventually(condition: Callable[[], Awaitable[bool]], expected: str, timeout_s: float = 90) -> float:
    """Wait until the condition holds; return the seconds it took."""
    started = time.monotonic()
    while not await condition():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s} s: {expected}"
        await asyncio.sleep(0.02)
    return time.monotonic() - started
