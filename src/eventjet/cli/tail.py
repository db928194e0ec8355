"""`eventjet tail`: the end of the log, and what comes."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import print_events, print_json_line

_LAST = 10


@on_app()
def tail(
    at: AppTarget,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is recorded from now on.")] = False,
    start: Annotated[
        int | None,
        typer.Option("--from", metavar="N", min=1, help=f"Begin at this position; else with the last {_LAST} events."),
    ] = None,
) -> None:
    """Show the log's events in order: the last ones, or from a position on."""
    asyncio.run(_tail(at, start, follow=follow, as_json=json))


async def _tail(at: AppTarget, start: int | None, *, follow: bool, as_json: bool) -> None:
    from eventjet.cli.events import shown

    async with at.app().connect(at.settings) as jet:
        log = await jet.log()
        first = start if start is not None else max(log.first, log.last - _LAST + 1)
        async for record in jet.store.records(start=first, follow=follow):
            event = shown(jet, record)
            if as_json:
                print_json_line(event.as_json())
            else:
                print_events([event], named=True)
