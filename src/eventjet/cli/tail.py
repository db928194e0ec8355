"""`eventjet tail`: the end of the log, and what comes."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from eventjet.cli.target import AppDirOption, AppOption, DatabaseOption, ServersOption, Target, target

_LAST = 10


def tail(
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is recorded from now on.")] = False,
    start: Annotated[
        int | None,
        typer.Option("--from", metavar="N", min=1, help=f"Begin at this position; else with the last {_LAST} events."),
    ] = None,
    app: AppOption = None,
    app_dir: AppDirOption = None,
    servers: ServersOption = None,
    database: DatabaseOption = None,
) -> None:
    """Show the log's events in order: the last ones, or from a position on."""
    asyncio.run(_tail(target(app, app_dir, servers, database), start, follow=follow, as_json=json))


async def _tail(at: Target, start: int | None, *, follow: bool, as_json: bool) -> None:
    from eventjet.cli.events import shown
    from eventjet.cli.terminal import print_events, print_json_line

    async with at.app().connect(at.settings) as jet:
        log = await jet.log()
        first = start if start is not None else max(log.first, log.last - _LAST + 1)
        async for record in jet.store.records(start=first, follow=follow):
            event = shown(jet, record)
            if as_json:
                print_json_line(event.as_json())
            else:
                print_events([event], named=True)
