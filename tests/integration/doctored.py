"""A deployed app for `eventjet doctor` to examine, with work of every kind and a log of its own."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Integer, MetaData, Numeric, String, Table

from eventjet import App, Recorded, projection
from eventjet.codec.subjects import cursor_bucket
from eventjet.doctor.examine import Examined, examine
from eventjet.doctor.report import Installation
from eventjet.examples.transfer.accounts import Account, Book, Deposited
from eventjet.examples.transfer.app import outside, receipts
from eventjet.examples.transfer.transfers import Transfer
from eventjet.findings import Finding, Level
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from tests.integration.reacting import working
from tests.logs import fresh_name
from tests.tables import execute

BOUND_S = 120.0
"""Bounds a whole examination, also on an overloaded machine. Only an examination that hangs takes so long."""
UNLUCKY = Decimal(13)

OK, NOTE, UNKNOWN, WARNING, FAULT, UNREACHABLE = Level
Kind = tuple[str, str, Level]

ALONE: frozenset[Kind] = frozenset(
    {
        ("monitoring", "sync_interval", UNKNOWN),
        ("streams", "replicas", WARNING),
        ("database", "settings", NOTE),  # the WAL-reset fault of older SQLites
        ("read models", "worker", NOTE),
        ("reactions", "worker", NOTE),
    }
)
"""Findings for a single server without a monitoring URL, while no worker runs."""

metadata = MetaData()
deposits_table = Table(
    "deposits",
    metadata,
    Column("account_id", String(40), primary_key=True),
    Column("amount", Numeric(12, 2), nullable=False),
    Column("number", Integer, nullable=False),
)


@dataclass(frozen=True, slots=True)
class Deposits:
    account_id: str
    amount: Decimal = Decimal(0)
    number: int = 0


def fold(row: Deposits | None, event: Recorded[Deposited]) -> Deposits | None:
    if event.data.amount == UNLUCKY:
        raise ValueError("unlucky")
    row = row or Deposits(event.aggregate_id)
    return replace(row, amount=row.amount + event.data.amount, number=row.number + 1)


DEPOSITS, NEWER = (
    projection("deposits", table=deposits_table, revision=revision, on_error="quarantine")(fold) for revision in (1, 2)
)


def app_of(name: str, **declared: Any) -> App:
    """Return an app with work of every kind; `declared` adds to it or replaces it."""
    work = {"projections": [DEPOSITS], "reactors": [receipts], **declared}
    return App(name, aggregates=[Account, Book], processes=[Transfer], deps=outside, **work)


@dataclass
class Deployment:
    """A deployment of an app; it has its streams and tables after `init`."""

    settings: Settings
    folder: Path
    app: App = field(default_factory=lambda: app_of(fresh_name()))
    monitoring: tuple[str, ...] = ()
    clock: Callable[[], float] = time.time
    timeout_s: float = BOUND_S

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.of(self.settings)

    async def init(self) -> Deployment:
        """Create what `eventjet init` creates."""
        async with self.app.connect(self.settings) as jet:
            await jet.init()
        if self.app.projections:
            create_tables(Database(self.settings.database).sync_engine(), self.app.projections.values())
        return self

    async def deposit_and_process(self, *amounts: Decimal) -> Deployment:
        """Deposit amounts, and let a worker process the events before it ends."""
        last = await self.deposit(*(amounts or (Decimal(5), Decimal(7))))
        async with self.app.connect(self.settings) as jet, working(self.app, self.settings):
            await jet.caught_up("deposits", position=last, timeout_s=BOUND_S)
        return self

    async def deposit(self, *amounts: Decimal) -> int:
        """Deposit each amount in an account of its own; return the last position."""
        last = 0
        async with self.app.connect(self.settings) as jet:
            for number, amount in enumerate(amounts):
                done = await jet.repository(Account).execute(f"a-{number}", Account.deposit, amount)
                last = done.position
        return last

    # Plant faults.

    def api(self, subject: str, body: object = None) -> dict[str, Any]:
        with NatsConnection.open(self.endpoint) as link:
            return link.api(subject, body)

    def config(self, stream: str) -> dict[str, Any]:
        with NatsConnection.open(self.endpoint) as link:
            return link.ask(stream_info(stream)).config

    def edit(self, stream: str, **settings: Any) -> None:
        self.api(f"STREAM.UPDATE.{stream}", {**self.config(stream), **settings})

    def remake(self, stream: str, **settings: Any) -> None:
        """Make the stream again with settings that an update cannot change."""
        before = self.config(stream)
        self.delete(stream)
        self.api(f"STREAM.CREATE.{stream}", {**before, **settings})

    def delete(self, stream: str) -> None:
        self.api(f"STREAM.DELETE.{stream}")

    def put_cursor(self, name: str, body: bytes) -> None:
        with NatsConnection.open(self.endpoint) as link:
            link.request(f"$KV.{cursor_bucket(self.app.name)}.c.{name}", body)

    def execute(self, *statements: str) -> list[Any]:
        return execute(self.settings.database, *statements)

    # Examine.

    async def examined(self) -> Examined:
        installation = Installation(self.app, self.settings, self.monitoring, self.timeout_s, self.clock)
        return await asyncio.to_thread(examine, installation)

    async def findings(self) -> tuple[Finding, ...]:
        examined = await self.examined()
        if examined.own_fault is not None:
            raise examined.own_fault
        return examined.findings


@contextmanager
def silent() -> Iterator[str]:
    """Yield the URL of a port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def kinds(findings: tuple[Finding, ...]) -> set[Kind]:
    """Return part, check and level of each finding that is not OK."""
    return {(finding.part, finding.check, finding.level) for finding in findings if finding.level is not Level.OK}


async def newer(deployment: Deployment) -> None:
    """Deploy the app with the next revision of its projection."""
    deployment.app = app_of(deployment.app.name, projections=[NEWER])
    await deployment.init()
