"""`Chain`: workers are killed or stopped one after the other where their fault says, while the next one stands by.

Every worker is armed before it starts, so the one that takes over meets its own fault in the midst of taking over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice

from tests.faults.processes import FIRES_S, Fault, WorkerProcess, await_it
from tests.faults.scene import Scene

SETTLES = ("worker.before_settle", "worker.after_settle")
QUIET = ("idle", "worker.lease_renewed")
IN_TRANSACTION = ("worker.before_commit", "worker.rows_written")
"""Where a worker stopped on SQLite keeps the database locked until it resumes or dies."""
LEASE_S = 0.6
FIRST_RATE = 100.0
ARRANGES_S = 0.5
"""How often a situation is arranged; a worker that is slow alone has to catch up in between."""
WRITES_S = 0.3
"""How long a revived worker may try to write before it is asked to end."""


class Chain:
    """A run of a plan of faults; `done` counts them."""

    def __init__(self, stage: Scene, processes: ExitStack, events: int) -> None:
        self.done: Counter[Fault] = Counter()
        self.under_load = 0
        self.locked = 0
        """How often a stopped worker kept SQLite locked, so that nobody could take over."""
        self.refused = 0
        """Revived workers that learned that they were deposed."""
        self.takeovers_s: list[float] = []
        """How long a standby took to take over the lease of a stopped worker."""
        self._stage = stage
        self._processes = processes
        self._events = events
        self._rivals: dict[WorkerProcess, float] = {}
        """Workers that were revived or stand in, and since when."""
        self._leaving: list[WorkerProcess] = []
        self._evictions = 0

    def run(self, plan: Sequence[Fault]) -> None:
        """Carry out every fault once, roughly in turn; at the end one worker is left and works."""
        began = time.monotonic()
        feed = self._stage.feed
        feed.rate = FIRST_RATE
        feed.allow(self._events)
        upcoming = iter(plan)
        armed = [self._start(next(upcoming)).ready()]
        for remaining in range(len(plan) - 1, -1, -1):
            armed += [self._start(fault) for fault in islice(upcoming, 1)]
            feed.go_on()
            struck = self._drive(armed)
            armed.remove(struck)
            assert struck.fault is not None
            self.done[Fault(struck.fault.name, struck.fault.action)] += 1
            self.under_load += feed.busy
            self._succeed(struck, armed)
            self._stage.check()
            # So that events arrive to the end.
            step_s = (time.monotonic() - began) / (len(plan) - remaining)
            feed.rate = max(1.0, feed.left / (step_s * max(1, remaining)))
        await_it(self._is_alone, lambda: "the others to end")
        self._start(None).ready()

    def _start(self, fault: Fault | None) -> WorkerProcess:
        return self._processes.enter_context(
            WorkerProcess(self._stage.ledger, self._stage.folder, fault, lease_s=LEASE_S)
        )

    def _drive(self, armed: Sequence[WorkerProcess]) -> WorkerProcess:
        """Bring a worker to where its fault is: the one that owns a projection, so usually the first."""
        began = arranged = time.monotonic()
        while True:
            for worker in armed:
                if worker.reached():
                    return worker
            self._dismiss_rivals()
            now = time.monotonic()
            logs = "\n".join(f"{worker.fault}: {worker.logged()}" for worker in armed)
            assert now - began < FIRES_S, f"no fault was reached: {self._stage.places()}\n{logs}"
            owner = next((worker for worker in armed if self._stage.owned_by(worker.pid)), None)
            if owner is not None and owner.fault is not None:
                if self._load(owner, owner.fault):
                    return owner
                if now - arranged > ARRANGES_S:
                    arranged = now
                    self._arrange(owner, owner.fault)
            time.sleep(0.02)

    def _load(self, owner: WorkerProcess, fault: Fault) -> bool:
        """Let events arrive, or not, as the fault needs it; True when the worker has been struck from outside."""
        feed = self._stage.feed
        if fault.name not in QUIET:
            feed.go_on()
            if not feed.left:
                feed.allow(10)
            return False
        feed.pause()
        if fault.name != "idle" or not self._is_idle():
            return False
        owner.strike()
        return True

    def _arrange(self, current: WorkerProcess, fault: Fault) -> None:
        """Arrange the situation in which a term reaches its failpoint."""
        if fault.name == "worker.before_release":
            self._evictions += 1
            if self._evictions % 2:
                current.ask_to_end()
            else:
                self._stage.evict()
        elif fault.name in SETTLES:
            self._stage.begin_to_build()
            self._stage.evict()

    def _is_idle(self) -> bool:
        """Return whether all is applied, and has been for so long that pulls wait at the server."""
        return self._caught_up() and (time.sleep(0.1) is None) and self._caught_up()

    def _caught_up(self) -> bool:
        return all(place.position == self._stage.feed.stored for place in self._stage.places().values())

    def _succeed(self, struck: WorkerProcess, armed: Sequence[WorkerProcess]) -> None:
        """Wait for a stopped worker to be replaced, and wake it."""
        assert struck.fault is not None
        if any(worker.fault is not None and worker.fault.name in SETTLES for worker in armed):
            self._stage.begin_to_build()
        if struck.fault.action == "stop":
            self._await_takeover(struck, armed)
            struck.revive()
            self._rivals[struck] = time.monotonic()

    def _await_takeover(self, struck: WorkerProcess, armed: Sequence[WorkerProcess]) -> None:
        """Wait for another epoch, or see that stopped workers lock the database, so that there can be none."""
        before = self._stage.owned_by(struck.pid)
        stands_by = any(worker.is_ready() and not worker.reached() for worker in armed)
        spares: list[WorkerProcess] = []
        began = time.monotonic()
        locked = False

        def is_over() -> bool:
            nonlocal locked
            now = self._stage.places()
            if not before or any(now[name].epoch > epoch for name, epoch in before.items()):
                return True
            if not spares and all(worker.reached() for worker in armed):
                # Their own faults came first, with the other lease perhaps.
                spares.append(self._start(None))
            locked = time.monotonic() - began > 3 * LEASE_S and self._stage.is_locked()
            return locked

        took_s = await_it(is_over, lambda: f"a takeover of {before}: {self._stage.places()}")
        self._rivals |= dict.fromkeys(spares, time.monotonic())
        self.locked += locked
        if before and stands_by and not spares and not locked:
            self.takeovers_s.append(took_s)

    def _dismiss_rivals(self) -> None:
        """End revived workers in good order once they have had a while to write."""
        for rival, since in list(self._rivals.items()):
            if rival.has_ended() or (rival.is_ready() and time.monotonic() - since > WRITES_S):
                rival.ask_to_end()
                self._leaving.append(rival)
                del self._rivals[rival]

    def _is_alone(self) -> bool:
        self._dismiss_rivals()
        for rival in [worker for worker in self._leaving if worker.has_ended()]:
            self.refused += rival.refusals > 0
            self._leaving.remove(rival)
        return not self._rivals and not self._leaving
