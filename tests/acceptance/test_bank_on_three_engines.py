"""The bank's events: a live worker, Spark and the local engine make the same tables, on both databases.

The rebuilds are commands started from another folder with nothing on their path: driver and Spark's workers find the
bank by its reference alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from sqlalchemy import create_engine, select

from eventjet import Imported
from eventjet.dev.nats import NatsServer
from eventjet.examples.bank.account import Account, Deposited, Opened, Withdrawn
from eventjet.examples.bank.read_models import balances, postings
from eventjet.sql.database import Database
from examples.bank.app import bank

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
EVENTS = int(os.environ.get("EVENTJET_TEST_BANK_EVENTS", "10000"))
ACCOUNTS = EVENTS // 25


def cents(random: Random) -> Decimal:
    return Decimal(random.randrange(1, 100_000)) / 100


def history() -> Iterator[Imported]:
    """Every account is opened; then money moves between them at random, to the cent."""
    for number in range(ACCOUNTS):
        yield Imported(Account, f"a-{number}", Opened(owner=f"owner {number}"))
    random = Random(5)
    for _ in range(EVENTS - ACCOUNTS):
        name = f"a-{random.randrange(ACCOUNTS)}"
        if random.random() < 0.6:
            yield Imported(Account, name, Deposited(amount=cents(random)))
        else:
            yield Imported(Account, name, Withdrawn(amount=cents(random), reason="rent"))


def balances_by_hand() -> list[tuple[str, str, Decimal]]:
    """Return the balances, computed without eventjet."""
    owners: dict[str, str] = {}
    amounts: defaultdict[str, Decimal] = defaultdict(Decimal)
    for imported in history():
        match imported.event:
            case Opened(owner=owner):
                owners[imported.aggregate_id] = owner
            case Deposited(amount=amount):
                amounts[imported.aggregate_id] += amount
            case Withdrawn(amount=amount):
                amounts[imported.aggregate_id] -= amount
            case _:
                raise AssertionError(imported)
    return sorted((name, owner, amounts[name]) for name, owner in owners.items())


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer(sync_interval="1m") as server:
        yield server


@pytest.fixture
async def environment(server: NatsServer, database: str) -> dict[str, str]:
    """The environment of the commands; the log is filled by the first test that needs it."""
    async with bank.connect(servers=server.url, database=database) as jet:
        await jet.init()
        await jet.append_many(history(), source="three-engines")
        assert (await jet.log()).last == EVENTS
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and "EVENTJET" not in name}
    return own | {
        "EVENTJET_SERVERS": server.url,
        "EVENTJET_DATABASE": database,
        "EVENTJET_APP": "examples.bank.app:bank",
    }


def tables(database: str) -> list[list[Any]]:
    """Read all rows as an application reads them: through the tables it declared."""
    engine = create_engine(Database(database).url)
    with engine.connect() as connection:
        rows = [
            [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key.columns))]
            for table in (balances.table, postings.table)
        ]
    engine.dispose()
    return rows


async def test_the_live_worker_spark_and_the_local_engine_agree(
    environment: dict[str, str], database: str, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    start = [sys.executable, "-P", "-m", "eventjet.cli"]
    place = {"cwd": elsewhere, "env": environment}

    def run(*words: str) -> None:
        done = subprocess.run(
            [*start, *words, "--app-dir", str(ROOT)], **place, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr

    blind = subprocess.run([sys.executable, "-P", "-c", "import examples"], **place, capture_output=True, text=True)
    assert "No module named 'examples'" in blind.stderr
    run("init")
    worker = subprocess.Popen([*start, "worker", "--app-dir", str(ROOT)], **place, stderr=subprocess.DEVNULL)
    try:
        async with bank.connect(servers=environment["EVENTJET_SERVERS"], database=database) as jet:
            for name in ("balances", "postings"):
                await jet.caught_up(name, position=EVENTS, timeout_s=60)
    finally:
        worker.terminate()
        assert worker.wait(30) == 0
    live = tables(database)
    assert sorted(live[0]) == balances_by_hand()
    assert len(live[1]) == EVENTS - ACCOUNTS
    for engine in ("spark", "local"):
        run("rebuild", "balances", "postings", "--engine", engine)
        assert tables(database) == live, engine
    run("verify", "balances")
    assert list(elsewhere.iterdir()) == []
