"""Ten writers at once over the same entities: a live worker and a later catch-up each apply every event once."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import ExitStack
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from eventjet.settings import Settings
from tests.faults.processes import WorkerProcess, await_it
from tests.faults.tally import Added, Noted, Tally, Truth, judge, snapshot, tally_app
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import database_with
from tests.logs import fresh_name

WRITERS = 10
EVENTS = int(os.environ.get("EVENTJET_TEST_CONCURRENT", "600"))
ENTITIES = 40
CATCH_UP_S = 600.0
"""How long the read models may make no progress."""


async def write(ledger: Ledger, seed: int, events: int) -> None:
    """Write over a connection of its own; some of the commands record two events."""
    chance = random.Random(seed)
    async with tally_app(ledger.name).connect(servers=ledger.settings.servers[0]) as jet:
        tallies = jet.repository(Tally)
        while events:
            decide = Tally.add_two if events > 1 and chance.random() < 0.2 else Tally.add
            amount = Decimal(chance.randrange(1, 10_000)) / 100
            done = await tallies.execute(f"e-{chance.randrange(ENTITIES)}", decide, amount)
            events -= len(done.events)


async def written(ledger: Ledger) -> None:
    """Run all writers at once."""
    async with asyncio.TaskGroup() as writers:
        for seed in range(WRITERS):
            writers.create_task(write(ledger, seed, EVENTS // WRITERS))


def databases(kind: str, request: pytest.FixtureRequest, folder: Path) -> list[str]:
    """Return two empty databases."""
    if kind == "sqlite":
        return [f"sqlite:///{folder}/{name}.db" for name in ("live", "later")]
    server: PostgresServer = request.getfixturevalue("eventjet_postgres")
    return [server.create_database(f"test_{uuid4().hex}") for _ in range(2)]


def positions(database: str) -> tuple[int, int]:
    tables = snapshot(database)
    return tables.totals_at, tables.journal_at


@pytest.mark.timeout(1_200 + EVENTS / 2)
@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
async def test_events_of_ten_writers_are_applied_once(
    kind: str,
    request: pytest.FixtureRequest,
    eventjet_nats: NatsServer,
    tmp_path: Path,
    processes: ExitStack,
) -> None:
    app = tally_app(fresh_name("tally"))
    live, later = databases(kind, request, tmp_path)
    settings = Settings(servers=(eventjet_nats.url,), database=live)
    ledger = Ledger(settings, app.name, app.catalog, dict(app.projections))
    for database in (live, later):
        database_with(database, *app.projections.values())
    # The stream must exist before its workers.
    async with tally_app(ledger.name).connect(servers=settings.servers[0]) as jet:
        await jet.init()
    worker = processes.enter_context(WorkerProcess(ledger, tmp_path, batch_max=1_000).ready())
    await written(ledger)
    await asyncio.to_thread(check, ledger, f"{kind}: with a live worker")
    worker.ask_to_end()
    worker.ended_well()
    # Only now: a projection has one durable at the server, whatever its database.
    other = Ledger(replace(settings, database=later), app.name, app.catalog, ledger.projections)
    processes.enter_context(WorkerProcess(other, tmp_path, batch_max=1_000).ready())
    await asyncio.to_thread(check, other, f"{kind}: by a later catch-up")


def check(ledger: Ledger, how: str) -> None:
    """Assert that the read models come to hold exactly what was appended."""
    log: list[tuple[str, Added | Noted]] = [(event.aggregate_id, event.data) for event in ledger.recorded(EVENTS)]
    assert len(log) == EVENTS
    database = ledger.settings.database
    await_it(
        lambda: min(positions(database)) >= EVENTS, lambda: how, CATCH_UP_S, reached=lambda: sum(positions(database))
    )
    tables = snapshot(database)
    verdict = judge(Truth(log), tables)
    print(f"\n{how}, events appended {WRITERS}-way: {tables.journal_count:,} applied, {verdict}")  # noqa: T201
    assert tables.journal_count == EVENTS == sum(row.additions for row in tables.totals)
    assert verdict.right
