"""Where a quarantine is: that of a projection in SQL, that of a reactor or a process beside its cursor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

from eventjet.codec.json import read_json
from eventjet.errors import UsageError
from eventjet.jetstream.client import connected
from eventjet.shown import cut
from eventjet.subscriptions.supervisor import chosen_of

if TYPE_CHECKING:
    from eventjet.app import App
    from eventjet.jetstream.client import Client
    from eventjet.projections.sql_projection import AnyResolved
    from eventjet.settings import Settings
    from eventjet.sql.quarantine import Listed, Shown, VerdictOutcome
    from eventjet.subscriptions.cursor_store import Cursors

T = TypeVar("T")
_Decide: TypeAlias = "Callable[[Cursors, str, Sequence[int]], Coroutine[Any, Any, list[int]]]"


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """What is stored of an event of the quarantine."""

    body: bytes | None
    type: str
    """Its wire name, a CloudEvent's type, or `message` of an inbox; empty where nothing says it."""
    schema: int | None = None
    """Of its shape; 0 where nobody says it, which no event has."""
    missing: str = ""
    """Why there is no body where one should be."""


class Quarantine(Protocol):
    """One quarantine, and what may be decided about it. Blocks; raises `UsageError` and `Unreachable`."""

    @property
    def what_dropping_means(self) -> str: ...

    def listed(self, *, resolved: bool) -> Sequence[Listed]: ...

    def shown(self, position: int) -> Shown | None: ...

    def stored(self, found: Shown) -> StoredEvent: ...

    def retry(self, positions: Sequence[int] | None) -> list[int]: ...

    def drop(self, positions: Sequence[int]) -> list[int]: ...

    def outcomes(self, positions: Sequence[int]) -> list[VerdictOutcome]: ...


def quarantine_of(app: App, settings: Settings, name: str) -> Quarantine:
    """The quarantine of what the app calls so; raises `UsageError` for a stranger."""
    chosen = chosen_of(app, [name])
    if chosen.projections:
        return _OfProjection(app, settings, chosen.projections[0])
    return _OfCursors(app, settings, [one.name for one in chosen.followers])


def told(one: VerdictOutcome) -> str:
    """What became of a verdict, in words."""
    if one.resolution == "parked":
        return f"{one.position}: failed again: {cut(one.reason)}"
    if one.resolution == "retry":
        return f"{one.position}: to be tried again"
    done = {"retried": "taken", "dropped": "dropped"}.get(one.resolution, one.resolution)
    if one.next is None:
        return f"{one.position}: {done}, and it blocks nothing any more"
    if one.next_resolution == "retry":
        return f"{one.position}: {done}; position {one.next}, which it blocked, is to be tried"
    return f"{one.position}: {done}; position {one.next}, which it blocked, failed: {cut(one.next_reason)}"


def not_yet(name: str) -> str:
    """Of a verdict that no worker has carried out."""
    return (
        f"No worker has carried it out yet. One of {name} will: as soon as it runs, or gets to it, and not "
        "while it is paused."
    )


class _OfProjection:
    what_dropping_means = "A rebuild will leave it out too."

    def __init__(self, app: App, settings: Settings, resolved: AnyResolved) -> None:
        self._app = app
        self._settings = settings
        self._of = resolved.name, resolved.revision

    def listed(self, *, resolved: bool) -> Sequence[Listed]:
        from eventjet.sql.quarantine import listed

        with self._connected(read_only=True) as connection:
            return listed(connection, [self._of[0]], resolved=resolved)

    def shown(self, position: int) -> Shown | None:
        from eventjet.sql.quarantine import shown

        with self._connected(read_only=True) as connection:
            return shown(connection, *self._of, position)

    def stored(self, found: Shown) -> StoredEvent:
        return stored_of_projection(self._app, found)

    def retry(self, positions: Sequence[int] | None) -> list[int]:
        from eventjet.sql.quarantine import retry

        with self._connected() as connection:
            return retry(connection, *self._of, positions)

    def drop(self, positions: Sequence[int]) -> list[int]:
        from eventjet.sql.quarantine import drop

        with self._connected() as connection:
            return drop(connection, *self._of, positions)

    def outcomes(self, positions: Sequence[int]) -> list[VerdictOutcome]:
        from eventjet.sql.quarantine import outcomes

        with self._connected(read_only=True) as connection:
            return outcomes(connection, *self._of, positions)

    @contextmanager
    def _connected(self, *, read_only: bool = False) -> Generator[Any]:
        from eventjet.sql.database import COMMAND, READ_ONLY, Database
        from eventjet.sql.locations import check_owner

        where = Database(self._settings.database)
        with (
            where.reaching_sync(),
            where.sync_engine("eventjet quarantine", COMMAND).connect() as connection,
            connection.execution_options(**{READ_ONLY: read_only}).begin(),
        ):
            check_owner(connection, self._of[0], self._app.name)
            yield connection


class _OfCursors:
    """Of one cursor, or of all partitions of a reactor: an event is in one of them."""

    what_dropping_means = "What it leads to will not happen, and what waits behind it goes on."

    def __init__(self, app: App, settings: Settings, names: Sequence[str]) -> None:
        self._app = app
        self._settings = settings
        self._names = names
        self._kind = kind_of(app, names[0])

    def listed(self, *, resolved: bool) -> Sequence[Listed]:
        from eventjet.subscriptions import cursor_control

        found = self._of_each(lambda cursors, name: cursor_control.listed(cursors, name, resolved=resolved))
        events = [replace(one, event_type=one.event_type or self._kind) for each in found for one in each]
        return sorted(events, key=lambda event: event.position)

    def shown(self, position: int) -> Shown | None:
        from eventjet.subscriptions import cursor_control

        found = self._of_each(lambda cursors, name: cursor_control.shown(cursors, name, position))
        return next((one for one in found if one is not None), None)

    def stored(self, found: Shown) -> StoredEvent:
        """Read from the log, or the stream of the inbox, where it is the event that was parked."""

        async def read() -> StoredEvent:
            async with connected(self._settings) as client:
                return await stored_of_follower(client, self._app, self._names[0], found)

        return asyncio.run(read())

    def retry(self, positions: Sequence[int] | None) -> list[int]:
        from eventjet.subscriptions import cursor_control

        if positions is not None:
            return self._where_they_are(positions, cursor_control.retry)
        found = self._of_each(lambda cursors, name: cursor_control.retry(cursors, name, None))
        return [position for each in found for position in each]

    def drop(self, positions: Sequence[int]) -> list[int]:
        from eventjet.subscriptions import cursor_control

        return self._where_they_are(positions, cursor_control.drop)

    def outcomes(self, positions: Sequence[int]) -> list[VerdictOutcome]:
        from eventjet.subscriptions import cursor_control

        found = self._of_each(lambda cursors, name: cursor_control.outcomes(cursors, name, positions))
        return [outcome for each in found for outcome in each]

    def _where_they_are(self, positions: Sequence[int], decide: _Decide) -> list[int]:
        """Decide in the partition that has each; the last one says of what none has that it is not parked."""
        from eventjet.subscriptions import cursor_control

        async def decided(cursors: Cursors) -> list[int]:
            await self._check(cursors, positions)
            left, chosen = list(dict.fromkeys(positions)), dict[str, list[int]]()
            for name in self._names[:-1]:
                parked = {event.position for event in await cursor_control.listed(cursors, name)}
                chosen[name] = [position for position in left if position in parked]
                left = [position for position in left if position not in parked]
            done: list[int] = []
            for name, own in [(self._names[-1], left), *chosen.items()]:
                done += await decide(cursors, name, own) if own else []
            return done

        return self._asked(decided)

    async def _check(self, cursors: Cursors, positions: Sequence[int]) -> None:
        """Say of an event why nothing can be decided about it; raises `UsageError`."""
        from eventjet.codec.subjects import declared_name
        from eventjet.domain.parked import BLOCKED, PARKED, RETRY

        each = [entry for name in self._names for entry in await cursors.parked(name, resolved=True)]
        known = {entry.position: entry for entry in each}
        for position in positions:
            entry = known.get(position)
            if entry is None:
                reason = "is not in the quarantine"
            elif entry.parked.resolution in (PARKED, RETRY):
                continue
            elif entry.parked.resolution == BLOCKED:
                reason = "waits behind a parked one of the same; give your verdict on that one"
            else:
                reason = f"was {entry.parked.resolution} already, and is not parked any more"
            name = declared_name(self._names[0])
            raise UsageError(
                f"The event at position {position} of {name!r} {reason}. "
                f"Look at `eventjet quarantine list {name} --all`."
            )

    def _of_each(self, ask: Callable[[Cursors, str], Coroutine[Any, Any, T]]) -> list[T]:
        async def each(cursors: Cursors) -> list[T]:
            return [await ask(cursors, name) for name in self._names]

        return self._asked(each)

    def _asked(self, ask: Callable[[Cursors], Coroutine[Any, Any, T]]) -> T:
        from eventjet.subscriptions.cursor_store import Cursors

        async def run() -> T:
            async with connected(self._settings) as client:
                return await ask(Cursors(client, self._app.name))

        return asyncio.run(run())


def kind_of(app: App, name: str) -> str:
    """What an event of a follower's quarantine is called where nothing says its type."""
    return "message" if name in app.inboxes else ""


def stored_of_projection(app: App, found: Shown) -> StoredEvent:
    """From the quarantine, which does not keep the schema: known of an event that has one shape only."""
    kind = app.catalog.named(found.event.event_type)
    schema = kind.info.schema if kind is not None and kind.info.schema == 1 else 0
    return StoredEvent(found.payload, found.event.event_type, schema)


async def stored_of_follower(client: Client, app: App, name: str, found: Shown) -> StoredEvent:
    """Read from the log, or the stream of the inbox, where it is the event that was parked."""
    from eventjet.codec.headers import SCHEMA, number_of
    from eventjet.errors import Forbidden, StreamMissing
    from eventjet.jetstream.api import message_at, stream_info
    from eventjet.projections.fold import is_of
    from eventjet.subscriptions.cursor_store import Cursors

    event, inbox = found.event, app.inboxes.get(name)
    stream = app.name if inbox is None else inbox.stream
    where = "the log" if inbox is None else f"the stream {stream!r}"
    try:
        record = await client.ask(message_at(stream, event.position))
        is_same = is_of(event.event_id, record)
        if is_same and inbox is not None:
            held = await Cursors(client, app.name).read(event.projection)
            is_same = (await client.ask(stream_info(stream))).created == held.cursor.log
    except StreamMissing:
        return StoredEvent(None, event.event_type, missing=f"{where} does not exist")
    except Forbidden as error:
        return StoredEvent(None, event.event_type, missing=str(error))
    if record is not None and is_same:
        kind = event.event_type or _cloud_type(record[4]) or kind_of(app, name)
        return StoredEvent(record[4], kind, number_of(record[3], SCHEMA))
    there = "nothing is there" if record is None else "another one is there"
    missing = f"{where} no longer has this event at position {event.position}: {there}"
    return StoredEvent(None, event.event_type, missing=missing)


def _cloud_type(body: bytes) -> str:
    """Of a CloudEvent in structured mode; empty for any other message."""
    try:
        told: Any = read_json(body)
    except ValueError:
        return ""
    kind = cast("dict[str, Any]", told).get("type") if isinstance(told, dict) and "specversion" in told else None
    return kind if isinstance(kind, str) else ""
