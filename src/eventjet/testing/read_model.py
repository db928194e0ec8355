"""`ReadModelCase`: one projection over SQLite, with a worker's writers; each run starts from empty tables."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from eventjet.codec.catalog import Catalog
from eventjet.domain.recorded import Recorded
from eventjet.domain.subscription import events_of, folded_events
from eventjet.projections.app_ref import Declared
from eventjet.projections.projection import Projection, state_keys
from eventjet.projections.resolve import ResolvedProjection, resolve
from eventjet.projections.row_codec import listed
from eventjet.projections.sql_projection import (
    AnyResolved,
    ResolvedSql,
    SqlProjection,
    resolve_sql,
    subscription,
)
from eventjet.projections.state_fold import StateFold
from eventjet.rebuild.folding import Folding
from eventjet.runtime import loop_runner
from eventjet.sql import checkpoint
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.sql.sqlite import make_readable
from eventjet.writers.batch import Batch
from eventjet.writers.fold_writer import FoldWriter
from eventjet.writers.sql_writer import SqlWriter

TableRows: TypeAlias = dict[str, list[dict[str, Any]]]
"""The rows of each table by the table's name, in the order of the primary key."""


def resolved_alone(projection: Declared, more: Iterable[type] = ()) -> AnyResolved:
    """Resolve a projection without an app; `more` are further event types that histories may contain."""
    if isinstance(projection, SqlProjection):
        return resolve_sql(projection, Catalog([*subscription(projection), *more]))
    function, place = (projection.fold, 1) if isinstance(projection, Projection) else (projection.rows, 0)
    folded = [event for source in state_keys(projection) for event in folded_events(source.aggregate)]
    return resolve(projection, Catalog([*events_of(function, function.__code__.co_varnames[place]), *folded, *more]))


class ReadModelCase:
    """One projection with its tables, made by `read_model_case`; its methods block and are not for coroutines."""

    def __init__(self, resolved: AnyResolved, database: Database, engine: AsyncEngine, runner: asyncio.Runner) -> None:
        self.resolved = resolved
        self.events = tuple(resolved.decoded if isinstance(resolved, ResolvedProjection) else resolved.events)
        self._database = database
        self._engine = engine
        self._runner = runner

    def written(self, events: Sequence[Recorded[Any]], ends: Iterable[int]) -> TableRows:
        """Return the rows after batches that end with the events of these numbers, from 1, uncommitted."""
        return self._runner.run(self._written(events, sorted({*ends, len(events)})))

    def in_one_pass(self, events: Sequence[Recorded[Any]]) -> TableRows:
        """Return the rows as a rebuild in one process makes them: all events folded and loaded, or handled in order."""
        if isinstance(self.resolved, ResolvedSql):
            return self.written(events, ())
        folding = Folding(self.resolved, self._database.dialect, {})
        folding.take(self._numbered(events))
        return self._runner.run(self._loaded([folding.codec.load(row) for row in folding.rows()]))

    def _numbered(self, events: Sequence[Recorded[Any]]) -> Sequence[Recorded[Any]]:
        resolved = self.resolved
        if isinstance(resolved, ResolvedProjection) and resolved.joins is not None:
            return StateFold(resolved).numbered(events)
        return events

    async def _written(self, events: Sequence[Recorded[Any]], ends: Sequence[int]) -> TableRows:
        resolved, events = self.resolved, self._numbered(events)
        async with self._engine.connect() as connection:
            await connection.run_sync(checkpoint.ensure, resolved.name, resolved.revision)
            if isinstance(resolved, ResolvedProjection) and resolved.quarantines:
                # An event that cannot be handled is an error here.
                resolved = replace(resolved, on_error="stop")
            writer = writer_of(resolved, self._database)
            after = 0
            for end in filter(None, ends):
                previous = await connection.run_sync(checkpoint.read, resolved.name, resolved.revision)
                assert previous is not None
                last = events[end - 1]
                batch = Batch(previous.position, last.position, last.event_id, events[after:end])
                await write_batch(writer, connection, previous, batch)
                after = end
            return await self._rows(connection)

    async def _loaded(self, rows: Sequence[Any]) -> TableRows:
        table = self.resolved.tables[0]
        names = [column.key for column in table.columns]
        async with self._engine.connect() as connection:
            if rows:
                await connection.execute(
                    table.insert(), [{name: listed(getattr(row, name)) for name in names} for row in rows]
                )
            return await self._rows(connection)

    async def _rows(self, connection: AsyncConnection) -> TableRows:
        rows: TableRows = {}
        is_sql = isinstance(self.resolved, ResolvedSql)
        for table in self.resolved.tables if is_sql else self.resolved.tables[:1]:
            result = await connection.execute(table.select().order_by(*table.primary_key.columns))
            rows[table.name] = [dict(row) for row in result.mappings()]
        return rows


def writer_of(resolved: AnyResolved, database: Database) -> FoldWriter | SqlWriter:
    """Return the writer that a worker uses for a projection, without a lease."""
    if isinstance(resolved, ResolvedSql):
        return SqlWriter(resolved, lease_s=0)
    return FoldWriter(resolved, database.dialect, lease_s=0)


async def write_batch(
    writer: FoldWriter | SqlWriter, connection: AsyncConnection, previous: checkpoint.Checkpoint, batch: Batch
) -> None:
    """Write a batch after a checkpoint; raises `HandlerFailed`, and what the database raises."""
    if isinstance(writer, SqlWriter):
        await writer.write(connection, previous, batch)
    else:
        await connection.run_sync(writer.write, previous, batch)


@contextmanager
def read_model_case(resolved: AnyResolved) -> Generator[ReadModelCase]:
    """Yield a projection with its tables in a temporary SQLite file."""
    for table in resolved.tables:
        make_readable(table)
    with tempfile.TemporaryDirectory(prefix="eventjet-") as folder, loop_runner() as runner:
        database = Database(f"sqlite:///{Path(folder) / 'trial.db'}")
        engine = database.engine()
        database.dialect.configure_for_handlers(engine.sync_engine)

        async def prepare() -> None:
            async with engine.begin() as connection:
                await connection.run_sync(create_tables, [resolved])

        try:
            runner.run(prepare())
            yield ReadModelCase(resolved, database, engine, runner)
        finally:
            runner.run(engine.dispose())
