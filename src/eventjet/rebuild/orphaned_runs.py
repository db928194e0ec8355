"""What rebuilds left behind whose process is gone: listed, and removed when somebody asks for it.

The next rebuild removes it too, unless the database does not remember the run any more.
"""

from __future__ import annotations

import re

from sqlalchemy import text

from eventjet.projections.columns import POSTGRESQL
from eventjet.rebuild import postgres, runs, sqlite
from eventjet.rebuild.shadows import clear_abandoned
from eventjet.sql.database import Database
from eventjet.sql.migrations import version

_RUN = re.compile(r"ej_([0-9a-f]{16})(_old)?")


def remains(database: Database) -> list[str]:
    """Schemas on PostgreSQL, files on SQLite, of runs that are over."""
    return sorted(name for name, run in _found(database) if not _is_alive(database, run))


def clear(database: Database) -> list[str]:
    """Remove them; returns the names of what is gone."""
    before = set(remains(database))
    clear_abandoned(database)
    for name, run in _found(database):
        if name in before and not _is_alive(database, run):
            if database.dialect.name == POSTGRESQL:
                postgres.drop_run(database, run)
            else:
                sqlite.drop_run(database, run)
    return sorted(before - {name for name, _ in _found(database)})


def _found(database: Database) -> list[tuple[str, str]]:
    """(name, run) of everything that looks like a run's."""
    if database.dialect.name == POSTGRESQL:
        with database.sync_engine("eventjet db").begin() as connection:
            names = [str(name) for name in connection.scalars(text("select nspname from pg_namespace"))]
    else:
        names = [name for name, _ in sqlite.found_files(database)]
    return [(name, found[1]) for name in names if (found := _RUN.fullmatch(name))]


def _is_alive(database: Database, run: str) -> bool:
    if database.dialect.name != POSTGRESQL:
        return sqlite.is_claimed(database, run)
    with database.sync_engine("eventjet db").begin() as connection:
        known = dict(runs.known_runs(connection)) if version(connection) is not None else {}
        return known.get(run) is False and not postgres.is_free(connection, run)
