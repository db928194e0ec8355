"""Read quarantined events, and retry or drop them: a projection's in SQL, others' beside their cursors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self, TypeVar, cast

from sqlalchemy import Connection

from eventjet.app import App
from eventjet.codec.headers import SCHEMA, number_of
from eventjet.codec.json import read_json
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
from eventjet.sql.quarantine import DecisionOutcome, Listed, Shown
from eventjet.subscriptions import cursor_control
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.supervisor import chosen_of
from eventjet.text import cut

T = TypeVar("T")

ENTRIES_MAX = 1_000
"""Entries that a page reads at most from the quarantine of a cursor: each costs a request to the server."""


class Connections(Protocol):
    """The open connections of an app to the database and the server."""

    @property
    def app(self) -> App: ...

    @property
    def settings(self) -> Settings: ...

    async def ask(self, question: Callable[[Connection], T]) -> T:
        """Return the answer of a question to the database, asked over a read-only session."""
        ...

    async def client(self) -> Client: ...


class CommandConnections:
    """Connections for one command: the server's is opened when first needed, the database's for each question."""

    def __init__(self, app: App, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self._ending = AsyncExitStack()
        self._client: Client | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ending.aclose()

    async def ask(self, question: Callable[[Connection], T]) -> T:
        return _in_database(self.settings, question, read_only=True)

    async def client(self) -> Client:
        if self._client is None:
            self._client = await self._ending.enter_async_context(connected(self.settings))
        return self._client


@dataclass(frozen=True, slots=True)
class QuarantinedEvent:
    """A quarantined event with what is stored of it."""

    shown: Shown
    type: str
    """Its wire name, a CloudEvent's type, or `message` for an inbox; empty where it is not known."""
    body: Any
    """The body as JSON; None where `missing` says why there is none."""
    missing: str
    waiting: Sequence[Listed]
    """The first of the events that it blocks."""


class Quarantine:
    """The quarantine of one projection, reactor or process of the app. Methods raise `UsageError` and `Unreachable`."""

    def __init__(self, connections: Connections, name: str) -> None:
        """Choose the quarantine of this name. Raises `UsageError` for a name that the app does not declare."""
        self._connections = connections
        self._app = connections.app
        chosen = chosen_of(self._app, [name])
        self._projection = chosen.projections[0] if chosen.projections else None
        self._cursors = [follower.name for follower in chosen.followers]
        """The cursors of a reactor or a process, one for each partition: an event is quarantined at one of them."""
        self.name = name
        self.revision = (self._projection or chosen.followers[0]).revision
        """The revision that the app declares; an event of another one is handled by the release that declares it."""

    @property
    def drop_effect(self) -> str:
        """A sentence that says what dropping an event causes."""
        if self._projection is not None:
            return "A rebuild will leave it out too."
        return "What it leads to will not happen, and what waits behind it goes on."

    async def listed(
        self, *, resolved: bool = False, after: int = 0, limit: int | None = None, text: str = ""
    ) -> tuple[Sequence[Listed], bool]:
        """Return the quarantined events of all revisions after a position, and whether there may be more of them.

        With `resolved` also those that were retried or dropped; with `text` only those whose reason, type, aggregate or
        id contains it, in upper or lower case. `limit` also bounds what is read.
        """
        if self._projection is not None:
            most = None if limit is None else limit + 1
            ask = partial(rows.listed, names=[self.name], resolved=resolved, after=after, limit=most, text=text)
            events = await self._ask(ask)
            if limit is None or len(events) <= limit:
                return events, False
            # An event that several revisions have quarantined is on one page, since the next one begins behind it.
            page = [event for event in events if event.position < events[-1].position]
            return page or events[:limit], True
        cursors, events, is_cut = await self._store(), list[Listed](), False
        for name in self._cursors:
            if limit is None:
                events += await cursor_control.listed(cursors, name, resolved=resolved)
            else:
                entries, may_be_more = await cursor_control.first_listed(cursors, name, ENTRIES_MAX)
                events, is_cut = [*events, *entries], is_cut or may_be_more
        kind = _default_type(self._app, self._cursors[0])
        events = [replace(event, event_type=event.event_type or kind) for event in events if event.position > after]
        events = [event for event in events if event.contains(text)]
        events.sort(key=lambda event: event.position)
        return events[:limit], is_cut or (limit is not None and len(events) > limit)

    async def event(self, position: int, *, personal: bool = False, waiting: int = 0) -> QuarantinedEvent | None:
        """Return an event with its body, masked unless `personal`, and the first `waiting` behind it; or None."""
        behind: Sequence[Listed] = ()
        if self._projection is not None:

            def ask(connection: Connection) -> tuple[Shown, Sequence[Listed]] | None:
                event = rows.shown(connection, self.name, self.revision, position)
                return None if event is None else (event, rows.waiting(connection, event.event, waiting))

            answer = await self._ask(ask)
            if answer is None:
                return None
            shown, behind = answer
            kind = self._app.catalog.named(shown.event.event_type)
            # Its schema is known only if the event has a single one; no event has schema 0.
            schema = kind.info.schema if kind is not None and kind.info.schema == 1 else 0
            body, event_type, missing = shown.payload, shown.event.event_type, ""
        else:
            cursors = await self._store()
            candidates = [await cursor_control.shown(cursors, name, position) for name in self._cursors]
            shown = next((candidate for candidate in candidates if candidate is not None), None)
            if shown is None:
                return None
            if waiting and shown.event.blocked:
                behind = (await cursor_control.waiting(cursors, shown.event))[:waiting]
            body, event_type, schema, missing = await self._stored_in_log(shown.event)
        value = None if body is None else stored_json(body)
        if value is not None and not personal:
            value = self._app.catalog.masked(event_type, schema, value)
        return QuarantinedEvent(shown, event_type, value, missing, behind)

    async def retry(self, positions: Sequence[int] | None) -> list[int]:
        """Have a worker try these events again, or all of them; return their positions."""
        if self._projection is not None:
            return await self._write(partial(rows.retry, positions=positions))
        if positions is not None:
            return await self._resolve(positions, cursor_control.retry)
        cursors = await self._store()
        batches = [await cursor_control.retry(cursors, name, None) for name in self._cursors]
        return [position for batch in batches for position in batch]

    async def drop(self, positions: Sequence[int]) -> list[int]:
        """Give up these events for good; return their positions."""
        if self._projection is not None:
            return await self._write(partial(rows.drop, positions=positions))
        return await self._resolve(positions, cursor_control.drop)

    async def outcomes(self, positions: Sequence[int]) -> list[DecisionOutcome]:
        """Return how far workers have carried out the decisions about these events."""
        if self._projection is not None:
            return await self._ask(partial(rows.outcomes, name=self.name, revision=self.revision, positions=positions))
        cursors = await self._store()
        batches = [await cursor_control.outcomes(cursors, name, positions) for name in self._cursors]
        return [outcome for batch in batches for outcome in batch]

    async def _store(self) -> Cursors:
        return Cursors(await self._connections.client(), self._app.name)

    async def _ask(self, question: Callable[[Connection], T]) -> T:
        return await self._connections.ask(self._owned(question))

    def _owned(self, question: Callable[[Connection], T]) -> Callable[[Connection], T]:
        """Return the question, asked only after `check_owner` has confirmed that the read model is this app's."""

        def ask(connection: Connection) -> T:
            check_owner(connection, self.name, self._app.name)
            return question(connection)

        return ask

    async def _write(self, decide: Callable[..., list[int]]) -> list[int]:
        question = self._owned(partial(decide, name=self.name, revision=self.revision))
        return await asyncio.to_thread(_in_database, self._connections.settings, question, read_only=False)

    async def _resolve(
        self, positions: Sequence[int], decide: Callable[[Cursors, str, Sequence[int]], Coroutine[Any, Any, list[int]]]
    ) -> list[int]:
        """Apply a decision in the partition that has each event; the last one refuses events that none has."""
        cursors = await self._store()
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

    async def _check_open(self, cursors: Cursors, positions: Sequence[int]) -> None:
        """Raise `UsageError`, with the reason, for an event that can be neither retried nor dropped."""
        entries = [entry for name in self._cursors for entry in await cursors.quarantined(name, resolved=True)]
        by_position = {entry.position: entry for entry in entries}
        for position in positions:
            entry = by_position.get(position)
            if entry is None:
                reason = "is not in the quarantine"
            elif entry.event.resolution in (QUARANTINED, RETRY):
                continue
            elif entry.event.resolution == BLOCKED:
                reason = "waits behind a quarantined one of the same; decide about that one"
            else:
                reason = f"was {entry.event.resolution} already, and is not quarantined any more"
            raise UsageError(
                f"The event at position {position} of {self.name!r} {reason}. "
                f"Look at `eventjet quarantine list {self.name} --all`."
            )

    async def _stored_in_log(self, event: Listed) -> tuple[bytes | None, str, int | None, str]:
        """Return (body, type, schema, why there is no body) of an event, from the log or from the inbox's stream."""
        client, inbox = await self._connections.client(), self._app.inboxes.get(self._cursors[0])
        stream = self._app.name if inbox is None else inbox.stream
        where = "the log" if inbox is None else f"the stream {stream!r}"
        try:
            record = await client.ask(message_at(stream, event.position))
            is_same = is_of(event.event_id, record)
            if is_same and inbox is not None:
                stored_cursor = await Cursors(client, self._app.name).read(event.projection)
                is_same = (await client.ask(stream_info(stream))).created == stored_cursor.cursor.log
        except StreamMissing:
            return None, event.event_type, None, f"{where} does not exist"
        except Forbidden as error:
            return None, event.event_type, None, str(error)
        if record is not None and is_same:
            kind = event.event_type or _cloud_type(record[4]) or _default_type(self._app, self._cursors[0])
            return record[4], kind, number_of(record[3], SCHEMA), ""
        actual = "nothing is there" if record is None else "another one is there"
        missing = f"{where} no longer has this event at position {event.position}: {actual}"
        return None, event.event_type, None, missing


def _in_database(settings: Settings, question: Callable[[Connection], T], *, read_only: bool) -> T:
    database = Database(settings.database)
    with (
        database.reaching_sync(),
        database.sync_engine("eventjet quarantine", COMMAND, existing=True).connect() as connection,
        connection.execution_options(**{READ_ONLY: read_only}).begin(),
    ):
        return question(connection)


def names_with_quarantine(app: App) -> list[str]:
    """Return the names of all projections, reactors and processes that may quarantine an event."""
    chosen = chosen_of(app, [])
    followers = [follower.declared_as for follower in chosen.followers]
    return list(dict.fromkeys([*(projection.name for projection in chosen.projections), *followers]))


def outcome_text(outcome: DecisionOutcome) -> str:
    """Return the result of a decision as one line of text."""
    position, behind = outcome.position, f"position {outcome.next}, which it blocked,"
    if outcome.resolution == "quarantined":
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


def _default_type(app: App, name: str) -> str:
    """Return the type to show for a quarantined event without one: `message` for an inbox, else empty."""
    return "message" if name in app.inboxes else ""


def _cloud_type(body: bytes) -> str:
    """Return the type of a CloudEvent in structured mode; empty for any other message."""
    try:
        value: Any = read_json(body)
    except ValueError:
        return ""
    kind = cast("dict[str, Any]", value).get("type") if isinstance(value, dict) and "specversion" in value else None
    return kind if isinstance(kind, str) else ""
