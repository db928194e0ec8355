"""The commands `eventjet dev` and `demo`: local servers with workers and, on request, the console."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.output import Lines, LogFormat, LogFormatOption, Table, log_format, log_to_stderr, note, show
from eventjet.cli.running import interruptible, progress, run_until_stopped, until_signalled
from eventjet.cli.setup import prepare
from eventjet.cli.target import AppTarget, on_app, option, switch
from eventjet.cli.ui import HERE, PORT, check_installed
from eventjet.cli.unique import unbuilt
from eventjet.dev.process import ServerProcess
from eventjet.dev.supervisor import Program
from eventjet.errors import Unreachable, UsageError
from eventjet.text import listed

if TYPE_CHECKING:
    from eventjet.dev.server import EmbeddedServer
    from eventjet.dev.stack import Stack

_ENDED_S = 20.0
"""Seconds that local servers, workers and the console have to end after a signal."""
_READY_S = 60.0
_POLL_S = 0.2
_NAMED_MAX = 3


@on_app(servers=False, database=False)
def dev(
    at: AppTarget,
    postgres: Annotated[bool, switch("--postgres", "An embedded PostgreSQL instead of SQLite.")] = False,
    temporary: Annotated[bool, switch("--temporary", "Keep nothing; else it stays in ./.eventjet.")] = False,
    reload: Annotated[
        bool, switch("--reload", "Start the workers again when a Python file of the app changes.")
    ] = False,
    ui: Annotated[bool, switch("--ui", "Serve the console as well.")] = False,
    allow_actions: Annotated[
        bool | None,
        switch(
            "--allow-actions/--no-allow-actions",
            "Whether everybody on this machine may act in that console; else it asks, and only shows where "
            "nobody can answer.",
        ),
    ] = None,
    logs: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Run NATS, a database and the app's workers here, until Ctrl-C.

    Prints what another shell needs to reach them.
    """
    from eventjet.dev.stack import running_stack

    log_to_stderr(logs)
    if allow_actions is not None and not ui:
        raise UsageError("--allow-actions is about the console. Give --ui as well.")
    if ui:
        check_installed()
    at.app()  # Report a fault in the app before anything starts.
    if ui and allow_actions is None:
        is_asked = sys.stdin.isatty() and sys.stderr.isatty()
        question = "May everybody on this machine pause, retry, drop and rebuild in the console?"
        allow_actions = is_asked and typer.confirm(question, err=True)
    folder = None if temporary else Path.cwd() / ".eventjet"
    with interruptible(_ENDED_S) as interruption, running_stack(folder, postgres=postgres) as stack:
        settings = replace(at.settings, servers=(stack.servers,), database=stack.database)
        try:
            at = replace(at, settings=settings)
            interruption.run(_work(at, stack, reload=reload, ui=ui, allow_actions=bool(allow_actions)))
        finally:
            interruption.ignore_signals()
        note("stopped")


async def _work(at: AppTarget, stack: Stack, *, reload: bool, ui: bool, allow_actions: bool) -> None:
    # Also with `reload`, whose worker prepares again: another shell may at once use what the notes below name.
    await prepare_here(at)
    settings = at.settings.shown()
    note(f"NATS at {settings['servers']}, {settings['database']}")
    note("In another shell:")
    # Print a file to source instead of the variables: one of them holds PostgreSQL's password.
    file = stack.write_exports(at.reference)
    path = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    print(f". {shlex.quote(str(path))}", flush=True)
    environ = {"EVENTJET_SERVERS": stack.servers, "EVENTJET_DATABASE": stack.database}
    environ |= {"EVENTJET_MONITORING": stack.monitoring, "EVENTJET_LOG_FORMAT": log_format()}
    console = ConsoleProcess(at, environ, _console_port(stack), allow_actions=allow_actions) if ui else None
    for moved in stack.ports.notes:
        note(moved)
    if reload:
        await work_reloading(at, environ, console, stack.embedded)
        return
    names = at.work([]).names
    names_text = ", ".join([*names, *served_names(at)]) or "nothing to work on"

    def ready(kept: str) -> None:
        show("; ".join(filter(None, (f"ready: {names_text}", kept, "Ctrl-C stops everything"))))

    try:
        if console is not None:
            await console.start()
        async with serving(at):
            await run_until_stopped(at, names, ready, until=_until_one_ends(stack.embedded))
    finally:
        if console is not None:
            await console.stop()


async def prepare_here(at: AppTarget) -> None:
    """Create all that the app needs on local servers, streams of others too; raises `UnknownAggregate`."""
    from eventjet.dev.streams import make_streams

    async with at.client() as client:
        for words in await make_streams(client, at.app()):
            note(words)
    topology, _ = await prepare(at)
    if topology.unknown:
        note("Where nobody needs what is recorded here, remove the folder .eventjet and begin anew. Else:")
        raise topology.unknown[0]
    for fault in (*map(str, topology.unusable), *await unbuilt(at)):
        note(fault)


@asynccontextmanager
async def serving(at: AppTarget) -> AsyncGenerator[None]:
    """Answer the commands that the app serves during the block, if it serves any, as `eventjet serve` does."""
    async with AsyncExitStack() as ending:
        if at.app().served:
            jet = await ending.enter_async_context(at.app().connect(at.settings))
            await ending.enter_async_context(jet.service())
        yield


def served_names(at: AppTarget) -> list[str]:
    """Return the names of the commands that the app serves."""
    return [f"{at.app().aggregates[command.aggregate].name}.{command.name}" for command in at.app().served]


async def work_reloading(
    at: AppTarget, environ: Mapping[str, str], console: ConsoleProcess | None, servers: Sequence[EmbeddedServer]
) -> None:
    """Run a worker, and a console if there is one, and restart them whenever a source file changes, until a signal.

    `environ` says where server and database are. A worker that ends by itself, for instance over an error in a source
    file, has printed why, and starts again at the next change. It never outlives this process. Raises `Unreachable`
    where watchfiles is not installed, and where one of the servers ends.
    """
    changes = _changes_of(at.folder)
    # The first step starts watching, so that no change is missed while the worker imports.
    change = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    stop = asyncio.ensure_future(_until_signalled(servers))
    try:
        while not stop.done():
            worker = _start_worker(at, environ)
            ended = asyncio.ensure_future(_wait_until_ended(worker))
            try:
                if console is not None:
                    await _start_console(console)
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
                note(f"changed: {_paths_text(change.result(), at.folder)}; the worker starts again")
                change = asyncio.ensure_future(anext(changes))
        stop.result()
    finally:
        stop.cancel()
        change.cancel()
        await asyncio.wait({change, stop})
        await changes.aclose()


async def _start_console(console: ConsoleProcess) -> None:
    """Start the console; where it cannot start, print why and return, so that the next change tries again."""
    try:
        await console.start()
    except Unreachable as error:
        note(f"{error} It starts again when a source changes.")


def _start_worker(at: AppTarget, environ: Mapping[str, str]) -> ServerProcess:
    command = [sys.executable, "-m", "eventjet.cli", "worker", "--prepare"]
    command += ["--app", at.reference, "--app-dir", str(at.folder)]
    return ServerProcess("The worker", Program(command, grace_s=25.0), None, {**os.environ, **environ})


async def _until_signalled(servers: Sequence[EmbeddedServer]) -> None:
    """Wait for a signal; raises `Unreachable` where one of the servers ends before."""
    ending = [asyncio.ensure_future(until_signalled()), asyncio.ensure_future(_until_one_ends(servers))]
    try:
        done, _ = await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in ending:
            each.cancel()
    for each in done:
        each.result()


async def _until_one_ends(servers: Sequence[EmbeddedServer]) -> None:
    """Wait until one of the servers has ended, and raise `Unreachable`: nobody starts it again."""
    while True:
        for server in servers:
            server.check_running()
        await asyncio.sleep(_POLL_S)


async def _wait_until_ended(worker: ServerProcess) -> None:
    while worker.running:  # noqa: ASYNC110 - a process tells nobody of its end
        await asyncio.sleep(_POLL_S)


async def _changes_of(folder: Path) -> AsyncGenerator[set[str]]:
    """Yield the Python files of the app that changed together; raises `Unreachable` without watchfiles."""
    try:
        from watchfiles import PythonFilter, awatch  # pyright: ignore[reportUnknownVariableType]
    except ImportError:
        raise Unreachable("watchfiles", "it is not installed", 'Install it: `pip install "eventjet[dev]"`.') from None
    ignored = [folder / ".eventjet", folder / ".venv", folder / "venv"]
    async for changes in awatch(folder, watch_filter=PythonFilter(ignore_paths=ignored), raise_interrupt=False):
        yield {path for _, path in changes}


def _paths_text(paths: set[str], folder: Path) -> str:
    names = sorted(str(Path(path).relative_to(folder)) for path in paths if Path(path).is_relative_to(folder))
    return listed(names, _NAMED_MAX)


class ConsoleProcess:
    """The console in a process of its own: at most one at a time, always on the same port."""

    def __init__(self, at: AppTarget, environ: Mapping[str, str], port: int, *, allow_actions: bool) -> None:
        """Describe a console on this port; `allow_actions` lets everybody on this machine act in it."""
        self._at = at
        self._allow_actions = allow_actions
        self._environ = environ
        self._port = port
        self._process: ServerProcess | None = None
        self._is_announced = False

    async def start(self) -> None:
        """Start the console, wait 60 s at most for its answer, and print its URL once; raises `Unreachable`."""
        command = [sys.executable, "-P", "-m", "eventjet.cli", "ui", "--announced"]
        command += ["--allow-actions"] if self._allow_actions else []
        command += ["--port", str(self._port), "--app", self._at.reference, "--app-dir", str(self._at.folder)]
        process = ServerProcess("The console", Program(command), None, {**os.environ, **self._environ})
        self._process = process
        await asyncio.to_thread(process.await_ready, self._answers, _READY_S)
        if not self._is_announced:
            self._is_announced = True
            show(f"console: http://{HERE}:{self._port}/")

    async def stop(self) -> None:
        """Stop the console; does nothing where none runs."""
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.stop)

    def _answers(self) -> bool:
        try:
            socket.create_connection((HERE, self._port), timeout=1.0).close()
        except OSError:
            return False
        return True


def _console_port(stack: Stack) -> int:
    """Return the console's port: that of the last time, at first the usual one, or the next that is free."""
    port = stack.ports.of("console", PORT)
    if port is None:
        raise UsageError(f"No port of {HERE} is free for the console. Leave --ui out.")
    stack.ports.keep("console", port)
    return port


def server(
    port: Annotated[
        int, option("--port", "N", "Its port on 127.0.0.1; 0 for any that is free.", min=0, max=65_535)
    ] = 4222,
    store: Annotated[
        Path | None, option("--store", "DIR", "Keep JetStream's data there; else it is removed at the end.")
    ] = None,
) -> None:
    """Run the embedded nats-server alone, with JetStream, until Ctrl-C; prints its URL. For development and tests.

    It listens on this machine only, without passwords or TLS, and has each event on the disk before it acknowledges
    it, as a server in production should.
    """
    from eventjet.dev.nats import NatsServer
    from eventjet.dev.stack import is_free, sole_user

    if port and not is_free(port):
        raise UsageError(
            f"Port {port} of {HERE} is taken, perhaps by another nats-server. Use that one, end it, or give another "
            "--port; --port 0 takes any that is free."
        )
    with interruptible(_ENDED_S) as interruption, ExitStack() as ending:
        if store is not None:
            store.mkdir(parents=True, exist_ok=True)
            ending.enter_context(sole_user(store))
        try:
            nats = ending.enter_context(NatsServer(store, port=port or None))
            show(nats.url)
            note("For development and tests only: everybody on this machine may use it.")
            note(
                "It keeps its data in a temporary folder until it ends."
                if store is None
                else f"Its data is in {store}."
            )
            note(f"In another shell: export EVENTJET_SERVERS={nats.url}")
            note("ready; Ctrl-C stops it")
            interruption.run(_until_one_ends([nats]))
        except KeyboardInterrupt:
            note("stopped")
        finally:
            interruption.ignore_signals()


def demo(
    accounts: Annotated[int, typer.Option("--accounts", min=1, hidden=True)] = 2_000,
    commands: Annotated[int, typer.Option("--commands", min=0, hidden=True)] = 20_000,
    imported: Annotated[int, typer.Option("--imported", min=1, hidden=True)] = 200_000,
    engine: Annotated[str, typer.Option("--engine", hidden=True)] = "spark",
) -> None:
    """Show everything at work: servers, commands, an import, a worker, rebuilds on Spark, verification.

    Takes one to three minutes and leaves nothing behind.
    """
    from eventjet.dev.demo import Demo

    began = time.monotonic()
    with interruptible(_ENDED_S) as interruption, progress() as show_progress:
        run = Demo(accounts, commands, imported, engine, show_progress, show)
        run.run(interruption.run)
    _, _, differences = run.verified[-1]
    show(
        [
            Lines([""]),
            Table(("phase", "events", "seconds", "events/s"), run.figures),
            Lines([""]),
            Table(("verified", "rows", "differences"), run.verified),
            Lines([""]),
            f"Done in {time.monotonic() - began:.0f} s. The last verification: {differences} differences",
        ]
    )
