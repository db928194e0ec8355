"""`eventjet worker`, `pause` and `resume`: keep read models up to date, hold them still, and let them go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer

from eventjet.cli.running import run_until_stopped
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import Answer, note
from eventjet.errors import UsageError

NamesArgument = Annotated[list[str], typer.Argument(metavar="PROJECTION...", help="Which ones.")]
RevisionOption = Annotated[
    int | None, typer.Option("--revision", metavar="N", min=1, help="Another revision than the app declares.")
]


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
    from eventjet.workers.health import address_of

    address = None if http is None else address_of(http)
    names = at.chosen(projections or [])
    if not names:
        raise UsageError("The app declares no projections, so there is nothing to work on. List one in its App.")
    asyncio.run(run_until_stopped(at, names, lambda: note(f"ready: {', '.join(names)}"), http=address))


@on_app(servers=False)
def pause(at: AppTarget, projections: NamesArgument, revision: RevisionOption = None) -> Answer:
    """Let projections stand still, all of them or none, until `eventjet resume`.

    Their workers stop before the next commit and stand by. A rebuild may go on; what it swaps in stays paused.
    """
    from eventjet.sql.pausing import pause

    chosen = _chosen(at, projections, revision)
    done = asyncio.run(pause(at.settings.database, chosen, declared=revision is None))
    lines = [
        f"{one.name} revision {one.revision} {'is paused' if one.changed else 'was paused already'} "
        f"at position {one.position:,}"
        for one in done
    ]
    return Answer(done, "\n".join(lines))


@on_app(servers=False)
def resume(at: AppTarget, projections: NamesArgument, revision: RevisionOption = None) -> Answer:
    """Let paused projections go on, all of them or none; a worker that stands by takes them at its next look."""
    from eventjet.sql.pausing import resume

    chosen = _chosen(at, projections, revision)
    done = asyncio.run(resume(at.settings.database, chosen, declared=revision is None))
    lines = [f"{one.name} revision {one.revision} goes on from position {one.position:,}" for one in done]
    return Answer(done, "\n".join(lines))


def _chosen(at: AppTarget, names: Sequence[str], revision: int | None) -> list[tuple[str, int]]:
    chosen = at.chosen(names)
    if revision is not None and len(chosen) > 1:
        raise UsageError("--revision is about one projection. Name one.")
    return [(name, revision or at.app().projections[name].revision) for name in chosen]
