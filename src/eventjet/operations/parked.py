"""Quarantines as pages show them: bounded, over connections that are open already, with what is personal hidden."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection

from eventjet.app import App
from eventjet.jetstream.client import Client
from eventjet.operations.events import stored_json
from eventjet.operations.quarantines import kind_of, stored_of_follower, stored_of_projection
from eventjet.sql import quarantine
from eventjet.sql.locations import check_owner
from eventjet.sql.quarantine import Listed, Shown, VerdictOutcome
from eventjet.subscriptions import cursor_control
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.supervisor import chosen_of

T = TypeVar("T")

ENTRIES_MAX = 1_000
"""Of the quarantine of a cursor: each costs a request to the server."""


class _Log(Protocol):
    @property
    def client(self) -> Client: ...


class Reach(Protocol):
    """Open connections."""

    @property
    def app(self) -> App: ...

    async def ask(self, question: Callable[[Connection], T]) -> T: ...

    async def log(self) -> _Log: ...


@dataclass(frozen=True, slots=True)
class ParkedEvents:
    """Of one name."""

    name: str
    revision: int
    """That the app declares: what is parked of another one is shown, retried and dropped with that one's code."""
    events: Sequence[Listed]
    is_cut: bool
    """Whether there may be more."""


@dataclass(frozen=True, slots=True)
class ParkedEvent:
    """One event of a quarantine, as far as it may be shown."""

    found: Shown
    event_type: str
    body: Any
    """As JSON, with what is personal hidden; None where `missing` says why there is none."""
    missing: str
    waiting: Sequence[Listed]
    """The first of those that wait behind it."""


def names_with_quarantine(app: App) -> list[str]:
    """All that may park an event."""
    chosen = chosen_of(app, [])
    return list(
        dict.fromkeys([*(one.name for one in chosen.projections), *(one.declared_as for one in chosen.followers)])
    )


async def parked_events(reach: Reach, name: str, *, limit: int, after: int = 0) -> ParkedEvents:
    """The first events that are parked, after a position; raises `UsageError`, `Unreachable`."""
    chosen = chosen_of(reach.app, [name])
    if chosen.projections:
        revision = chosen.projections[0].revision
        found = await reach.ask(
            _of_own(reach.app, name, partial(quarantine.listed, names=[name], after=after, limit=limit + 1))
        )
        return ParkedEvents(name, revision, found[:limit], len(found) > limit)
    cursors = Cursors((await reach.log()).client, reach.app.name)
    found, is_cut = list[Listed](), False
    for one in chosen.followers:
        entries, may_be_more = await cursor_control.first_listed(cursors, one.name, ENTRIES_MAX)
        is_cut = is_cut or may_be_more
        found += [replace(entry, event_type=entry.event_type or kind_of(reach.app, name)) for entry in entries]
    found = sorted((one for one in found if one.position > after), key=lambda one: one.position)
    return ParkedEvents(name, chosen.followers[0].revision, found[:limit], is_cut or len(found) > limit)


async def parked_event(reach: Reach, name: str, position: int, *, limit: int) -> ParkedEvent | None:
    """One event with what is stored of it, and `limit` of those that wait behind it; None where it is not there."""
    app, chosen = reach.app, chosen_of(reach.app, [name])
    if chosen.projections:
        own = chosen.projections[0]
        seen = await reach.ask(_of_own(app, name, partial(_shown_with, own.name, own.revision, position, limit)))
        if seen is None:
            return None
        found, waiting = seen
        stored = stored_of_projection(app, found)
    else:
        client = (await reach.log()).client
        cursors = Cursors(client, app.name)
        each = [await cursor_control.shown(cursors, one.name, position) for one in chosen.followers]
        found = next((one for one in each if one is not None), None)
        if found is None:
            return None
        waiting = (await cursor_control.waiting(cursors, found.event))[:limit] if found.event.blocked else []
        stored = await stored_of_follower(client, app, name, found)
    body = None if stored.body is None else stored_json(stored.body)
    shown = None if body is None else app.catalog.masked(stored.type, stored.schema, body)
    return ParkedEvent(found, stored.type, shown, stored.missing, waiting)


def _of_own(app: App, name: str, question: Callable[[Connection], T]) -> Callable[[Connection], T]:
    """The question, asked where the read model is seen to be this app's; raises as `check_owner` where it is not."""

    def ask(connection: Connection) -> T:
        check_owner(connection, name, app.name)
        return question(connection)

    return ask


def _shown_with(
    name: str, revision: int, position: int, limit: int, connection: Connection
) -> tuple[Shown, list[Listed]] | None:
    found = quarantine.shown(connection, name, revision, position)
    return None if found is None else (found, quarantine.waiting(connection, found.event, limit))


async def outcomes_now(reach: Reach, name: str, positions: Sequence[int]) -> list[VerdictOutcome]:
    """What has become of cursor_control."""
    chosen = chosen_of(reach.app, [name])
    if chosen.projections:
        own = chosen.projections[0]
        asked = partial(quarantine.outcomes, name=own.name, revision=own.revision, positions=positions)
        return await reach.ask(_of_own(reach.app, name, asked))
    cursors = Cursors((await reach.log()).client, reach.app.name)
    return [one for each in chosen.followers for one in await cursor_control.outcomes(cursors, each.name, positions)]
