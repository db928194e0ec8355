"""A worker replaces another one in time. Tests in `tests/faults` show that nothing is lost or applied twice."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack

import pytest

from eventjet.sql.checkpoint import Checkpoint, ensure, read, take
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.status import status
from tests.forked import ForkedWorker
from tests.integration.ledger_log import Ledger, history
from tests.integration.projecting import BALANCES, folded, rows_of
from tests.tables import reading

TAKEOVER_S = float(os.environ.get("EVENTJET_TEST_TAKEOVER_S", "15"))
"""A lease and a half, and the delay of a busy machine; abandoned pulls would last half a minute."""


class Worker(ForkedWorker):
    """A worker process."""

    def __init__(self, ledger: Ledger, batch_max: int = 50, lease_s: float = 3.5) -> None:
        arguments = (ledger.settings.servers[0], ledger.settings.database, ledger.name, str(batch_max), str(lease_s))
        super().__init__("tests.integration.worker_process", arguments)

    def kill(self) -> None:
        self.process.kill()
        self.ended()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def stored(ledger: Ledger) -> tuple[Checkpoint | None, list[object]]:
    with reading(ledger.settings.database) as connection:
        return read(connection, "balances", 1), rows_of(connection, BALANCES)


async def owner(ledger: Ledger) -> str | None:
    return next(
        work_status.owner for work_status in await status(ledger, ledger.settings) if work_status.name == "balances"
    )


@pytest.mark.slow
async def test_an_idle_worker_that_is_killed_is_replaced_in_time(ledger: Ledger, processes: ExitStack) -> None:
    last = ledger.append(history(200))
    first = processes.enter_context(Worker(ledger)).ready()
    await ledger.caught_up(last)
    processes.enter_context(Worker(ledger)).ready()
    # The pulls of the first worker wait at the server when it dies.
    first.kill()
    killed = time.monotonic()
    last = ledger.append(history(50, seed=8))
    await ledger.caught_up(last)
    assert time.monotonic() - killed < TAKEOVER_S
    assert stored(ledger)[1] == folded(ledger.recorded(last))


async def test_a_dead_worker_with_a_lease_in_the_future_is_replaced_in_time(ledger: Ledger) -> None:
    last = ledger.append(history(100))
    with ledger.where.sync_engine().begin() as connection:
        ensure(connection, "balances", 1)
        assert take(connection, "balances", 1, "a dead worker", 0.5) is not None
    ledger.execute("update eventjet_projection set lease_until = lease_until + 3600")
    work_status = await ledger.status()
    assert (work_status.owner, work_status.lost_owner, work_status.lost_s) == (None, "a dead worker", None)
    async with ledger.working("balances", options=WorkerOptions(poll_s=0.1)):
        await ledger.caught_up(last)
        work_status = await ledger.status()
        assert work_status.owner is not None
        assert work_status.lost_owner is None
    assert stored(ledger)[1] == folded(ledger.recorded(last))


async def test_a_terminated_worker_releases_its_lease_at_once(ledger: Ledger, processes: ExitStack) -> None:
    last = ledger.append(history(100))
    first = processes.enter_context(Worker(ledger)).ready()
    await ledger.caught_up(last)
    first.signal(signal.SIGTERM)
    first.ended()
    assert first.process.returncode == 0
    assert await owner(ledger) is None
