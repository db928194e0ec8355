"""`eventjet pause` and `eventjet resume`: let projections stand still, and go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.target import AppTarget, JsonOption, on_app
from eventjet.cli.terminal import print_json, say
from eventjet.errors import UsageError

if TYPE_CHECKING:
    from eventjet.sql.pausing import Paused

NamesArgument = Annotated[list[str], typer.Argument(metavar="PROJECTION...", help="Which ones.")]
RevisionOption = Annotated[
    int | None, typer.Option("--revision", metavar="N", min=1, help="Another revision than the app declares.")
]


@on_app(servers=False)
def pause(
    at: AppTarget,
    projections: NamesArgument,
    revision: RevisionOption = None,
    json: JsonOption = False,
) -> None:
    """Let projections stand still, all of them or none, until `eventjet resume`.

    Their workers stop before the next commit and stand by. A rebuild may go on; what it swaps in stays paused.
    """
    from eventjet.sql.pausing import pause

    chosen = _chosen(at, projections, revision)
    done = asyncio.run(pause(at.settings.database, chosen, declared=revision is None))
    if json:
        print_json([asdict(one) for one in done])
        return
    for one in done:
        say(f"{_name(one)} {'is paused' if one.changed else 'was paused already'} at position {one.position:,}")


@on_app(servers=False)
def resume(
    at: AppTarget,
    projections: NamesArgument,
    revision: RevisionOption = None,
    json: JsonOption = False,
) -> None:
    """Let paused projections go on, all of them or none; a worker that stands by takes them at its next look."""
    from eventjet.sql.pausing import resume

    chosen = _chosen(at, projections, revision)
    done = asyncio.run(resume(at.settings.database, chosen, declared=revision is None))
    if json:
        print_json([asdict(one) for one in done])
        return
    for one in done:
        say(f"{_name(one)} goes on from position {one.position:,}")


def _chosen(at: AppTarget, names: Sequence[str], revision: int | None) -> list[tuple[str, int]]:
    chosen = at.chosen(names)
    if revision is not None and len(chosen) > 1:
        raise UsageError("--revision is about one projection. Name one.")
    return [(name, revision or at.app().projections[name].revision) for name in chosen]


def _name(one: Paused) -> str:
    return f"{one.name} revision {one.revision}"
