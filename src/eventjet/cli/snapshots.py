"""`eventjet snapshots`: work on the folded states that are kept beside the log."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.failure import ANSWER_IS_NO
from eventjet.cli.interrupts import finished
from eventjet.cli.rebuild import EngineOption, MasterOption, engine_options
from eventjet.cli.target import AppTarget, JsonOption, on_app
from eventjet.cli.terminal import counted, print_json, say

if TYPE_CHECKING:
    from eventjet.rebuild import SnapshotReport

snapshots = typer.Typer(name="snapshots", help="Folded states that are kept beside the log.", no_args_is_help=True)


@snapshots.command()
@on_app(database=False)
def build(
    at: AppTarget,
    aggregate: Annotated[str, typer.Argument(help="Which type.")],
    min_events: Annotated[
        int | None,
        typer.Option("--min-events", metavar="N", help="Only aggregates with so many; default: its snapshot_every."),
    ] = None,
    engine: EngineOption = "spark",
    master: MasterOption = None,
    json: JsonOption = False,
) -> None:
    """Write the snapshots of all aggregates of a type from one reading of the log.

    Commands go on meanwhile, and no snapshot takes the place of a newer one. Exit status 1 when a history is broken.
    """
    from eventjet.rebuild import build_snapshots

    chosen = engine_options(engine, master)
    report = finished(
        "Snapshots written so far are kept; run it again for the others.",
        lambda progress: build_snapshots(
            at.ref, aggregate, at.settings, engine=chosen, min_events=min_events, progress=progress
        ),
    )
    if json:
        told = asdict(report)
        print_json({**told, **told.pop("tally"), "seconds": dict(report.seconds)})
    else:
        _print(report)
    if report.tally.broken:
        raise typer.Exit(ANSWER_IS_NO)


def _print(report: SnapshotReport) -> None:
    tally = report.tally
    read = f"{counted(tally.events, 'event')} of {counted(tally.aggregates, 'aggregate')}"
    say(
        f"{report.aggregate}: {counted(tally.written, 'snapshot')} written from {read}, at position {report.position:,}"
    )
    left = {
        "had a newer one, or the same": tally.newer,
        f"have fewer than {counted(report.min_events, 'event')}": tally.few,
        "are too large for the bucket": tally.too_large,
        "have a state that would not come back from JSON": tally.unkept,
        "could not be folded": tally.broken,
    }
    for why, number in left.items():
        if number:
            say(f"  - {number:,} {why}")
    for fault in tally.told:
        say(f"  - {fault}")
    if tally.broken > len(tally.told):
        say(f"  - and {tally.broken - len(tally.told):,} more")
    spent = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report.seconds.items())
    say(f"{report.engine} engine: {spent}")
