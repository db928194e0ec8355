"""`eventjet history` and `eventjet tail`: all events of one aggregate, and the end of the log."""

from __future__ import annotations

import asyncio
import json as jsonlib
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eventjet.cli.completing import names_of
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import Answer, columns, filled, note, print_json, terminal_width
from eventjet.domain.unique import CLAIMS
from eventjet.projections.app_ref import aggregate_of
from eventjet.shown import cut, cut_values, printable

if TYPE_CHECKING:
    pass

_LAST = 10
_INDENT = " " * 9
_DATA_MAX = 2_000
"""Characters of an event in a listing."""

PersonalOption = Annotated[
    bool, typer.Option("--show-personal", help="Show the fields that are marked personal; else they are hidden.")
]


@on_app()
def history(
    at: AppTarget,
    aggregate: Annotated[
        str,
        typer.Argument(
            metavar="AGGREGATE",
            help="The aggregate's name, for instance account.",
            autocompletion=names_of("aggregates"),
        ),
    ],
    aggregate_id: Annotated[str, typer.Argument(metavar="ID", help="Which one.")],
    after: Annotated[
        int, typer.Option("--after", metavar="VERSION", min=0, help="Only what came after this version.")
    ] = 0,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="So many events at the most.")
    ] = None,
    newest_first: Annotated[bool, typer.Option("--newest-first", help="Begin with the last event.")] = False,
    personal: PersonalOption = False,
) -> Answer:
    """Show what happened to one aggregate; exit status 1 when it has no events."""
    part = {"after": after, "limit": limit, "newest_first": newest_first}
    events = asyncio.run(_history(at, aggregate, aggregate_id, personal, part))
    if not events:
        behind = f" after version {after}" if after else ""
        return Answer([], lambda: note(f"There are no events of {aggregate} {aggregate_id}{behind}."), ok=False)
    return Answer(events, lambda: print("\n".join(line(event, named=False) for event in events)))


async def _history(
    at: AppTarget, aggregate: str, aggregate_id: str, personal: bool, part: dict[str, Any]
) -> list[dict[str, Any]]:
    from eventjet.commands.timeline import part_of
    from eventjet.operations.events import shown

    app = at.app()
    if aggregate != CLAIMS:
        aggregate_of(app, aggregate)
    async with app.connect(at.settings) as jet:
        await jet.log()  # says that `init` is missing, where it is
        voids = await jet.voids()
        records = await part_of(jet.store, aggregate, aggregate_id, **part)
        return [shown(jet, record, voids, personal=personal) for record in records]


@on_app()
def tail(
    at: AppTarget,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is recorded from now on.")] = False,
    start: Annotated[
        int | None,
        typer.Option("--from", metavar="N", min=1, help=f"Begin at this position; else with the last {_LAST} events."),
    ] = None,
    until: Annotated[
        int | None, typer.Option("--until", metavar="N", min=1, help="End behind this position, with --follow too.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=1, help="End after so many events; without --from, the last ones."),
    ] = None,
    personal: PersonalOption = False,
) -> None:
    """Show the log's events in order: the last ones, or from a position on."""
    asyncio.run(_tail(at, start, until, limit, follow=follow, as_json=json, personal=personal))


async def _tail(
    at: AppTarget,
    start: int | None,
    until: int | None,
    limit: int | None,
    *,
    follow: bool,
    as_json: bool,
    personal: bool,
) -> None:
    from eventjet.operations.events import shown

    async with at.app().connect(at.settings) as jet:
        log = await jet.log()
        voids = await jet.voids()
        end = log.last if until is None else min(until, log.last)
        first = start if start is not None else max(log.first, end - (limit or _LAST) + 1)
        printed = 0
        async for record in jet.store.records(start=first, until=until, follow=follow):
            event = shown(jet, record, voids, personal=personal)
            if as_json:
                print_json(event, indent=None)
            else:
                print(line(event, named=True), flush=True)
            printed += 1
            if printed == limit:
                return


def line(event: Mapping[str, Any], *, named: bool) -> str:
    """An event in one line, or more where the terminal asks for it; `named` says whose it is."""
    when = datetime.fromisoformat(event["recorded_at"]).strftime("%Y-%m-%d %H:%M:%SZ")
    whose = f"{event['aggregate']} {event['aggregate_id']}  " if named else ""
    version = "v?" if event["version"] is None else f"v{event['version']}"
    schema = "" if event["schema"] in (None, 1) else f" (schema {event['schema']})"
    data = event["data"]
    if not isinstance(data, str):
        data = jsonlib.dumps(cut_values(data), ensure_ascii=False, separators=(",", ":"))
    head = printable(f"{event['position']:>7}  {when}  {whose}{version}  {event['type']}{schema}")
    told = f"  void: {event['void']}" if "void" in event else ""
    rest = printable(cut(data, _DATA_MAX) + (f"  unreadable: {event['fault']}" if "fault" in event else told))
    width = terminal_width()
    if columns(f"{head}  {rest}") <= width:
        return f"{head}  {rest}"
    lines = [filled(head, width, indent=_INDENT), filled(rest, width, indent=_INDENT, first=_INDENT)]
    return "\n".join(filter(None, lines))
