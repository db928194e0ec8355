"""`SqlWriter` runs the handlers of a batch of events and advances the checkpoint in one transaction.

It advances the checkpoint first, so that the row stays locked while handlers run: nobody else can write meanwhile,
however short the lease is. The session's limits bound how long a stopped worker keeps the row locked.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from typing import Any, cast

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import DDL, Column, Connection, String, Table, TextClause, event, inspect
from sqlalchemy.exc import DBAPIError, InvalidRequestError, PendingRollbackError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.sql.dml import UpdateBase

from eventjet import failpoints
from eventjet.codec.reasons import reason_of
from eventjet.domain.recorded import Recorded
from eventjet.errors import CheckpointFenced, HandlerFailed, ProjectionStopped, UnexpectedExit
from eventjet.errors.projection import HALF_WRITTEN
from eventjet.observability import logs
from eventjet.projections.sql_projection import ResolvedHandler, ResolvedSql
from eventjet.runtime import is_cancelled
from eventjet.sql.checkpoint import Checkpoint, advance, renew
from eventjet.sql.database import dialect_named, is_transient
from eventjet.sql.dialect import Fault
from eventjet.text import listed
from eventjet.writers.batch import Batch
from eventjet.writers.fold_writer import fenced

_log = logging.getLogger(__name__)
_ENDS = re.compile(
    r"^(?:\s|/\*.*?\*/|--[^\n]*\n)*+"
    r"(begin|start\s+transaction|savepoint|release|commit|end|abort|rollback|prepare\s+transaction)\b"
    r"|;\s*(commit|abort|rollback)\b",
    re.IGNORECASE | re.DOTALL,
)
"""SQL text of the application that would end the transaction, or begin another."""
_WAY_OUT = (
    "a worker commits what handlers write together with the checkpoint; leave the {0} open, and use "
    "`async with {0}.begin_nested()` around what may fail"
)
_WENT_ON_AFTER_ERROR = (
    "went on after an error of the database, which undid what it wrote; "
    "use `async with {}.begin_nested()` around what may fail"
)
_ENDED_SAVEPOINT = "ended the transaction of its {0}: " + _WAY_OUT
_WENT_ON_AFTER_TIMEOUT = (
    "went on after a timeout or a cancellation had cut a statement off, and what the database made of it is not "
    "known; let no time of your own run out over a statement"
)
_ENDING = ("begin", "close", "commit", "invalidate", "rollback")
"""The methods of a connection and of a session that a handler must not call."""
_LOSING = ("expire", "expire_all", "expunge", "expunge_all")
"""The methods of a session that forget changes which are not flushed."""
_UNFLUSHED = "its session holds changes that would be lost; `await session.flush()` before"
_SET_SAVEPOINT = "savepoint eventjet_batch"
_ROLL_BACK = "rollback to savepoint eventjet_batch"


class _CallFailed(Exception):
    """A handler that was given several events failed; it is not known yet at which event."""

    def __init__(self, handler: ResolvedHandler, reason: str) -> None:
        super().__init__(reason)
        self.handler = handler
        self.reason = reason


class SqlWriter:
    """Writes the batches of one SQL projection to the tables that the connection finds under their names.

    Handlers run in the order of the log. A handler of a sequence is called once for each run of its events, that is,
    events that follow one another with no event of another handler between them. If such a call fails, the batch is
    undone and its events are passed one by one, which identifies the event at fault.
    """

    def __init__(self, resolved: ResolvedSql, *, lease_s: float) -> None:
        self._resolved = resolved
        self._lease_s = lease_s
        self._guard = Guard(resolved)

    async def write(self, connection: AsyncConnection, checkpoint: Checkpoint, batch: Batch) -> None:
        """Advance the checkpoint and run the handlers in the caller's transaction, which must roll back on any error.

        Renews the lease where the handlers took longer than a third of it. Raises `CheckpointFenced`, `HandlerFailed`
        with the event that could not be handled, `ProjectionStopped`, and other errors of the database.
        """
        if not batch.is_consistent:
            raise CheckpointFenced(checkpoint.name, f"a batch after position {batch.after} ends at {batch.last}")
        failpoints.reach("worker.before_commit")
        began = time.monotonic()
        await connection.run_sync(self._advance, checkpoint, batch)
        if batch.events:
            self._guard.attach(connection)
            await self._handle(connection, batch.events)
            if time.monotonic() - began > self._lease_s / 3:
                await connection.run_sync(renew, checkpoint, self._lease_s)
        failpoints.reach("worker.rows_written")

    def _advance(self, connection: Connection, checkpoint: Checkpoint, batch: Batch) -> None:
        if not advance(connection, checkpoint, batch.after, batch.last, batch.event_id, self._lease_s):
            raise fenced(connection, checkpoint, batch)

    async def _handle(self, connection: AsyncConnection, events: Sequence[Recorded[Any]]) -> None:
        driver = await driver_of(connection)
        calls = self._calls(events)
        if len(calls) == len(events):
            for handler, handler_events in calls:
                await self._call(connection, driver, handler, handler_events)
            return
        await connection.exec_driver_sql(_SET_SAVEPOINT)
        try:
            for handler, handler_events in calls:
                await self._call(connection, driver, handler, handler_events)
        except _CallFailed as error:
            logs.EVENT_BY_EVENT.log(
                _log, name=self._resolved.name, handler=error.handler.name, count=len(events), reason=error.reason
            )
            await _undo(connection)
            for event in events:
                await self._call(connection, driver, self._resolved.handlers[type(event.data)], (event,))

    def _calls(self, events: Sequence[Recorded[Any]]) -> list[tuple[ResolvedHandler, Sequence[Recorded[Any]]]]:
        """Return the calls of a batch in order: each handler with the events it is given."""
        handlers = self._resolved.handlers
        calls: list[tuple[ResolvedHandler, Sequence[Recorded[Any]]]] = []
        for handler, group in groupby(events, lambda event: handlers[type(event.data)]):
            run = tuple(group)
            calls += [(handler, run)] if handler.takes_many else [(handler, (event,)) for event in run]
        return calls

    async def _call(
        self, connection: AsyncConnection, driver: Any, handler: ResolvedHandler, events: Sequence[Recorded[Any]]
    ) -> None:
        """Call a handler; raise `HandlerFailed` with its event for what it raises or leaves behind.

        Raises `_CallFailed` where it was given several events, `ProjectionStopped` where the transaction is over, and
        transient errors of the database unchanged.
        """
        guard = self._guard
        error: BaseException | None = None
        reason: str | None = None
        try:
            await self._run(connection, handler, events if handler.takes_many else events[0])
        except BaseException as exception:
            if is_cancelled(exception):
                raise
            error = UnexpectedExit.instead_of(exception)
        fault = guard.refusal or guard.fault
        if fault is None and connection.invalidated:
            raise self._failed(events[0], f"{handler.name} {_WENT_ON_AFTER_TIMEOUT}") from error
        error = fault or error
        if error is not None:
            reason = reason_of(error, private=self._resolved.is_private) + guard.more_of(error)
            reason = str(error) if isinstance(error, NotAllowed) else reason
        elif is_over(driver):
            name, position = self._resolved.name, events[0].position
            reason = f"{handler.name} ended the transaction at position {position}, so its tables {HALF_WRITTEN}"
            with suppress(SQLAlchemyError):  # the driver may be closed
                await connection.invalidate()
            raise ProjectionStopped(name, reason, f"Fix it, then run `eventjet rebuild {name}`.")
        elif is_spoilt(driver):
            reason = f"{handler.name} {_WENT_ON_AFTER_ERROR.format('connection')}"
        elif connection.in_nested_transaction():
            reason = f"{handler.name} left a savepoint open; use `async with connection.begin_nested()`"
        if reason is None:
            return
        if guard.refusal is not None:
            # SQLAlchemy considers the transaction ended, and the server does not.
            with suppress(SQLAlchemyError):
                await connection.invalidate()
        elif isinstance(error, DBAPIError) and is_transient(error):
            raise error
        elif len(events) > 1 and not is_over(driver):
            raise _CallFailed(handler, reason) from error
        raise self._failed(events[0], reason) from error

    async def _run(self, connection: AsyncConnection, handler: ResolvedHandler, argument: Any) -> None:
        """Run a handler; what it leaves in its session is flushed."""
        guard = self._guard
        if not handler.takes_session:
            with guard.handling(handler.name):
                await handler.function(argument, connection)
            return
        # In a savepoint of its own, an error in a flush undoes no more than what the handler did. A session that is
        # closed for good cannot be used by what the handler has left running.
        options: dict[str, Any] = {"join_transaction_mode": "create_savepoint", "close_resets_only": False}
        async with AsyncSession(connection, expire_on_commit=False, **options) as session:
            guard.attach_session(session.sync_session)
            try:
                with guard.handling(handler.name):
                    await handler.function(argument, session)
                    await session.flush()
            except PendingRollbackError as error:
                raise NotAllowed(f"{handler.name} {_WENT_ON_AFTER_ERROR.format('session')}") from error
            try:
                await session.commit()
            except InvalidRequestError as error:
                did = _WENT_ON_AFTER_ERROR if isinstance(error, PendingRollbackError) else _ENDED_SAVEPOINT
                raise NotAllowed(f"{handler.name} {did.format('session')}") from error

    def _failed(self, event: Recorded[Any], reason: str) -> HandlerFailed:
        return HandlerFailed(self._resolved.name, event.position, event.aggregate_id, reason)


async def _undo(connection: AsyncConnection) -> None:
    """Undo what the handlers of a batch have done, including savepoints that they left open."""
    while (nested := connection.get_nested_transaction()) is not None:
        await nested.rollback()
    await connection.exec_driver_sql(_ROLL_BACK)


class NotAllowed(Exception):
    """A handler did something that it must not do; the message has no values of events."""


class Guard:
    """Keeps a handler inside its transaction and its tables, and notes transient faults; on one connection at a time.

    Forbidden statements are refused before they take effect. A fault of the connection, a lock or the server that the
    handler met is reported as such, even if the handler caught it.
    """

    def __init__(self, resolved: ResolvedSql) -> None:
        self._tables = resolved.tables
        self._declared = {table.name for table in resolved.tables}
        self._connection: Connection | None = None
        self._handler: str | None = None
        self.refusal: NotAllowed | None = None
        """The first refusal of the current or last handler; None when nothing was refused."""
        self.fault: DBAPIError | None = None
        """The first transient fault that the current or last handler met."""
        self._overlong: tuple[DBAPIError, str] | None = None

    def attach(self, connection: AsyncConnection) -> None:
        """Listen to this connection from now on; does nothing where it already does."""
        sync = connection.sync_connection
        assert sync is not None
        if sync is self._connection:
            return
        self._connection = sync
        event.listen(sync, "commit", self._on_commit)
        event.listen(sync, "rollback", self._on_rollback)
        event.listen(sync, "before_execute", self._check_table)
        event.listen(sync, "before_cursor_execute", self._check_text)
        event.listen(sync.engine, "handle_error", self._note)
        self._watch(sync, "connection", _ENDING, _WAY_OUT.format("connection"))

    def attach_session(self, session: Session) -> None:
        """Watch the session of one call."""
        event.listen(session, "after_transaction_end", self._on_end)
        event.listen(session, "persistent_to_detached", self._on_detached)
        self._watch(session, "session", (*_ENDING, "reset"), _WAY_OUT.format("session"))
        self._watch(session, "session", _LOSING, _UNFLUSHED, lambda: any((session.new, session.dirty, session.deleted)))
        # It forgets the changes of its object before it flushes those of all others.
        self._watch(session, "session", ("refresh",), _UNFLUSHED, lambda: any(session.dirty))

    def _watch(
        self,
        target: Connection | Session,
        noun: str,
        names: Iterable[str],
        why: str,
        is_wrong: Callable[[], bool] = lambda: True,
    ) -> None:
        """Refuse the methods of these names on this connection or session, for as long as a handler runs."""

        def watched(method: Callable[..., Any], name: str, *arguments: Any, **options: Any) -> Any:
            # SQLAlchemy itself begins a savepoint by `begin`, and invalidates a connection for an error.
            is_own = options.get("nested") or any(isinstance(argument, BaseException) for argument in arguments)
            if not is_own and is_wrong():
                self._refuse(f"call {noun}.{name}(): {why}")
            return method(*arguments, **options)

        for name in names:
            setattr(target, name, partial(watched, getattr(target, name), name))

    @contextmanager
    def handling(self, handler: str) -> Generator[None]:
        """Watch the statements of the handler of this name within the block."""
        self._handler, self.refusal, self.fault, self._overlong = handler, None, None, None
        try:
            yield
        finally:
            self._handler = None

    def more_of(self, error: BaseException) -> str:
        """Return which column a text was too long for, where the database did not say so; else an empty string."""
        return f": {self._overlong[1]}" if self._overlong is not None and self._overlong[0] is error else ""

    def _refuse(self, action: str) -> None:
        if self._handler is not None:
            self.refusal = self.refusal or NotAllowed(f"{self._handler} must not {action}")
            raise self.refusal

    def _on_commit(self, _connection: Connection) -> None:
        self._refuse(f"commit: {_WAY_OUT.format('connection')}")

    def _on_rollback(self, _connection: Connection) -> None:
        self._refuse(f"roll back: {_WAY_OUT.format('connection')}")

    def _on_end(self, _session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None:
            self._refuse(f"end the transaction of its session: {_WAY_OUT.format('session')}")

    def _on_detached(self, _session: Session, instance: object) -> None:
        """Refuse `make_transient`, which is no method of the session, for an object with changes."""
        if inspect(instance).modified:
            self._refuse(f"make an object transient: {_UNFLUSHED}")

    def allows(self, statement: Any) -> bool:
        """Whether a statement writes only to the projection's tables, as far as SQLAlchemy knows."""
        table = getattr(statement, "table", None) if isinstance(statement, UpdateBase) else None
        return not isinstance(table, Table) or (table.schema is None and table.name in self._declared)

    def _check_table(self, _connection: Any, statement: Any, *_: Any) -> None:
        if not self.allows(statement):
            self._refuse(f"write to {statement.table.fullname!r}, which is not among the projection's tables")

    def _check_text(
        self, _connection: Any, _cursor: Any, statement: str, _parameters: Any, context: Any, _many: bool
    ) -> None:
        ends = _ENDS.search(statement) if self._handler is not None and _is_by_hand(context) else None
        if ends is not None:
            words = " ".join((ends[1] or ends[2]).split()).upper()
            self._refuse(f"execute {words}: {_WAY_OUT.format('connection')}")

    def _note(self, context: Any) -> None:
        error = context.sqlalchemy_exception
        if self._handler is None or not isinstance(error, DBAPIError):
            return
        if is_transient(error):
            self.fault = self.fault or error
            return
        if Fault.TOO_LONG in dialect_named(context.dialect.name).faults(error):
            self._overlong = error, overlong(context.parameters, self._tables)


def _is_by_hand(context: Any) -> bool:
    """Whether the application wrote the statement's text; SQLAlchemy itself may set a savepoint for `begin_nested`."""
    compiled = getattr(context, "compiled", None)
    return compiled is None or isinstance(compiled.statement, TextClause | DDL)


async def driver_of(connection: AsyncConnection) -> Any:
    """Return the driver's own connection."""
    return (await connection.get_raw_connection()).driver_connection


def is_over(driver: Any) -> bool:
    """Whether the transaction has ended, so that a statement would be committed by itself."""
    if isinstance(driver, psycopg.AsyncConnection):
        return driver.info.transaction_status in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)
    try:
        return not driver.in_transaction
    except ValueError:  # it is closed
        return True


def is_spoilt(driver: Any) -> bool:
    """Whether only a rollback is possible: PostgreSQL would silently answer a commit with a rollback."""
    return isinstance(driver, psycopg.AsyncConnection) and driver.info.transaction_status == TransactionStatus.INERROR


_ROW_SUFFIX = re.compile(r"_m[0-9]+$")
"""The suffix that SQLAlchemy adds to a parameter's name where one statement has the values of several rows."""


def overlong(parameters: Any, declared: Sequence[Table]) -> str:
    """Say which column a text was too long for, without the text itself.

    `parameters` is one mapping, or one for each row. Where their names do not tell the column, say because SQL computes
    the value, all columns with a limit are listed.
    """
    rows = cast("Sequence[Any]", parameters if isinstance(parameters, list | tuple) else [parameters])
    named_values = [item for row in rows if isinstance(row, Mapping) for item in cast("Mapping[str, Any]", row).items()]
    texts = [(name, len(value)) for name, value in named_values if isinstance(value, str)]
    columns: list[Column[Any]] = [column for table in declared for column in table.columns]
    limits = [
        (column.key, f"{column.table.name}.{column.name}", column.type.length)
        for column in columns
        if isinstance(column.type, String) and column.type.length is not None
    ]
    for name, length in texts:
        for key, column, limit in limits:
            if _ROW_SUFFIX.sub("", name) == key and length > limit:
                return f"{column} holds {limit} characters, and {length} were given"
    name, length = max(texts, key=lambda entry: entry[1], default=("", 0))
    longest_text = f"; the longest text given is {name!r} with {length}" if name else ""
    limits_text = listed(f"{column} holds {limit}" for _, column, limit in limits)
    return f"of the columns limited in characters {limits_text}{longest_text}"
