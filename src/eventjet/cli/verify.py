"""`eventjet verify`: compare a read model with the log, row by row, with nothing paused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from eventjet.cli.failure import ANSWER_IS_NO
from eventjet.cli.rebuild import EngineOption, FromArchiveOption, MasterOption, NoShipOption, engine_options
from eventjet.cli.target import AppDirOption, AppOption, DatabaseOption, JsonOption, ServersOption, Target, target

if TYPE_CHECKING:
    from eventjet.rebuild import Difference, EngineOptions, VerifyReport


def verify(
    projection: Annotated[str, typer.Argument(help="Which one.")],
    engine: EngineOption = "local",
    master: MasterOption = None,
    from_archive: FromArchiveOption = None,
    no_ship: NoShipOption = False,
    json: JsonOption = False,
    app: AppOption = None,
    app_dir: AppDirOption = None,
    servers: ServersOption = None,
    database: DatabaseOption = None,
) -> None:
    """Compare a read model with the log, row by row; exit status 1 when they differ.

    Workers, commands and readers go on meanwhile. The first differences are named, with the position since which
    the row is not what the log says.
    """
    from eventjet.cli.interrupts import terminable, told_when_stopping
    from eventjet.cli.terminal import print_json

    at = target(app, app_dir, servers, database)
    chosen = engine_options(engine, master, no_ship)
    (name,) = at.chosen([projection])
    with terminable("Nothing was changed."):
        report = asyncio.run(told_when_stopping(_verify(at, name, chosen, from_archive)))
    if json:
        examples = [{**asdict(one), "key": shown_key(one.key)} for one in report.examples]
        print_json({**asdict(report), "seconds": dict(report.seconds), "examples": examples})
    else:
        _print(report)
    if report.differences:
        raise typer.Exit(ANSWER_IS_NO)


async def _verify(at: Target, name: str, engine: EngineOptions, from_archive: str | None) -> VerifyReport:
    from eventjet.cli.progress import progress
    from eventjet.rebuild import AppRef, verify

    with progress() as shown:
        return await verify(
            AppRef.parse(at.reference, at.folder),
            name,
            at.settings,
            engine=engine,
            from_archive=from_archive,
            progress=lambda step: shown(step.phase, step.done, step.total or None),
        )


def _print(report: VerifyReport) -> None:
    from eventjet.cli.terminal import counted, say

    found = counted(report.differences, "difference")
    say(f"{found}: {report.projection} at position {report.position:,}, {counted(report.rows, 'row')}")
    for one in report.examples:
        say(f"  - {shown_key(one.key)}: {_compared(one)}; {one.since}")
    if report.differences > len(report.examples):
        say(f"  - and {report.differences - len(report.examples):,} more")
    if report.differences:
        say(f"`eventjet rebuild {report.projection}` makes it again from the log.")


def _compared(one: Difference) -> str:
    """What differs between two rows, column by column."""
    if one.live is None:
        return "it has no row and should have one"
    if one.expected is None:
        return "it has a row and should have none"
    live, expected = _columns(one.live), _columns(one.expected)
    pairs = [(name, value, expected[name]) for name, value in live.items()]
    return ", ".join(f"{name} is {value} and should be {due}" for name, value, due in pairs if value != due)


def _columns(row: Any) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        return cast("Mapping[str, Any]", row)
    return {field.name: getattr(row, field.name) for field in fields(row)}


def shown_key(key: tuple[Any, ...]) -> str:
    """A key as one writes it; the parts of a composite one separated by commas."""
    return ", ".join(map(str, key))
