"""`eventjet dev` and `eventjet demo`: everything on this machine, with nothing but Python."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.db import prepare
from eventjet.cli.running import interruptible, progress, run_until_stopped
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import note, print_table, say

if TYPE_CHECKING:
    from eventjet.dev.stack import Stack


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
    with interruptible() as calm, running_stack(folder, postgres=postgres) as stack:
        settings = replace(at.settings, servers=(stack.servers,), database=stack.database)
        try:
            asyncio.run(_work(replace(at, settings=settings), stack))
        finally:
            calm()
        note("stopped")


async def _work(at: AppTarget, stack: Stack) -> None:
    await prepare(at)
    shown = at.settings.shown()
    note(f"NATS at {shown['servers']}, {shown['database']}")
    note("In another shell:")
    for line in stack.exports(at.reference):
        print(line, flush=True)
    file = stack.write_exports(at.reference)
    note(f"or: . {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}")
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
    from eventjet.dev.demo import Sizes, run_demo

    began = time.monotonic()
    with interruptible(), progress() as shown:
        report = run_demo(Sizes(accounts, commands, imported, engine), shown, say)
    print()
    print_table(("phase", "events", "seconds", "events/s"), report.figures)
    print()
    print_table(("verified", "rows", "differences"), report.verified)
    print()
    _, _, differences = report.verified[-1]
    say(f"Done in {time.monotonic() - began:.0f} s. The last verification: {differences} differences")
