"""Processes of this project's programs, forked from one that has imported eventjet: `Forked`, `ForkedWorker`, `run`.

A new interpreter takes most of a second of a processor to import what a command or a worker needs, and the tests start
hundreds. A forked process is like any other, to be killed, stopped and queried; only its imports are done. Tests of the
start itself, imports and flags included, start an interpreter.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Self

from eventjet import failpoints

ROOT = Path(__file__).parents[1]
STARTS_S = 60.0
IMPORTED = [
    "eventjet.app",
    "eventjet.cli.main",
    "eventjet.rebuild",
    "eventjet.subscriptions.supervisor",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite",
]
"""None of them starts a thread or opens anything, so a fork has all they need."""


class Forked:
    """`python -m module argument…`, its output in files; it has the interface of `subprocess.Popen`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        environ: Mapping[str, str],
        out: Path,
        err: Path,
        path: Sequence[str] = (),
        start_new_session: bool = False,
    ) -> None:
        """`path`: what comes before the interpreter's own places for modules, and PYTHONPATH."""
        self.args = [module, *arguments]
        own_arguments = (
            module, list(arguments), str(folder), dict(environ), list(path), str(out), str(err), start_new_session,
        )  # fmt: skip
        self._process = context().Process(target=_become, args=own_arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            assert time.monotonic() >= deadline
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedWorker:
    """A process that prints `ready` when it is; killed at the end."""

    def __init__(self, module: str, arguments: Sequence[str], **more: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._folder.name, name) for name in ("out", "err"))
        environ = {**os.environ, **more}
        self.process = Forked(
            module, arguments, folder=ROOT, environ=environ, out=self._out, err=self._err, path=[str(ROOT)]
        )

    def ready(self) -> Self:
        deadline = time.monotonic() + STARTS_S
        while not self._out.exists() or self._out.read_text() != "ready\n":
            assert self.runs(), self.ended()
            assert time.monotonic() < deadline, self.logged()
            time.sleep(0.01)
        return self

    def runs(self) -> bool:
        return self.process.poll() is None

    def logged(self) -> str:
        return self._err.read_text() if self._err.exists() else ""

    def ended(self, timeout_s: float = 30.0) -> str:
        """Return what it logged, once it has ended."""
        self.process.wait(timeout_s)
        return self.logged()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(STARTS_S)
        self._folder.cleanup()


def run(
    module: str, arguments: Sequence[str], *, folder: Path, environ: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run to the end, and return what was printed; kill the process when it does not end."""
    with tempfile.TemporaryDirectory() as temporary:
        out, err = Path(temporary, "out"), Path(temporary, "err")
        process = Forked(module, arguments, folder=folder, environ=environ, out=out, err=err)
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, status, out.read_text(), err.read_text())


def context() -> ForkServerContext:
    """Return the context of `multiprocessing` that forks such processes."""
    forkserver = multiprocessing.get_context("forkserver")
    # Has an effect before the first fork only.
    forkserver.set_forkserver_preload(IMPORTED)
    return forkserver


def _become(
    module: str,
    arguments: list[str],
    folder: str,
    environ: dict[str, str],
    path: list[str],
    out: str,
    err: str,
    start_new_session: bool,
) -> None:
    """Set up, in the new process, what an interpreter finds when it starts."""
    if start_new_session:
        os.setsid()
    # Background jobs of a shell ignore SIGINT, programs under `nohup` ignore SIGHUP, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    for number, file in enumerate((os.devnull, out, err)):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # pytest has put the project's folder there, which a program does not have.
    inherited = [entry for entry in sys.path if entry and Path(entry).resolve() != ROOT]
    python_path = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*path, *python_path, *(entry for entry in inherited if entry not in python_path)]
    sys.argv = [module, *arguments]
    # Modules that have read the other environment.
    importlib.reload(failpoints)
    tempfile.tempdir = None
    runpy.run_module(module, run_name="__main__", alter_sys=True)
