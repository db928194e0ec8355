"""One event of a hundred is bad: each is quarantined once, its successors are blocked, and all others are applied."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.audit import install
from tests.faults.bad_events import Mixture, position_of, state_of, wary_log
from tests.faults.processes import Fault, WorkerProcess, await_it
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import database_with

BAD = int(os.environ.get("EVENTJET_TEST_BAD", "200"))
EVENTS = 100 * BAD
ENTITIES = EVENTS // 5
MEMORY_MAX_MB = 300
CATCH_UP_S = 600 + EVENTS / 200


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ledger, Mixture]]:
    """The log, on a server of its own that does not wait for the disk."""
    with wary_log(EVENTS, BAD, ENTITIES) as log:
        yield log


@pytest.mark.slow
@pytest.mark.timeout(600 + 2 * CATCH_UP_S)
def test_bad_events_are_quarantined_once_and_all_others_applied(
    stored: tuple[Ledger, Mixture], database: str, tmp_path: Path, processes: ExitStack
) -> None:
    ledger, mixture = stored
    database_with(database, *ledger.projections.values())
    install(database)
    ledger = replace(ledger, settings=replace(ledger.settings, database=database))

    def start(fault: Fault | None = None) -> WorkerProcess:
        started = WorkerProcess(ledger, tmp_path, fault, batch_max=1_000, lease_s=2.0, names=("wary",))
        return processes.enter_context(started).ready()

    began = time.monotonic()
    doomed = start(Fault("worker.after_commit", "stop", 4))
    await_it(doomed.reached, doomed.logged, CATCH_UP_S)
    assert 0 < position_of(database) < EVENTS
    peaks = [doomed.peak_mb()]
    doomed.process.kill()
    worker = start()
    await_it(lambda: position_of(database) >= EVENTS, worker.logged, CATCH_UP_S)
    seconds = time.monotonic() - began
    peaks.append(worker.peak_mb())
    assert worker.process.poll() is None, worker.logged()
    worker.ask_to_end()
    worker.ended_well()
    rows, entries = state_of(database)
    resolutions = {row.position: row.resolution for row in entries}
    kinds = Counter(mixture.quarantined.values())
    sys.stdout.write(
        f"\n{database.partition(':')[0]}: {EVENTS:,} events, {BAD:,} of them bad ({kinds}): "
        f"{sum(way == 'quarantined' for way in resolutions.values()):,} quarantined, "
        f"{len(entries) - len(resolutions)} twice, "
        f"{len(mixture.behind):,} behind them, {len(mixture.rows):,} rows right; in {seconds:.0f} s with one worker "
        f"killed on the way; memory at most {max(peaks):.0f} MB\n"
    )
    assert len(entries) == len(resolutions)
    assert resolutions == dict.fromkeys(mixture.quarantined, "quarantined") | dict.fromkeys(mixture.behind, "blocked")
    assert all(row.reason for row in entries if row.resolution == "quarantined")
    assert rows == mixture.rows
    assert max(peaks) < MEMORY_MAX_MB
