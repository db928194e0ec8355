"""`SqlWriter` runs the handlers of a batch of events and advances the checkpoint in one transaction.

It advances the checkpoint first, so that the row stays locked while handlers run: nobody else can write meanwhile,
however short the lease is. The session's limits bound how long a stopped worker keeps the row locked.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import Any, cast

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import DDL, Column, Connection, String, Table, TextClause, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection
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
    r"^\s*(begin|start\s+transaction|savepoint|release|commit|end|abort|rollback|prepare\s+transaction)\b"
    r"|;\s*(commit|abort|rollback)\b",
    re.IGNORECASE,
)
"""SQL text of the application that would end the transaction, or begin another."""
_SAME_TRANSACTION = "the checkpoint is in the same transaction"
_WENT_ON_AFTER_ERROR = (
    "it went on after an error of the database, which undid everything; "
    "use `connection.begin_nested()` around what may fail"
)
_WENT_ON_AFTER_TIMEOUT = (
    "it went on after a timeout or a cancellation had cut a statement off, and what the database made of it is not "
    "known; let no time of your own run out over a statement"
)


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
            logs.EVENT_BY_EVENT.tell(
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
            with guard.handling(handler.name):
                await handler.function(events if handler.takes_many else events[0], connection)
        except BaseException as exception:
            if is_cancelled(exception):
                raise
            error = UnexpectedExit.instead_of(exception)
        fault = guard.refusal or guard.fault
        if fault is None and connection.invalidated:
            raise self._failed(events[0], _WENT_ON_AFTER_TIMEOUT) from error
        error = fault or error
        if error is not None:
            reason = reason_of(error, private=self._resolved.is_private) + guard.more_of(error)
        elif is_over(driver):
            name, position = self._resolved.name, events[0].position
            reason = f"{handler.name} ended the transaction at position {position}, so its tables {HALF_WRITTEN}"
            raise ProjectionStopped(name, reason, f"Fix it, then run `eventjet rebuild {name}`.")
        elif is_spoilt(driver):
            reason = _WENT_ON_AFTER_ERROR
        elif connection.in_nested_transaction():
            reason = "it left a savepoint open; use `async with connection.begin_nested()`"
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

    def _failed(self, event: Recorded[Any], reason: str) -> HandlerFailed:
        return HandlerFailed(self._resolved.name, event.position, event.aggregate_id, reason)


async def _undo(connection: AsyncConnection) -> None:
    """Undo what the handlers of a batch have done, including savepoints that they left open."""
    while (nested := connection.get_nested_transaction()) is not None:
        await nested.rollback()
    await connection.exec_driver_sql(_ROLL_BACK)


class NotAllowed(Exception):
    """A handler tried something that it must not do; it was refused before it took effect."""


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
        self._refuse(f"commit: {_SAME_TRANSACTION}")

    def _on_rollback(self, _connection: Connection) -> None:
        self._refuse(f"roll back: {_SAME_TRANSACTION}")

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
            self._refuse(f"execute {' '.join(ends[0].split()).lstrip('; ').upper()}: {_SAME_TRANSACTION}")

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
        return driver.info.transaction_status == TransactionStatus.IDLE
    return not driver.in_transaction


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
