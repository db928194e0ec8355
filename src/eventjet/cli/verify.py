"""`eventjet verify`: compare a read model with the log, row by row, with nothing paused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from eventjet.cli.failure import ANSWER_IS_NO
from eventjet.cli.interrupts import finished
from eventjet.cli.rebuild import EngineOption, FromArchiveOption, MasterOption, NoShipOption, engine_options
from eventjet.cli.target import AppTarget, JsonOption, on_app
from eventjet.cli.terminal import counted, print_json, say

if TYPE_CHECKING:
    from eventjet.rebuild import Difference, VerifyReport


@on_app()
def verify(
    at: AppTarget,
    projection: Annotated[str, typer.Argument(help="Which one.")],
    engine: EngineOption = "local",
    master: MasterOption = None,
    from_archive: FromArchiveOption = None,
    no_ship: NoShipOption = False,
    json: JsonOption = False,
) -> None:
    """Compare a read model with the log, row by row; exit status 1 when they differ.

    Workers, commands and readers go on meanwhile. The first differences are named, with the position since which
    the row is not what the log says.
    """
    from eventjet.rebuild import verify as compare

    chosen = engine_options(engine, master, no_ship)
    (name,) = at.chosen([projection])
    report = finished(
        "Nothing was changed.",
        lambda progress: compare(
            at.ref, name, at.settings, engine=chosen, from_archive=from_archive, progress=progress
        ),
    )
    if json:
        examples = [{**asdict(one), "key": shown_key(one.key)} for one in report.examples]
        print_json({**asdict(report), "seconds": dict(report.seconds), "examples": examples})
    else:
        _print(report)
    if report.differences:
        raise typer.Exit(ANSWER_IS_NO)


def _print(report: VerifyReport) -> None:
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
