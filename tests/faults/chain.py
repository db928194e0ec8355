"""`Chain`: one worker after another is killed or stopped where its fault says, each while the next one stands by.

Every worker is armed before it starts, so the one that takes over meets its own fault in the midst of taking over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

from tests.faults.processes import FIRES_S, Fault, WorkerProcess, await_it
from tests.faults.scene import NAMES, Scene

SETTLES = ("worker.before_settle", "worker.after_settle")
QUIET = ("idle", "worker.lease_renewed")
IN_TRANSACTION = ("worker.before_commit", "worker.rows_written")
"""Where a worker stopped on SQLite holds the database until it resumes or dies."""
LEASE_S = 0.6
FIRST_RATE = 100.0


class Chain:
    """Runs a plan of faults; `done` counts them."""

    def __init__(self, stage: Scene, processes: ExitStack, events: int) -> None:
        self.done: Counter[Fault] = Counter()
        self.under_load = 0
        self.held = 0
        """Times that a stopped worker held SQLite, so that nobody could take over."""
        self.refused = 0
        """Revived workers that were told that they were deposed."""
        self.takeovers_s: list[float] = []
        self._stage = stage
        self._processes = processes
        self._events = events
        self._rivals: list[WorkerProcess] = []
        self._leaving: list[WorkerProcess] = []
        self._evictions = 0

    def run(self, plan: Sequence[Fault]) -> None:
        """Every fault in turn; at the end one worker is left and works."""
        began = time.monotonic()
        feed = self._stage.feed
        feed.rate = FIRST_RATE
        feed.allow(self._events)
        current = self._start(plan[0]).ready()
        for index, fault in enumerate(plan):
            following = plan[index + 1] if index + 1 < len(plan) else None
            standby = self._start(following)
            feed.go_on()
            self._dismiss_rivals()
            self._drive(current)
            self.done[Fault(fault.name, fault.action)] += 1
            self.under_load += feed.busy
            self._succeed(current, standby)
            self._stage.check()
            current = standby
            # So that events arrive to the end.
            step_s = (time.monotonic() - began) / (index + 1)
            feed.rate = max(1.0, feed.left / (step_s * max(1, len(plan) - index - 1)))
        await_it(self._is_alone, lambda: "the others to end")

    def _start(self, fault: Fault | None) -> WorkerProcess:
        return self._processes.enter_context(
            WorkerProcess(self._stage.ledger, self._stage.folder, fault, lease_s=LEASE_S)
        )

    def _drive(self, current: WorkerProcess) -> None:
        """Bring the worker to where its fault is."""
        fault, feed = current.fault, self._stage.feed
        assert fault is not None
        began = time.monotonic()
        arranged = 0.0
        while not current.reached():
            now = time.monotonic()
            assert now - began < FIRES_S, f"{fault} was not reached: {self._stage.places()}\n{current.logged()}"
            whole = len(self._stage.owned_by(current.pid)) == len(NAMES)
            if fault.name in QUIET:
                if whole:
                    feed.pause()
                if whole and fault.name == "idle" and self._is_idle():
                    current.strike()
                    return
            elif not feed.busy:
                feed.allow(10)
            if whole and now - max(arranged, began) > 0.5:
                arranged = now
                self._arrange(current, fault)
            time.sleep(0.02)

    def _arrange(self, current: WorkerProcess, fault: Fault) -> None:
        """What a term reaches only in its situation."""
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
        """All is applied, and for so long that pulls wait at the server."""
        return self._caught_up() and (time.sleep(0.1) is None) and self._caught_up()

    def _caught_up(self) -> bool:
        return all(place.position == self._stage.feed.stored for place in self._stage.places().values())

    def _succeed(self, struck: WorkerProcess, standby: WorkerProcess) -> None:
        """See a stopped worker replaced, and wake it."""
        assert struck.fault is not None
        builds = standby.fault is not None and standby.fault.name in SETTLES
        if builds:
            self._stage.begin_to_build()
        if struck.fault.action == "stop":
            took_s = self._await_takeover(struck, standby)
            if took_s is None:
                self.held += 1
            else:
                self.takeovers_s.append(took_s)
            struck.revive()
            self._rivals.append(struck)

    def _await_takeover(self, struck: WorkerProcess, standby: WorkerProcess) -> float | None:
        """Returns the seconds it took, or None when stopped workers hold the database, so that there can be none."""
        before = self._stage.owned_by(struck.pid)
        spares: list[WorkerProcess] = []
        began = time.monotonic()
        held = False

        def is_over() -> bool:
            nonlocal held
            now = self._stage.places()
            if not before or any(now[name].epoch > epoch for name, epoch in before.items()):
                return True
            if not spares and standby.reached():
                # Its own fault came first, with the other lease perhaps.
                spares.append(self._start(None))
            held = time.monotonic() - began > 3 * LEASE_S and self._stage.is_held()
            return held

        took_s = await_it(is_over, lambda: f"a takeover of {before}: {self._stage.places()}")
        self._rivals += spares
        return None if held else took_s

    def _dismiss_rivals(self) -> None:
        """Those revived have had a while to write; from here on they end in good order."""
        if self._rivals:
            time.sleep(0.3)
        for rival in self._rivals:
            if not rival.has_ended():
                if not rival.is_ready():
                    continue
                rival.ask_to_end()
            self._leaving.append(rival)
        self._rivals = [one for one in self._rivals if one not in self._leaving]

    def _is_alone(self) -> bool:
        self._dismiss_rivals()
        for rival in [one for one in self._leaving if one.has_ended()]:
            self.refused += rival.refusals > 0
            self._leaving.remove(rival)
        return not self._rivals and not self._leaving
