"""Worker processes for the fault tests, which arm, stop, revive, kill and query them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.forked import ROOT, Forked
from tests.integration.ledger_log import Ledger

FIRES_S = 300.0
ENDS_S = 300.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to a worker, and where: at a failpoint, or from outside while it is `idle`."""

    name: str
    action: str
    """`kill` or `stop`."""
    count: int = 1
    """At which time of reaching the failpoint it fires."""

    def __str__(self) -> str:
        return f"{self.name} {self.action}"


class WorkerProcess:
    """A process of `tests.faults.worker` (or another module with the same arguments)."""

    def __init__(
        self,
        ledger: Ledger,
        folder: Path,
        fault: Fault | None = None,
        *,
        batch_max: int = 25,
        lease_s: float = 0.8,
        names: tuple[str, ...] = (),
        module: str = "tests.faults.worker",
    ) -> None:
        self.fault = fault
        self._asked = False
        stem = folder / f"worker-{ledger.name}-{time.monotonic_ns()}"
        self._log, self._fired = stem.with_suffix(".log"), stem.with_suffix(".fired")
        place = (",".join(ledger.settings.servers), ledger.settings.database, ledger.name, str(batch_max), str(lease_s))
        environ = {**os.environ, "EVENTJET_FAILPOINT_LOG": str(self._fired)}
        if fault is not None and fault.name != "idle":
            environ["EVENTJET_FAILPOINT"] = f"{fault.name}:{fault.action}:{fault.count}"
        self.process = Forked(
            module, [*place, *names], folder=ROOT, environ=environ, out=self._log, err=self._log, path=[str(ROOT)]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(ENDS_S)

    @property
    def pid(self) -> int:
        return self.process.pid

    def ready(self) -> Self:
        """Wait until it works or stands by; its fault may come first."""
        self._await(lambda: self.is_ready() or self.reached(), "to be ready")
        return self

    def is_ready(self) -> bool:
        return "ready\n" in self.logged()

    def fired(self) -> str:
        """Return what its failpoint noted when the process reached it; empty before."""
        return self._fired.read_text() if self._fired.exists() else ""

    def reached(self) -> bool:
        """Return whether its failpoint was reached and has had its effect."""
        fired = self.fired()
        if not fired:
            return False
        assert self.fault is not None
        assert fired == f"{self.fault.name}:{self.fault.action}\n"
        if self.fault.action == "kill":
            return self.process.poll() == -signal.SIGKILL
        return self.is_stopped()

    def strike(self) -> None:
        """Do from outside what its fault says."""
        assert self.fault is not None
        self.process.send_signal(signal.SIGKILL if self.fault.action == "kill" else signal.SIGSTOP)
        self._await(lambda: self.process.poll() is not None or self.is_stopped(), "to be struck")

    def is_stopped(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:  # it has ended
            return False

    def stop(self) -> None:
        """Send SIGSTOP, and wait until the process has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        self._await(self.is_stopped, "to stop")

    def revive(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def ask_to_end(self) -> None:
        """Send SIGTERM, once: a second one could arrive when nothing handles it any more."""
        if not self._asked:
            self._asked = True
            self.process.send_signal(signal.SIGTERM)

    def ended_well(self) -> None:
        """Wait until it ends by itself, with status 0."""
        status = self.process.wait(ENDS_S)
        assert status == 0, f"{self.fault}: it ended with {status}:\n{self.logged()}"

    def has_ended(self) -> bool:
        """Return whether it has ended by itself, with status 0."""
        if self.process.poll() is None:
            return False
        self.ended_well()
        return True

    def logged(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def peak_mb(self) -> float:
        """Return the most memory it has had."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))

    @property
    def refusals(self) -> int:
        """Return how often it was refused because a projection is no longer its own."""
        return self.logged().count("is no longer this worker's")

    def _await(self, condition: Callable[[], bool], description: str) -> None:
        deadline = time.monotonic() + FIRES_S
        while not condition():
            alive = self.process.poll() is None
            assert alive or condition(), f"it ended with {self.process.returncode}:\n{self.logged()}"
            assert time.monotonic() < deadline, f"not within {FIRES_S} s: {description}\n{self.logged()}"
            time.sleep(0.01)


def await_it(
    condition: Callable[[], bool],
    description: Callable[[], str],
    timeout_s: float = FIRES_S,
    reached: Callable[[], int] = lambda: 0,
) -> float:
    """Wait for a condition; return the seconds it took. The time begins anew whenever `reached` grows."""
    started = grown_at = time.monotonic()
    most = reached()
    while not condition():
        now, progress = time.monotonic(), reached()
        if progress > most:
            grown_at, most = now, progress
        assert now - grown_at < timeout_s, f"not within {timeout_s} s: {description()}"
        time.sleep(0.02)
    return time.monotonic() - started
