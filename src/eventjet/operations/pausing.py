"""Pausing and resuming what an app works on: projections by their checkpoints, all else by its cursors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from eventjet.app import App
from eventjet.errors import UsageError
from eventjet.jetstream.client import connected
from eventjet.settings import Settings
from eventjet.sql import revisions
from eventjet.sql.revisions import Paused
from eventjet.subscriptions import cursor_control
from eventjet.subscriptions.cursor_control import PausedCursor
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.supervisor import chosen_of

Changed: TypeAlias = Paused | PausedCursor


async def pause(app: App, settings: Settings, names: Sequence[str], revision: int | None = None) -> list[Changed]:
    """Let what is named stand still; raises `UsageError` for what cannot, and `Unreachable`.

    `revision` is another one than the app declares, of the one projection that is named then.
    """
    return await _change(app, settings, names, revision, revisions.pause, cursor_control.pause)


async def resume(app: App, settings: Settings, names: Sequence[str], revision: int | None = None) -> list[Changed]:
    """Let what is named go on; raises `UsageError` for what is not paused, and `Unreachable`."""
    return await _change(app, settings, names, revision, revisions.resume, cursor_control.resume)


def paused_told(app: App, one: Changed) -> str:
    """`balances revision 1 is paused at position 12`."""
    return f"{_called(app, one)} {'is paused' if one.changed else 'was paused already'} at position {one.position:,}"


def resumed_told(app: App, one: Changed) -> str:
    """`balances revision 1 goes on from position 12`."""
    return f"{_called(app, one)} goes on from position {one.position:,}"


async def _change(
    app: App,
    settings: Settings,
    names: Sequence[str],
    revision: int | None,
    projections: Callable[..., Coroutine[Any, Any, list[Paused]]],
    followers: Callable[[Cursors, Sequence[str]], Coroutine[Any, Any, list[PausedCursor]]],
) -> list[Changed]:
    """Carry it out on what is named: checkpoints first, since they may refuse, then cursors."""
    chosen = chosen_of(app, names)
    if revision is not None and (len(chosen.projections) != 1 or chosen.followers):
        raise UsageError("A revision is about one projection. Name one.")
    pairs = [(one.name, revision or one.revision) for one in chosen.projections]
    done: list[Changed] = []
    if pairs:
        done += await projections(settings.database, pairs, app=app.name, declared=revision is None)
    if chosen.followers:
        async with connected(settings) as client:
            done += await followers(Cursors(client, app.name), [one.name for one in chosen.followers])
    return done


def _called(app: App, one: Changed) -> str:
    return f"{one.name} revision {one.revision}" if one.name in app.projections else one.name
