"""`eventjet demo`: the whole road on one machine."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from eventjet.cli.interrupts import interruptible
from eventjet.cli.progress import progress
from eventjet.cli.terminal import print_table, say


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
