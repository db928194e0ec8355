"""`eventjet cursor`: put what follows the log at another position."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import ANSWER_IS_NO, Answer, counted, note, say
from eventjet.errors import UsageError

if TYPE_CHECKING:
    from eventjet.reactions.following import Declaration

cursor = typer.Typer(help="How far reactors and processes have come.", no_args_is_help=True)


@cursor.command("set")
@on_app(database=False)
def set_(
    at: AppTarget,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a reactor or a process.")],
    position: Annotated[int, typer.Argument(metavar="POSITION", min=0, help="The last that counts as done.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> Answer:
    """Put a cursor at a position of the log: after a restore, or to have effects again, or to leave some out."""
    declared = at.work([name]).followers
    if not declared:
        raise UsageError(f"{name!r} is a projection, and has a checkpoint. Rebuild it instead.")
    before, _ = asyncio.run(_set(at, declared, position, write=False))
    told = "it has no cursor yet"
    if before is not None:
        more = "be handled again" if position < before else "be left out"
        told = f"it stands at {before:,}, so what lies between will {more}"
    if not yes and not typer.confirm(f"Put {name} at position {position:,}? Now {told}.", err=True):
        note("Nothing was changed.")
        raise typer.Exit(ANSWER_IS_NO)
    _, lost = asyncio.run(_set(at, declared, position, write=True))
    if lost:
        say(f"{counted(len(lost), 'parked event')} of a log that is gone: given up (`quarantine list {name} --all`).")
    if declared[0].kind == "process":
        say(f"Run `eventjet process sync {name}`, too: it wakes the processes that are there.")
    return Answer(
        {"name": name, "position": position, "before": before, "dropped": lost},
        f"{name} goes on after position {position:,}",
    )


async def _set(
    at: AppTarget, declared: Sequence[Declaration], position: int, *, write: bool
) -> tuple[int | None, list[int]]:
    """Where it stood, and what was parked of another log."""
    from eventjet.cursors.kv import Cursors
    from eventjet.reactions.beginning import cursor_at, put, records_of, where
    from eventjet.repository.repositories import open_repositories

    async with open_repositories(at.app(), at.settings) as (repositories, client):
        wanted = await cursor_at(repositories.store, client, declared[0], position)
        cursors = Cursors(client, at.app().name)
        before = await where(cursors, declared)
        record_at = records_of(repositories.store, client, declared[0])
        return before, await put(cursors, declared, wanted, record_at) if write else []
