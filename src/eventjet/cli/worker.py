"""`eventjet worker`: keep read models up to date."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from eventjet.cli.running import run_until_stopped
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import note
from eventjet.errors import UsageError


@on_app()
def worker(
    at: AppTarget,
    projections: Annotated[
        list[str] | None, typer.Argument(metavar="PROJECTION", help="Which ones; default: all of the app.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            envvar="EVENTJET_WORKER_HTTP",
            help="Tell /healthz and /metrics there; else nowhere.",
        ),
    ] = None,
) -> None:
    """Keep read models up to date until SIGTERM or Ctrl-C, which finish the batch in hand.

    Any number may run: each projection is kept by one of them, and the others stand by.
    """
    from eventjet.workers.http import address_of

    address = None if http is None else address_of(http)
    names = at.chosen(projections or [])
    if not names:
        raise UsageError("The app declares no projections, so there is nothing to work on. List one in its App.")
    asyncio.run(run_until_stopped(at, names, lambda: note(f"ready: {', '.join(names)}"), http=address))
