"""Workers that are far behind, and their fold processes killed and stopped at every step: nothing lost or repeated."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from itertools import count

import pytest

from eventjet import failpoints
from tests.among import SEVERAL
from tests.faults.among import DIVIDES, divided
from tests.faults.audit import Audit
from tests.faults.processes import FIRES_S, Fault, WorkerProcess, await_it
from tests.faults.scene import Scene
from tests.fold_processes import all_ended, fold_processes, fork_servers

KILLS = int(os.environ.get("EVENTJET_TEST_FOLD_KILLS", "5"))
"""How many, on each database and with each number of processes; 12 reach every place in both ways."""
WORKER = "worker"
"""The worker itself, struck from outside while others fold."""
SERVER = "fork server"
"""What forks the others, struck from outside, too: the worker goes on alone."""
PLACES = (*(name for name in failpoints.NAMES if name.startswith("fold.")), WORKER, SERVER)
ALONE = "goes on in one process: A fold process cannot be made"
BACKLOG = 600
LEASE_S = 2.0


def plan(kills: int, first: str) -> list[Fault]:
    """Every place in both ways, again and again; a short plan has half of them in the `first` way."""
    chance = random.Random(kills)
    actions = (first, "stop" if first == "kill" else "kill")
    found: list[Fault] = []
    for turn in count():
        for index, name in enumerate(PLACES):
            if len(found) == kills:
                return found
            often = 1 if name == "fold.begun" else chance.randrange(1, 9)
            found.append(Fault(name, actions[(index + turn) % 2], often))
    raise AssertionError


class Siege:
    """One worker after another, each far behind when it, or one of its fold processes, is struck."""

    def __init__(self, stage: Scene, processes: ExitStack, among: int) -> None:
        self.done: Counter[Fault] = Counter()
        self.lost = 0
        """Times that a worker said that it had lost a fold process."""
        self._stage = stage
        self._processes = processes
        self._among = among
        self._chance = random.Random(among)
        self.workers: list[WorkerProcess] = []

    def suffer(self, fault: Fault) -> None:
        """Have it happen; the worker goes on by itself, or another one takes over."""
        worker = self._start(fault)
        if fault.name == WORKER:
            self._await(worker, lambda: DIVIDES in worker.logged())
            self._strike(worker, fault.action)
            self._replaced(worker)
        elif fault.name == SERVER:
            self._await(worker, lambda: DIVIDES in worker.logged())
            (server,) = fork_servers(self._stage.ledger.name)
            os.kill(server, signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
            self._await(worker, lambda: ALONE in worker.logged())
            self._moves_on()
            worker.ask_to_end()
            worker.ended_well()
        else:
            self._await(worker, lambda: bool(worker.fired()))
            assert worker.fired() == f"{fault.name}:{fault.action}\n"
            self._await(worker, lambda: "A fold process" in worker.logged())
            self.lost += 1
            self._moves_on()
            worker.ask_to_end()
            worker.ended_well()
        assert all_ended(self._stage.ledger.name)
        self._stage.check()
        self.done[Fault(fault.name, fault.action)] += 1

    def last(self) -> None:
        """One that works to the end."""
        self._start(None)

    def _start(self, fault: Fault | None) -> WorkerProcess:
        armed = fault if fault is not None and fault.name not in (WORKER, SERVER) else None
        made = WorkerProcess(self._stage.ledger, self._stage.folder, armed, lease_s=LEASE_S, among=self._among)
        self.workers.append(made)
        return self._processes.enter_context(made)

    def _await(self, worker: WorkerProcess, found: object) -> None:
        """Keep it far behind until that is so."""
        assert callable(found)
        began = time.monotonic()
        feed = self._stage.feed
        while not found():
            assert worker.process.poll() is None, worker.logged()
            assert time.monotonic() - began < 2 * FIRES_S, worker.logged()
            places = self._stage.places().values()
            behind = feed.stored + feed.left - min((one.position for one in places), default=0)
            if behind < BACKLOG and not feed.left:
                feed.allow(BACKLOG)
            time.sleep(0.02)

    def _strike(self, worker: WorkerProcess, action: str) -> None:
        time.sleep(self._chance.random() * 0.3)
        if action == "kill":
            worker.process.send_signal(signal.SIGKILL)
            worker.process.wait(FIRES_S)
            return
        worker.stop()

    def _replaced(self, worker: WorkerProcess) -> None:
        """Another one takes over, unless this one was stopped where it holds the database, as one can only on SQLite.

        Should it be stopped, it wakes then, is refused, and ends in good order.
        """
        before = self._stage.owned_by(worker.pid)
        other = self._start(None)
        began = time.monotonic()
        self._await(
            other,
            lambda: self._is_past(before) or (time.monotonic() - began > 3 * LEASE_S and self._stage.is_held()),
        )
        if worker.process.poll() is None:
            worker.revive()
            worker.ask_to_end()
            worker.ended_well()
        other.ask_to_end()
        other.ended_well()

    def _is_past(self, epochs: dict[str, int]) -> bool:
        now = self._stage.places()
        return all(now[name].epoch > epoch for name, epoch in epochs.items())

    def _moves_on(self) -> None:
        before = {name: one.position for name, one in self._stage.places().items()}
        self._stage.feed.allow(BACKLOG)
        await_it(
            lambda: all(one.position > before[name] for name, one in self._stage.places().items()),
            lambda: f"batches after {before}",
            2 * FIRES_S,
        )


@pytest.mark.slow
@pytest.mark.timeout(120 + 120 * KILLS)
@pytest.mark.parametrize("among", SEVERAL)
def test_fold_processes_killed_and_stopped_at_every_step_lose_and_repeat_nothing(
    stage: Scene, processes: ExitStack, among: int
) -> None:
    siege = Siege(stage, processes, among)
    for fault in plan(KILLS, "stop" if stage.is_sqlite else "kill"):
        siege.suffer(fault)
    siege.last()
    verdict = stage.finish()
    audit = Audit.read(stage.ledger.settings.database)
    stage.say(f"{siege.done.total()} kills and stops with {among} fold processes: {verdict}; {audit}")
    stage.say(f"{siege.lost} terms ended over a fold process that was lost; rows right at {stage.checks} looks")
    stage.said.extend(
        f"  {name:16} killed {siege.done[Fault(name, 'kill')]:3}, stopped {siege.done[Fault(name, 'stop')]:3}"
        for name in PLACES
    )
    assert verdict.right
    assert not audit.zombies
    assert not audit.breaks
    assert divided(siege.workers, audit) >= KILLS // 2
    assert siege.done.total() == KILLS
    assert {fault.name for fault in siege.done} == set(PLACES[:KILLS])
    # One that is being started has not forked the others yet.
    await_it(
        lambda: len(fold_processes(stage.ledger.name)) in (0, among),
        lambda: f"fold processes: {fold_processes(stage.ledger.name)}",
        2 * FIRES_S,
    )
