"""A Python that lacks what Windows or macOS lacks: `python emulation.py windows|macos PROGRAM [python's arguments]`.

It imports the standard library's and other packages' modules first, since those have code of their own for each
platform; then it removes what the platform lacks, and runs the program of python's arguments. `PROGRAM` becomes
`sys.executable`, so that child processes are emulated, too. Windows' paths and line ends are not emulated.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import ctypes
import fcntl
import importlib
import io
import os
import runpy
import select
import selectors
import shutil
import signal
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_STANDARD = """asyncio.subprocess concurrent.futures.process getpass http.server logging.handlers multiprocessing.pool
multiprocessing.resource_tracker pathlib platform pydoc ssl subprocess tempfile urllib.request uuid webbrowser
zoneinfo""".split()
_OTHERS = """aiosqlite alembic.command anyio click._termui_impl jinja2 msgspec nats.js nkeys opentelemetry.sdk.trace
orjson psycopg psycopg.rows pydantic pytest rich.console rich.live rich.progress rich.table rich.traceback
sqlalchemy.dialects.postgresql sqlalchemy.dialects.sqlite sqlalchemy.ext.asyncio starlette.applications
starlette.responses starlette.staticfiles typer.completion typer.main uvicorn.lifespan.on uvicorn.loops.auto
uvicorn.protocols.http.auto uvicorn.protocols.websockets.auto""".split()
_NO_SIGNALS = """SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1
SIGUSR2 SIGWINCH alarm getitimer pause pidfd_send_signal pthread_kill pthread_sigmask setitimer sigpending sigwait
sigtimedwait sigwaitinfo""".split()
_NO_OS = """chown chroot eventfd fchmod fchown fork forkpty getegid geteuid getgid getgroups getpgid getpriority getsid
getuid killpg lchown memfd_create mkfifo mknod nice openpty pidfd_open posix_spawn posix_spawnp pread pwrite
register_at_fork sched_getaffinity sched_setaffinity sendfile setegid seteuid setgid setpgid setsid setuid statvfs sync
sysconf uname wait waitid""".split()
_NO_MODULES = "fcntl grp pty pwd readline resource syslog termios tty".split()
_NOT_ON_MACOS = "eventfd memfd_create pidfd_open sched_getaffinity sched_setaffinity splice".split()


def windows() -> None:
    """Take away what Windows lacks, and refuse to remove or rename an open file, as Windows does."""
    _remove(signal, _NO_SIGNALS)
    _remove(os, _NO_OS)
    _remove(select, ["epoll", "poll"])
    for name in _NO_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    sys.modules["msvcrt"] = _msvcrt()
    sys.platform = "win32"
    selectors.DefaultSelector = selectors.SelectSelector  # type: ignore[misc]
    windows_io: Any = io
    windows_io._WindowsConsoleIO = type("_WindowsConsoleIO", (), {})
    _ask_for_encodings()
    _loops()
    _open_files_stay()


def macos() -> None:
    """Take away what macOS lacks: `/proc`, functions for processes that only Linux has, and `prctl`."""
    _remove(os, _NOT_ON_MACOS)
    _remove(signal, ["pidfd_send_signal", "sigtimedwait", "sigwaitinfo"])
    _remove(select, ["epoll"])
    sys.platform = "darwin"
    selectors.DefaultSelector = selectors.PollSelector  # type: ignore[misc]
    for module, name in (
        (builtins, "open"),
        (io, "open"),
        (os, "open"),
        (os, "listdir"),
        (os, "scandir"),
        (os, "stat"),
        (os, "lstat"),
    ):
        setattr(module, name, _without_proc(getattr(module, name)))
    load = ctypes.CDLL

    def without_prctl(name: str | None, *arguments: Any, **options: Any) -> Any:
        library: Any = load(name, *arguments, **options)
        library.prctl = _missing
        return library

    ctypes.CDLL = without_prctl  # type: ignore[assignment,misc]


def _remove(module: types.ModuleType, names: Sequence[str]) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
    if hasattr(module, "process_cpu_count"):  # it calls `sched_getaffinity`, and without it is `cpu_count`
        module.process_cpu_count = module.cpu_count  # type: ignore[attr-defined]


def _missing(*_: Any) -> Any:
    raise AssertionError("this platform lacks what was called")


def _without_proc(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if not isinstance(path, int) and os.fsdecode(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *arguments, **options)

    return call


def _msvcrt() -> types.ModuleType:
    """Return the module whose locks Windows has; here they lock the whole file."""
    module: Any = types.ModuleType("msvcrt")
    module.LK_NBLCK = 2

    def locking(file: int, mode: int, count: int) -> None:
        assert (mode, count) == (module.LK_NBLCK, 1)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    module.locking = locking
    return module


def _ask_for_encodings() -> None:
    """Let eventjet fail where it opens text without naming its encoding, which on Windows is not UTF-8."""
    assert sys.flags.warn_default_encoding
    warnings.filterwarnings("error", category=EncodingWarning, module=r"(eventjet|examples)\b")


def _loops() -> None:
    """Give `asyncio` the two loops of Windows; the first is the one that programs get."""

    class ProactorEventLoop(asyncio.SelectorEventLoop):
        """A loop that watches no file descriptors for its users, and no signals."""

        def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
            raise NotImplementedError

        def add_writer(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
            raise NotImplementedError

        def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:
            raise NotImplementedError

    class SelectorEventLoop(asyncio.SelectorEventLoop):
        """A loop that watches no signals."""

        def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:
            raise NotImplementedError

    class Policy(asyncio.DefaultEventLoopPolicy):
        _loop_factory = ProactorEventLoop

    windows: Any = asyncio
    windows.ProactorEventLoop, windows.SelectorEventLoop = ProactorEventLoop, SelectorEventLoop
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        windows.set_event_loop_policy(Policy())


def _open_files_stay() -> None:
    shutil._use_fd_functions = False  # type: ignore[attr-defined]

    def guarded(function: Callable[..., Any], count: int) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            for path in map(os.fsdecode, arguments[:count]):
                if any(os.path.exists(path) and os.path.samefile(path, open_file) for open_file in _open_files()):
                    raise PermissionError(13, "The process cannot access the file, because it is open", path)
            return function(*arguments, **options)

        return call

    for name, count in (("unlink", 1), ("remove", 1), ("rename", 2), ("replace", 2)):
        setattr(os, name, guarded(getattr(os, name), count))


def _open_files() -> list[str]:
    files: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            file = os.readlink(f"/proc/self/fd/{number}")
            if os.path.isfile(file):
                files.append(file)
    return files


def _load_others() -> None:
    for name in (*_STANDARD, *_OTHERS):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run(arguments: Sequence[str]) -> None:
    """Run what python's arguments ask for: `-c CODE`, `-m MODULE` or a file, with their own arguments."""
    arguments = [*arguments]
    while arguments and arguments[0] in ("-I", "-S", "-P"):
        arguments.pop(0)
    kind = arguments[0]
    # In place of this script's folder: the current one, as python has it.
    sys.path[0] = os.getcwd()
    if kind == "-c":
        sys.argv = ["-c", *arguments[2:]]
        # As python's own: classes in it are found in `__main__`.
        exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)
    elif kind == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _platform, sys.executable, *_arguments = sys.argv[1:]
    # The supervisor between a program and its server has to start fast, and imports nothing of others.
    if not any(Path(each).name == "supervisor.py" for each in _arguments[:3]):
        _load_others()
    {"windows": windows, "macos": macos}[_platform]()
    run(_arguments)
