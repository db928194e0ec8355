"""The workers of an app: `eventjet worker`, `pause`, `resume`, and with servers of their own `dev` and `demo`."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.completing import names_of
from eventjet.cli.console_process import ConsoleProcess, check_installed
from eventjet.cli.db import prepare
from eventjet.cli.reloading import work_reloading
from eventjet.cli.running import interruptible, progress, run_until_stopped
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import Answer, LogFormat, LogFormatOption, log_format, log_to_stderr, note, print_table, say
from eventjet.errors import UsageError

if TYPE_CHECKING:
    from eventjet.dev.stack import Stack

_ENDED_S = 20.0
"""How long servers of our own, and what works on them, may take to end after a signal."""
NamesArgument = Annotated[
    list[str], typer.Argument(metavar="NAME", help="Which ones.", autocompletion=names_of("work"))
]
RevisionOption = Annotated[
    int | None, typer.Option("--revision", metavar="N", min=1, help="Another revision than the app declares.")
]


@on_app()
def worker(
    at: AppTarget,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Projections, reactors, processes; default: all of the app.",
            autocompletion=names_of("work"),
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            envvar="EVENTJET_WORKER_HTTP",
            help="Tell /healthz and /metrics there; else nowhere.",
        ),
    ] = None,
    make: Annotated[bool, typer.Option("--prepare", hidden=True)] = False,
    logs: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Keep read models up to date, and do what events lead to, until SIGTERM or Ctrl-C, which finish what is in hand.

    Any number may run: each projection, reactor and process is worked on by one of them, and the others stand by.
    """
    from eventjet.subscriptions.health import address_of

    log_to_stderr(logs)
    address = None if http is None else address_of(http)
    chosen = at.work(names or []).names
    if not chosen:
        raise UsageError("The app declares nothing to work on. List a projection or a reactor in its App.")
    if make:  # `dev --reload`, whose worker may come with new tables
        asyncio.run(prepare(at))
    asyncio.run(
        run_until_stopped(
            at,
            chosen,
            lambda: note(f"ready: {', '.join(chosen)}; working or standing by"),
            http=address,
        )
    )


@on_app()
def pause(at: AppTarget, names: NamesArgument, revision: RevisionOption = None) -> Answer:
    """Let projections, reactors or processes stand still, all of them or none, until `eventjet resume`.

    Their workers stop before the next commit, or event, and stand by. A rebuild may go on; what it swaps in stays
    paused.
    """
    from eventjet.operations.pausing import pause, paused_told

    done = asyncio.run(pause(at.app(), at.settings, names, revision))
    return Answer(done, "\n".join(paused_told(at.app(), one) for one in done))


@on_app()
def resume(at: AppTarget, names: NamesArgument, revision: RevisionOption = None) -> Answer:
    """Let what is paused go on, all of it or none; a worker that stands by takes it at its next look."""
    from eventjet.operations.pausing import resume, resumed_told

    done = asyncio.run(resume(at.app(), at.settings, names, revision))
    return Answer(done, "\n".join(resumed_told(at.app(), one) for one in done))


@on_app(servers=False, database=False, jvm=True)
def dev(
    at: AppTarget,
    postgres: Annotated[bool, typer.Option("--postgres", help="An embedded PostgreSQL instead of SQLite.")] = False,
    temporary: Annotated[bool, typer.Option("--temporary", help="Keep nothing; else it stays in ./.eventjet.")] = False,
    reload: Annotated[
        bool, typer.Option("--reload", help="Start the workers again when a Python file of the app changes.")
    ] = False,
    ui: Annotated[bool, typer.Option("--ui", help="Serve the console as well.")] = False,
    allow_actions: Annotated[
        bool | None,
        typer.Option(
            "--allow-actions/--no-allow-actions",
            help="Whether everybody on this machine may act in that console; else it asks, and only shows where "
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
    at.app()  # A fault in it is best told before anything starts.
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
            interruption.calm()
        note("stopped")


async def _work(at: AppTarget, stack: Stack, *, reload: bool, ui: bool, allow_actions: bool) -> None:
    if not reload:
        await prepare(at)
    shown = at.settings.shown()
    note(f"NATS at {shown['servers']}, {shown['database']}")
    note("In another shell:")
    # Not the variables themselves: one holds PostgreSQL's password.
    file = stack.write_exports(at.reference, at.settings.jvm_cache)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    print(f". {shlex.quote(str(shown))}", flush=True)
    environ = {"EVENTJET_SERVERS": stack.servers, "EVENTJET_DATABASE": stack.database}
    if (jvm_cache := at.settings.jvm_cache) is not None:
        environ["EVENTJET_JVM_CACHE"] = str(jvm_cache.absolute())
    environ |= {"EVENTJET_MONITORING": stack.monitoring, "EVENTJET_LOG_FORMAT": log_format()}
    console = ConsoleProcess(at, environ, allow_actions=allow_actions) if ui else None
    if reload:
        await work_reloading(at, environ, console)
        return
    names = at.work([]).names
    kept = ", ".join(names) or "nothing to work on"
    try:
        if console is not None:
            await console.start()
        await run_until_stopped(at, names, lambda: say(f"ready: {kept}; Ctrl-C stops everything"))
    finally:
        if console is not None:
            await console.stop()


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
    with interruptible(_ENDED_S) as interruption, progress() as shown:
        run = Demo(accounts, commands, imported, engine, shown, say)
        run.run(interruption.run)
    print()
    print_table(("phase", "events", "seconds", "events/s"), run.figures)
    print()
    print_table(("verified", "rows", "differences"), run.verified)
    print()
    _, _, differences = run.verified[-1]
    say(f"Done in {time.monotonic() - began:.0f} s. The last verification: {differences} differences")
