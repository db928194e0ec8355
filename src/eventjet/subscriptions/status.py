"""`status`: the position, lag and state of each subscription of an app, read from the database and the server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from sqlalchemy import Connection, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from eventjet.codec.headers import RawRecord
from eventjet.codec.subjects import cursor_bucket
from eventjet.domain.position import ACTIVE, BUILDING, FAILED, NEW
from eventjet.domain.quarantined import QUARANTINED, RETRY
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
from eventjet.jetstream.api import StreamState, last_message, next_message, reading_values, server_time, stream_info
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.integrity import log_fault, succession_fault
from eventjet.log.public_stream import check_public
from eventjet.log.topology import cursors_config, identity_of, missing_stream, reading_log_state, timer_config
from eventjet.log.topology import standstill as standstill_of
from eventjet.nats.endpoint import Endpoint
from eventjet.projections.app_ref import Application
from eventjet.settings import Settings
from eventjet.sql import locations
from eventjet.sql.checkpoint import Checkpoint, read_all
from eventjet.sql.database import COMMAND, Database, dialect_of
from eventjet.sql.dialect import READ_ONLY, Fault
from eventjet.sql.own_tables import RUN_ITSELF, Clock, rebuilds
from eventjet.sql.quarantine import quarantined_counts
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.cursor import PROCESS, Cursor
from eventjet.subscriptions.cursor_store import QuarantinedEntry
from eventjet.subscriptions.declarations import INBOX, REACTOR, Declaration, declarations_of, filters_of, has_timers
from eventjet.subscriptions.work_status import StatusHistory, StatusSnapshot, WorkStatus, paced
from eventjet.text import cut

REASON_MAX = 1_000
"""Most characters of a reason."""
_CLOCK_S = 1.0
"""How far the clocks of two servers of a cluster may differ, in seconds."""


@dataclass(frozen=True, slots=True)
class CursorSeen:
    """A cursor as it is stored, and how long ago it was written."""

    cursor: Cursor
    sequence: int
    silent_s: float
    """Seconds since the cursor was written, by the server's clock."""

    @property
    def has_lost_owner(self) -> bool:
        """Whether the owner ended without releasing the cursor: a live owner writes it three times a lease."""
        return self.cursor.owner is not None and self.silent_s > 2 * WorkerOptions().lease_s + _CLOCK_S


def cursors_seen(connection: NatsConnection, app: Application) -> list[CursorSeen]:
    """Return all cursors of an app, each with the seconds since it was written.

    This machine's clock is not used: the current time is that of the log's leader, or that of the newest cursor if it
    is later. A cursor that cannot be read is returned as failed, with an empty `log`.
    Raises `LogUnusable` before `eventjet init`.
    """
    try:
        now = connection.ask(server_time(app.name))
    except StreamMissing:
        raise missing_stream(app.name) from None
    records = _cursor_records(connection, app)
    now = max([now, *(record[1] / 1e9 for record in records)])
    cursors: list[CursorSeen] = []
    for sequence, time_ns, subject, _, body in records:
        try:
            cursor = Cursor.decoded(body)
        except CursorDamaged as error:
            name = subject.decode().rpartition(".c.")[2]
            declared = declarations_of(app).get(name)
            cursor = Cursor(name, REACTOR if declared is None else declared.kind, "", state=FAILED, reason=str(error))
        cursors.append(CursorSeen(cursor, sequence, now - time_ns / 1e9))
    return cursors


def _cursor_records(connection: NatsConnection, app: Application) -> list[RawRecord]:
    """Return the records of all cursors.

    The list is empty when the app declares no cursors and its credentials may not read any. Without direct gets, which
    list the keys, only the cursors that the app declares are read.
    """
    try:
        return connection.run(reading_values(cursor_bucket(app.name), "c.*"))
    except NoResponders:
        bucket = cursor_bucket(app.name)
        requests = [last_message(f"KV_{bucket}", f"$KV.{bucket}.c.{name}") for name in sorted(declarations_of(app))]
        return [record for record in connection.ask_all(requests) if record is not None and record[4]]
    except Forbidden:
        if declarations_of(app):
            raise
        return []


def cursor_fault(
    connection: NatsConnection, state: StreamState, cursor: Cursor
) -> LogRolledBack | LogIncomplete | str | None:
    """Return why a cursor cannot continue in this log; None if it can, or if it follows another stream."""
    if not cursor.log:
        return cursor.reason
    if cursor.kind == INBOX:
        return None
    if reason := succession_fault(state, cursor.log, cursor.furthest):
        return LogRolledBack(cursor.name, cursor.furthest, reason)
    return connection.run(log_fault(state, cursor))


def look_at_followers(
    connection: NatsConnection, app: Application, declared: Mapping[str, Declaration], last: int
) -> list[WorkStatus]:
    """Return the status of all that is declared or has a cursor; `last` is the last position of the log. Blocks."""
    log = connection.run(reading_log_state(app.name))
    identity_of(log)  # raises for a log that has lost its identity
    of_cursors = _standstill(connection, cursors_config(app.name, 1))
    of_timers = _standstill(connection, timer_config(app.name, 1)) if has_timers(app) else None
    statuses = {
        name: WorkStatus(
            name,
            declaration.revision,
            NEW,
            position=0,
            log_position=last,
            lag_events=last,
            reason="it has no cursor: run `eventjet init`",
            kind=declaration.kind,
        )
        for name, declaration in declared.items()
    }
    for snapshot in cursors_seen(connection, app):
        cursor, declaration = snapshot.cursor, declarations_of(app).get(snapshot.cursor.name)
        standstill = of_cursors or (of_timers if cursor.kind == PROCESS else None)
        try:
            progress = _progress(connection, app, cursor, declaration, log, standstill)
        except CursorDamaged as error:
            progress = _Progress(fault=error)
        reason = str(progress.fault) if progress.fault else cursor.blocking or cursor.reason
        has_owner = cursor.owner is not None and not snapshot.has_lost_owner
        if declaration is not None and not has_owner and (refusal := cursor.refusal_of(declaration.revision)):
            stops = progress.fault or cursor.state == FAILED
            reason = f"{reason} Besides, {refusal}" if stops and reason else refusal
        statuses[cursor.name] = WorkStatus(
            cursor.name,
            cursor.revision or (1 if declaration is None else declaration.revision),
            FAILED if progress.fault and cursor.state == ACTIVE else cursor.state,
            position=cursor.position,
            log_position=last,
            lag_events=progress.lag_events,
            lag_s=progress.lag_s,
            owner=None if snapshot.has_lost_owner else cursor.owner,
            lost_owner=cursor.owner if snapshot.has_lost_owner else None,
            lost_s=snapshot.silent_s if snapshot.has_lost_owner else None,
            reason=_cut(reason),
            declared=cursor.name in declared,
            quarantined=progress.quarantined,
            kind=cursor.kind,
        )
    return [statuses[name] for name in sorted(statuses)]


@dataclass(frozen=True, slots=True)
class _Progress:
    """The distance of one cursor from the end of its stream, and what keeps it from getting there."""

    lag_events: int = 0
    lag_s: float | None = None
    quarantined: int = 0
    """Number of quarantined events."""
    fault: EventjetError | str | None = None
    """Why the cursor cannot continue; None when it can."""


def _progress(
    connection: NatsConnection,
    app: Application,
    cursor: Cursor,
    declaration: Declaration | None,
    log: StreamState,
    standstill: EventjetError | None,
) -> _Progress:
    """Return the progress of a cursor; raises `CursorDamaged` for an entry of the quarantine that cannot be read."""
    try:
        records = connection.run(reading_values(cursor_bucket(app.name), f"q.{cursor.name}.*"))
        entries = [QuarantinedEntry.decoded(record[4]) for record in records]
    except NoResponders as error:
        # Where the settings may not be read, the failed listing is all that is known.
        standstill, entries = standstill or error, []
    quarantined = sum(entry.event.resolution in (QUARANTINED, RETRY) for entry in entries)
    if declaration is not None and declaration.stream:
        stream = declaration.stream
        try:
            state = connection.ask(stream_info(stream))
        except StreamMissing:
            return _Progress(quarantined=quarantined, fault=standstill or f"the stream {stream!r} does not exist")
        except Forbidden:
            return _Progress(quarantined=quarantined, fault=standstill)
        if not cursor.log:
            return _Progress(quarantined=quarantined, fault=standstill or cursor.reason)
        fault = None if state.created == cursor.log else f"the stream {stream!r} is not the one that it began in"
        lag = _lag(connection, stream, cursor, [declaration.subject], state.last)
        return _Progress(*lag, quarantined, standstill or fault)
    filters = [] if declaration is None else filters_of(app, declaration.events)
    lag = _lag(connection, app.name, cursor, filters, log.last)
    fault = standstill or cursor_fault(connection, log, cursor)
    return _Progress(*lag, quarantined, fault or _public_fault(connection, app, cursor.name))


def _standstill(connection: NatsConnection, declared: Mapping[str, Any]) -> LogDrifted | None:
    """Return the error for settings with which no cursor can move; None without any, or if they may not be read."""
    try:
        return standstill_of(connection.ask(stream_info(str(declared["name"]))), declared)
    except (StreamMissing, Forbidden):
        return None


def _public_fault(connection: NatsConnection, app: Application, name: str) -> LogUnusable | None:
    """Return why the stream of a publication cannot be used; None if it can, or if it may not be read."""
    publication = app.publications.get(name)
    if publication is None:
        return None
    try:
        try:
            state = connection.ask(stream_info(publication.stream))
        except StreamMissing:
            state = None
        check_public(state, publication.stream, name)
    except LogUnusable as error:
        return error
    except Forbidden:
        pass
    return None


def _lag(
    connection: NatsConnection, stream: str, cursor: Cursor, filters: list[str], last: int
) -> tuple[int, float | None]:
    """Return the lag in positions, 0 if none concerns the cursor, and the age in seconds, None if that is unknown."""
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


async def status(app: Application, settings: Settings, *, pause_s: float | None = None) -> list[WorkStatus]:
    """Return the status of every subscription that is declared or has a checkpoint or a cursor.

    With `pause_s`, a second snapshot after that pause gives the pace and the time left; the pause is taken only when
    something lags. Raises `Unreachable`.
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
    """Yield the status every `interval_s`, with its pace; raises an error of the first read, and yields a later one."""
    async with StatusReader(app, settings) as reader:
        history = StatusHistory()
        history.add(await reader.read())
        yield history.statuses()
        while True:
            await asyncio.sleep(interval_s)
            try:
                history.add(await reader.read())
            except EventjetError as error:
                yield error
                continue
            yield history.statuses()


class StatusReader:
    """Reads the status repeatedly over connections that it keeps; a fault closes them. Used by one task."""

    def __init__(self, app: Application, settings: Settings, names: Collection[str] | None = None) -> None:
        """Create a reader for which `names` are declared, by default all subscriptions of the app.

        Without the name of a projection the database is not read, and without another name no cursor is: the
        credentials may not allow it.
        """
        self._database = Database(settings.database)
        self._endpoint = Endpoint.of(settings)
        declarations = declarations_of(app)
        names = [*app.projections, *declarations] if names is None else names
        self._declared = {
            (projection.name, projection.revision) for name, projection in app.projections.items() if name in names
        }
        self._followers = {name: declaration for name, declaration in declarations.items() if name in names}
        self._app = app
        self._engine: AsyncEngine | None = None
        self._connection: NatsConnection | None = None
        self._closed = 0
        """How often the connections were closed."""
        self._lock = threading.Lock()
        """Held while `_connection` and `_closed` are changed: a thread may go on after its read was cancelled."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def read(self) -> StatusSnapshot:
        """Return the status of every subscription, projections first, by name and revision; raises `Unreachable`."""
        try:
            snapshot = await self._checkpoints() if self._declared else CheckpointSnapshot()
            at = time.monotonic()
            statuses = await asyncio.to_thread(self._look, snapshot, self._closed)
        except BaseException:
            await self._close()
            raise
        return StatusSnapshot(at, statuses)

    def _look(self, snapshot: CheckpointSnapshot, closed: int) -> list[WorkStatus]:
        """Return the statuses for the checkpoints that were read from the database. Blocks."""
        connection = self._connection
        if connection is None:
            connection = NatsConnection.open(self._endpoint)
            with self._lock:
                is_late = closed != self._closed  # a task that was cancelled did not wait for this thread
                if not is_late:
                    self._connection = connection
            if is_late:
                connection.close()
                return []
        statuses, last = look_at_projections(connection, self._app.name, snapshot)
        followers = look_at_followers(connection, self._app, self._followers, last) if self._followers else []
        return [*statuses, *followers]

    async def _close(self) -> None:
        engine, self._engine = self._engine, None
        with self._lock:
            self._closed += 1
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if engine is not None:
            await engine.dispose()

    async def _checkpoints(self) -> CheckpointSnapshot:
        if self._engine is None:
            self._engine = self._database.engine("eventjet status", COMMAND, existing=True)
        async with self._database.reaching(), self._engine.connect() as connection:
            await connection.execution_options(**{READ_ONLY: True})
            return await connection.run_sync(read_checkpoints, self._app.name, self._declared)


@dataclass(frozen=True, slots=True)
class CheckpointSnapshot:
    """The checkpoints and quarantines of an app's projections, as the database has them."""

    declared: Collection[tuple[str, int]] = ()
    """Name and revision of the projections that the app declares."""
    rows: Sequence[tuple[Checkpoint, float]] = ()
    """Every checkpoint, by name and revision, with the seconds that its lease still has.

    It is failed if its tables are lost, and new for a declared projection that has none yet.
    """
    quarantined: Mapping[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    """Number of quarantined events by name and revision."""
    refusal: str = ""
    """Why the database takes no writes, if it says so; else empty."""
    rebuilding: frozenset[tuple[str, int]] = frozenset()
    """Name and revision of what a rebuild or a verification is making again."""


def read_checkpoints(connection: Connection, app: str, declared: Collection[tuple[str, int]]) -> CheckpointSnapshot:
    """Read the checkpoints and quarantines of an app, without writing.

    Tables that these credentials may not read count as the checkpoint describes them. Checkpoints of another app are
    left out; a `declared` projection whose name belongs to another app is returned as failed.
    """
    stored_rows = read_all(connection)
    owners = {checkpoint.name: checkpoint.app for checkpoint, _ in stored_rows if checkpoint.app not in ("", app)}
    rows = {
        (checkpoint.name, checkpoint.revision): (_with_loss(connection, checkpoint), remaining_s)
        for checkpoint, remaining_s in stored_rows
        if checkpoint.name not in owners
    }
    for name, revision in set(declared) - rows.keys():
        state, reason = NEW, None
        if name in owners:
            state, reason = FAILED, f"in this database its name belongs to the app {owners[name]!r}"
        rows[name, revision] = (Checkpoint(name, revision, 1, 0, "", "", 0, None, 0.0, 0.0, state, reason), 0.0)
    return CheckpointSnapshot(
        declared,
        [rows[key] for key in sorted(rows)],
        {key: count for key, count in quarantined_counts(connection).items() if key[0] not in owners},
        dialect_of(connection).refuses_writes(connection),
        _rebuilding(connection),
    )


def _rebuilding(connection: Connection) -> frozenset[tuple[str, int]]:
    """Return name and revision of the rebuilds whose lease is fresh; none where these credentials may not read them."""
    is_live = (rebuilds.c.part == RUN_ITSELF) & (rebuilds.c.lease_until > Clock())
    try:
        with connection.begin_nested():
            rows = connection.execute(select(rebuilds.c.projection, rebuilds.c.revision).where(is_live))
            return frozenset((name, revision) for name, revision in rows)
    except DBAPIError as error:
        if Fault.FORBIDDEN not in dialect_of(connection).faults(error):
            raise
    return frozenset()


def look_at_projections(
    connection: NatsConnection, stream: str, snapshot: CheckpointSnapshot
) -> tuple[list[WorkStatus], int]:
    """Return the status of each projection, declared or with a checkpoint, and the last position. Blocks."""
    log = _read_log(connection, stream, snapshot)
    return statuses_of(snapshot, log), log.last


@dataclass(frozen=True, slots=True)
class LogSnapshot:
    """The end of the log, and what it says about checkpoints."""

    last: int = 0
    """The log's last position."""
    ages: Mapping[int, float | None] = field(default_factory=dict[int, float | None])
    """Age in seconds of the event after each checkpoint's position: 0 at the end of the log, None when unknown."""
    faults: Mapping[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    """The fault that will stop the worker of a name and revision."""


def statuses_of(snapshot: CheckpointSnapshot, log: LogSnapshot) -> list[WorkStatus]:
    """Return the status of every projection that is declared or has a checkpoint, given what was read from the log."""
    return [_status(checkpoint, remaining_s, snapshot, log) for checkpoint, remaining_s in snapshot.rows]


def _status(checkpoint: Checkpoint, remaining_s: float, snapshot: CheckpointSnapshot, log: LogSnapshot) -> WorkStatus:
    key = (checkpoint.name, checkpoint.revision)
    # A lease with more time left than it lasts is from before the database's clock was set back, and not renewed since.
    lives = 0 < remaining_s <= checkpoint.lease_s + _CLOCK_S
    is_silent = checkpoint.owner is not None and remaining_s <= 0
    # A database that takes no writes holds no reason; a live lease shows that its worker can write.
    stuck = snapshot.refusal if not lives and checkpoint.state in (NEW, BUILDING, ACTIVE) else ""
    return WorkStatus(
        *key,
        FAILED if key in log.faults else checkpoint.state,
        position=checkpoint.position,
        log_position=log.last,
        lag_events=max(0, log.last - checkpoint.position),
        lag_s=log.ages.get(checkpoint.position),
        owner=checkpoint.owner if lives else None,
        generation=checkpoint.generation,
        reason=_cut(log.faults.get(key) or stuck or checkpoint.reason),
        declared=key in snapshot.declared,
        location=checkpoint.location,
        lost_owner=None if lives else checkpoint.owner,
        lost_s=checkpoint.lease_s - remaining_s if is_silent else None,
        quarantined=snapshot.quarantined.get(key, 0),
        rebuilding=key in snapshot.rebuilding,
    )


def _read_log(connection: NatsConnection, stream: str, snapshot: CheckpointSnapshot) -> LogSnapshot:
    """Read the log's end, the age of the event after each checkpoint, and faults of active checkpoints. Blocks."""
    state = connection.run(reading_log_state(stream))
    identity_of(state)  # raises for a log that has lost its identity
    checkpoints = [checkpoint for checkpoint, _ in snapshot.rows]
    faults: dict[tuple[str, int], str] = {}
    for checkpoint in checkpoints:
        fault = connection.run(log_fault(state, checkpoint))
        if fault is not None and checkpoint.state in (NEW, BUILDING, ACTIVE):
            faults[checkpoint.name, checkpoint.revision] = str(fault)
    ages: dict[int, float | None] = {}
    for position in {checkpoint.position for checkpoint in checkpoints}:
        if position >= state.last:
            ages[position] = 0.0
            continue
        record = connection.ask(next_message(stream, position + 1))
        ages[position] = None if record is None else max(0.0, time.time() - record[1] / 1e9)
    return LogSnapshot(state.last, ages, faults)


def _cut(reason: str | None) -> str | None:
    """Cut a stored reason, which may be of any length, to `REASON_MAX` characters."""
    return None if reason is None else cut(reason, REASON_MAX)


def _with_loss(connection: Connection, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint as its worker will see it: failed if tables, as far as they may be read, are lost."""
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
