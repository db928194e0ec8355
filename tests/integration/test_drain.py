"""On SIGTERM a worker commits its batch and releases the lease, and a standby takes over at once."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.ledger_log import Ledger, eventually, history
from tests.integration.projecting import folded
from tests.integration.test_worker_takeover import Worker, stored

LEASE_S = 120.0
"""Longer than any wait in this file, so a takeover proves that the lease was released."""


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it is seen in /proc that a process is stopped")
async def test_a_terminated_worker_commits_its_batch_and_a_standby_takes_over(
    ledger: Ledger, processes: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = ledger.append(history(2_000))
    monkeypatch.setenv("EVENTJET_FAILPOINT", "worker.batch_folded:stop:5")
    first = processes.enter_context(Worker(ledger, batch_max=50, lease_s=LEASE_S))
    monkeypatch.delenv("EVENTJET_FAILPOINT")

    async def has_stopped() -> bool:
        return is_stopped(first.process.pid)

    await eventually(has_stopped, "the fifth batch, folded and not yet written")
    before, _ = stored(ledger)
    assert before is not None
    first.signal(signal.SIGTERM)
    first.signal(signal.SIGCONT)
    first.ended()
    after, rows = stored(ledger)
    assert first.process.returncode == 0
    assert after is not None
    assert (after.owner, after.epoch) == (None, before.epoch)
    assert before.position < after.position < last
    assert rows == folded(ledger.recorded(after.position))

    processes.enter_context(Worker(ledger, lease_s=LEASE_S)).ready()
    await ledger.caught_up(last)
    assert stored(ledger)[1] == folded(ledger.recorded(last))


async def test_a_standby_takes_over_from_a_worker_that_drains_under_load(ledger: Ledger, processes: ExitStack) -> None:
    ledger.append(history(5_000))
    first = processes.enter_context(Worker(ledger, batch_max=20, lease_s=LEASE_S)).ready()
    processes.enter_context(Worker(ledger, lease_s=LEASE_S)).ready()

    async def is_under_way() -> bool:
        current, _ = stored(ledger)
        return current is not None and current.position > 500

    await eventually(is_under_way, "progress")
    first.signal(signal.SIGTERM)
    last = ledger.append(history(200, seed=8))
    first.ended()
    await ledger.caught_up(last)
    assert stored(ledger)[1] == folded(ledger.recorded(last))
