"""`eventjet history`: all events of one aggregate, in order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.failure import ANSWER_IS_NO
from eventjet.cli.target import AppTarget, JsonOption, on_app
from eventjet.cli.terminal import note, print_events, print_json
from eventjet.errors import UsageError

if TYPE_CHECKING:
    from eventjet.cli.events import ShownEvent


@on_app()
def history(
    at: AppTarget,
    aggregate: Annotated[str, typer.Argument(help="The aggregate's name, for instance account.")],
    aggregate_id: Annotated[str, typer.Argument(metavar="ID", help="Which one.")],
    json: JsonOption = False,
) -> None:
    """Show what happened to one aggregate; exit status 1 when it has no events."""
    found = asyncio.run(_read(at, aggregate, aggregate_id))
    if json:
        print_json([one.as_json() for one in found])
    else:
        print_events(found, named=False)
    if not found:
        if not json:
            note(f"There are no events of {aggregate} {aggregate_id}.")
        raise typer.Exit(ANSWER_IS_NO)


async def _read(at: AppTarget, aggregate: str, aggregate_id: str) -> list[ShownEvent]:
    from eventjet.cli.events import shown

    app = at.app()
    names = sorted(info.name for info in app.aggregates.values())
    if aggregate not in names:
        raise UsageError(f"The app {app.name!r} has no aggregate {aggregate!r}. It has {', '.join(names)}.")
    async with app.connect(at.settings) as jet:
        await jet.log()  # says that `init` is missing, where it is
        return [shown(jet, record) for record in await jet.store.history(aggregate, aggregate_id)]
