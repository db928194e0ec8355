"""The process between a program and its embedded server, which ends the server when the program is gone.

The supervisor runs as a script (`python -I -S supervisor.py PROGRAM PARENT`), with the standard library only and in
one thread. It has a session of its own, so that Ctrl-C in a terminal reaches the program and not the server. It ends
the server when its standard input closes, when its parent changes (a forked child may hold that pipe open), or when
it gets SIGTERM, SIGINT or SIGHUP. It adopts and kills the processes that the server leaves behind. On Linux the
server dies with the supervisor, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

_POLL_S = 0.25
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_EXEC_FAILED = 127
_SWEEPS_MAX = 1_500


class Account(NamedTuple):
    """The user and group that a program runs as; only root can choose others than its own."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run and how to end it; passed to the supervisor as one JSON argument."""

    command: list[str]
    stop_signal: int = signal.SIGTERM
    orphan_signal: int = signal.SIGKILL
    """The signal that the kernel sends to the program if the supervisor itself is killed."""
    grace_s: float = 10.0
    """Seconds that the program has to end by itself before it is killed."""
    account: Account | None = None
    remove: str | None = None
    """A folder to remove if the process that started the program ends without having ended the program."""


def main(argument: str, parent: int) -> int:
    """Run the program until it or the process `parent` ends.

    Returns the program's exit status, or 128 + the signal that ended it; 0 when the parent ended first.
    """
    program = Program(**json.loads(argument))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    watch = _Watch(parent)
    child = _spawn(program)
    try:
        os.write(1, f"{child}\n".encode())
    except BrokenPipeError:
        watch.told_to_end = True  # the parent was interrupted while it started this process
    while not watch.ended(child):
        if watch.parent_gone():
            _end(child, program, watch)
            _sweep()
            if program.remove is not None:
                shutil.rmtree(program.remove, ignore_errors=True)
            return 0
        watch.wait(_POLL_S, 0)
    _sweep()
    code = os.waitstatus_to_exitcode(watch.status)
    return code if code >= 0 else 128 - code


class _Watch:
    """The events that the supervisor waits for, with one bounded `select`."""

    def __init__(self, parent: int) -> None:
        self.status = 0
        self._parent = parent
        self.told_to_end = False
        self._wake, write = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._told)

    def wait(self, seconds: float, *inputs: int) -> None:
        """Return at the next signal, or when one of the inputs can be read."""
        select.select([self._wake, *inputs], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 512)

    def parent_gone(self) -> bool:
        """Return whether the supervisor got a signal to end, its parent changed, or its standard input was closed."""
        if self.told_to_end or os.getppid() != self._parent:
            return True
        readable, _, _ = select.select([0], [], [], 0)
        return bool(readable) and os.read(0, 512) == b""

    def ended(self, child: int) -> bool:
        """Reap all dead children and adopted orphans; return True once the server is among them or no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == child:
                self.status = status
                return True

    def _told(self, *_: Any) -> None:
        self.told_to_end = True


def _spawn(program: Program) -> int:
    """Start the program as a child process and return its pid; the child exits with 127 if it cannot run it."""
    supervisor = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        os.dup2(2, 1)
        if program.account is not None:
            uid, gid = program.account
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        # Set after the change of user, which clears it.
        _prctl(_PR_SET_PDEATHSIG, program.orphan_signal)
        if os.getppid() == supervisor:
            os.execv(program.command[0], program.command)
    except BaseException as error:
        os.write(2, f"cannot run {program.command[0]}: {error}\n".encode())
    os._exit(_EXEC_FAILED)


def _end(child: int, program: Program, watch: _Watch) -> None:
    """Ask the server to end, and kill it after its grace period; a paused server is woken first."""
    for number in (program.stop_signal, signal.SIGCONT):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
    deadline = time.monotonic() + program.grace_s
    while time.monotonic() < deadline:
        if watch.ended(child):
            return
        # Not for standard input, which stays readable once it is closed.
        watch.wait(min(_POLL_S, program.grace_s))
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _sweep() -> None:
    """Kill the processes that the dead server left behind; as subreaper, this process has adopted all of them."""
    for _ in range(_SWEEPS_MAX):
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _children() -> list[int]:
    """Return the pids of this process's children from `/proc`; none where there is no `/proc`."""
    children: list[int] = []
    supervisor = os.getpid()
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as stat:
                    parent = int(stat.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == supervisor:
                children.append(int(entry))
    return children


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
