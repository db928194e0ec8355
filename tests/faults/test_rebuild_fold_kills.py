"""Rebuilds and their fold processes killed and stopped at every step: the live table is always whole."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from sqlalchemy import text

from eventjet.cli.output import UNREACHABLE
from eventjet.dev.nats import NatsServer
from eventjet.sql.database import Database
from tests.among import SEVERAL
from tests.faults.among import PATIENCE
from tests.faults.processes import Fault, await_it
from tests.faults.rebuilding import STARTS_S, WHERE_IT_FOLDS, RebuildProcess, Stage, stage
from tests.integration.rebuild_log import remains

TURNS = int(os.environ.get("EVENTJET_TEST_REBUILD_KILLS", "0")) // 10
"""How often everything is done; by default a fifth of it, another one on the other database."""
PATIENCE_S = 12.0
RUN = "run"
"""The rebuild itself, struck from outside while its fold processes fold."""
READ = "rebuild.batch_read"
PLACES = (RUN, READ, *WHERE_IT_FOLDS)
PASSED = "fold.answered"
"""Who is struck there has done what it was asked for, so the rebuild may go on without it."""


def plan(*, sqlite: bool) -> list[Fault]:
    """Every place in both ways."""
    every = [Fault(name, action) for name, action in product(PLACES, ("kill", "stop"))]
    return every * TURNS if TURNS else every[sqlite + 1 :: 5]


def generations(scene: Stage) -> list[int]:
    with Database(scene.ledger.settings.database).sync_engine("fault tests").connect() as connection:
        return list(connection.scalars(text("select generation from eventjet_projection order by name")))


class Siege:
    """One rebuild after another, each struck where its fault says; it swaps nothing in unless it ends well."""

    def __init__(self, scene: Stage, among: int) -> None:
        self.done: Counter[Fault] = Counter()
        self.who: Counter[str] = Counter()
        """Who was struck."""
        self._scene = scene
        self._chance = random.Random(among)

    async def suffer(self, fault: Fault) -> None:
        """Have it happen, and see what it leaves."""
        before = generations(self._scene)
        # Of what a process reaches more than once, one of the first; on the shortest log there are three.
        often = self._chance.randrange(1, 4) if fault.name in (READ, "fold.taken") else 1
        at = {"action": "tell", "at": "fold.begun"} if fault.name == RUN else {"action": fault.action}
        if fault.name != RUN:
            at["at"] = f"{fault.name}:{often}"
        with RebuildProcess(self._scene, **at) as run:
            ended_well = self._struck(run, fault)
            await_it(lambda: run.others() == {}, lambda: f"{run.others()}\n{run.logged()}")
        if fault.name != RUN:  # else it may have been killed within the swap of one of them
            assert (generations(self._scene) != before) == ended_well, run.logged()
        if ended_well or (fault.name != RUN and run.process.returncode != -signal.SIGKILL):
            assert remains(Database(self._scene.ledger.settings.database)) == []
        assert not self._scene.wrong, self._scene.wrong[:5]
        await self._scene.settle()
        self.done[fault] += 1

    def _struck(self, run: RebuildProcess, fault: Fault) -> bool:
        """Whether the rebuild was done all the same."""
        if fault.name == RUN:
            await_it(run.fired.exists, run.logged, STARTS_S)
            time.sleep(self._chance.random() * 0.3)
            self.who[RUN] += 1
            if fault.action == "kill":
                run.process.kill()
                return run.ended() == 0
            run.process.send_signal(signal.SIGSTOP)
        if fault.name == PASSED and run.ended() == 0:
            assert run.fired.exists(), run.logged()
            self.who["fold process"] += 1
            return True
        if fault.action == "kill":
            self.who[run.killed(fault.name, self._scene.among)] += 1
            return False
        if fault.name != RUN:
            self.who["fold process" if run.await_stop() != [run.process.pid] else RUN] += 1
        if fault.name in (RUN, READ):
            # Its fold processes wait for it, however long it stands still.
            time.sleep(self._chance.random() * 1.5 * PATIENCE_S)
            run.process.send_signal(signal.SIGCONT)
            # Stopped while it connects, it finds the time for that over when it wakes, and says so.
            assert run.ended() in ((0, UNREACHABLE) if fault.name == RUN else (0,)), run.logged()
            return run.ended() == 0
        run.failed_over_a_fold_process()
        return False


@pytest.mark.slow
@pytest.mark.timeout(300 + 400 * max(1, TURNS))
@pytest.mark.parametrize("among", SEVERAL)
async def test_a_rebuild_with_fold_processes_that_are_killed_or_stopped_changes_nothing_or_all(
    eventjet_nats: NatsServer, database: str, tmp_path: Path, among: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATIENCE, str(PATIENCE_S))
    with stage(eventjet_nats.url, database, tmp_path, among=among) as scene:
        siege = Siege(scene, among)
        faults = plan(sqlite=scene.is_sqlite)
        for fault in faults:
            await siege.suffer(fault)
        scene.said.append(f"{siege.done.total()} kills and stops under rebuilds, of whom: {dict(siege.who)}")
        scene.said += [
            f"  {name:24} killed {siege.done[Fault(name, 'kill')]:3}, stopped {siege.done[Fault(name, 'stop')]:3}"
            for name in PLACES
        ]
        assert siege.done.total() == len(faults)
        assert siege.who["fold process"] >= len(faults) // 2
        assert siege.who[RUN] > 0
