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
from eventjet.errors import CursorFenced, LogUnusable, StreamMissing, UsageError
from eventjet.nats.api import stream_info
from eventjet.nats.client import Client
from eventjet.projections.app_ref import Application
from eventjet.store.store import EventStore

REACTOR, PROCESS, PUBLICATION, INBOX = "reactor", "process", "publication", "inbox"


@dataclass(frozen=True, slots=True)
class Declaration:
    """What follows the log by a cursor, as far as it can be told without a connection."""

    name: str
    kind: str
    revision: int
    start: Start
    events: tuple[type, ...]
    """What it is told of; nothing of this log for an inbox."""
    stream: str = ""
    """The stream that it follows, where that is another than the log; empty for the log."""
    subject: str = ""
    """Of that stream, what it takes."""


def declarations_of(app: Application) -> dict[str, Declaration]:
    """All that an app has, by name."""
    found = [
        *(Declaration(one.name, REACTOR, one.revision, one.start, one.events) for one in app.reactors.values()),
        *(Declaration(one.name, PROCESS, one.revision, "new", heard_by(one)) for one in app.processes.values()),
        *(Declaration(one.name, PUBLICATION, 1, one.start, one.events) for one in app.publications.values()),
        *(
            Declaration(one.name, INBOX, one.revision, one.start, (), one.stream, one.subject)
            for one in app.inboxes.values()
        ),
    ]
    return {one.name: one for one in found}


def heard_by(info: ProcessInfo) -> tuple[type, ...]:
    """A process's own events, and those it listens to."""
    return tuple(dict.fromkeys([*info.events, *(event for one in info.listeners for event in one.events)]))


def filters_of(app: Application, events: Sequence[type]) -> list[str]:
    """The subjects of all aggregates that one of the events belongs to."""
    wanted = set(events)
    return [f"{app.name}.{info.name}.*" for cls, info in app.aggregates.items() if wanted & set(folded_events(cls))]


async def begin(
    cursors: Cursors, store: EventStore, client: Client, declared: Iterable[Declaration]
) -> list[tuple[str, int]]:
    """Make the cursors that are missing, where their declarations start; names and positions.

    Here and once: if the first worker did it, what is new would depend on when that one comes up.
    """
    made: list[tuple[str, int]] = []
    for one in declared:
        if await cursors.find(one.name) is not None:
            continue
        cursor = await cursor_at(store, client, one, one.start)
        try:
            await cursors.write(HeldCursor(cursor, 0), cursor)
        except CursorFenced:
            continue  # another `init` was quicker
        made.append((one.name, cursor.position))
    return made


async def cursor_at(store: EventStore, client: Client, one: Declaration, start: Start) -> Cursor:
    """A cursor where something is to go on; raises `UsageError` for a position that is not there.

    Raises `LogUnusable` for an inbox whose stream does not exist.
    """
    if one.stream:
        try:
            foreign = await client.ask(stream_info(one.stream))
        except StreamMissing:
            what = f"The stream {one.stream!r} of the inbox {one.name!r}"
            raise LogUnusable(what, "it does not exist", "Create it first, or name another.") from None
        log, last, record = foreign.created, foreign.last, None
        position = _position(start, last)
    else:
        state = await store.state()
        log, last = state.identity, state.last
        position = _position(start, last)
        record = await store.at(position) if position else None
    if position > last or (position and record is None and not one.stream):
        raise UsageError(
            f"{one.name!r} cannot stand at position {position}: the log ends at {last}. Give one that is in it."
        )
    return Cursor(one.name, one.kind, log, position, "" if record is None else header(record[3], MSG_ID) or "")


def _position(start: Start, last: int) -> int:
    return start if isinstance(start, int) else last if start == "new" else 0
