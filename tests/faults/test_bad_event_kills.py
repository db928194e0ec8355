"""Workers with fold processes that are killed and stopped while they park and release: as one process, undisturbed."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import pytest
from sqlalchemy import text

from eventjet import failpoints
from eventjet.sql import quarantine as verdict
from eventjet.sql.database import Database
from tests.among import SEVERAL
from tests.faults.among import divided
from tests.faults.audit import Audit, install
from tests.faults.bad_events import MENDED, Mixture, position_of, state_of, wary_log
from tests.faults.processes import FIRES_S, Fault, WorkerProcess, await_it
from tests.fold_processes import all_ended
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import made
from tests.tables import reading

KILLS = min(11, int(os.environ.get("EVENTJET_TEST_FOLD_KILLS", "2")))
"""While events are parked, and again while they are released; 11 are everything once."""
EVENTS = 2_000 * (1 + KILLS)
BAD = EVENTS // 40
ENTITIES = EVENTS // 5
LEASE_S = 2.0
BATCH_MAX = 20
AT_ONCE = ("worker.batch_folded", "worker.rows_written", "worker.after_commit")
FOLDS = [name for name in failpoints.NAMES if name.startswith("fold.")]
ENDS_S = 4 * FIRES_S


def plan(chance: random.Random) -> list[Fault]:
    """Fold processes in both ways, and the worker itself."""
    every = [*product(FOLDS, ("kill", "stop")), *((name, "kill") for name in AT_ONCE)]
    chance.shuffle(every)
    # Alone a worker commits few batches while its fold processes start.
    often = {name: 1 if name == "fold.begun" else chance.randrange(1, 4) for name in FOLDS}
    return [Fault(name, action, often.get(name) or chance.randrange(8, 16)) for name, action in every[:KILLS]]


@dataclass
class Road:
    """One database's way through the log."""

    ledger: Ledger
    folder: Path
    processes: ExitStack
    among: int
    workers: list[WorkerProcess] = field(default_factory=list[WorkerProcess])
    left: int = 0
    """Events that came after the last kill."""

    @property
    def database(self) -> str:
        return self.ledger.settings.database

    def go(self, last: int, faults: list[Fault]) -> None:
        """To that position, with nothing left to be tried, past all the faults."""
        for fault in faults:
            self._suffer(fault)
        self.left = last - position_of(self.database)
        worker = self._start(None)
        await_it(lambda: position_of(self.database) == last and self._waiting() == 0, worker.logged, ENDS_S)
        worker.ask_to_end()
        worker.ended_well()
        assert all_ended(self.ledger.name)

    def release(self) -> None:
        """Have all that is parked tried again."""
        engine = Database(self.database).sync_engine()
        with engine.begin() as connection:
            assert len(verdict.retry(connection, "wary", 1, None)) >= BAD
        engine.dispose()

    def _suffer(self, fault: Fault) -> None:
        worker = self._start(fault)
        if fault.name in FOLDS:
            await_it(lambda: "A fold process" in worker.logged(), worker.logged, ENDS_S)
            assert worker.fired(), worker.logged()
            worker.ask_to_end()
            worker.ended_well()
        else:
            await_it(worker.reached, worker.logged, ENDS_S)
        assert all_ended(self.ledger.name)

    def _start(self, fault: Fault | None) -> WorkerProcess:
        batch_max = BATCH_MAX if self.among > 1 else 1_000
        made = WorkerProcess(
            self.ledger, self.folder, fault, batch_max=batch_max, lease_s=LEASE_S, names=("wary",), among=self.among
        )
        self.workers.append(self.processes.enter_context(made))
        return made

    def _waiting(self) -> int:
        with reading(self.database) as connection:
            query = "select count(*) from eventjet_quarantine where resolution = 'retry'"
            return int(connection.execute(text(query)).scalar_one())


@pytest.mark.timeout(240 + 240 * KILLS)
@pytest.mark.parametrize("among", SEVERAL)
def test_what_is_parked_and_released_under_kills_is_what_one_process_parks_and_releases(
    new_database: Callable[[], str], tmp_path: Path, processes: ExitStack, among: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(among)
    with wary_log(EVENTS, BAD, ENTITIES) as (ledger, mixture):

        def road(among: int) -> Road:
            database = new_database()
            made(database, *ledger.projections.values())
            install(database)
            own = replace(ledger, settings=replace(ledger.settings, database=database))
            return Road(own, tmp_path, processes, among)

        alone, several = road(1), road(among)
        alone.go(EVENTS, [])
        several.go(EVENTS, plan(chance))
        assert several.left > 0
        rows, kept = state_of(several.database)
        assert (rows, kept) == state_of(alone.database)
        assert rows == mixture.rows
        parked = {one.position for one in kept if one.resolution == "parked"}
        assert (parked, {one.position for one in kept} - parked) == (set(mixture.parked), mixture.behind)

        # Those that were poisoned are taken from here on, and as many events follow.
        monkeypatch.setenv(MENDED, "1")
        last = EVENTS + EVENTS
        assert Mixture(EVENTS, BAD, ENTITIES, seed=12).store(ledger) == last
        for one in (alone, several):
            one.release()
        alone.go(last, [])
        several.go(last, plan(chance))
        assert several.left > 0
        rows, kept = state_of(several.database)
        assert (rows, kept) == state_of(alone.database)
        released = {one.position for one in kept if one.resolution == "retried"}
        assert released == {position for position, kind in mixture.parked.items() if kind == "poison"}
    times = divided(several.workers, Audit.read(several.database))
    sys.stdout.write(
        f"\n{several.database.partition(':')[0]}: {2 * KILLS} kills and stops with {among} fold processes, {times} "
        f"divided terms: as one process {len(rows):,} rows, {len(kept):,} in quarantine, {len(released)} released\n"
    )
    assert times >= KILLS
