"""`status`: where each projection, reactor, process, publication and inbox of an app stands, seen from outside."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from eventjet.codec.headers import RawRecord
from eventjet.codec.subjects import cursor_bucket
from eventjet.domain.parked import PARKED, RETRY
from eventjet.errors import (
    CursorDamaged,
    EventjetError,
    Forbidden,
    LogDrifted,
    LogIncomplete,
    LogRolledBack,
    LogUnusable,
    NoResponders,
    StreamMissing,
    TableLost,
)
from eventjet.jetstream.api import StreamState, last_message, next_message, server_time, stream_info
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.integrity import log_fault, state_of_log
from eventjet.log.public_stream import check_public
from eventjet.log.topology import cursors_config, timer_config
from eventjet.log.topology import standstill as standstill_of
from eventjet.nats.endpoint import Endpoint
from eventjet.projections.app_ref import Application
from eventjet.settings import Settings
from eventjet.sql import locations
from eventjet.sql.checkpoint import ACTIVE, BUILDING, FAILED, NEW, Checkpoint, read_all
from eventjet.sql.database import COMMAND, READ_ONLY, Database
from eventjet.sql.dialect import Fault
from eventjet.sql.dialects import dialect_of
from eventjet.sql.quarantine import parked_counts
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.cursor import PROCESS, Cursor
from eventjet.subscriptions.cursor_store import ParkedEntry
from eventjet.subscriptions.declarations import INBOX, REACTOR, Declaration, declarations_of, filters_of, has_timers
from eventjet.text import cut

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
        return connection.values(cursor_bucket(app.name), "c.*")
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
            records = connection.values(cursor_bucket(app.name), f"q.{cursor.name}.*")
            entries = [ParkedEntry.decoded(record[4]) for record in records]
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
        position = cursor.first_open(cursor.position + 1)
        while (record := connection.ask(next_message(stream, position, subject))) is not None:
            position = cursor.first_open(record[0])
            if position == record[0]:
                waiting.append((record[0], record[1]))
                break
    if not waiting:
        return (0, 0.0) if filters else (last - cursor.position, None)
    return last - cursor.position, max(0.0, time.time() - min(waiting)[1] / 1e9)


PROJECTION = "projection"
REASON_MAX = 1_000
"""Characters of why something stands still."""
_PACE_S = 10.0
"""How far the database's clock may be corrected without notice."""


@dataclass(frozen=True, slots=True)
class WorkStatus:
    """One projection at one revision, or one reactor, process, publication or inbox."""

    name: str
    revision: int
    state: str
    position: int
    """What its rows are true for."""
    log_position: int
    """The log's last position."""
    lag_events: int
    lag_s: float | None
    """Age of the oldest event that is not in it yet; None when it cannot be known."""
    owner: str | None
    """The worker that holds the lease now."""
    generation: int
    """Rebuilds swapped in, and one."""
    reason: str | None
    """Why it failed or waits."""
    declared: bool
    """Whether the app still declares this revision; nobody advances one that no process declares."""
    location: str = ""
    """Where its tables are: empty where they are declared and read, else a schema, or a suffix on SQLite."""
    lost_owner: str | None = None
    """The worker that held the lease last and did not let go of it: killed, stopped or cut off."""
    lost_s: float | None = None
    """How long ago it was seen last; None where the database's clock has been set back since."""
    parked: int = 0
    """Events it could not take, which wait for a decision or for a worker that tries them again."""
    events_per_s: float | None = None
    """How fast its position moves; None when only one look was taken."""
    eta_s: float | None = None
    """When it will have caught up with the log, which grows meanwhile; None when it will not at this pace."""
    kind: str = PROJECTION
    """`projection`, `reactor` or `process`."""


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """All projections at one moment."""

    at: float
    """By this process's monotonic clock."""
    projections: list[WorkStatus]


async def status(app: Application, settings: Settings, *, pause_s: float | None = None) -> list[WorkStatus]:
    """Every projection that is declared or has a checkpoint, by name and revision. Raises `Unreachable`.

    With pace and time left after a pause, which is taken only where something lags.
    """
    async with StatusReader(app, settings) as reader:
        first = last = await reader.read()
        if pause_s is None:
            return first.projections
        if any(status.lag_events and status.state in (BUILDING, ACTIVE) for status in first.projections):
            await asyncio.sleep(pause_s)
            last = await reader.read()
        return paced(first, last)


async def watched(
    app: Application, settings: Settings, interval_s: float
) -> AsyncGenerator[list[WorkStatus] | EventjetError]:
    """The status every `interval_s` without end, its pace by the snapshots of the last ten seconds.

    Raises what the first look raises; what goes wrong later is yielded, and looked after again.
    """
    async with StatusReader(app, settings) as reader:
        snapshots = deque([await reader.read()])
        yield paced(snapshots[0], snapshots[-1])
        while True:
            await asyncio.sleep(interval_s)
            try:
                snapshots.append(await reader.read())
            except EventjetError as error:
                yield error
                continue
            while len(snapshots) > 2 and snapshots[1].at < snapshots[-1].at - _PACE_S:
                snapshots.popleft()
            yield paced(snapshots[0], snapshots[-1])


def paced(before: StatusSnapshot, after: StatusSnapshot) -> list[WorkStatus]:
    """The later snapshot, with what the earlier one tells of pace and time left."""
    known = {(status.name, status.revision, status.generation): status for status in before.projections}
    return [
        _paced(status, known.get((status.name, status.revision, status.generation)), after.at - before.at)
        for status in after.projections
    ]


def _paced(status: WorkStatus, before: WorkStatus | None, seconds: float) -> WorkStatus:
    if seconds <= 0 or before is None or status.position < before.position:
        return replace(status, eta_s=None if status.lag_events else 0.0)
    pace = (status.position - before.position) / seconds
    gain = pace - max(0, status.log_position - before.log_position) / seconds
    eta_s = status.lag_events / gain if gain > 0 else None
    return replace(status, events_per_s=pace, eta_s=eta_s if status.lag_events else 0.0)


class StatusReader:
    """Reads the status again and again, over connections that it keeps; a fault drops them. Used by one task."""

    def __init__(self, app: Application, settings: Settings, names: Collection[str] | None = None) -> None:
        """All that the app has, or what is named: for who may look at nothing else."""
        self._database = Database(settings.database)
        self._endpoint = Endpoint.of(settings)
        wanted = [*app.projections, *declarations_of(app)] if names is None else names
        self._declared = {(one.name, one.revision) for one in app.projections.values() if one.name in wanted}
        self._followers = {name: one for name, one in declarations_of(app).items() if name in wanted}
        self._app = app
        self._engine: AsyncEngine | None = None
        self._connection: NatsConnection | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def read(self) -> StatusSnapshot:
        """Every projection that is declared or has a checkpoint, by name and revision. Raises `Unreachable`."""
        try:
            seen = await self._checkpoints() if self._declared else SeenCheckpoints([], {})
            at = time.monotonic()
            statuses = await asyncio.to_thread(self._look, seen)
        except BaseException:
            await self._close()
            raise
        return StatusSnapshot(at, statuses)

    def _look(self, seen: SeenCheckpoints) -> list[WorkStatus]:
        """Blocks."""
        if self._connection is None:
            self._connection = NatsConnection.open(self._endpoint)
        statuses, last = look_at_projections(self._connection, self._app.name, seen, self._declared)
        followers = look_at_followers(self._connection, self._app, self._followers, last) if self._followers else []
        return [*statuses, *followers]

    async def _close(self) -> None:
        engine, self._engine = self._engine, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if engine is not None:
            await engine.dispose()

    async def _checkpoints(self) -> SeenCheckpoints:
        if self._engine is None:
            self._engine = self._database.engine("eventjet status", COMMAND)
        async with self._database.reaching(), self._engine.connect() as connection:
            await connection.execution_options(**{READ_ONLY: True})
            return await connection.run_sync(see_checkpoints, self._app.name, self._declared)


@dataclass(frozen=True, slots=True)
class SeenCheckpoints:
    """What the database says of an app's projections."""

    rows: list[tuple[Checkpoint, float]]
    """Every checkpoint, failed where its tables are lost, with the seconds its lease still has."""
    parked: dict[tuple[str, int], int]
    """Events in quarantine, by name and revision."""
    refusal: str = ""
    """Why the database takes no writes, where it says so."""


def see_checkpoints(connection: Connection, app: str, declared: Collection[tuple[str, int]]) -> SeenCheckpoints:
    """Only looks; what these credentials may not look at counts as it is noted.

    Of another app's checkpoints it says no more than that they keep those which this app has `declared` from beginning.
    """
    found = read_all(connection)
    owners = {one.name: one.app for one, _ in found if one.app not in ("", app)}
    checkpoint = [(_judged(connection, one), left_s) for one, left_s in found if one.name not in owners]
    for name, revision in sorted(declared):
        if name in owners:
            reason = f"in this database its name belongs to the app {owners[name]!r}"
            checkpoint.append((Checkpoint(name, revision, 1, 0, "", "", 0, None, 0.0, 0.0, FAILED, reason), 0.0))
    parked = {key: count for key, count in parked_counts(connection).items() if key[0] not in owners}
    return SeenCheckpoints(checkpoint, parked, dialect_of(connection).refuses_writes(connection))


def look_at_projections(
    connection: NatsConnection, stream: str, seen: SeenCheckpoints, declared: Collection[tuple[str, int]]
) -> tuple[list[WorkStatus], int]:
    """Every projection that is declared, as (name, revision), or has a checkpoint; and the log's last position. Blocks.

    Raises `Unreachable` and `StoreError`.
    """
    log = see_log(connection, stream, checkpoints_of(seen, declared))
    return statuses_of(seen, declared, log), log.last


@dataclass(frozen=True, slots=True)
class SeenLog:
    """What the log says of checkpoints."""

    last: int = 0
    """Its last position."""
    ages: Mapping[int, float | None] = field(default_factory=dict[int, float | None])
    """Of the event after each checkpoint's position: 0 at the end of the log, None where it is not known."""
    faults: Mapping[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    """What the worker of a name and a revision will stop at."""


def checkpoints_of(seen: SeenCheckpoints, declared: Collection[tuple[str, int]]) -> list[Checkpoint]:
    """All there are, by name and revision, and new ones of what is declared and has none."""
    found = [checkpoint for checkpoint, _ in seen.rows]
    for name, revision in set(declared) - {(checkpoint.name, checkpoint.revision) for checkpoint in found}:
        found.append(Checkpoint(name, revision, 1, 0, "", "", 0, None, 0.0, 0.0, NEW, None))
    return sorted(found, key=lambda checkpoint: (checkpoint.name, checkpoint.revision))


def statuses_of(seen: SeenCheckpoints, declared: Collection[tuple[str, int]], log: SeenLog) -> list[WorkStatus]:
    """Every projection that is declared or has a checkpoint, over a log as it was seen."""
    left_s = {(checkpoint.name, checkpoint.revision): left_s for checkpoint, left_s in seen.rows}
    return [
        _status(checkpoint, left_s.get((checkpoint.name, checkpoint.revision), 0.0), seen, declared, log)
        for checkpoint in checkpoints_of(seen, declared)
    ]


def _status(
    checkpoint: Checkpoint,
    lease_left_s: float,
    seen: SeenCheckpoints,
    declared: Collection[tuple[str, int]],
    log: SeenLog,
) -> WorkStatus:
    key = (checkpoint.name, checkpoint.revision)
    lives = _lives(checkpoint, lease_left_s)
    # Nobody could note a reason there; whoever has a lease could write it.
    stuck = seen.refusal if not lives and checkpoint.state in (NEW, BUILDING, ACTIVE) else ""
    return WorkStatus(
        name=checkpoint.name,
        revision=checkpoint.revision,
        state=FAILED if key in log.faults else checkpoint.state,
        position=checkpoint.position,
        log_position=log.last,
        lag_events=max(0, log.last - checkpoint.position),
        lag_s=log.ages.get(checkpoint.position),
        owner=checkpoint.owner if lives else None,
        generation=checkpoint.generation,
        reason=_cut(log.faults.get(key) or stuck or checkpoint.reason),
        declared=key in declared,
        location=checkpoint.location,
        lost_owner=None if lives else checkpoint.owner,
        lost_s=_silent_s(checkpoint, lease_left_s),
        parked=seen.parked.get(key, 0),
    )


def look_at_followers(
    connection: NatsConnection, app: Application, declared: Mapping[str, Declaration], last: int
) -> list[WorkStatus]:
    """Every reactor and process that is declared or has a cursor, over a log that ends at `last`. Blocks."""
    looks = {checkpoint.name: checkpoint for checkpoint in look_at_cursors(connection, app)}
    names = sorted({*declared, *looks})
    return [_follower(name, declared.get(name), looks.get(name), last) for name in names]


def _follower(name: str, declared: Declaration | None, look: CursorLook | None, last: int) -> WorkStatus:
    if look is None:
        assert declared is not None
        missing = "it has no cursor: run `eventjet init`"
        return WorkStatus(name, declared.revision, NEW, 0, last, last, None, None, 1, missing, True, kind=declared.kind)
    cursor = look.cursor
    return WorkStatus(
        name=name,
        revision=cursor.revision or (1 if declared is None else declared.revision),
        state=FAILED if look.fault and cursor.state == ACTIVE else cursor.state,
        position=cursor.position,
        log_position=last,
        lag_events=look.lag_events,
        lag_s=look.lag_s,
        owner=None if look.seen.has_lost_owner else cursor.owner,
        lost_owner=cursor.owner if look.seen.has_lost_owner else None,
        lost_s=look.seen.silent_s if look.seen.has_lost_owner else None,
        generation=1,
        reason=_cut(look.fault or cursor.reason),
        declared=declared is not None,
        parked=look.parked,
        kind=cursor.kind,
    )


def see_log(connection: NatsConnection, stream: str, checkpoints: Sequence[Checkpoint]) -> SeenLog:
    """Its last position, the age of the event after each checkpoint's, and what its worker will stop at. Blocks.

    Raises `Unreachable` and `StoreError`.
    """
    identity, state = state_of_log(connection, stream)
    faults: dict[tuple[str, int], str] = {}
    for checkpoint in checkpoints:
        fault = log_fault(connection, identity, state, checkpoint)
        if fault is not None and checkpoint.state in (NEW, BUILDING, ACTIVE):
            faults[checkpoint.name, checkpoint.revision] = str(fault)
    ages: dict[int, float | None] = {}
    for position in {checkpoint.position for checkpoint in checkpoints}:
        if position >= state.last:
            ages[position] = 0.0
            continue
        record = connection.ask(next_message(stream, position + 1))
        ages[position] = None if record is None else max(0.0, time.time() - record[1] / 1e9)
    return SeenLog(state.last, ages, faults)


def _cut(reason: str | None) -> str | None:
    """Whoever wrote it may have written anything."""
    return None if reason is None else cut(reason, REASON_MAX)


def _lives(checkpoint: Checkpoint, left_s: float) -> bool:
    """A lease with more left than it lasts was given before the clock was set back, and not renewed since."""
    return 0 < left_s <= checkpoint.lease_s + _CLOCK_S


def _silent_s(checkpoint: Checkpoint, left_s: float) -> float | None:
    """How long its owner has been silent, where it was lost."""
    return None if checkpoint.owner is None or left_s > 0 else checkpoint.lease_s - left_s


def _judged(connection: Connection, checkpoint: Checkpoint) -> Checkpoint:
    """As its worker will find it: failed where its tables are lost. Who may not look at them sees what is noted."""
    if checkpoint.state not in (BUILDING, ACTIVE):
        return checkpoint
    try:
        with connection.begin_nested():
            locations.check_identity(connection, checkpoint)
    except TableLost as error:
        return replace(checkpoint, state=FAILED, reason=str(error))
    except DBAPIError as error:
        if Fault.FORBIDDEN not in dialect_of(connection).faults(error):
            raise
    return checkpoint
