"""A `SqlProjection` tried on a few events, in a SQLite file that is gone afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from sqlalchemy import select

from eventjet.domain.recorded import Recorded
from eventjet.projections.sql_projection import ResolvedSql
from eventjet.sql import checkpoint
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.sql.sqlite_types import make_readable
from eventjet.writers.batch import Batch
from eventjet.writers.sql_writer import SqlWriter

TableRows: TypeAlias = dict[str, list[dict[str, Any]]]
"""Table → its rows, by primary key."""


async def rows_after(resolved: ResolvedSql, events: Sequence[Recorded[Any]]) -> TableRows:
    """The rows of all tables after these events, which are of the subscription and have rising positions."""
    for table in resolved.tables:
        make_readable(table)
    with tempfile.TemporaryDirectory(prefix="eventjet-") as folder:
        database = Database(f"sqlite:///{Path(folder) / 'trial.db'}")
        engine = database.engine()
        database.dialect.enforce_foreign_keys(engine.sync_engine)
        try:
            async with engine.begin() as connection:
                await connection.run_sync(create_tables, [resolved])
                await connection.run_sync(checkpoint.ensure, resolved.name, resolved.revision)
                held = await connection.run_sync(checkpoint.read, resolved.name, resolved.revision)
            assert held is not None
            async with engine.connect() as connection:
                if events:
                    await connection.begin()
                    last = events[-1]
                    batch = Batch(0, last.position, last.event_id, events)
                    await SqlWriter(resolved, lease_s=0).write(connection, held, batch)
                    await connection.commit()
                return {
                    table.name: [
                        dict(row)
                        for row in (
                            await connection.execute(select(table).order_by(*table.primary_key.columns))
                        ).mappings()
                    ]
                    for table in resolved.tables
                }
        finally:
            await engine.dispose()
