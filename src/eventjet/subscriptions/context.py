"""`WorkerContext`: what the projection runners of one process share; `Session`: the SQL connection of one session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet.codec.catalog import Catalog
from eventjet.codec.subjects import notice, notice_subject
from eventjet.errors import Forbidden
from eventjet.jetstream.client import Client
from eventjet.log.mirror import LogReader
from eventjet.observability import logs
from eventjet.projections.fold import BlockedAggregates
from eventjet.projections.resolve import ResolvedProjection
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.database import Database
from eventjet.sql.dialect import READ_ONLY
from eventjet.sql.locations import located_tables
from eventjet.sql.postgres_connections import look_first_in
from eventjet.writers.fold_writer import FoldWriter
from eventjet.writers.sql_writer import driver_of, is_over

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The limits of a worker; by default a worker takes over a dead worker's projection in under 5 s."""

    batch_max: int = 16_000
    """Most events in one transaction: with slow handlers a worker takes fewer."""
    lease_s: float = 3.5
    """How long a lease lasts without a batch or a renewal, in seconds."""
    poll_s: float = 0.5
    """How often a standby looks for a free lease, in seconds."""
    backoff_s: tuple[float, float] = (0.1, 5.0)
    """First and longest pause after a transient fault, in seconds; each pause is twice the last."""
    drain_s: float = 10.0
    """How long a stopping worker may take to finish its current batches, in seconds."""
    deps_s: float = 60.0
    """How long opening `App(deps=…)` may take before it is cancelled and tried again, in seconds."""
    look_s: float = 5.0
    """How often the status is read for health and metrics, where they are served, in seconds."""
    stalled_s: float = 30.0
    """How long a projection may lag without progress before its worker counts as unhealthy, in seconds."""


class Notices:
    """Publishes the positions of projections over core NATS, so that waiting readers need not poll the database.

    Publishing never waits and never fails. A lost notice is harmless: see `eventjet.sql.waiting`.
    """

    def __init__(self, client: Client, app: str) -> None:
        self._client = client
        self._app = app
        self._is_denied = False
        client.on_denied.append(self._denied)
        client.on_lost.append(self._lost)

    def publish(self, projection: str, revision: int, position: int) -> None:
        """Publish the position of a projection, unless the server has denied this connection the subject."""
        if not self._is_denied:
            self._client.publish(notice_subject(self._app, projection), notice(revision, position))

    def _denied(self, fault: Forbidden) -> None:
        if fault.subject.startswith(notice_subject(self._app, "")) and not self._is_denied:
            self._is_denied = True
            logs.NOTICES_DENIED.log(_log, reason=fault)

    def _lost(self) -> None:
        self._is_denied = False  # the next connection may have other permissions


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The resources that the projection runners of one process share; created within the loop that runs them."""

    stream: str
    log: str
    """Identity of the log when this process began."""
    catalog: Catalog
    database: Database
    client: Client
    """For the log, and for notices."""
    reader: LogReader
    """Where the log's events are read."""
    owner: str
    """Name of this process in leases."""
    options: WorkerOptions
    notices: Notices
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    def fold_writer(
        self, resolved: ResolvedProjection, checkpoint: Checkpoint, blocked: BlockedAggregates | None = None
    ) -> FoldWriter:
        """Return a writer for one session, which writes to the table slot that the checkpoint names."""
        dialect = self.database.dialect
        tables = located_tables(resolved, checkpoint.location, dialect)
        return FoldWriter(resolved, dialect, lease_s=self.options.lease_s, tables=tables, blocked=blocked)

    def turn(self) -> AbstractAsyncContextManager[Any]:
        """Return the lock for writing: with a single writer, queueing here is cheaper than polling the database."""
        return nullcontext() if self.database.dialect.is_concurrent else self._turn


class Session:
    """The SQL connection of one session, used by one task at a time; an error leaves no transaction open."""

    def __init__(self, connection: AsyncConnection, context: WorkerContext) -> None:
        self._connection = connection
        self._context = context
        self._is_concurrent = context.database.dialect.is_concurrent

    @classmethod
    @asynccontextmanager
    async def open(cls, context: WorkerContext, purpose: str, *, for_handlers: bool = False) -> AsyncGenerator[Session]:
        """Open a new connection for the block, since statements prepared on an older connection may no longer fit.

        `for_handlers` prepares the connection for an application's own statements, which may rely on foreign keys.
        Raises `Unreachable`.
        """
        engine = context.database.engine(f"eventjet {purpose}", existing=True)
        if for_handlers:
            context.database.dialect.configure_for_handlers(engine.sync_engine)
        try:
            async with context.database.reaching():
                session = cls(await engine.connect(), context)
            try:
                yield session
            finally:
                await session._connection.close()
        finally:
            await engine.dispose()

    async def read(self, look: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that only reads; its transaction, if any, is rolled back afterwards."""
        await self._read_only(True)
        try:
            return await self._connection.run_sync(look, *args, **kwargs)
        finally:
            if self._connection.in_transaction():
                await self._connection.rollback()

    async def write(self, change: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in one transaction, and commit it."""
        await self._read_only(False)
        async with self._context.turn(), self._connection.begin():
            return await self._connection.run_sync(change, *args, **kwargs)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[AsyncConnection]:
        """Open a transaction for statements that are awaited one by one; any error rolls it back."""
        await self._read_only(False)
        async with self._context.turn():
            await self._connection.begin()
            try:
                yield self._connection
                await self._connection.commit()
            except BaseException:
                await self._undo()
                raise

    async def commit_by_statement(self) -> None:
        """Let the database commit each statement from here on, if it is concurrent: a `write` is one statement then."""
        if self._is_concurrent:
            await self._connection.execution_options(isolation_level="AUTOCOMMIT")

    async def look_first_in(self, schema: str) -> None:
        """Look for names without a schema in this schema first, from here on; only for PostgreSQL."""

        def look(connection: DBAPIConnection, _record: object) -> None:
            look_first_in(connection, schema)

        # Also on a connection that replaces this one, which SQLAlchemy may open by itself.
        event.listen(self._connection.sync_engine, "connect", look)
        await self._connection.run_sync(lambda connection: look_first_in(connection.connection, schema))

    async def _undo(self) -> None:
        """Roll back; a connection that is not clean afterwards is replaced by a new connection."""
        connection = self._connection
        with suppress(SQLAlchemyError):
            await connection.rollback()
            if not connection.in_transaction() and is_over(await driver_of(connection)):
                return
        with suppress(SQLAlchemyError):
            await connection.invalidate()
        await connection.close()
        self._connection = await connection.engine.connect()

    async def _read_only(self, enabled: bool) -> None:
        if not self._is_concurrent:
            await self._connection.execution_options(**{READ_ONLY: enabled})
