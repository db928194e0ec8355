"""What of an app follows the log by a cursor, and where its cursor begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eventjet.codec.envelope import MSG_ID, header
from eventjet.cursors.cursor import Cursor
from eventjet.cursors.kv import Cursors, HeldCursor
from eventjet.domain.process import ProcessInfo
from eventjet.domain.reactor import Start
from eventjet.domain.subscription import folded_events
from eventjet.errors import CursorFenced, UsageError
from eventjet.projections.app_ref import Application
from eventjet.store.store import EventStore

REACTOR, PROCESS, PUBLICATION = "reactor", "process", "publication"


@dataclass(frozen=True, slots=True)
class Declaration:
    """What follows the log by a cursor, as far as it can be told without a connection."""

    name: str
    kind: str
    revision: int
    start: Start
    events: tuple[type, ...]
    """What it is told of."""


def declarations_of(app: Application) -> dict[str, Declaration]:
    """All that an app has, by name."""
    found = [
        *(Declaration(one.name, REACTOR, one.revision, one.start, one.events) for one in app.reactors.values()),
        *(Declaration(one.name, PROCESS, one.revision, "new", heard_by(one)) for one in app.processes.values()),
        *(Declaration(one.name, PUBLICATION, 1, one.start, one.events) for one in app.publications.values()),
    ]
    return {one.name: one for one in found}


def heard_by(info: ProcessInfo) -> tuple[type, ...]:
    """A process's own events, and those it listens to."""
    return tuple(dict.fromkeys([*info.events, *(event for one in info.listeners for event in one.events)]))


def filters_of(app: Application, events: Sequence[type]) -> list[str]:
    """The subjects of all aggregates that one of the events belongs to."""
    wanted = set(events)
    return [f"{app.name}.{info.name}.*" for cls, info in app.aggregates.items() if wanted & set(folded_events(cls))]


async def begin(cursors: Cursors, store: EventStore, declared: Iterable[Declaration]) -> list[tuple[str, int]]:
    """Make the cursors that are missing, where their declarations start; names and positions.

    Here and once: if the first worker did it, what is new would depend on when that one comes up.
    """
    made: list[tuple[str, int]] = []
    for one in declared:
        if await cursors.find(one.name) is not None:
            continue
        state = await store.state()
        position = {"new": state.last, "beginning": 0}.get(one.start) if isinstance(one.start, str) else one.start
        assert position is not None
        cursor = await cursor_at(store, one.name, one.kind, position)
        try:
            await cursors.write(HeldCursor(cursor, 0), cursor)
        except CursorFenced:
            continue  # another `init` was quicker
        made.append((one.name, position))
    return made


async def cursor_at(store: EventStore, name: str, kind: str, position: int) -> Cursor:
    """A cursor at a position of the log; raises `UsageError` for one that is not in it."""
    state = await store.state()
    record = await store.at(position) if position else None
    if position > state.last or (position and record is None):
        raise UsageError(
            f"{name!r} cannot stand at position {position}: the log ends at {state.last}. Give one that is in it."
        )
    event_id = "" if record is None else header(record[3], MSG_ID) or ""
    return Cursor(name, kind, state.identity, position, event_id)
