"""What the projectors of one process share, `WorkerContext`, and the SQL connection of one term, `Session`."""

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
from eventjet.nats.endpoint import Endpoint
from eventjet.observability import logs
from eventjet.observability.metrics import Meter
from eventjet.projections.fold import BlockedAggregates
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.database import READ_ONLY, Database
from eventjet.sql.locations import located
from eventjet.sql.postgres_connections import look_first_in
from eventjet.writers.fold_writer import FoldWriter
from eventjet.writers.sql_writer import driver_of, is_over

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Bounds of a worker; by default it takes over a dead worker's projection in under 5 s."""

    batch_max: int = 16_000
    """Events in one transaction, at most: with slow handlers a worker takes fewer."""
    lease_s: float = 3.5
    """How long a lease lives without a batch or a renewal."""
    poll_s: float = 0.5
    """How often a standby looks for a free lease."""
    backoff_s: tuple[float, float] = (0.1, 5.0)
    """First and longest pause after a transient fault; each is twice the one before."""
    drain_s: float = 10.0
    """How long a stopping worker may take to finish the batches in hand."""
    deps_s: float = 60.0
    """How long opening `App(deps=…)` may take before it is given up, and tried again."""
    look_s: float = 5.0
    """How often health and metrics are looked after, where they are served."""
    stalled_s: float = 30.0
    """How long a projection may lag without progress before its worker is called unhealthy."""


class Notices:
    """Tells over core NATS how far projections are true, so that nobody has to ask the database all the time.

    Telling never waits and never fails. What is lost is harmless: see `eventjet.sql.waiting`.
    """

    def __init__(self, client: Client, app: str) -> None:
        self._client = client
        self._app = app
        self._is_denied = False
        client.on_denied.append(self._denied)
        client.on_lost.append(self._lost)

    def tell(self, projection: str, revision: int, position: int) -> None:
        if not self._is_denied:
            self._client.publish(notice_subject(self._app, projection), notice(revision, position))

    def _denied(self, fault: Forbidden) -> None:
        if fault.subject.startswith(notice_subject(self._app, "")) and not self._is_denied:
            self._is_denied = True
            logs.NOTICES_DENIED.tell(_log, reason=fault)

    def _lost(self) -> None:
        self._is_denied = False  # the next connection may have other rights


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Made within the loop that runs the projectors."""

    stream: str
    log: str
    """Its identity when this process began."""
    catalog: Catalog
    database: Database
    endpoint: Endpoint
    client: Client
    owner: str
    """This process, as leases name it."""
    options: WorkerOptions
    notices: Notices
    meters: dict[str, Meter] = field(default_factory=dict[str, Meter], repr=False)
    """What this process has done, by durable."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    def meter(self, resolved: AnyResolved) -> Meter:
        return self.meters.setdefault(resolved.durable, Meter(resolved.name, resolved.revision))

    def fold_writer(
        self, resolved: ResolvedProjection, checkpoint: Checkpoint, blocked: BlockedAggregates | None = None
    ) -> FoldWriter:
        """For one term: it writes to where the checkpoint says that the table is."""
        dialect = self.database.dialect
        table = located(resolved.table, checkpoint.location, dialect)
        return FoldWriter(resolved, dialect, lease_s=self.options.lease_s, table=table, blocked=blocked)

    def turn(self) -> AbstractAsyncContextManager[Any]:
        """Held while writing: where one writer excludes all others, queueing here is cheaper than polling there."""
        return nullcontext() if self.database.dialect.is_concurrent else self._turn


class Session:
    """Made by `Session.open`, used by one task at a time. Raises what SQLAlchemy raises; nothing is left open then."""

    def __init__(self, connection: AsyncConnection, context: WorkerContext) -> None:
        self._connection = connection
        self._context = context
        self._is_concurrent = context.database.dialect.is_concurrent

    @classmethod
    @asynccontextmanager
    async def open(cls, context: WorkerContext, purpose: str, *, by_hand: bool = False) -> AsyncGenerator[Session]:
        """A new connection, or `Unreachable`: what an older one has prepared may not fit the tables any more.

        `by_hand` is for the statements of an application, which may rely upon its foreign keys.
        """
        engine = context.database.engine(f"eventjet {purpose}")
        if by_hand:
            context.database.dialect.prepare_for_handlers(engine.sync_engine)
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
        """Run something that only reads; a transaction begins with its first statement, if there is any."""
        await self._read_only(True)
        try:
            return await self._connection.run_sync(look, *args, **kwargs)
        finally:
            if self._connection.in_transaction():
                await self._connection.rollback()

    async def write(self, change: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        await self._read_only(False)
        async with self._context.turn(), self._connection.begin():
            return await self._connection.run_sync(change, *args, **kwargs)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[AsyncConnection]:
        """A transaction for statements that are awaited one by one; rolled back on any error."""
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
        """From here on each `write` is one statement, which a concurrent database commits without being asked."""
        if self._is_concurrent:
            await self._connection.execution_options(isolation_level="AUTOCOMMIT")

    async def look_first_in(self, schema: str) -> None:
        """From here on names without a schema are looked for in this one before any other. Only for PostgreSQL."""

        def look(made: DBAPIConnection, _record: object) -> None:
            look_first_in(made, schema)

        # On whatever replaces the connection too, which SQLAlchemy may do by itself.
        event.listen(self._connection.sync_engine, "connect", look)
        await self._connection.run_sync(lambda connection: look_first_in(connection.connection, schema))

    async def _undo(self) -> None:
        """Roll back; a connection that does not come out of it clean is replaced by a new one."""
        connection = self._connection
        with suppress(SQLAlchemyError):
            await connection.rollback()
            if not connection.in_transaction() and is_over(await driver_of(connection)):
                return
        with suppress(SQLAlchemyError):
            await connection.invalidate()
        await connection.close()
        self._connection = await connection.engine.connect()

    async def _read_only(self, wanted: bool) -> None:
        if not self._is_concurrent:
            await self._connection.execution_options(**{READ_ONLY: wanted})
