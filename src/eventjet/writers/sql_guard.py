"""`Guard`: keeps a handler of a `SqlProjection` inside the transaction it was given, and its faults apart.

What a handler must not do is refused before it takes effect. A fault of the connection, of a lock or of the server that
the handler met is told as such, whatever the handler made of it.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import DDL, Connection, Table, TextClause, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.dml import UpdateBase

from eventjet.projections.sql_projection import ResolvedSql
from eventjet.sql.dialect import is_transient

_ENDS = re.compile(
    r"^\s*(begin|start\s+transaction|savepoint|release|commit|end|abort|rollback|prepare\s+transaction)\b"
    r"|;\s*(commit|abort|rollback)\b",
    re.IGNORECASE,
)
"""Statements by hand that would end the transaction, or begin another."""


class NotAllowed(Exception):
    """A handler tried what it must not do; nothing has happened yet."""


class Guard:
    """For one projection, on one connection at a time."""

    def __init__(self, resolved: ResolvedSql) -> None:
        self._declared = {table.name for table in resolved.tables}
        self._connection: Connection | None = None
        self._handler: str | None = None
        self.refusal: NotAllowed | None = None
        """Why the handler that runs, or ran last, was refused something."""
        self.fault: DBAPIError | None = None
        """The first transient fault that the handler met."""

    def attach(self, connection: AsyncConnection) -> None:
        """Watch this connection from here on."""
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
        """While the handler of this name runs."""
        self._handler, self.refusal, self.fault = handler, None, None
        try:
            yield
        finally:
            self._handler = None

    def _refuse(self, what: str) -> None:
        if self._handler is None:
            return
        self.refusal = self.refusal or NotAllowed(
            f"{self._handler} must not {what}: the checkpoint is in the same transaction"
        )
        raise self.refusal

    def _on_commit(self, _connection: Connection) -> None:
        self._refuse("commit")

    def _on_rollback(self, _connection: Connection) -> None:
        self._refuse("roll back")

    def _check_table(self, _connection: Any, statement: Any, *_: Any) -> None:
        if self._handler is None or not isinstance(statement, UpdateBase):
            return
        table = getattr(statement, "table", None)
        if isinstance(table, Table) and (table.schema is not None or table.name not in self._declared):
            self.refusal = self.refusal or NotAllowed(
                f"{self._handler} must not write to {table.fullname!r}, which is not among the projection's tables"
            )
            raise self.refusal

    def _check_text(
        self, _connection: Any, _cursor: Any, statement: str, _parameters: Any, context: Any, _many: bool
    ) -> None:
        if self._handler is None or not _is_by_hand(context):
            return
        found = _ENDS.search(statement)
        if found is not None:
            self._refuse(f"execute {' '.join(found[0].split()).lstrip('; ').upper()}")

    def _note(self, context: Any) -> None:
        error = context.sqlalchemy_exception
        if self._handler is not None and self.fault is None and isinstance(error, DBAPIError) and is_transient(error):
            self.fault = error


def _is_by_hand(context: Any) -> bool:
    """Whether the statement's text is the application's own; SQLAlchemy's, for `begin_nested`, may be a savepoint."""
    compiled = getattr(context, "compiled", None)
    return compiled is None or isinstance(compiled.statement, TextClause | DDL)


async def driver_of(connection: AsyncConnection) -> Any:
    """The driver's own connection."""
    return (await connection.get_raw_connection()).driver_connection


def is_over(driver: Any) -> bool:
    """Whether the transaction has ended."""
    if isinstance(driver, psycopg.AsyncConnection):
        return driver.info.transaction_status == TransactionStatus.IDLE
    return not driver.in_transaction


def is_spoilt(driver: Any) -> bool:
    """Whether nothing but a rollback is possible: PostgreSQL would answer a commit with one, and say nothing."""
    return isinstance(driver, psycopg.AsyncConnection) and driver.info.transaction_status == TransactionStatus.INERROR
