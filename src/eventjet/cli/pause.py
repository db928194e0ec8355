"""`eventjet pause` and `eventjet resume`: let projections stand still, and go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.target import AppDirOption, AppOption, DatabaseOption, JsonOption, Target, target
from eventjet.errors import UsageError

if TYPE_CHECKING:
    from eventjet.sql.pausing import Paused

NamesArgument = Annotated[list[str], typer.Argument(metavar="PROJECTION...", help="Which ones.")]
RevisionOption = Annotated[
    int | None, typer.Option("--revision", metavar="N", min=1, help="Another revision than the app declares.")
]


def pause(
    projections: NamesArgument,
    revision: RevisionOption = None,
    json: JsonOption = False,
    app: AppOption = None,
    app_dir: AppDirOption = None,
    database: DatabaseOption = None,
) -> None:
    """Let projections stand still, all of them or none, until `eventjet resume`.

    Their workers stop before the next commit and stand by. A rebuild may go on; what it swaps in stays paused.
    """
    from eventjet.cli.terminal import print_json, say
    from eventjet.sql.pausing import pause

    at = target(app, app_dir, None, database)
    chosen = _chosen(at, projections, revision)
    done = asyncio.run(pause(at.settings.database, chosen, declared=revision is None))
    if json:
        print_json([asdict(one) for one in done])
        return
    for one in done:
        say(f"{_name(one)} {'is paused' if one.changed else 'was paused already'} at position {one.position:,}")


def resume(
    projections: NamesArgument,
    revision: RevisionOption = None,
    json: JsonOption = False,
    app: AppOption = None,
    app_dir: AppDirOption = None,
    database: DatabaseOption = None,
) -> None:
    """Let paused projections go on, all of them or none; a worker that stands by takes them at its next look."""
    from eventjet.cli.terminal import print_json, say
    from eventjet.sql.pausing import resume

    at = target(app, app_dir, None, database)
    chosen = _chosen(at, projections, revision)
    done = asyncio.run(resume(at.settings.database, chosen, declared=revision is None))
    if json:
        print_json([asdict(one) for one in done])
        return
    for one in done:
        say(f"{_name(one)} goes on from position {one.position:,}")


def _chosen(at: Target, names: Sequence[str], revision: int | None) -> list[tuple[str, int]]:
    chosen = at.chosen(names)
    if revision is not None and len(chosen) > 1:
        raise UsageError("--revision is about one projection. Name one.")
    return [(name, revision or at.app().projections[name].revision) for name in chosen]


def _name(one: Paused) -> str:
    return f"{one.name} revision {one.revision}"
