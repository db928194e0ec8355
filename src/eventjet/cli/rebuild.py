"""`eventjet rebuild`: make read models again from the log, beside the live ones, and swap them in."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.target import AppDirOption, AppOption, DatabaseOption, JsonOption, ServersOption, Target, target
from eventjet.errors import UsageError

if TYPE_CHECKING:
    from eventjet.rebuild import EngineName, RebuildReport

EngineOption = Annotated[
    str, typer.Option("--engine", metavar="spark|local", help="Spark, or this process alone without a JVM.")
]
MasterOption = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", help="Spark's; else SPARK_REMOTE, else all cores of this machine."),
]


def rebuild(
    projections: Annotated[list[str], typer.Argument(metavar="PROJECTION", help="Which ones.")],
    engine: EngineOption = "spark",
    master: MasterOption = None,
    json: JsonOption = False,
    app: AppOption = None,
    app_dir: AppDirOption = None,
    servers: ServersOption = None,
    database: DatabaseOption = None,
) -> None:
    """Make read models again from the log while the live ones serve, and swap them in.

    Ctrl-C, or a fault anywhere, leaves the live ones as they are.
    """
    from eventjet.cli.interrupts import terminable, told_when_stopping
    from eventjet.cli.terminal import print_json

    at = target(app, app_dir, servers, database)
    chosen, names = engine_named(engine), at.chosen(projections)
    with terminable("The live read models are as they were."):
        report = asyncio.run(told_when_stopping(_rebuild(at, names, chosen, master)))
    if json:
        print_json({**asdict(report), "seconds": dict(report.seconds)})
    else:
        _print(report)


def engine_named(name: str) -> EngineName:
    """The engine of this name; raises `UsageError`."""
    from eventjet.rebuild import ENGINES

    if name not in ENGINES:
        raise UsageError(f"There is no engine {name!r}. Use {' or '.join(ENGINES)}.")
    return name


async def _rebuild(at: Target, names: list[str], engine: EngineName, master: str | None) -> RebuildReport:
    from eventjet.cli.progress import progress
    from eventjet.rebuild import AppRef, rebuild

    with progress() as shown:
        return await rebuild(
            AppRef.parse(at.reference, at.folder),
            names,
            at.settings,
            engine=engine,
            master=master,
            progress=lambda step: shown(step.phase, step.done, step.total or None),
        )


def _print(report: RebuildReport) -> None:
    from eventjet.cli.terminal import counted, say, where

    for one in report.projections:
        made = f"{counted(one.rows, 'row')} from {counted(report.events, 'event')}"
        how = ", in order" if one.in_order else ""
        say(f"{one.projection} revision {one.revision}: {made}{how}, swapped in at position {one.position:,}")
        if one.place:
            say(
                f"It is {where(one.place)}, beside the revision that readers see. If it is newer, its worker lets it "
                f"take over; `eventjet db promote {one.projection}` does so at once."
            )
    spent = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report.seconds.items())
    say(f"{report.engine} engine: {spent}")
