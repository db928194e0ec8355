"""`eventjet dev`: an app on this machine with nothing but Python, until Ctrl-C."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.init import prepare
from eventjet.cli.interrupts import interruptible
from eventjet.cli.running import run_until_stopped
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import note, say

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

    at.app()  # a fault in it is told before anything is started
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
    exports = stack.exports(at.reference)
    for line in exports:
        print(line, flush=True)
    file = stack.write_exports(at.reference)
    note(f"or: . {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}")
    names = at.chosen([])
    kept = ", ".join(names) or "no projections"
    await run_until_stopped(at, names, lambda: say(f"ready: {kept}; Ctrl-C stops everything"))
