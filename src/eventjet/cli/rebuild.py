"""`eventjet rebuild`, `verify` and `snapshots build`: the log folded in bulk, on Spark or in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from eventjet.cli.completing import names_of
from eventjet.cli.running import finished
from eventjet.cli.target import AppTarget, on_app, without_token
from eventjet.cli.terminal import Answer, say
from eventjet.errors import UsageError
from eventjet.shown import counted, spent

if TYPE_CHECKING:
    from eventjet.rebuild import EngineOptions, Preview, SnapshotReport, VerifyReport
    from eventjet.rebuild.plan import EngineChoice

EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="auto|spark|local",
        help="Spark, or this process alone without a JVM; auto: Spark for a cluster or a large log.",
    ),
]
MasterOption = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="URL",
        callback=without_token,
        help="Spark's; else SPARK_REMOTE, else all cores of this machine.",
    ),
]
FromArchiveOption = Annotated[
    str | None,
    typer.Option("--from-archive", metavar="URL", help="Read the past from an archive, as far as that goes."),
]
NoShipOption = Annotated[
    bool, typer.Option("--no-ship", help="Do not send the app's package to Spark: it is installed there.")
]
ProcessesOption = Annotated[
    int,
    typer.Option("--processes", metavar="N", min=1, max=64, help="How many fold, where it is the local engine."),
]

snapshots = typer.Typer(name="snapshots", help="Folded states that are kept beside the log.", no_args_is_help=True)


@on_app(jvm=True)
def rebuild(
    at: AppTarget,
    projections: Annotated[
        list[str],
        typer.Argument(metavar="PROJECTION", help="Which ones.", autocompletion=names_of("projections")),
    ],
    engine: EngineOption = "auto",
    master: MasterOption = None,
    from_archive: FromArchiveOption = None,
    no_ship: NoShipOption = False,
    processes: ProcessesOption = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and what would refuse it; change nothing.")
    ] = False,
) -> Answer:
    """Make read models again from the log while the live ones serve, and swap them in.

    Ctrl-C, or a fault anywhere, leaves the live ones as they are.
    """
    from eventjet.operations.rebuilding import preview_told, rebuilt_told
    from eventjet.rebuild import preview
    from eventjet.rebuild import rebuild as make_again

    chosen, names = _engine_options(engine, master, no_ship, processes), at.chosen(projections)
    if dry_run:
        planned = asyncio.run(preview(at.ref, names, at.settings, engine=chosen, from_archive=from_archive))
        return Answer(_as_json(planned), lambda: _print(preview_told(planned)), ok=not planned.refusals)
    work = partial(make_again, at.ref, names, at.settings, engine=chosen, from_archive=from_archive)
    report = finished("No live read model was changed but by a swap that was complete.", work)
    return Answer(report, lambda: _print(rebuilt_told(report)))


@on_app(jvm=True)
def verify(
    at: AppTarget,
    projection: Annotated[
        str, typer.Argument(metavar="PROJECTION", help="Which one.", autocompletion=names_of("projections"))
    ],
    engine: EngineOption = "auto",
    master: MasterOption = None,
    from_archive: FromArchiveOption = None,
    no_ship: NoShipOption = False,
    processes: ProcessesOption = 1,
) -> Answer:
    """Compare a read model with the log, row by row; exit status 1 when they differ.

    Workers, commands and readers go on meanwhile. The first differences are named, with the position since which
    the row is not what the log says.
    """
    from eventjet.operations.verification import shown_difference
    from eventjet.rebuild import verify as compare

    chosen = _engine_options(engine, master, no_ship, processes)
    name = at.projection(projection).name
    work = partial(compare, at.ref, name, at.settings, engine=chosen, from_archive=from_archive)
    report = finished("Nothing was changed.", work)
    private = at.app().projections[name].is_private
    value = {**asdict(report), "examples": [shown_difference(one, private=private) for one in report.examples]}
    return Answer(value, lambda: _print_verified(report, private=private), ok=not report.differences)


@snapshots.command()
@on_app(database=False, jvm=True)
def build(
    at: AppTarget,
    aggregate: Annotated[
        str, typer.Argument(metavar="AGGREGATE", help="Which type.", autocompletion=names_of("aggregates"))
    ],
    min_events: Annotated[
        int | None,
        typer.Option("--min-events", metavar="N", help="Only aggregates with so many; default: its snapshot_every."),
    ] = None,
    engine: EngineOption = "auto",
    master: MasterOption = None,
) -> Answer:
    """Write the snapshots of all aggregates of a type from one reading of the log.

    Commands go on meanwhile, and no snapshot takes the place of a newer one. Exit status 1 when a history is broken.
    """
    from eventjet.rebuild import build_snapshots

    chosen = _engine_options(engine, master)
    report = finished(
        "Snapshots written so far are kept; run it again for the others.",
        partial(build_snapshots, at.ref, aggregate, at.settings, engine=chosen, min_events=min_events),
    )
    value = asdict(report)
    tally = value.pop("tally")
    return Answer(value | tally, lambda: _print_built(report), ok=not report.tally.broken)


def _engine_options(name: str, master: str | None, no_ship: bool = False, processes: int = 1) -> EngineOptions:
    """The engine of this name; raises `UsageError`."""
    from eventjet.rebuild import EngineOptions
    from eventjet.rebuild.job import options_of

    if name == "local" and master is not None:
        raise UsageError("--master is Spark's, and --engine local runs without it. Leave one of them out.")
    if name == "spark" and processes != 1:
        raise UsageError("--processes is the local engine's; Spark has its own, as --master says. Leave it out.")
    return options_of(EngineOptions(cast("EngineChoice", name), master, ship=not no_ship, processes=processes))


def _print(lines: Iterator[str]) -> None:
    for line in lines:
        say(line)


def _as_json(planned: Preview) -> dict[str, Any]:
    plan = planned.plan
    return {
        **{name: getattr(plan, name) for name in ("engine", "stream", "first", "last", "archived", "events")},
        "ranges": [one._asdict() for one in plan.ranges],
        "partitions": plan.partitions,
        "passes": [{"route": one.route.value, "projections": list(one.projections)} for one in plan.passes],
        "projections": [{**asdict(one), "route": one.route.value} for one in planned.candidates],
        **{name: getattr(planned, name) for name in ("master", "database", "location", "upgrades", "leftovers")},
        "refusals": planned.refusals,
    }


def _print_verified(report: VerifyReport, *, private: bool) -> None:
    from eventjet.operations.verification import compared, shown_key

    differences = counted(report.differences, "difference")
    say(f"{differences}: {report.projection} at position {report.position:,}, {counted(report.rows, 'row')}")
    for example in report.examples:
        say(f"  - {shown_key(example.key)}: {compared(example, private=private)}; {example.since}")
    if report.differences > len(report.examples):
        say(f"  - and {report.differences - len(report.examples):,} more")
    if report.finding:
        say(report.finding.fix)


def _print_built(report: SnapshotReport) -> None:
    tally = report.tally
    written, read = counted(tally.written, "snapshot"), counted(tally.events, "event")
    aggregates = counted(tally.aggregates, "aggregate")
    say(f"{report.aggregate}: {written} written from {read} of {aggregates}, at position {report.position:,}")
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
    say(f"{report.engine} engine: {spent(report.seconds)}")
