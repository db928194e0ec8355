"""The console of `eventjet dev --ui`: a process of its own beside the worker, which ends with it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping

from eventjet.cli.target import AppTarget
from eventjet.cli.terminal import say
from eventjet.dev.process import ServerProcess
from eventjet.dev.supervisor import Program
from eventjet.errors import UsageError

HERE = "127.0.0.1"
PORT = 8321
_READY_S = 60.0


def check_installed() -> None:
    """Raise `UsageError` where the extra `ui` is missing."""
    try:
        import jinja2
        import python_multipart
        import starlette
        import uvicorn
    except ModuleNotFoundError as error:
        raise UsageError(f"The console needs {error.name}. Install it with `pip install 'eventjet[ui]'`.") from None
    del jinja2, python_multipart, starlette, uvicorn


class ConsoleProcess:
    """At most one at a time, always on the same port."""

    def __init__(self, at: AppTarget, environ: Mapping[str, str], *, allow_actions: bool) -> None:
        """`environ` says where server and database are; `allow_actions` lets whoever is on this machine act."""
        self._at = at
        self._allow_actions = allow_actions
        self._environ = environ
        self._port = _free_port()
        self._process: ServerProcess | None = None
        self._is_told = False

    async def start(self) -> None:
        """Returns once it answers, and says where, the first time; raises `Unreachable` where it ends before."""
        command = [sys.executable, "-P", "-m", "eventjet.cli", "ui", "--told"]
        command += ["--allow-actions"] if self._allow_actions else []
        command += ["--port", str(self._port), "--app", self._at.reference, "--app-dir", str(self._at.folder)]
        process = ServerProcess("The console", Program(command), None, {**os.environ, **self._environ})
        self._process = process
        await asyncio.to_thread(process.await_ready, self._answers, _READY_S)
        if not self._is_told:
            self._is_told = True
            say(f"console: http://{HERE}:{self._port}/")

    async def stop(self) -> None:
        """Any number of times."""
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.stop)

    def _answers(self) -> bool:
        try:
            socket.create_connection((HERE, self._port), timeout=1.0).close()
        except OSError:
            return False
        return True


def _free_port() -> int:
    """The usual one, or another where that is taken."""
    for port in (PORT, 0):
        try:
            with socket.create_server((HERE, port)) as probe:
                return probe.getsockname()[1]
        except OSError:
            continue
    raise UsageError(f"No port of {HERE} is free for the console. Leave --ui out.")
