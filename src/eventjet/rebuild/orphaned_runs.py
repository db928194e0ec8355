"""What rebuilds left behind whose process is gone: listed, and removed by the next rebuild or when somebody asks."""

from __future__ import annotations

from contextlib import suppress

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from eventjet.rebuild import runs
from eventjet.rebuild.run_space import found_spaces, run_space
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.sql.migrations import version


def orphaned(connection: Connection, database: Database) -> list[str]:
    """Schemas on PostgreSQL, files on SQLite, of runs that are over; only looks."""
    ended = dict(runs.known_runs(connection)) if version(connection) is not None else {}
    return sorted(
        name
        for name, run in found_spaces(connection, database)
        if ended.get(run) or not run_space(database, run).is_claimed(connection)
    )


def remove_orphaned(database: Database) -> list[str]:
    """Remove them, and forget runs that left nothing else behind; the names of what is gone."""
    engine = database.sync_engine("eventjet rebuild")
    with engine.begin() as connection:
        create_tables(connection)
        ended = dict(runs.known_runs(connection))
        found = found_spaces(connection, database)
    removed: set[str] = set()
    # A run may be killed before it is announced, too.
    for run in {*ended, *(run for _, run in found)}:
        space = run_space(database, run)
        # One that somebody else owns, or still reads, is left to the next.
        with suppress(SQLAlchemyError), engine.begin() as connection:
            if ended.get(run) or not space.is_claimed(connection):
                space.clear(connection)
                runs.close_run(connection, run)
                removed.add(run)
    return sorted(name for name, run in found if run in removed)
