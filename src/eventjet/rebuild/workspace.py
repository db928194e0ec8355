"""`Workspace` is the place in a database for the tables of one run, until they are swapped in or removed.

On PostgreSQL a workspace is a schema (`postgres_workspace`), on SQLite a file (`sqlite_workspace`).

`leftovers` lists the workspaces of runs whose process has ended, and `remove_leftovers` removes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from eventjet.rebuild import postgres_workspace, runs, sqlite_workspace
from eventjet.rebuild.postgres_workspace import PostgresWorkspace
from eventjet.rebuild.runs import PURPOSE, RUN, Target
from eventjet.rebuild.sqlite_workspace import SqliteWorkspace
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.sql.migrations import version

Workspace: TypeAlias = PostgresWorkspace | SqliteWorkspace


def workspace_of(database: Database, run: str) -> Workspace:
    """Return the workspace of one run in a database, without creating anything."""
    return PostgresWorkspace(database, run) if _is_postgres(database) else SqliteWorkspace(database, run)


def _is_postgres(database: Database) -> bool:
    return database.dialect.name == "postgresql"


def load_part(target: Target, number: int, rows: Iterable[Sequence[Any]]) -> int:
    """Load the rows of one part exactly once, all or none of them, and return how many rows the part has.

    The ledger (the run's own table of rebuilds) records each loaded part, so a task that is tried again does not load
    its part again. Raises `RowsRefused`.
    """
    module = postgres_workspace if _is_postgres(target.database) else sqlite_workspace
    return module.load_part(target, number, rows)


def leftovers(connection: Connection, database: Database) -> list[str]:
    """Return the schemas on PostgreSQL, or files on SQLite, of runs that have ended; nothing is changed."""
    ended = runs.announced_runs(connection) if version(connection) is not None else {}
    return sorted(
        name
        for name, run in _names_of_runs(connection, database)
        if ended.get(run) or not workspace_of(database, run).is_claimed(connection)
    )


def remove_leftovers(database: Database, *, existing: bool = False) -> list[str]:
    """Remove the leftovers and rows of runs that have ended, and return the removed schemas or files.

    With `existing`, a missing SQLite file is an error; else it is made, with eventjet's tables.
    """
    engine = database.sync_engine(PURPOSE, existing=existing)
    with engine.begin() as connection:
        create_tables(connection)
        ended = runs.announced_runs(connection)
        names_and_runs = _names_of_runs(connection, database)
    removed: set[str] = set()
    # A run that was killed before it was announced has no row, but may have a lock file.
    for run in {*ended, *(run for _, run in names_and_runs)}:
        workspace = workspace_of(database, run)
        # A workspace that another database user owns, or that is still read, is left to the next job.
        try:
            with engine.begin() as connection:
                if ended.get(run) or not workspace.is_claimed(connection):
                    workspace.clear(connection)
                    runs.close_run(connection, run)
                    removed.add(run)
        except SQLAlchemyError as error:
            runs.log_leftover(f"ej_{run}", error)
    return sorted(name for name, run in names_and_runs if run in removed)


def _names_of_runs(connection: Connection, database: Database) -> list[tuple[str, str]]:
    """Return (name, run) of every schema or file whose name is that of a run's."""
    kind = PostgresWorkspace if _is_postgres(database) else SqliteWorkspace
    pattern = re.compile(rf"ej_({RUN.pattern})(?:{'|'.join(map(re.escape, kind.suffixes))})")
    return [(name, match[1]) for name in kind.names(connection, database) if (match := pattern.fullmatch(name))]
