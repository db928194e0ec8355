"""Workers of a SQL projection with a batch handler, killed at every step: no event is lost or written twice."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings
from tests.faults.processes import Fault, WorkerProcess, await_it
from tests.faults.writing import WRITING, truth, writing
from tests.integration.by_hand import table_rows
from tests.integration.by_hand_writing import writes
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import database_with
from tests.logs import fresh_name

KILLS = int(os.environ.get("EVENTJET_TEST_BATCH_KILLS", "4"))
"""The number on each database; 7 reach every place."""
OFTEN = ("worker.rows_written", "worker.before_commit", "worker.after_commit", "worker.batch_taken")
"""Failpoints that every batch reaches, so they are armed for a later one."""
PLACES = (*OFTEN, "worker.lease_taken", "worker.durable_created", "worker.log_checked")
TURNS = 4
"""Additions to each of 20 accounts, for each kill."""


@pytest.fixture
def ledger(eventjet_nats: NatsServer, database: str) -> Iterator[Ledger]:
    there = writing(Settings(servers=(eventjet_nats.url,), database=database), fresh_name("ledger"))
    database_with(database, WRITING)
    there.create()
    yield there
    there.delete()


@pytest.mark.slow
@pytest.mark.timeout(600 + 60 * KILLS)
async def test_workers_killed_around_a_call_take_every_event_once(ledger: Ledger, tmp_path: Path) -> None:
    chance = random.Random(KILLS)
    last = 0
    for turn, name in enumerate(islice(cycle(PLACES), KILLS)):
        last = ledger.append(writes(20, TURNS) if turn == 0 else writes(20, TURNS)[20:])
        fault = Fault(name, "kill", chance.randrange(1, 4) if name in OFTEN else 1)
        module = "tests.faults.writing"
        with WorkerProcess(ledger, tmp_path, fault, batch_max=20, module=module) as process:
            await_it(process.reached, lambda: f"{fault}\n{process.logged()}")  # noqa: B023 - within the turn
        position = (await ledger.status()).position or 0
        assert table_rows(ledger.where) == truth(ledger.recorded(position)), f"after {fault}"
    async with ledger.working():
        await ledger.caught_up(last, WRITING)
    assert table_rows(ledger.where) == truth(ledger.recorded(last))
