"""`eventjet demo`: the whole road on one machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.interrupts import interruptible
from eventjet.cli.progress import ProgressView, progress
from eventjet.cli.terminal import print_table, say

if TYPE_CHECKING:
    from eventjet.dev.demo import DemoReport


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

    with interruptible(), progress() as shown:
        report = run_demo(Sizes(accounts, commands, imported, engine), _Teller(shown))
    _print(report)


class _Teller:
    """Bars or lines of progress, and prose between them."""

    def __init__(self, shown: ProgressView) -> None:
        self._shown = shown

    def progress(self, phase: str, done: int, total: int | None = None, step: str = "") -> None:
        self._shown(phase, done, total, step)

    def say(self, text: str) -> None:
        say(text)


def _print(report: DemoReport) -> None:
    rows = [(one.phase, one.events, one.seconds, round(one.rate)) for one in report.figures]
    print()
    print_table(("phase", "events", "seconds", "events/s"), rows)
    print()
    print_table(("verified", "rows", "differences"), [(one.when, one.rows, one.differences) for one in report.verified])
    last = report.verified[-1]
    print()
    say(f"Done in {report.seconds:.0f} s. The last verification: {last.differences} differences")
