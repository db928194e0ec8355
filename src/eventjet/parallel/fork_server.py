"""`ForkServer`: a process that has imported the application, and forks fold processes of itself.

While this process has one thread, it is a fork of it: there within milliseconds, and with the very code that this one
runs. Beside other threads a fork could deadlock, so a program is started then, which imports the application again.
"""

from __future__ import annotations

import array
import gc
import marshal
import os
import pickle
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from eventjet.errors import FoldProcessLost
from eventjet.parallel import process
from eventjet.parallel.code_seen import CodeSeen
from eventjet.parallel.process import FoldFailed, Loadable, fold, line_of, named, spared

_PROGRAM = "import sys; sys.path[:] = {first}; from {module} import main; sys.path[:] = {path}; main()"
"""A module of the application that is named like one of Python's own hides it from the application, not from this."""
_LIBRARY = str(Path(os.__file__).parent)
_READY, _FAILED, _FORK, _MADE, _REAP, _REAPED = b"R", b"F", b"K", b"M", b"W", b"D"
"""From it: that it can fork, or why it never will. To it and back: fork, with the new one's socket, and its process id
and handle; say which have ended, and how."""
_MESSAGE_MAX = 65_536
_BOUND_S = 20.0
"""How long it may take for anything but its start: many times what a fork takes."""
_END_S = 5.0


class ForkServer:
    """Made by `of`, ended by `close`; of use to any thread.

    Raises `FoldProcessLost` where it is gone or does not answer, and `FoldFailed` where it could not import the
    application, or imported other code than this process has.
    """

    def __init__(
        self, control: socket.socket, lifeline: int, pid: int, program: subprocess.Popen[bytes] | None = None
    ) -> None:
        control.settimeout(_BOUND_S)
        self._control = control
        self._lifeline = lifeline
        self._handle = os.pidfd_open(pid)
        self._program = program
        self._seen = None if program is None else CodeSeen.now()
        self._is_ready = False
        self._failure: str | None = None
        """Why it never will be ready."""
        self._is_lost = False
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def of(cls, app: Loadable) -> ForkServer:
        """For an application that this process has imported; does not wait for it: `is_ready` tells."""
        return cls.forked(app) if _is_alone() else cls.started(app)

    @classmethod
    def forked(cls, app: Loadable) -> ForkServer:
        """Of this process, which has no other thread."""
        own, its = _pair()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                own.close()
                os.close(writing)
                _let_go_of_sockets(its.fileno())
                _serve(its, reading, app)
            finally:
                os._exit(0)  # what the application does at its end is its own process's
        its.close()
        os.close(reading)
        return cls(own, writing, pid)

    @classmethod
    def started(cls, app: Loadable) -> ForkServer:
        """As a program."""
        own, its = _pair()
        reading, writing = os.pipe()
        try:
            program = started(__name__, its.fileno(), reading)
        except BaseException:
            own.close()
            os.close(writing)
            raise
        finally:
            its.close()
            os.close(reading)
        server = cls(own, writing, program.pid, program)
        with suppress(OSError):  # `is_ready` says so
            own.send(pickle.dumps(app))
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Whether it can fork; waits for that so long."""
        with self._lock:
            if self._is_lost:
                raise self._lost()
            if not self._is_ready and self._failure is None:
                if not _is_readable(self._control, timeout_s):
                    return False
                kind, payload, _ = self._received()
                self._is_ready = kind == _READY
                self._failure = payload.decode() if kind == _FAILED else None
            if self._failure is not None:
                raise FoldFailed(self._failure)
        # It imports what lies on the disk. After half a deploy that is other code, which would fold some aggregates
        # otherwise than this process folds the rest.
        changed = None if self._seen is None else self._seen.changed()
        if changed is not None:
            raise FoldFailed(f"{changed} is another file than the one it was started with; start the worker again")
        return True

    def fork(self, its: socket.socket) -> tuple[int, int]:
        """A fold process that serves this end of a socket: its process id, and a handle, to be closed by the caller."""
        with self._lock:
            self._sent(_FORK, its.fileno())
            kind, payload, handles = self._received()
            if kind == _FAILED:
                raise FoldFailed(payload.decode())
            return int(payload), handles[0]

    def ended(self) -> dict[int, int]:
        """Those that have ended since this was asked before, with the status that `os.waitpid` gives."""
        with self._lock:
            self._sent(_REAP)
            _, payload, _ = self._received()
            found: dict[int, int] = marshal.loads(payload)  # noqa: S302 - of our own process
            return found

    def close(self) -> None:
        """End it, whatever it is doing, and those that it has forked and nobody has ended."""
        if self._closed:
            return
        self._closed = True
        self._control.close()
        os.close(self._lifeline)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        see_ended(self._handle)
        os.close(self._handle)
        if self._program is not None:
            self._program.poll()  # it was waited for

    def _sent(self, kind: bytes, *numbers: int) -> None:
        if self._is_lost:
            raise self._lost()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))] if numbers else []
        try:
            self._control.sendmsg([kind], rights)
        except OSError:
            raise self._lost() from None

    def _received(self) -> tuple[bytes, bytes, list[int]]:
        try:
            message, handles, _, _ = socket.recv_fds(self._control, _MESSAGE_MAX, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            raise self._lost() from None
        if not message:
            raise self._lost()
        return message[:1], message[1:], handles

    def _lost(self) -> FoldProcessLost:
        """For good: what it may still answer would be taken for the answer to what is asked next."""
        self._is_lost = True
        return FoldProcessLost("cannot be made: what forks them is gone, or does not answer")


def main() -> None:
    """The program, which ends in silence when nobody hears it any more."""
    control, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    with suppress(BrokenPipeError, ConnectionResetError):
        app = pickle.loads(control.recv(_MESSAGE_MAX))  # noqa: S301 - nobody else has the other end
        _serve(control, lifeline, app)


def started(module: str, *numbers: int, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """The program of one of these modules, with descriptors it inherits, and the path and flags of this process."""
    first = sorted(sys.path, key=lambda each: each not in (_LIBRARY, f"{_LIBRARY}/lib-dynload"))
    text = _PROGRAM.format(first=first, module=module, path=sys.path)
    flags = ["-P", *["-O"] * sys.flags.optimize]
    return subprocess.Popen([sys.executable, *flags, "-c", text, *map(str, numbers)], stdin=stdin, pass_fds=numbers)


def see_ended(handle: int) -> None:
    """Wait for the end of a process that was killed. In a container this one may be the first, and inherit it."""
    if _is_readable(handle, _END_S):
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, handle, os.WEXITED)


def _serve(control: socket.socket, lifeline: int, app: Loadable) -> None:
    """What it does, until nobody has the other end of its socket."""
    control.settimeout(None)
    spared()
    named("eventjet forks")
    try:
        app.load()
    except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits for the answer is told
        control.send(_FAILED + line_of(error))
        return
    gc.freeze()
    control.send(_READY)
    statuses: dict[int, int] = {}
    while True:
        kind, numbers, _, _ = socket.recv_fds(control, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not kind:
            return
        if kind == _REAP:
            _reap(statuses)
            control.send(_REAPED + marshal.dumps(statuses))
            statuses.clear()
            continue
        its = socket.socket(fileno=numbers[0])
        try:
            pid = _forked(control, its, lifeline, app)
        except OSError as error:  # no memory, or too many processes
            control.send(_FAILED + line_of(error))
        else:
            handle = os.pidfd_open(pid)
            socket.send_fds(control, [_MADE + str(pid).encode()], [handle])
            os.close(handle)
        its.close()


def _forked(control: socket.socket, its: socket.socket, lifeline: int, app: Loadable) -> int:
    """The process id of a new fold process.

    Where the application has started threads, another program is started for it.
    """
    if not _is_alone():
        program = started(process.__name__, its.fileno(), lifeline, stdin=subprocess.PIPE)
        assert program.stdin is not None
        with program.stdin:
            program.stdin.write(pickle.dumps(app))
        return program.pid
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            fold(its, lifeline)
        finally:
            os._exit(0)
    return pid


def _reap(statuses: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            statuses[pid] = status


def _let_go_of_sockets(kept: int) -> None:
    """Those of the process that was forked would stay open when it closes them, and their peers would not hear of it.

    Their numbers stay taken: what still belongs to one of them here closes nothing else.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in [int(one.name) for one in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # the folder's own is closed by now
            if each != kept and stat.S_ISSOCK(os.fstat(each).st_mode):
                os.dup2(nothing, each, inheritable=False)
    os.close(nothing)


def _pair() -> tuple[socket.socket, socket.socket]:
    """One message is one message there."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _is_alone() -> bool:
    """Whether this process has one thread."""
    return len(list(Path("/proc/self/task").iterdir())) == 1


def _is_readable(what: socket.socket | int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(what, select.POLLIN)
    return bool(poll.poll(1_000 * timeout_s))
