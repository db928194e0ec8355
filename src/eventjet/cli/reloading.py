"""The worker of `eventjet dev --reload`: a process of its own, started again whenever a source of the app changes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from eventjet.cli.console_process import ConsoleProcess
from eventjet.cli.running import until_signalled
from eventjet.cli.target import AppTarget
from eventjet.cli.terminal import note
from eventjet.dev.process import ServerProcess
from eventjet.dev.supervisor import Program
from eventjet.errors import Unreachable

_LOOK_S = 0.2
_NAMED_MAX = 3


async def work_reloading(at: AppTarget, environ: Mapping[str, str], console: ConsoleProcess | None) -> None:
    """Keep a worker, and the console if there is to be one, at the app as its sources are, until a signal.

    `environ` says where server and database are. A worker that ended, over an error in a source for one, has said why,
    and the next change is waited for. It ends with this process, however that ends. Raises `Unreachable` without
    watchfiles.
    """
    changes = _changes_of(at.folder)
    # The first step begins to watch, so that nothing is missed from before the worker imports.
    change = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    stop = asyncio.ensure_future(until_signalled())
    try:
        while not stop.done():
            worker = _started(at, environ)
            ended = asyncio.ensure_future(_ended(worker))
            try:
                if console is not None:
                    await _start(console)
                await asyncio.wait({change, stop, ended}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done() and not change.done() and not stop.done():
                    note("The worker has ended; it starts again when a source changes.")
                    await asyncio.wait({change, stop}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
                if console is not None:
                    await console.stop()
                await asyncio.to_thread(worker.stop)
            if change.done():
                note(f"changed: {_named(change.result(), at.folder)}; the worker starts again")
                change = asyncio.ensure_future(anext(changes))
    finally:
        stop.cancel()
        change.cancel()
        await asyncio.wait({change, stop})
        await changes.aclose()


async def _start(console: ConsoleProcess) -> None:
    """One that cannot start, over an error in a source for one, has said why."""
    try:
        await console.start()
    except Unreachable as error:
        note(f"{error} It starts again when a source changes.")


def _started(at: AppTarget, environ: Mapping[str, str]) -> ServerProcess:
    command = [sys.executable, "-m", "eventjet.cli", "worker", "--prepare"]
    command += ["--app", at.reference, "--app-dir", str(at.folder)]
    return ServerProcess("The worker", Program(command, grace_s=25.0), None, {**os.environ, **environ})


async def _ended(worker: ServerProcess) -> None:
    while worker.running:  # noqa: ASYNC110 - a process tells nobody of its end
        await asyncio.sleep(_LOOK_S)


async def _changes_of(folder: Path) -> AsyncGenerator[set[str]]:
    """Paths of Python files that changed together; not those of environments, caches and our own data."""
    try:
        from watchfiles import PythonFilter, awatch  # pyright: ignore[reportUnknownVariableType]
    except ImportError:
        raise Unreachable("watchfiles", "it is not installed", 'Install it: `pip install "eventjet[dev]"`.') from None
    ignored = [folder / ".eventjet", folder / ".venv", folder / "venv"]
    async for found in awatch(folder, watch_filter=PythonFilter(ignore_paths=ignored), raise_interrupt=False):
        yield {path for _, path in found}


def _named(paths: set[str], folder: Path) -> str:
    names = sorted(str(Path(path).relative_to(folder)) for path in paths if Path(path).is_relative_to(folder))
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more:,} more" if more > 0 else "")
