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
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import NamedTuple

_POLL_S = 0.25
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_EXEC_FAILED = 127
_SWEEPS_MAX = 1_500
_SIGKILL = 9
"""Its number, because Windows, where this module is imported and never run, has no such signal."""


class Account(NamedTuple):
    """The user and group that a program runs as; only root can choose others than its own."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run and how to end it; passed to the supervisor as one JSON argument."""

    command: list[str]
    stop_signal: int = signal.SIGTERM
    orphan_signal: int = _SIGKILL
    """The signal that the kernel sends to the program if the supervisor itself is killed."""
    grace_s: float = 10.0
    """Seconds that the program has to end by itself before it is killed."""
    account: Account | None = None
    remove: str | None = None
    """A folder to remove if the process that started the program ends without having ended the program."""


def main(argument: str, parent: int) -> int:
    """Run the program until it or the process `parent` ends; return its status, or 128 + the signal that ended it."""
    program = Program(**json.loads(argument))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ending, received = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}, set[int]()
    wake, write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *ending):
        signal.signal(number, lambda number, _frame: received.add(number))
    try:
        child = _start(program)
    except OSError as error:
        os.write(2, f"cannot run {program.command[0]}: {error}\n".encode())
        return _EXEC_FAILED
    # The parent may have been interrupted while it started this process; then standard input is closed, too.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{child.pid}\n".encode())
    while child.poll() is None:
        # A forked child of the parent may hold standard input open, so its end is not enough.
        if received & ending or os.getppid() != parent or _is_closed(0):
            _end(child, program)
            _sweep()
            if program.remove is not None:
                shutil.rmtree(program.remove, ignore_errors=True)
            return 0
        select.select([wake, 0], [], [], _POLL_S)
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 512)
    _sweep()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _is_closed(number: int) -> bool:
    readable, _, _ = select.select([number], [], [], 0)
    return bool(readable) and os.read(number, 512) == b""


def _start(program: Program) -> subprocess.Popen[bytes]:
    """Start the program as a child process; raises `OSError` when it cannot be run."""
    supervisor = os.getpid()

    def die_with_supervisor() -> None:
        # Called after the change of user, which clears it.
        _prctl(_PR_SET_PDEATHSIG, program.orphan_signal)
        if os.getppid() != supervisor:
            os._exit(_EXEC_FAILED)

    uid, gid = program.account or (None, None)
    return subprocess.Popen(
        program.command,
        stdin=subprocess.DEVNULL,
        stdout=2,
        preexec_fn=die_with_supervisor,  # noqa: PLW1509 - this process has one thread
        user=uid,
        group=gid,
        extra_groups=None if uid is None else [],
    )


def _end(child: subprocess.Popen[bytes], program: Program) -> None:
    """Ask the server to end, and kill it after its grace period; a paused server is woken first."""
    child.send_signal(program.stop_signal)
    child.send_signal(signal.SIGCONT)
    try:
        child.wait(program.grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


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
