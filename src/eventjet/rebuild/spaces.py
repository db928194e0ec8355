"""Which `RunSpace` a database has, and what is in it of rebuilds whose process is gone.

That is listed, and removed by the next rebuild or when somebody asks.
"""

from __future__ import annotations

import re

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from eventjet.rebuild import runs
from eventjet.rebuild.postgres import PostgresSpace
from eventjet.rebuild.runs import PURPOSE, RunSpace
from eventjet.rebuild.sqlite import SqliteSpace
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.sql.migrations import version

_KINDS: dict[str, type[RunSpace]] = {"postgresql": PostgresSpace, "sqlite": SqliteSpace}


def space_kind(database: Database) -> type[RunSpace]:
    """What a run has in this kind of database."""
    return _KINDS[database.dialect.name]


def orphaned(connection: Connection, database: Database) -> list[str]:
    """Schemas on PostgreSQL, files on SQLite, of runs that are over; only looks."""
    kind = space_kind(database)
    ended = dict(runs.known_runs(connection)) if version(connection) is not None else {}
    return sorted(
        name
        for name, run in _named(connection, database)
        if ended.get(run) or not kind(database, run).is_claimed(connection)
    )


def remove_orphaned(database: Database) -> list[str]:
    """Remove them, and forget runs that left nothing else behind; the names of what is gone."""
    kind, engine = space_kind(database), database.sync_engine(PURPOSE)
    with engine.begin() as connection:
        create_tables(connection)
        ended = dict(runs.known_runs(connection))
        named = _named(connection, database)
    removed: set[str] = set()
    # A run may be killed before it is announced, too.
    for run in {*ended, *(run for _, run in named)}:
        space = kind(database, run)
        # One that somebody else owns, or still reads, is left to the next.
        try:
            with engine.begin() as connection:
                if ended.get(run) or not space.is_claimed(connection):
                    space.clear(connection)
                    runs.close_run(connection, run)
                    removed.add(run)
        except SQLAlchemyError as error:
            runs.say_left(f"ej_{run}", error)
    return sorted(name for name, run in named if run in removed)


def _named(connection: Connection, database: Database) -> list[tuple[str, str]]:
    """(name, run) of everything there is of runs, by the names alone."""
    kind = space_kind(database)
    name_of_run = re.compile(rf"ej_({runs.RUN.pattern})(?:{'|'.join(map(re.escape, kind.suffixes))})")
    return [(name, found[1]) for name in kind.names(connection, database) if (found := name_of_run.fullmatch(name))]
