"""An app's `Jet` over a log in memory and read models in SQLite, for an application's tests without a server."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from eventjet.codec.headers import event_id_of
from eventjet.commands.repository import Repositories
from eventjet.jet import Jet
from eventjet.log.memory import MemoryStore
from eventjet.observability import tracing
from eventjet.projections.app_ref import Application
from eventjet.projections.fold import reader
from eventjet.projections.sql_projection import AnyResolved
from eventjet.settings import Settings
from eventjet.sql import checkpoint
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.testing.read_model import write_batch, writer_of
from eventjet.writers.batch import Batch
from eventjet.writers.fold_writer import FoldWriter
from eventjet.writers.sql_writer import SqlWriter


@dataclass(slots=True)
class MemoryReadModels:
    """The read models of a log in memory, each brought up to date when somebody waits for it, as by a worker."""

    app: Application
    store: MemoryStore
    database: Database
    engine: AsyncEngine
    _writers: dict[str, FoldWriter | SqlWriter] = field(default_factory=dict[str, FoldWriter | SqlWriter])
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def prepare(self) -> None:
        """Create the tables of the app's projections."""
        self.database.dialect.configure_for_handlers(self.engine.sync_engine)
        async with self.engine.begin() as connection:
            await connection.run_sync(create_tables, list(self.app.projections.values()))

    async def catch_up(self, resolved: AnyResolved) -> int:
        """Apply the rest of the log to a read model in one transaction and return the position that it reached."""
        async with self._lock, self.engine.begin() as connection:
            await connection.run_sync(checkpoint.ensure, resolved.name, resolved.revision)
            previous = await connection.run_sync(checkpoint.read, resolved.name, resolved.revision)
            assert previous is not None
            records = [record async for record in self.store.records(start=previous.position + 1)]
            if not records:
                return previous.position
            read = reader(self.app.catalog.of_log(await self.store.skip_markers()), resolved)
            read.expect(records)
            events = [event for event in map(read, records) if event is not None]
            batch = Batch(previous.position, records[-1][0], event_id_of(records[-1]), events)
            writer = self._writers.get(resolved.name) or writer_of(resolved, self.database)
            await write_batch(writer, connection, previous, batch)
            self._writers[resolved.name] = writer
            return batch.last


@asynccontextmanager
async def open_in_memory(app: Application, store: MemoryStore | None = None) -> AsyncGenerator[Jet]:
    """Yield the `Jet` that `App.in_memory` gives; `store` is an existing log, without which a new one is used."""
    store = MemoryStore(app.name) if store is None else store
    repositories = Repositories(app, store)
    repositories.guard.check()  # as on a server, where a connection belongs to one loop
    if not app.projections:
        with tracing.connected():
            yield Jet(repositories, Settings())
        return
    with tracing.connected(), tempfile.TemporaryDirectory(prefix="eventjet-") as folder:
        database = Database(f"sqlite:///{Path(folder) / 'read_models.db'}")
        engine = database.engine()
        models = MemoryReadModels(app, store, database, engine)
        try:
            await models.prepare()
            yield Jet(repositories, Settings(database=database.url), read_models=models)
        finally:
            await engine.dispose()
