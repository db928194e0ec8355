"""`eventjet rebuild`: make read models again from the log, beside the live ones, and swap them in."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eventjet.cli.failure import ANSWER_IS_NO
from eventjet.cli.interrupts import finished
from eventjet.cli.target import AppTarget, JsonOption, on_app
from eventjet.cli.terminal import counted, print_json, say, where
from eventjet.errors import UsageError

if TYPE_CHECKING:
    from eventjet.rebuild import Candidate, EngineOptions, Preview, RebuildReport

EngineOption = Annotated[
    str, typer.Option("--engine", metavar="spark|local", help="Spark, or this process alone without a JVM.")
]
MasterOption = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", help="Spark's; else SPARK_REMOTE, else all cores of this machine."),
]
FromArchiveOption = Annotated[
    str | None,
    typer.Option("--from-archive", metavar="URL", help="Read the past from an archive, as far as that goes."),
]
NoShipOption = Annotated[
    bool, typer.Option("--no-ship", help="Do not send the app's package to Spark: it is installed there.")
]


@on_app()
def rebuild(
    at: AppTarget,
    projections: Annotated[list[str], typer.Argument(metavar="PROJECTION", help="Which ones.")],
    engine: EngineOption = "spark",
    master: MasterOption = None,
    from_archive: FromArchiveOption = None,
    no_ship: NoShipOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and what would refuse it; change nothing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Make read models again from the log while the live ones serve, and swap them in.

    Ctrl-C, or a fault anywhere, leaves the live ones as they are.
    """
    from eventjet.rebuild import rebuild as make_again

    chosen, names = engine_options(engine, master, no_ship), at.chosen(projections)
    if dry_run:
        _preview(at, names, chosen, from_archive, json=json)
        return
    report = finished(
        "No live read model was changed but by a swap that was complete.",
        lambda progress: make_again(
            at.ref, names, at.settings, engine=chosen, from_archive=from_archive, progress=progress
        ),
    )
    if json:
        print_json({**asdict(report), "seconds": dict(report.seconds)})
    else:
        _print(report)


def engine_options(name: str, master: str | None, no_ship: bool = False) -> EngineOptions:
    """The engine of this name; raises `UsageError`."""
    from eventjet.rebuild import ENGINES, EngineOptions

    if name not in ENGINES:
        raise UsageError(f"There is no engine {name!r}. Use {' or '.join(ENGINES)}.")
    return EngineOptions(name, master, ship=not no_ship)


def _print(report: RebuildReport) -> None:
    for one in report.projections:
        made = f"{counted(one.rows, 'row')} from {counted(report.events, 'event')}"
        how = ", sequentially" if one.sequential else ""
        say(f"{one.projection} revision {one.revision}: {made}{how}, swapped in at position {one.position:,}")
        if one.location:
            say(
                f"It is {where(one.location)}, beside the revision that readers see. If it is newer, its worker lets "
                f"it take over; `eventjet db promote {one.projection}` does so at once."
            )
    spent = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report.seconds.items())
    say(f"{report.engine} engine: {spent}")
    total_s = sum(report.seconds.values())
    local_s = report.local_at_most_s
    if local_s is not None and local_s < total_s:
        say(
            f"Starting Spark outweighed the work: `--engine local` would have taken about {local_s:.0f} s or less, "
            f"and this took {total_s:.0f} s."
        )


def _preview(at: AppTarget, names: list[str], engine: EngineOptions, from_archive: str | None, *, json: bool) -> None:
    from eventjet.rebuild import preview

    app = at.ref
    planned = preview(app, names, at.settings, engine=engine, from_archive=from_archive)
    found = asyncio.run(planned)
    if json:
        print_json(_as_json(found))
    else:
        _print_preview(found)
    if found.refusals:
        raise typer.Exit(ANSWER_IS_NO)


def _print_preview(found: Preview) -> None:
    plan = found.plan
    for one in found.candidates:
        say(f"{one.projection} revision {one.revision}: {one.route.value}; {_live(one)}")
    say(f"{plan.stream}: {counted(plan.events, 'event')}, positions {plan.first:,} to {plan.last:,}")
    if plan.archived >= plan.first:
        say(f"Positions up to {min(plan.archived, plan.last):,} would be read from the archive.")
    on = f"spark engine on {found.master}" if found.master else "local engine"
    ranges, parts = counted(len(plan.ranges), "range"), counted(plan.partitions, "partition")
    say(f"{on}: the log is read {_times(len(plan.passes))}, in {ranges} into {parts}")
    say(f"{found.database}: the shadows would be in {found.location}")
    if found.upgrades:
        say("eventjet's own tables would be made, or brought up to date, first.")
    if found.remains:
        say(f"What killed rebuilds left would be removed first: {', '.join(found.remains)}.")
    for refusal in found.refusals:
        say(f"Refused: {refusal}")
    say("Nothing was changed.")


def _live(one: Candidate) -> str:
    return "no live one yet" if one.position is None else f"the live one is {one.state} at position {one.position:,}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _as_json(found: Preview) -> dict[str, Any]:
    plan = found.plan
    return {
        "engine": plan.engine,
        "master": found.master,
        "stream": plan.stream,
        "first": plan.first,
        "last": plan.last,
        "archived": plan.archived,
        "events": plan.events,
        "ranges": [one._asdict() for one in plan.ranges],
        "partitions": plan.partitions,
        "passes": [
            {"route": one.route.value, "projections": [step.projection for step in one.steps]} for one in plan.passes
        ],
        "projections": [{**asdict(one), "route": one.route.value} for one in found.candidates],
        "database": found.database,
        "location": found.location,
        "upgrades": found.upgrades,
        "remains": found.remains,
        "refusals": found.refusals,
    }
