"""Where the cursors of an app stand, for who looks from outside. Blocks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eventjet.codec.headers import RawRecord
from eventjet.codec.subjects import cursor_bucket
from eventjet.domain.parked import PARKED, RETRY
from eventjet.errors import (
    CursorDamaged,
    Forbidden,
    LogDrifted,
    LogIncomplete,
    LogRolledBack,
    LogUnusable,
    NoResponders,
    StreamMissing,
)
from eventjet.jetstream.api import StreamState, last_message, next_message, server_time, stream_info
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.public_stream import check_public
from eventjet.log.topology import cursors_config, timer_config
from eventjet.log.topology import standstill as standstill_of
from eventjet.projections.app_ref import Application
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.cursor import FAILED, PROCESS, Cursor
from eventjet.subscriptions.cursor_store import ParkedEntry, values_among
from eventjet.subscriptions.following import INBOX, REACTOR, Declaration, declarations_of, filters_of, has_timers
from eventjet.subscriptions.reader import log_fault, state_of_log

_CLOCK_S = 1.0
"""How far the clocks of two servers of a cluster may be apart."""


@dataclass(frozen=True, slots=True)
class CursorSeen:
    """One cursor as it is stored."""

    cursor: Cursor
    sequence: int
    silent_s: float
    """How long ago it was written, by the server's clock."""

    @property
    def has_lost_owner(self) -> bool:
        """Whether a worker has it that has ended without letting go: a live one writes it three times a lease."""
        return self.cursor.owner is not None and self.silent_s > 2 * WorkerOptions().lease_s + _CLOCK_S


@dataclass(frozen=True, slots=True)
class CursorLook:
    """One cursor, and what waits for it."""

    seen: CursorSeen
    lag_events: int
    """Positions of the log after it, where one of them concerns it; else 0."""
    lag_s: float | None
    """Age of the oldest event that it has not dealt with; None when it cannot be known."""
    parked: int
    fault: str = ""
    """Why it cannot go on over this log."""

    @property
    def cursor(self) -> Cursor:
        return self.seen.cursor

    @property
    def name(self) -> str:
        return self.cursor.name


def cursors_of(connection: NatsConnection, app: Application) -> list[Cursor]:
    """All cursors of an app, as `cursors_seen` has them; none where `init` has not made their bucket."""
    return [_cursor_in(record, app) for record in _cursor_records(connection, app)]


def cursors_seen(connection: NatsConnection, app: Application) -> list[CursorSeen]:
    """As `cursors_of`, with how long each has not been written. No clock of this machine is asked.

    The log's leader tells the time, and the newest cursor where that is ahead of it. One that cannot be read has failed
    for that, and is of no log.
    """
    now = connection.ask(server_time(app.name))
    records = _cursor_records(connection, app)
    now = max([now, *(record[1] / 1e9 for record in records)])
    return [CursorSeen(_cursor_in(record, app), record[0], now - record[1] / 1e9) for record in records]


def _cursor_in(record: RawRecord, app: Application) -> Cursor:
    try:
        return Cursor.decoded(record[4])
    except CursorDamaged as error:
        name = record[2].decode().rpartition(".c.")[2]
        declared = declarations_of(app).get(name)
        kind = REACTOR if declared is None else declared.kind
        return Cursor(name, kind, "", state=FAILED, reason=str(error))


def _cursor_records(connection: NatsConnection, app: Application) -> list[RawRecord]:
    """None, too, where the app declares nothing that has a cursor, and its roles may look at none.

    Without direct gets, which list them, there are only those that the app declares.
    """
    try:
        return _values(connection, app.name, "c.*")
    except NoResponders:
        bucket = cursor_bucket(app.name)
        asked = [last_message(f"KV_{bucket}", f"$KV.{bucket}.c.{name}") for name in sorted(declarations_of(app))]
        return [record for record in connection.ask_all(asked) if record is not None and record[4]]
    except Forbidden:
        if declarations_of(app):
            raise
        return []


def cursor_fault(
    connection: NatsConnection, identity: str, state: StreamState, cursor: Cursor
) -> LogRolledBack | LogIncomplete | str | None:
    """Why it cannot go on over this log; None if it can, or follows another stream."""
    if not cursor.log:
        return cursor.reason
    if cursor.kind == INBOX:
        return None
    if cursor.log != identity:
        reason = f"it is of the log {cursor.log} and the stream {state.name!r} is {identity}"
        return LogRolledBack(cursor.name, cursor.position, reason)
    return log_fault(connection, identity, state, cursor)


def look_at_cursors(connection: NatsConnection, app: Application) -> list[CursorLook]:
    """All cursors of an app; none where `init` has not made their bucket."""
    identity, state = state_of_log(connection, app.name)
    last = state.last
    declared = declarations_of(app)
    looks: list[CursorLook] = []
    of_cursors = _standstill(connection, cursors_config(app.name, 1))
    of_timers = _standstill(connection, timer_config(app.name, 1)) if has_timers(app) else None
    for seen in cursors_seen(connection, app):
        cursor = seen.cursor
        own = declared.get(cursor.name)
        standstill = of_cursors or (of_timers if cursor.kind == PROCESS else None)
        try:
            entries = [ParkedEntry.decoded(record[4]) for record in _values(connection, app.name, f"q.{cursor.name}.*")]
        except CursorDamaged as error:
            looks.append(CursorLook(seen, 0, None, 0, str(error)))
            continue
        except NoResponders as error:
            # Where nobody may look at the settings, that nothing can be listed is all that is known.
            standstill, entries = standstill or error, []
        if own is not None and own.stream:
            look = _inbox(connection, own, seen, entries)
            looks.append(look if standstill is None else replace(look, fault=str(standstill)))
            continue
        filters = [] if own is None else filters_of(app, own.events)
        lag, age_s = _lag(connection, app.name, cursor, filters, last)
        parked = sum(entry.parked.resolution in (PARKED, RETRY) for entry in entries)
        fault = standstill or cursor_fault(connection, identity, state, cursor)
        fault = fault or _public_fault(connection, app, cursor.name)
        looks.append(CursorLook(seen, lag, age_s, parked, "" if fault is None else str(fault)))
    return looks


def _standstill(connection: NatsConnection, declared: Mapping[str, Any]) -> LogDrifted | None:
    """With which settings of this stream no cursor can move; None where it is missing, or nobody may look."""
    try:
        return standstill_of(connection.ask(stream_info(str(declared["name"]))), declared)
    except (StreamMissing, Forbidden):
        return None


def _public_fault(connection: NatsConnection, app: Application, name: str) -> LogUnusable | None:
    """Why the stream of a publication cannot be used; None for anything else, and where nobody may look."""
    publication = app.publications.get(name)
    if publication is None:
        return None
    try:
        found = connection.ask(stream_info(publication.stream))
    except StreamMissing:
        found = None
    except Forbidden:
        return None
    try:
        check_public(found, publication.stream, name)
    except LogUnusable as error:
        return error
    return None


def _inbox(
    connection: NatsConnection, own: Declaration, seen: CursorSeen, entries: Sequence[ParkedEntry]
) -> CursorLook:
    """One that follows another stream than the log."""
    cursor = seen.cursor
    parked = sum(entry.parked.resolution in (PARKED, RETRY) for entry in entries)
    try:
        state = connection.ask(stream_info(own.stream))
    except StreamMissing:
        return CursorLook(seen, 0, None, parked, f"the stream {own.stream!r} does not exist")
    except Forbidden:
        return CursorLook(seen, 0, None, parked)
    if not cursor.log:
        return CursorLook(seen, 0, None, parked, cursor.reason or "")
    fault = "" if state.created == cursor.log else f"the stream {own.stream!r} is not the one that it began in"
    return CursorLook(seen, *_lag(connection, own.stream, cursor, [own.subject], state.last), parked, fault)


def _lag(
    connection: NatsConnection, stream: str, cursor: Cursor, filters: list[str], last: int
) -> tuple[int, float | None]:
    """(positions after it, age of the first that concerns it)."""
    if cursor.position >= last:
        return 0, 0.0
    waiting: list[tuple[int, int]] = []
    for subject in filters:
        position = cursor.position + 1
        while (record := connection.ask(next_message(stream, position, subject))) is not None:
            if not cursor.is_done(record[0]):
                waiting.append((record[0], record[1]))
                break
            position = record[0] + 1
    if not waiting:
        return (0, 0.0) if filters else (last - cursor.position, None)
    return last - cursor.position, max(0.0, time.time() - min(waiting)[1] / 1e9)


def _values(connection: NatsConnection, app: str, key: str) -> list[RawRecord]:
    """The records of all keys that match, but for those that were deleted."""
    bucket = cursor_bucket(app)
    return values_among(connection.records(f"KV_{bucket}", f"$KV.{bucket}.{key}"))
