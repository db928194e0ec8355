"""`eventjet rebuild`, `verify` and `snapshots build`: the log folded in bulk, on Spark or in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from eventjet.cli.completing import names_of
from eventjet.cli.running import finished
from eventjet.cli.target import AppTarget, on_app, without_token
from eventjet.cli.terminal import Answer, counted, say, spent, where
from eventjet.errors import UsageError
from eventjet.shown import cut

if TYPE_CHECKING:
    from eventjet.rebuild import Difference, EngineOptions, Preview, RebuildReport, SnapshotReport, VerifyReport
    from eventjet.rebuild.choice import EngineChoice

EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="auto|spark|local",
        help="Spark, or this process alone without a JVM; auto: Spark where it is configured or pays.",
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

snapshots = typer.Typer(name="snapshots", help="Folded states that are kept beside the log.", no_args_is_help=True)


@on_app()
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and what would refuse it; change nothing.")
    ] = False,
) -> Answer:
    """Make read models again from the log while the live ones serve, and swap them in.

    Ctrl-C, or a fault anywhere, leaves the live ones as they are.
    """
    from eventjet.rebuild import preview
    from eventjet.rebuild import rebuild as make_again

    chosen, names = _engine_options(engine, master, no_ship), at.chosen(projections)
    if dry_run:
        planned = asyncio.run(preview(at.ref, names, at.settings, engine=chosen, from_archive=from_archive))
        return Answer(_as_json(planned), lambda: _print_preview(planned), ok=not planned.refusals)
    work = partial(make_again, at.ref, names, at.settings, engine=chosen, from_archive=from_archive)
    report = finished("No live read model was changed but by a swap that was complete.", work)
    return Answer(report, lambda: _print_rebuilt(report))


@on_app()
def verify(
    at: AppTarget,
    projection: Annotated[
        str, typer.Argument(metavar="PROJECTION", help="Which one.", autocompletion=names_of("projections"))
    ],
    engine: EngineOption = "auto",
    master: MasterOption = None,
    from_archive: FromArchiveOption = None,
    no_ship: NoShipOption = False,
) -> Answer:
    """Compare a read model with the log, row by row; exit status 1 when they differ.

    Workers, commands and readers go on meanwhile. The first differences are named, with the position since which
    the row is not what the log says.
    """
    from eventjet.rebuild import verify as compare

    chosen = _engine_options(engine, master, no_ship)
    name = at.projection(projection).name
    work = partial(compare, at.ref, name, at.settings, engine=chosen, from_archive=from_archive)
    report = finished("Nothing was changed.", work)
    private = at.app().projections[name].is_private
    sides = [(_columns(one.live, private=private), _columns(one.expected, private=private)) for one in report.examples]
    examples = [
        {"key": shown_key(one.key), "live": live, "expected": expected, "columns": one.columns, "since": one.since}
        for one, (live, expected) in zip(report.examples, sides, strict=True)
    ]
    value = {**asdict(report), "examples": examples}
    return Answer(value, lambda: _print_verified(report, private=private), ok=not report.differences)


@snapshots.command()
@on_app(database=False)
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


def _engine_options(name: str, master: str | None, no_ship: bool = False) -> EngineOptions:
    """The engine of this name; raises `UsageError`."""
    from eventjet.rebuild import EngineOptions
    from eventjet.rebuild.job import options_of

    if name == "local" and master is not None:
        raise UsageError("--master is Spark's, and --engine local runs without it. Leave one of them out.")
    return options_of(EngineOptions(cast("EngineChoice", name), master, ship=not no_ship))


def _print_rebuilt(report: RebuildReport) -> None:
    for one in report.projections:
        made = f"{counted(one.rows, 'row')} from {counted(report.events, 'event')}"
        how = ", sequentially" if one.sequential else ""
        say(f"{one.projection} revision {one.revision}: {made}{how}, swapped in at position {one.position:,}")
        if one.location:
            say(
                f"It is {where(one.location)}, beside the revision that readers see. If it is newer, its worker lets "
                f"it take over; `eventjet db promote {one.projection}` does so at once."
            )
    _print_beginning(report.first)
    say(f"{report.engine} engine: {spent(report.seconds)}")
    total_s = sum(report.seconds.values())
    local_s = report.local_at_most_s
    if local_s is not None and local_s < total_s:
        say(
            f"Starting Spark outweighed the work: `--engine local` would have taken about {local_s:.0f} s or less, "
            f"and this took {total_s:.0f} s."
        )


def _print_beginning(first: int) -> None:
    if first > 1:
        say(
            f"The log begins at position {first:,}: rows hold nothing of what came before. If an archive has it, use "
            "`--from-archive`."
        )


def _print_preview(planned: Preview) -> None:
    plan = planned.plan
    for one in planned.candidates:
        live = (
            "no live one yet" if one.position is None else f"the live one is {one.state} at position {one.position:,}"
        )
        say(f"{one.projection} revision {one.revision}: {one.route.value}; {live}")
    say(f"{plan.stream}: {counted(plan.events, 'event')}, positions {plan.first:,} to {plan.last:,}")
    _print_beginning(plan.first)
    if plan.archived >= plan.first:
        say(f"Positions up to {min(plan.archived, plan.last):,} would be read from the archive.")
    on = f"spark engine on {planned.master}" if planned.master else "local engine"
    times = "once" if len(plan.passes) == 1 else f"{len(plan.passes)} times"
    ranges, parts = counted(len(plan.ranges), "range"), counted(plan.partitions, "partition")
    say(f"{on}: the log is read {times}, in {ranges} into {parts}")
    say(f"{planned.database}: the shadows would be in {planned.location}")
    if planned.upgrades:
        say("eventjet's own tables would be made, or brought up to date, first.")
    if planned.remains:
        say(f"What killed rebuilds left would be removed first: {', '.join(planned.remains)}.")
    for refusal in planned.refusals:
        say(f"Refused: {refusal}")
    say("Nothing was changed.")


def _as_json(planned: Preview) -> dict[str, Any]:
    plan = planned.plan
    return {
        **{name: getattr(plan, name) for name in ("engine", "stream", "first", "last", "archived", "events")},
        "ranges": [one._asdict() for one in plan.ranges],
        "partitions": plan.partitions,
        "passes": [{"route": one.route.value, "projections": list(one.projections)} for one in plan.passes],
        "projections": [{**asdict(one), "route": one.route.value} for one in planned.candidates],
        **{name: getattr(planned, name) for name in ("master", "database", "location", "upgrades", "remains")},
        "refusals": planned.refusals,
    }


def _print_verified(report: VerifyReport, *, private: bool) -> None:
    differences = counted(report.differences, "difference")
    say(f"{differences}: {report.projection} at position {report.position:,}, {counted(report.rows, 'row')}")
    for example in report.examples:
        say(f"  - {shown_key(example.key)}: {_compared(example, private=private)}; {example.since}")
    if report.differences > len(report.examples):
        say(f"  - and {report.differences - len(report.examples):,} more")
    if report.differences:
        say(f"`eventjet rebuild {report.projection}` makes it again from the log.")


def _compared(example: Difference, *, private: bool) -> str:
    """What differs between two rows, column by column."""
    if example.live is None:
        return "it has no row and should have one"
    if example.expected is None:
        return "it has a row and should have none"
    live, expected = _columns(example.live, private=private) or {}, _columns(example.expected, private=private) or {}
    return ", ".join(
        _told_apart(name, (live[name], expected[name]), (_value(example.live, name), _value(example.expected, name)))
        for name in example.columns
    )


def _told_apart(name: str, shown: tuple[Any, Any], values: tuple[Any, Any]) -> str:
    """One column as it may be shown: by its values; where they print alike by their types, or in these words."""
    live, expected = (cut(str(one)) for one in shown)
    kinds = [type(one).__name__ for one in values]
    if live != expected:
        return f"{name} is {live} and should be {expected}"
    if kinds[0] != kinds[1]:
        return f"{name} is {live} ({kinds[0]}) and should be {expected} ({kinds[1]})"
    alike = f" ({kinds[0]}) and should be another one, which prints alike" if str(values[0]) == str(values[1]) else ""
    return f"{name} is {live}{alike or ' and should be another one'}"


def _value(row: Any, name: str) -> Any:
    return cast("Mapping[str, Any]", row)[name] if isinstance(row, Mapping) else getattr(row, name)


def _columns(row: Any, *, private: bool) -> Mapping[str, Any] | None:
    """A row as it may be shown; of a table by hand nobody knows which columns are personal."""
    from eventjet.domain.personal import masked_row, masked_whole

    if row is None or not isinstance(row, Mapping):
        return None if row is None else masked_row(row)
    named = dict(cast("Mapping[str, Any]", row))
    return masked_whole(named) if private else named


def shown_key(key: tuple[Any, ...]) -> str:
    """A key as one writes it; the parts of a composite one separated by commas."""
    return ", ".join(map(str, key))


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
