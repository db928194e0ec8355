"""Workers that are killed, stopped and revived: nothing is lost, nothing is applied twice, on both databases."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from eventjet.settings import Settings
from eventjet.sql.checkpoint import Checkpoint, ensure, read, take
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.status import status
from tests.forked import ForkedWorker
from tests.integration.ledger_log import Ledger, eventually, history
from tests.integration.projecting import BALANCES, MOVEMENTS, folded, made, rows_of
from tests.tables import reading

TAKEOVER_S = float(os.environ.get("EVENTJET_TEST_TAKEOVER_S", "15"))
"""A lease and a half, and what a busy machine adds; pulls that nobody takes back would last half a minute."""
KILLS = 4


class Worker(ForkedWorker):
    """One worker process."""

    def __init__(self, ledger: Ledger, batch_max: int = 50, lease_s: float = 3.5) -> None:
        place = (ledger.settings.servers[0], ledger.settings.database, ledger.name, str(batch_max), str(lease_s))
        super().__init__("tests.integration.worker_process", place)

    def kill(self) -> None:
        self.process.kill()
        self.ended()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def stored(ledger: Ledger) -> tuple[Checkpoint | None, list[object]]:
    with reading(ledger.settings.database) as connection:
        return read(connection, "balances", 1), rows_of(connection, BALANCES)


async def owner(ledger: Ledger) -> str | None:
    return next(one.owner for one in await status(ledger, ledger.settings) if one.name == "balances")


async def is_past(ledger: Ledger, position: int) -> bool:
    found, _ = await asyncio.to_thread(stored, ledger)
    return found is not None and found.position >= position


async def is_held_by(ledger: Ledger, worker: Worker) -> bool:
    found, _ = stored(ledger)
    return found is not None and f":{worker.process.pid}:" in (found.owner or "")


@pytest.mark.slow
async def test_an_idle_worker_that_is_killed_is_replaced_in_time(ledger: Ledger, processes: ExitStack) -> None:
    last = ledger.append(history(200))
    first = processes.enter_context(Worker(ledger)).ready()
    await ledger.caught_up(last)
    processes.enter_context(Worker(ledger)).ready()
    # The first one's pulls are waiting at the server when it dies.
    first.kill()
    killed = time.monotonic()
    last = ledger.append(history(50, seed=8))
    await ledger.caught_up(last)
    assert time.monotonic() - killed < TAKEOVER_S
    assert stored(ledger)[1] == folded(ledger.recorded(last))


@pytest.mark.slow
async def test_a_stopped_worker_is_replaced_and_commits_nothing_when_revived(
    ledger: Ledger, processes: ExitStack
) -> None:
    if ledger.settings.database.startswith("sqlite"):
        pytest.skip("a worker stopped within a transaction holds SQLite until it resumes or dies")
    ledger.append(history(20_000))
    zombie = processes.enter_context(Worker(ledger)).ready()
    await eventually(lambda: is_past(ledger, 500), "some batches")
    zombie.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    other = processes.enter_context(Worker(ledger, batch_max=1_000)).ready()
    await eventually(lambda: is_held_by(ledger, other), "the other to take over")
    assert time.monotonic() - stopped < TAKEOVER_S + 5
    await ledger.caught_up(20_000)
    before = stored(ledger)
    zombie.signal(signal.SIGCONT)
    zombie.signal(signal.SIGTERM)
    logged = zombie.ended()
    assert zombie.process.returncode == 0, logged
    found, rows = stored(ledger)
    assert (found, rows)[1] == before[1] == folded(ledger.recorded(20_000))
    assert found is not None
    assert before[0] is not None
    assert (found.epoch, found.position) == (before[0].epoch, before[0].position)
    last = ledger.append(history(100, seed=8))
    await ledger.caught_up(last, timeout_s=TAKEOVER_S)
    assert other.process.poll() is None


@pytest.mark.slow
async def test_workers_killed_at_random_lose_and_repeat_nothing(ledger: Ledger, processes: ExitStack) -> None:
    chance = random.Random(3)
    workers = [processes.enter_context(Worker(ledger, batch_max=20, lease_s=1)).ready() for _ in range(2)]
    last = 0
    for round_ in range(KILLS):
        first, last = last, ledger.append(history(1_500, seed=round_))
        target = chance.randrange(first + 1, last)
        await eventually(lambda target=target: is_past(ledger, target), f"position {target}")
        found, _ = stored(ledger)
        assert found is not None
        held = next((one for one in workers if f":{one.process.pid}:" in (found.owner or "")), workers[0])
        # In small batches a kill finds it within a transaction more often than not.
        held.kill()
        workers.remove(held)
        workers.append(processes.enter_context(Worker(ledger, batch_max=20, lease_s=1)))
    await ledger.caught_up(last, timeout_s=60)
    events = ledger.recorded(last)
    assert stored(ledger)[1] == folded(events)
    print(f"{KILLS} kills over {len(events)} events: 0 lost, 0 twice")  # noqa: T201


async def test_a_dead_worker_whose_lease_was_given_by_a_clock_ahead_is_replaced_in_time(ledger: Ledger) -> None:
    last = ledger.append(history(100))
    with ledger.where.sync_engine().begin() as connection:
        ensure(connection, "balances", 1)
        assert take(connection, "balances", 1, "a dead worker", 0.5) is not None
    ledger.execute("update eventjet_projection set lease_until = lease_until + 3600")
    found = await ledger.status()
    assert (found.owner, found.lost_owner, found.lost_s) == (None, "a dead worker", None)
    async with ledger.working("balances", options=WorkerOptions(poll_s=0.1)):
        await ledger.caught_up(last)
        found = await ledger.status()
        assert found.owner is not None
        assert found.lost_owner is None
    assert stored(ledger)[1] == folded(ledger.recorded(last))


async def test_a_worker_asked_to_end_lets_go_at_once(ledger: Ledger, processes: ExitStack) -> None:
    last = ledger.append(history(100))
    first = processes.enter_context(Worker(ledger)).ready()
    await ledger.caught_up(last)
    first.signal(signal.SIGTERM)
    first.ended()
    assert first.process.returncode == 0
    assert await owner(ledger) is None


@pytest.mark.slow
async def test_servers_that_are_killed_are_waited_out(tmp_path: Path, processes: ExitStack) -> None:
    with NatsServer(sync_interval="1m") as nats, PostgresServer() as postgres:
        ledger = Ledger(Settings(servers=(nats.url,), database=postgres.url))
        made(ledger.settings.database, BALANCES, MOVEMENTS)
        ledger.create()
        ledger.append(history(8_000))
        worker = processes.enter_context(Worker(ledger, batch_max=20)).ready()
        for round_, server in enumerate((postgres, nats, postgres, nats), 1):
            await eventually(lambda round_=round_: is_past(ledger, round_ * 300), "progress")
            server.kill()
            server.start()
        last = ledger.append(history(100, seed=8))
        await ledger.caught_up(last, timeout_s=40)
        assert stored(ledger)[1] == folded(ledger.recorded(last))
        assert worker.process.poll() is None
