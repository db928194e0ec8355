"""One server as a supervised child process: started once, ended for certain.

The server outlives neither this object's `stop` or `kill`, nor the program, however the program ends: a supervisor
stands between them (`supervisor.py`). Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from eventjet.dev.supervisor import ProgramPlan
from eventjet.errors import ComponentFailed

_SPAWN_S = 20.0
_POLL_S = 0.005
_KILLED_S = 20.0
_PAUSED_S = 20.0
_TAIL_LINES = 4
_TAIL_BYTES = 8_192


@dataclass(frozen=True, slots=True)
class Account:
    """The user a server runs as; only root can choose another than itself."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Program:
    """What is run, and how this kind of server is asked to end."""

    component: str
    """What errors call it."""
    command: Sequence[str]
    log: Path
    """Takes the server's output, and the supervisor's."""
    stop_signal: signal.Signals = signal.SIGTERM
    orphan_signal: signal.Signals = signal.SIGKILL
    grace_s: float = 10.0
    account: Account | None = None
    environ: Mapping[str, str] | None = None
    remove: Path | None = None
    """Removed by the supervisor should the program end without having closed the server."""


class ServerProcess:
    """A running server."""

    def __init__(self, program: Program) -> None:
        self._program = program
        with program.log.open("ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py")), _plan(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=None if program.environ is None else dict(program.environ),
                start_new_session=True,
            )
        try:
            self.pid = self._announced_pid()
        except BaseException:
            self._abandon()
            raise

    @property
    def running(self) -> bool:
        return self._supervisor.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Signal the server, if it still runs."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def pause(self) -> None:
        """Stop the server's clock; returns once it stands still, where the kernel tells (Linux), or after 20 s."""
        self.send(signal.SIGSTOP)
        deadline = time.monotonic() + _PAUSED_S
        while self.running and not _stands_still(self.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask the server to end, and kill it when it has not within its grace; a paused one is woken to hear it."""
        self.send(self._program.stop_signal)
        self.send(signal.SIGCONT)
        if self.wait(self._program.grace_s) is None:
            self.kill()

    def kill(self) -> None:
        """End the server at once, as a crash would, with everything it started."""
        self.send(signal.SIGKILL)
        if self.wait(_KILLED_S) is None:
            self._abandon()
            raise self.failure(f"its process {self.pid} outlives SIGKILL")

    def wait(self, timeout_s: float) -> int | None:
        """The exit status once the server has ended, or None when it has not within the time given."""
        try:
            status = self._supervisor.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._close_pipes()
        return status

    def await_ready(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll until the server is ready; ends it and raises `Unreachable` when it ends or takes too long."""
        deadline = time.monotonic() + timeout_s
        try:
            while not ready():
                if not self.running:
                    raise self.failure("it ended while starting")
                if time.monotonic() > deadline:
                    raise self.failure(f"it was not ready within {timeout_s:g} s")
                time.sleep(_POLL_S)
        except BaseException:
            self.kill()
            raise

    def finish(self, timeout_s: float) -> int:
        """Wait for a program that ends by itself; returns its exit status, and ends it when it takes too long."""
        try:
            status = self.wait(timeout_s)
            if status is None:
                raise self.failure(f"it was not done within {timeout_s:g} s")
        except BaseException:
            self.kill()
            raise
        return status

    def failure(self, reason: str) -> ComponentFailed:
        """The error for this program, with what it said last."""
        program = self._program
        return ComponentFailed(program.component, reason, program.log, _tail(program.log), kept=program.remove is None)

    def _announced_pid(self) -> int:
        assert self._supervisor.stdout is not None
        readable, _, _ = select.select([self._supervisor.stdout], [], [], _SPAWN_S)
        line = self._supervisor.stdout.readline() if readable else b""
        if not line:
            raise self.failure("its supervisor did not start")
        return int(line)

    def _abandon(self) -> None:
        """Close the supervisor's standard input, which ends the server, and take leave of it."""
        self._close_pipes()
        try:
            self._supervisor.wait(self._program.grace_s + _KILLED_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()

    def _close_pipes(self) -> None:
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                pipe.close()


def _tail(log: Path) -> str:
    """The last lines of a log as one line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return " | ".join(line.strip() for line in lines[-_TAIL_LINES:] if line.strip())


def _stands_still(pid: int) -> bool:
    """Whether SIGSTOP has reached every thread: each goes on until it is scheduled."""
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread ended meanwhile
        return False
    return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)


def _plan(program: Program) -> str:
    account = program.account
    plan = ProgramPlan(
        command=list(program.command),
        parent=os.getpid(),
        stop_signal=program.stop_signal,
        orphan_signal=program.orphan_signal,
        grace_s=program.grace_s,
        uid=None if account is None else account.uid,
        gid=None if account is None else account.gid,
        remove=None if program.remove is None else str(program.remove),
    )
    return json.dumps(asdict(plan))
