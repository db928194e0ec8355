"""The workers of an app: `eventjet worker`, `pause`, `resume`, and with servers of their own `dev` and `demo`."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.db import prepare
from eventjet.cli.running import interruptible, progress, run_until_stopped
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import Answer, note, print_table, say
from eventjet.errors import UsageError

if TYPE_CHECKING:
    from eventjet.dev.stack import Stack

_ENDED_S = 20.0
"""How long servers of our own, and what works on them, may take to end after a signal."""
NamesArgument = Annotated[list[str], typer.Argument(metavar="PROJECTION...", help="Which ones.")]
RevisionOption = Annotated[
    int | None, typer.Option("--revision", metavar="N", min=1, help="Another revision than the app declares.")
]


@on_app()
def worker(
    at: AppTarget,
    projections: Annotated[
        list[str] | None, typer.Argument(metavar="PROJECTION", help="Which ones; default: all of the app.")
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
) -> None:
    """Keep read models up to date until SIGTERM or Ctrl-C, which finish the batch in hand.

    Any number may run: each projection is kept by one of them, and the others stand by.
    """
    from eventjet.workers.health import address_of

    address = None if http is None else address_of(http)
    names = at.chosen(projections or [])
    if not names:
        raise UsageError("The app declares no projections, so there is nothing to work on. List one in its App.")
    asyncio.run(run_until_stopped(at, names, lambda: note(f"ready: {', '.join(names)}"), http=address))


@on_app(servers=False)
def pause(at: AppTarget, projections: NamesArgument, revision: RevisionOption = None) -> Answer:
    """Let projections stand still, all of them or none, until `eventjet resume`.

    Their workers stop before the next commit and stand by. A rebuild may go on; what it swaps in stays paused.
    """
    from eventjet.sql.pausing import pause

    chosen = _chosen(at, projections, revision)
    done = asyncio.run(pause(at.settings.database, chosen, declared=revision is None))
    lines = [
        f"{one.name} revision {one.revision} {'is paused' if one.changed else 'was paused already'} "
        f"at position {one.position:,}"
        for one in done
    ]
    return Answer(done, "\n".join(lines))


@on_app(servers=False)
def resume(at: AppTarget, projections: NamesArgument, revision: RevisionOption = None) -> Answer:
    """Let paused projections go on, all of them or none; a worker that stands by takes them at its next look."""
    from eventjet.sql.pausing import resume

    chosen = _chosen(at, projections, revision)
    done = asyncio.run(resume(at.settings.database, chosen, declared=revision is None))
    lines = [f"{one.name} revision {one.revision} goes on from position {one.position:,}" for one in done]
    return Answer(done, "\n".join(lines))


def _chosen(at: AppTarget, names: Sequence[str], revision: int | None) -> list[tuple[str, int]]:
    chosen = at.chosen(names)
    if revision is not None and len(chosen) > 1:
        raise UsageError("--revision is about one projection. Name one.")
    return [(name, revision or at.app().projections[name].revision) for name in chosen]


@on_app(servers=False, database=False)
def dev(
    at: AppTarget,
    postgres: Annotated[bool, typer.Option("--postgres", help="An embedded PostgreSQL instead of SQLite.")] = False,
    temporary: Annotated[bool, typer.Option("--temporary", help="Keep nothing; else it stays in ./.eventjet.")] = False,
) -> None:
    """Run NATS, a database and the app's workers here, until Ctrl-C.

    Prints what another shell needs to reach them.
    """
    from eventjet.dev.stack import running_stack

    at.app()  # A fault in it is best told before anything starts.
    folder = None if temporary else Path.cwd() / ".eventjet"
    with interruptible(_ENDED_S) as interruption, running_stack(folder, postgres=postgres) as stack:
        settings = replace(at.settings, servers=(stack.servers,), database=stack.database)
        try:
            interruption.run(_work(replace(at, settings=settings), stack))
        finally:
            interruption.calm()
        note("stopped")


async def _work(at: AppTarget, stack: Stack) -> None:
    await prepare(at)
    shown = at.settings.shown()
    note(f"NATS at {shown['servers']}, {shown['database']}")
    note("In another shell:")
    # Not the variables themselves: one holds PostgreSQL's password.
    file = stack.write_exports(at.reference)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    print(f". {shlex.quote(str(shown))}", flush=True)
    names = at.chosen([])
    kept = ", ".join(names) or "no projections"
    await run_until_stopped(at, names, lambda: say(f"ready: {kept}; Ctrl-C stops everything"))


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
