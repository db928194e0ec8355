"""`RunSpace`: where a database keeps what one run makes, until it is swapped in or thrown away.

A schema of the run's own on PostgreSQL, a file of the run's own on SQLite.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sqlalchemy import Column, Connection, Engine, Table
from sqlalchemy.ext.asyncio import AsyncEngine

from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild.postgres import PostgresSpace
from eventjet.rebuild.runs import RUN
from eventjet.rebuild.sqlite import SqliteSpace
from eventjet.sql.database import Database
from eventjet.sql.exchange import Exchange


class RunSpace(Protocol):
    """One run's place. Every method blocks; connections are to the live database unless something else is said."""

    @property
    def live(self) -> Engine:
        """Connections to the live database."""
        ...

    @property
    def purpose(self) -> str:
        """What the database shows of the run's sessions."""
        ...

    @property
    def database(self) -> Database:
        """Where rows are loaded: the live one on PostgreSQL, the run's file on SQLite."""
        ...

    @property
    def schema(self) -> str | None:
        """What `database` calls the schema of the run's tables; None where they need none."""
        ...

    @property
    def attached(self) -> str:
        """What connections to the live database call it, once they have been attached."""
        ...

    @property
    def location(self) -> str:
        """The location whose names the run's tables have."""
        ...

    @staticmethod
    def names(connection: Connection, database: Database) -> Sequence[str]:
        """Of everything that may be a run's, in a database."""
        ...

    @staticmethod
    def described(database: Database) -> str:
        """Where a run's tables would be, in words."""
        ...

    @staticmethod
    def read_only(database: Database) -> AbstractContextManager[Connection | None]:
        """A connection that cannot write and leaves nothing behind; None where there is no database yet."""
        ...

    def claimed(self) -> AbstractContextManager[None]:
        """Hold what tells other processes that this run's process lives; it goes with the process."""
        ...

    def is_claimed(self, connection: Connection) -> bool:
        """Whether the run's process lives; if not, nobody else finds that out until the transaction ends."""
        ...

    def engine(self) -> Engine:
        """Connections that find the run's tables, and eventjet's own of the run, by their names alone."""
        ...

    def handlers_engine(self) -> AsyncEngine:
        """The same, for handlers of SQL by hand."""
        ...

    def create(self, tables: Sequence[Table], *, bare: bool) -> None:
        """Make the tables, empty, and eventjet's own; `bare` ones lack until `finish` what would slow a load."""
        ...

    def finish(self, projection: str, tables: Sequence[Table], *, bare: bool) -> None:
        """Make them what the declared ones are; raises `RowsRefused` for what a rule forbids."""
        ...

    def snapshot(self) -> AbstractContextManager[Connection]:
        """A transaction, attached, that sees the live database as it is at one moment, and lets others write there."""
        ...

    def swapping(self) -> AbstractContextManager[Connection]:
        """A transaction for the swap; raises `NotNow`."""
        ...

    def attach(self, connection: Connection) -> None:
        """Let it see the run's tables. What is written to them by others afterwards may wait for its end."""
        ...

    def copy(self, connection: Connection, query: str, name: str) -> None:
        """Make a table of the run's of what a query gives."""
        ...

    def exchange(self, connection: Connection, resolved: AnyResolved, location: str) -> Exchange:
        """The live tables, which are in that location, for the run's."""
        ...

    def carry_out(self, exchange: Exchange, resolved: AnyResolved, location: str) -> None:
        """Put the run's tables, or their rows, in the place of the live ones, which are locked."""
        ...

    def strange_writes(self, connection: Connection) -> list[str]:
        """Tables other than the run's that the open transaction of a handler has written to."""
        ...

    def numbered(self, tables: Sequence[Table]) -> set[Column[Any]]:
        """Columns that a sequence filled which does not take numbers back when a transaction is rolled back."""
        ...

    def interrupt(self) -> None:
        """End what the run's connections are doing, from another thread. Never raises."""
        ...

    def drop(self) -> None:
        """Remove what is there, or what it replaced, and forget the run. Never raises."""
        ...

    def clear(self, connection: Connection) -> None:
        """Remove what is there of a run whose process is gone."""
        ...


_KINDS: dict[str, type[PostgresSpace] | type[SqliteSpace]] = {"postgresql": PostgresSpace, "sqlite": SqliteSpace}


def run_space(database: Database, run: str) -> RunSpace:
    """The place of one run."""
    return _KINDS[database.dialect.name](database, run)


def found_spaces(connection: Connection, database: Database) -> list[tuple[str, str]]:
    """(name, run) of everything there is of runs, by the names alone."""
    kind = _KINDS[database.dialect.name]
    name_of_run = re.compile(rf"ej_({RUN.pattern})(?:{'|'.join(map(re.escape, kind.suffixes))})")
    return [(name, found[1]) for name in kind.names(connection, database) if (found := name_of_run.fullmatch(name))]


def described(database: Database) -> str:
    """Where the tables of a run would be, in words."""
    return _KINDS[database.dialect.name].described(database)


def read_only(database: Database) -> AbstractContextManager[Connection | None]:
    """A connection that cannot write and leaves nothing behind; None where there is no database yet."""
    return _KINDS[database.dialect.name].read_only(database)
