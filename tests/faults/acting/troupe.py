"""Worker processes that are started again whenever they end, each perhaps with a failpoint armed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

LEASE_S = 2.0


@dataclass
class Actor:
    """A process, and the failpoint that it was started with."""

    process: subprocess.Popen[bytes]
    point: str | None
    began: float = field(default_factory=time.monotonic)
    stopped_at: float | None = None
    woken_at: float | None = None


class Troupe:
    """So many workers at a time, until it is closed. `tend` is to be called often."""

    def __init__(
        self,
        server: str,
        folder: Path,
        size: int,
        points: Sequence[str] = (),
        module: str = "tests.faults.acting.worker",
    ) -> None:
        """`points` are armed one after the other: `name:action:count`; `module` is what each worker runs."""
        self._module = module
        self.reached: Counter[str] = Counter()
        self.killed = 0
        self.outside = folder / "outside"
        self._server = server
        self._folder = folder
        self._size = size
        self._points = deque(points)
        self._actors: list[Actor] = []
        self._started = 0

    def __enter__(self) -> Self:
        self.tend()
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            actor.process.send_signal(signal.SIGCONT)
            actor.process.terminate()
        for actor in self._actors:
            try:
                actor.process.wait(60)
            except subprocess.TimeoutExpired:
                actor.process.kill()
                actor.process.wait(60)

    @property
    def left(self) -> int:
        """Return the number of failpoints that were not tried yet."""
        return len(self._points) + sum(actor.point is not None for actor in self._actors)

    def tend(self) -> None:
        """Start what is missing; wake what a failpoint has stopped, once others must have taken over."""
        for actor in list(self._actors):
            state = Path(f"/proc/{actor.process.pid}/stat")
            if actor.process.poll() is not None:
                self._actors.remove(actor)
                self._note(actor)
            elif actor.point is not None and state.exists() and state.read_text().rpartition(")")[2].split()[0] == "T":
                actor.stopped_at = actor.stopped_at or time.monotonic()
                if time.monotonic() - actor.stopped_at > 2 * LEASE_S:
                    self._note(actor)
                    actor.point, actor.woken_at = None, time.monotonic()
                    actor.process.send_signal(signal.SIGCONT)
            elif actor.woken_at is not None and self._points and time.monotonic() - actor.woken_at > LEASE_S:
                # A zombie has had its time by now; armed workers get their turn.
                actor.process.kill()
        while len(self._actors) < self._size:
            self._actors.append(self._start())

    def kill_worker(self, chance: random.Random) -> None:
        """Kill a worker at random."""
        actor = chance.choice(self._actors)
        self.killed += 1
        actor.process.kill()
        actor.process.wait(60)

    def give_up_points(self, older_s: float) -> None:
        """Kill workers that have not reached their failpoint within a time; it is armed again, for the first time."""
        for actor in self._actors:
            if actor.point is not None and actor.stopped_at is None and time.monotonic() - actor.began > older_s:
                name, action, _ = actor.point.split(":")
                self._points.append(f"{name}:{action}:1")
                actor.point = None
                actor.process.kill()

    def _note(self, actor: Actor) -> None:
        if actor.point is not None and (actor.stopped_at is not None or actor.process.returncode == -signal.SIGKILL):
            self.reached[actor.point.rpartition(":")[0]] += 1

    def _start(self) -> Actor:
        point = self._points.popleft() if self._points else None
        self._started += 1
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENTJET_")}
        if point is not None:
            environment["EVENTJET_FAILPOINT"] = point
        log = (self._folder / f"worker-{self._started}.log").open("wb")
        command = [sys.executable, "-m", self._module, self._server, str(self.outside), str(LEASE_S)]
        with log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        return Actor(process, point)
