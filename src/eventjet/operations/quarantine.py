"""Read quarantined events, and retry or drop them: a projection's in SQL, a reactor's or process's beside its cursor.

`Quarantine` opens its own connections and blocks; the command line and actions use it. The functions that take a
`Connections` serve pages: they are bounded, use open connections, and mask personal data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from sqlalchemy import Connection

from eventjet.app import App
from eventjet.codec.headers import SCHEMA, number_of
from eventjet.codec.json import read_json
from eventjet.codec.subjects import declared_name
from eventjet.domain.quarantined import BLOCKED, QUARANTINED, RETRY
from eventjet.errors import Forbidden, StreamMissing, UsageError
from eventjet.jetstream.api import message_at, stream_info
from eventjet.jetstream.client import Client, connected
from eventjet.operations.events import stored_json
from eventjet.projections.fold import is_of
from eventjet.settings import Settings
from eventjet.sql import quarantine as rows
from eventjet.sql.database import COMMAND, Database
from eventjet.sql.dialect import READ_ONLY
from eventjet.sql.locations import check_owner
from eventjet.sql.quarantine import Listed, Shown, VerdictOutcome
from eventjet.subscriptions import cursor_control
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.supervisor import chosen_of
from eventjet.text import cut

T = TypeVar("T")

ENTRIES_MAX = 1_000
"""Entries that a page reads at most from the quarantine of a cursor: each costs a request to the server."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """The stored body of a quarantined event, and its type."""

    body: bytes | None
    type: str
    """Its wire name, a CloudEvent's type, or `message` for an inbox; empty where it is not known."""
    schema: int | None = None
    """The number of its schema; 0, which no event has, where it is not known."""
    missing: str = ""
    """Why there is no body; empty where there is one."""


class Quarantine:
    """The quarantine of one projection, reactor or process of the app.

    Methods block, and raise `UsageError` and `Unreachable`.
    """

    def __init__(self, app: App, settings: Settings, name: str) -> None:
        """Choose the quarantine of this name. Raises `UsageError` for a name that the app does not declare."""
        chosen = chosen_of(app, [name])
        self._app = app
        self._settings = settings
        self._projection = chosen.projections[0] if chosen.projections else None
        self._cursors = [follower.name for follower in chosen.followers]
        """The cursors of a reactor or a process, one for each partition: an event is quarantined at one of them."""

    @property
    def drop_effect(self) -> str:
        """A sentence that says what dropping an event causes."""
        if self._projection is not None:
            return "A rebuild will leave it out too."
        return "What it leads to will not happen, and what waits behind it goes on."

    def listed(self, *, resolved: bool) -> Sequence[Listed]:
        """Return the quarantined events of all revisions; with `resolved` also those that were retried or dropped."""
        if self._projection is not None:
            return self._in_database(
                lambda connection, name, _: rows.listed(connection, [name], resolved=resolved), read_only=True
            )
        kind = default_type(self._app, self._cursors[0])
        listings = self._in_cursors(lambda cursors, name: cursor_control.listed(cursors, name, resolved=resolved))
        events = [replace(event, event_type=event.event_type or kind) for listing in listings for event in listing]
        return sorted(events, key=lambda event: event.position)

    def shown(self, position: int) -> Shown | None:
        """Return one event with its traceback; None where it is not in the quarantine."""
        if self._projection is not None:
            return self._in_database(
                lambda connection, name, revision: rows.shown(connection, name, revision, position), read_only=True
            )
        events = self._in_cursors(lambda cursors, name: cursor_control.shown(cursors, name, position))
        return next((event for event in events if event is not None), None)

    def stored(self, event: Shown) -> StoredEvent:
        """Return the stored body of an event; for a cursor it is read from the log, or from the inbox's stream."""
        if self._projection is not None:
            return stored_by_projection(self._app, event)

        async def read() -> StoredEvent:
            async with connected(self._settings) as client:
                return await stored_in_log(client, self._app, self._cursors[0], event)

        return asyncio.run(read())

    def retry(self, positions: Sequence[int] | None) -> list[int]:
        """Have a worker try these events again, or all of them; return their positions."""
        if self._projection is not None:
            return self._in_database(
                lambda connection, name, revision: rows.retry(connection, name, revision, positions)
            )
        if positions is not None:
            return self._resolve(positions, cursor_control.retry)
        batches = self._in_cursors(lambda cursors, name: cursor_control.retry(cursors, name, None))
        return [position for batch in batches for position in batch]

    def drop(self, positions: Sequence[int]) -> list[int]:
        """Give up these events for good; return their positions."""
        if self._projection is not None:
            return self._in_database(
                lambda connection, name, revision: rows.drop(connection, name, revision, positions)
            )
        return self._resolve(positions, cursor_control.drop)

    def outcomes(self, positions: Sequence[int]) -> list[VerdictOutcome]:
        """Return how far workers have carried out the decisions about these events."""
        if self._projection is not None:
            return self._in_database(
                lambda connection, name, revision: rows.outcomes(connection, name, revision, positions), read_only=True
            )
        batches = self._in_cursors(lambda cursors, name: cursor_control.outcomes(cursors, name, positions))
        return [outcome for batch in batches for outcome in batch]

    def _in_database(self, ask: Callable[[Connection, str, int], T], *, read_only: bool = False) -> T:
        """Call `ask` with a connection to the database, and the projection's name and revision."""
        assert self._projection is not None
        with self._connected(self._projection.name, read_only=read_only) as connection:
            return ask(connection, self._projection.name, self._projection.revision)

    @contextmanager
    def _connected(self, projection: str, *, read_only: bool) -> Generator[Connection]:
        database = Database(self._settings.database)
        with (
            database.reaching_sync(),
            database.sync_engine("eventjet quarantine", COMMAND).connect() as connection,
            connection.execution_options(**{READ_ONLY: read_only}).begin(),
        ):
            check_owner(connection, projection, self._app.name)
            yield connection

    def _in_cursors(self, ask: Callable[[Cursors, str], Coroutine[Any, Any, T]]) -> list[T]:
        """Call `ask` for each cursor over one connection to the server."""

        async def each(cursors: Cursors) -> list[T]:
            return [await ask(cursors, name) for name in self._cursors]

        return self._run(each)

    def _run(self, ask: Callable[[Cursors], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            async with connected(self._settings) as client:
                return await ask(Cursors(client, self._app.name))

        return asyncio.run(run())

    def _resolve(
        self, positions: Sequence[int], decide: Callable[[Cursors, str, Sequence[int]], Coroutine[Any, Any, list[int]]]
    ) -> list[int]:
        """Apply a decision in the partition that has each event; the last one refuses events that none has."""

        async def resolve(cursors: Cursors) -> list[int]:
            await self._check_open(cursors, positions)
            remaining, chosen = list(dict.fromkeys(positions)), dict[str, list[int]]()
            for name in self._cursors[:-1]:
                quarantined = {event.position for event in await cursor_control.listed(cursors, name)}
                chosen[name] = [position for position in remaining if position in quarantined]
                remaining = [position for position in remaining if position not in quarantined]
            done: list[int] = []
            for name, batch in [(self._cursors[-1], remaining), *chosen.items()]:
                done += await decide(cursors, name, batch) if batch else []
            return done

        return self._run(resolve)

    async def _check_open(self, cursors: Cursors, positions: Sequence[int]) -> None:
        """Raise `UsageError`, with the reason, for an event that can be neither retried nor dropped."""
        entries = [entry for name in self._cursors for entry in await cursors.parked(name, resolved=True)]
        by_position = {entry.position: entry for entry in entries}
        for position in positions:
            entry = by_position.get(position)
            if entry is None:
                reason = "is not in the quarantine"
            elif entry.parked.resolution in (QUARANTINED, RETRY):
                continue
            elif entry.parked.resolution == BLOCKED:
                reason = "waits behind a quarantined one of the same; decide about that one"
            else:
                reason = f"was {entry.parked.resolution} already, and is not quarantined any more"
            name = declared_name(self._cursors[0])
            raise UsageError(
                f"The event at position {position} of {name!r} {reason}. "
                f"Look at `eventjet quarantine list {name} --all`."
            )


def outcome_text(outcome: VerdictOutcome) -> str:
    """Return the result of a decision as one line of text."""
    position, behind = outcome.position, f"position {outcome.next}, which it blocked,"
    if outcome.resolution == "parked":
        return f"{position}: failed again: {cut(outcome.reason)}"
    if outcome.resolution == "retry":
        return f"{position}: to be tried again"
    done = {"retried": "taken", "dropped": "dropped"}.get(outcome.resolution, outcome.resolution)
    if outcome.next is None:
        return f"{position}: {done}, and it blocks nothing any more"
    if outcome.next_resolution == "retry":
        return f"{position}: {done}; {behind} is to be tried"
    return f"{position}: {done}; {behind} failed: {cut(outcome.next_reason)}"


def pending_text(name: str) -> str:
    """Return the text for a decision that no worker has carried out yet."""
    return (
        f"No worker has carried it out yet. One of {name} will: as soon as it runs, or gets to it, and not "
        "while it is paused."
    )


def default_type(app: App, name: str) -> str:
    """Return the type to show for a quarantined event without one: `message` for an inbox, else empty."""
    return "message" if name in app.inboxes else ""


def stored_by_projection(app: App, event: Shown) -> StoredEvent:
    """Return the body that a projection's quarantine keeps; its schema is known only if the event has a single one."""
    kind = app.catalog.named(event.event.event_type)
    schema = kind.info.schema if kind is not None and kind.info.schema == 1 else 0
    return StoredEvent(event.payload, event.event.event_type, schema)


async def stored_in_log(client: Client, app: App, name: str, shown: Shown) -> StoredEvent:
    """Read a quarantined event from the log, or from the inbox's stream.

    Where the position no longer has the event that was quarantined, `missing` of the result says so.
    """
    event, inbox = shown.event, app.inboxes.get(name)
    stream = app.name if inbox is None else inbox.stream
    where = "the log" if inbox is None else f"the stream {stream!r}"
    try:
        record = await client.ask(message_at(stream, event.position))
        is_same = is_of(event.event_id, record)
        if is_same and inbox is not None:
            stored_cursor = await Cursors(client, app.name).read(event.projection)
            is_same = (await client.ask(stream_info(stream))).created == stored_cursor.cursor.log
    except StreamMissing:
        return StoredEvent(None, event.event_type, missing=f"{where} does not exist")
    except Forbidden as error:
        return StoredEvent(None, event.event_type, missing=str(error))
    if record is not None and is_same:
        kind = event.event_type or _cloud_type(record[4]) or default_type(app, name)
        return StoredEvent(record[4], kind, number_of(record[3], SCHEMA))
    actual = "nothing is there" if record is None else "another one is there"
    missing = f"{where} no longer has this event at position {event.position}: {actual}"
    return StoredEvent(None, event.event_type, missing=missing)


def _cloud_type(body: bytes) -> str:
    """Return the type of a CloudEvent in structured mode; empty for any other message."""
    try:
        value: Any = read_json(body)
    except ValueError:
        return ""
    kind = cast("dict[str, Any]", value).get("type") if isinstance(value, dict) and "specversion" in value else None
    return kind if isinstance(kind, str) else ""


class _Log(Protocol):
    @property
    def client(self) -> Client: ...


class Connections(Protocol):
    """The open connections to the database and the server that pages share."""

    @property
    def app(self) -> App: ...

    async def ask(self, question: Callable[[Connection], T]) -> T: ...

    async def log(self) -> _Log: ...


@dataclass(frozen=True, slots=True)
class QuarantinePage:
    """A page of the events in one quarantine."""

    name: str
    revision: int
    """The revision that the app declares; an event of another one is handled by the release that declares it."""
    events: Sequence[Listed]
    is_cut: bool
    """Whether there may be more events."""


@dataclass(frozen=True, slots=True)
class QuarantinedEvent:
    """A quarantined event as it may be shown: with personal data masked."""

    found: Shown
    event_type: str
    body: Any
    """The body as JSON, with personal data masked; None where `missing` says why there is none."""
    missing: str
    waiting: Sequence[Listed]
    """The first of the events that it blocks."""


def names_with_quarantine(app: App) -> list[str]:
    """Return the names of all projections, reactors and processes that may quarantine an event."""
    chosen = chosen_of(app, [])
    names = [
        *(projection.name for projection in chosen.projections),
        *(follower.declared_as for follower in chosen.followers),
    ]
    return list(dict.fromkeys(names))


async def quarantine_page(connections: Connections, name: str, *, limit: int, after: int = 0) -> QuarantinePage:
    """Return the first quarantined events after a position. Raises `UsageError` and `Unreachable`."""
    chosen = chosen_of(connections.app, [name])
    if chosen.projections:
        ask = partial(rows.listed, names=[name], after=after, limit=limit + 1)
        events = await connections.ask(_with_owner_check(connections.app, name, ask))
        return QuarantinePage(name, chosen.projections[0].revision, events[:limit], len(events) > limit)
    cursors = Cursors((await connections.log()).client, connections.app.name)
    events, is_cut, kind = list[Listed](), False, default_type(connections.app, name)
    for follower in chosen.followers:
        entries, may_be_more = await cursor_control.first_listed(cursors, follower.name, ENTRIES_MAX)
        is_cut = is_cut or may_be_more
        events += [replace(entry, event_type=entry.event_type or kind) for entry in entries]
    events = sorted((event for event in events if event.position > after), key=lambda event: event.position)
    return QuarantinePage(name, chosen.followers[0].revision, events[:limit], is_cut or len(events) > limit)


async def quarantined_event(
    connections: Connections, name: str, position: int, *, limit: int
) -> QuarantinedEvent | None:
    """Return a quarantined event with its body and the first `limit` events that it blocks.

    Return None where the position is not in the quarantine.
    """
    app, chosen = connections.app, chosen_of(connections.app, [name])
    if chosen.projections:
        revision = chosen.projections[0].revision

        def ask(connection: Connection) -> tuple[Shown, list[Listed]] | None:
            event = rows.shown(connection, name, revision, position)
            return None if event is None else (event, rows.waiting(connection, event.event, limit))

        answer = await connections.ask(_with_owner_check(app, name, ask))
        if answer is None:
            return None
        event, waiting = answer
        stored = stored_by_projection(app, event)
    else:
        client = (await connections.log()).client
        cursors = Cursors(client, app.name)
        candidates = [await cursor_control.shown(cursors, follower.name, position) for follower in chosen.followers]
        event = next((candidate for candidate in candidates if candidate is not None), None)
        if event is None:
            return None
        waiting = (await cursor_control.waiting(cursors, event.event))[:limit] if event.event.blocked else []
        stored = await stored_in_log(client, app, name, event)
    body = None if stored.body is None else app.catalog.masked(stored.type, stored.schema, stored_json(stored.body))
    return QuarantinedEvent(event, stored.type, body, stored.missing, waiting)


async def outcomes_now(connections: Connections, name: str, positions: Sequence[int]) -> list[VerdictOutcome]:
    """Return how far workers have carried out the decisions about these events."""
    chosen = chosen_of(connections.app, [name])
    if chosen.projections:
        ask = partial(rows.outcomes, name=name, revision=chosen.projections[0].revision, positions=positions)
        return await connections.ask(_with_owner_check(connections.app, name, ask))
    cursors = Cursors((await connections.log()).client, connections.app.name)
    return [
        outcome
        for follower in chosen.followers
        for outcome in await cursor_control.outcomes(cursors, follower.name, positions)
    ]


def _with_owner_check(app: App, name: str, question: Callable[[Connection], T]) -> Callable[[Connection], T]:
    """Return the question, asked only after `check_owner` has confirmed that the read model is this app's."""

    def ask(connection: Connection) -> T:
        check_owner(connection, name, app.name)
        return question(connection)

    return ask
