"""Workers that are stopped, replaced and woken: their late writes are refused."""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack
from itertools import count
from statistics import median

import pytest

from tests.faults.audit import Audit
from tests.faults.processes import Fault, WorkerProcess, await_it
from tests.faults.scene import Scene

TAKEOVERS = int(os.environ.get("EVENTJET_TEST_TAKEOVERS", "6"))
RATE = 200.0
LEASE_S = 0.6
FACES_ITS_SUCCESSOR = 3
"""Every third zombie wakes while its successor has not written yet: only the epoch is against it then."""


class Duel:
    """Two workers on a projection, of which the owner is stopped again and again."""

    def __init__(self, stage: Scene, processes: ExitStack) -> None:
        self.takeovers_s: list[float] = []
        self.locked = 0
        self.refused = 0
        self.face_to_face = 0
        self._stage = stage
        self._processes = processes
        self.all: list[WorkerProcess] = []
        self._chance = random.Random(5)
        self.workers: list[WorkerProcess] = []

    def start(self, fault: Fault | None = None) -> WorkerProcess:
        worker = WorkerProcess(self._stage.ledger, self._stage.folder, fault, lease_s=LEASE_S, names=("totals",))
        self.workers.append(self._processes.enter_context(worker))
        self.all.append(worker)
        return worker

    def owner(self) -> WorkerProcess:
        owners: list[WorkerProcess] = []

        def is_known() -> bool:
            place = self._stage.owner_of("totals")
            owners[:] = [worker for worker in self.workers if place is not None and worker.pid == place.pid]
            return bool(owners)

        await_it(is_known, lambda: f"an owner: {self._stage.places()}")
        return owners[0]

    def stop_at_random(self) -> None:
        """Stop the owner wherever it is, and wake it once the other one has written."""
        owner = self.owner()
        time.sleep(self._chance.random() * 0.4)
        owner.stop()
        if self._take_over(owner):
            position = self._stage.places()["totals"].position
            await_it(lambda: self._stage.places()["totals"].position > position, lambda: "the successor to write")
        self._revive(owner)

    def face_successor(self) -> None:
        """Stop the owner before a commit and its successor before its first one; wake the owner first."""
        for worker in self.workers:
            worker.ask_to_end()
        for worker in self.workers:
            worker.ended_well()
        self.workers.clear()
        place = "worker.batch_folded" if self._stage.is_sqlite else "worker.before_commit"
        often = self._chance.randrange(2, 6)
        owner = self.start(Fault(place, "stop", often)).ready()
        await_it(owner.reached, owner.logged)
        successor = self.start(Fault("worker.lease_taken", "stop"))
        self._take_over(owner)
        await_it(successor.reached, successor.logged)
        self._revive(owner)
        successor.revive()
        self.face_to_face += 1

    def _take_over(self, owner: WorkerProcess) -> bool:
        """Wait until another epoch has begun; return False when the stopped worker locks the database."""
        place = self._stage.places()["totals"]
        if place.pid != owner.pid:  # it was stopped as it let go
            return True
        began = time.monotonic()
        locked = False

        def is_over() -> bool:
            nonlocal locked
            locked = time.monotonic() - began > 3 * LEASE_S and self._stage.is_locked()
            return locked or self._stage.places()["totals"].epoch > place.epoch

        took_s = await_it(is_over, lambda: f"a takeover: {self._stage.places()}")
        if locked:
            self.locked += 1
        else:
            self.takeovers_s.append(took_s)
        return not locked

    def _revive(self, zombie: WorkerProcess) -> None:
        before = zombie.refusals
        zombie.revive()
        for tries in count():
            if zombie.refusals > before or tries == 20:
                break
            time.sleep(0.02)
        self.refused += zombie.refusals > before


@pytest.mark.slow
@pytest.mark.timeout(600 + 60 * TAKEOVERS)
def test_revived_workers_write_nothing_and_starve_nobody(stage: Scene, processes: ExitStack) -> None:
    stage.names = ("totals",)
    stage.feed.rate = RATE
    stage.feed.allow(1_000_000)
    duel = Duel(stage, processes)
    duel.start().ready()
    duel.start().ready()
    for round_ in count(1):
        if len(duel.takeovers_s) >= TAKEOVERS:
            break
        assert round_ < 5 * TAKEOVERS
        if round_ % FACES_ITS_SUCCESSOR:
            duel.stop_at_random()
        else:
            duel.face_successor()
        stage.check()
    stage.feed.end()
    verdict = stage.finish()
    audit = Audit.read(stage.ledger.settings.database)
    stage.say(f"{len(duel.takeovers_s)} takeovers from stopped workers that were woken afterwards: {audit}")
    stage.say(
        f"{duel.refused} of the woken were refused a write, {duel.face_to_face} of them woke before their successor's "
        f"first write; {duel.locked} more held the database, so that nobody took over"
    )
    stage.say(
        f"with leases of {LEASE_S} s a takeover took {median(duel.takeovers_s):.2f} s in the middle, "
        f"{max(duel.takeovers_s):.2f} s at most; {verdict}; rows right at each of {stage.checks} looks"
    )
    assert verdict.right
    assert not audit.zombies
    assert not audit.breaks
    assert duel.refused >= TAKEOVERS // 3
    assert duel.face_to_face >= TAKEOVERS // FACES_ITS_SUCCESSOR // 2
