"""Runs and their leases: whose shadow is alive, and whose may be cleared away. Time is the database's.

`RunSpace`: where a database keeps what one run makes, until it is swapped in or thrown away: a schema of the run's own
on PostgreSQL, a file of the run's own on SQLite.
"""

from __future__ import annotations

import logging
import re
import reprlib
import secrets
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import psycopg
from sqlalchemy import Column, Connection, Engine, MetaData, Table, delete, insert, select, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from eventjet.codec.reasons import reason_of
from eventjet.domain.parked import Parked
from eventjet.errors import LeaseEnded, RowsRefused
from eventjet.observability import logs
from eventjet.projections.app_ref import Application
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql.database import Database
from eventjet.sql.dialect import qualified, verbatim
from eventjet.sql.own_tables import Clock, rebuilds
from eventjet.sql.table_moves import Exchange

PURPOSE = "eventjet rebuild"
"""What a database shows of sessions that are not one run's own, or outlive it."""

_log = logging.getLogger(__name__)

LEASE_S = 30.0
RENEW_S = 5.0

RUN = re.compile(r"[0-9a-f]{16}")
_SELF = -1
"""The part that stands for the run itself."""
_RULES = (psycopg.IntegrityError, psycopg.DataError, sqlite3.IntegrityError, sqlite3.DataError)
"""What the drivers raise about values and rows."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where one projection's rows go; a value that can be pickled."""

    run: str
    projection: str
    revision: int
    database: Database
    """Where the shadow is: the live one on PostgreSQL, a file of the run's own on SQLite."""
    table: str
    columns: tuple[str, ...]
    known: Mapping[int, str] = field(default_factory=dict[int, str], repr=False, hash=False)
    """Positions that are in the live quarantine, with what was decided; empty where nothing is quarantined."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one task folded and loaded of one projection."""

    projection: str
    events: int
    rows: int
    parked: Sequence[Parked] = ()
    """What it could not take."""


class RunSpace(ABC):
    """One run's place. Every method blocks; connections are to the live database unless something else is said."""

    suffixes: ClassVar[tuple[str, ...]]
    """Of the names, after `ej_<run>`, of everything that may be a run's."""
    copied_as: ClassVar[str] = "table"
    """What a table is created as that need not outlive a crash of the server."""
    run: str
    live: Engine
    """Connections to the live database."""
    database: Database
    """Where rows are loaded: the live one on PostgreSQL, the run's file on SQLite."""
    attached: str
    """The schema of the run's tables for connections to the live database, once they have been attached."""
    location: str
    """The location whose names the run's tables have."""

    @abstractmethod
    def __init__(self, database: Database, run: str) -> None:
        """Nothing is made yet."""

    @staticmethod
    @abstractmethod
    def names(connection: Connection, database: Database) -> Sequence[str]:
        """Of everything that may be a run's, in a database."""

    @staticmethod
    @abstractmethod
    def described(database: Database) -> str:
        """Where a run's tables would be, in words."""

    @staticmethod
    @abstractmethod
    def load(target: Target, number: int, rows: Iterable[Sequence[Any]]) -> int:
        """Load one part, whole or not at all, and once only; return how many rows the ledger says it has.

        A task that is tried again finds its part in the ledger. Raises `RowsRefused`.
        """

    @abstractmethod
    def claimed(self) -> AbstractContextManager[None]:
        """Hold what tells other processes that this run's process lives; it goes with the process."""

    @abstractmethod
    def is_claimed(self, connection: Connection) -> bool:
        """Whether the run's process lives; if not, nobody else finds that out until the transaction ends."""

    @abstractmethod
    def engine(self) -> Engine:
        """Connections that find the run's tables, and eventjet's own of the run, by their names alone."""

    @abstractmethod
    def handlers_engine(self) -> AsyncEngine:
        """The same, for handlers of SQL by hand."""

    @abstractmethod
    def create(self, tables: Sequence[Table], *, bare: bool) -> None:
        """Make the tables, empty, and eventjet's own; `bare` ones lack until `finish` what would slow a load."""

    @abstractmethod
    def finish(self, projection: str, tables: Sequence[Table], *, bare: bool) -> None:
        """Make them what the declared ones are; raises `RowsRefused` for what a rule forbids."""

    @abstractmethod
    def snapshot(self) -> AbstractContextManager[Connection]:
        """A transaction, attached, that sees the live database as it is at one moment, and lets others write there."""

    @abstractmethod
    def swapping(self) -> AbstractContextManager[Connection]:
        """A transaction for the swap; raises `NotNow`."""

    @abstractmethod
    def attach(self, connection: Connection) -> None:
        """Let it see the run's tables. What is written to them by others afterwards may wait for its end."""

    def copy(self, connection: Connection, query: str, name: str) -> None:
        """Make a table of the run's of what a query gives."""
        connection.execute(verbatim(f"create {self.copied_as} {qualified(self.attached, name)} as {query}"))

    @abstractmethod
    def exchange(self, connection: Connection, resolved: AnyResolved, location: str) -> Exchange:
        """The live tables, which are in that location, for the run's."""

    def carry_out(self, exchange: Exchange, resolved: AnyResolved, location: str) -> None:
        """Put the run's tables, or their rows, in the place of the live ones, which are locked."""
        del resolved, location
        exchange.carry_out()

    def strange_writes(self, connection: Connection) -> list[str]:
        """Tables other than the run's that the open transaction of a handler has written to."""
        del connection
        return []

    def numbered(self, tables: Sequence[Table]) -> set[Column[Any]]:
        """Columns that a sequence filled which does not take numbers back when a transaction is rolled back."""
        del tables
        return set()

    @abstractmethod
    def interrupt(self) -> None:
        """End what the run's connections are doing, from another thread. Never raises."""

    @abstractmethod
    def drop(self) -> None:
        """Remove what is there, or what it replaced, and forget the run. Never raises."""

    @abstractmethod
    def clear(self, connection: Connection) -> None:
        """Remove what is there of a run whose process is gone."""


@contextmanager
def refusals(projection: str, find: Callable[[], str] = str) -> Generator[None]:
    """Turn what a driver raises about a rule into `RowsRefused`; `find` names the row where the driver does not."""
    try:
        yield
    except DBAPIError as error:
        if not isinstance(error.orig, _RULES):
            raise
        raise RowsRefused(projection, _reason(error.orig, find())) from error
    except _RULES as error:
        raise RowsRefused(projection, _reason(error, find())) from error


def discreet(error: RowsRefused, app: Application) -> RowsRefused:
    """What may be shown of it: the database repeats a row's values, and some of them may be personal."""
    resolved = app.projections.get(error.projection)
    if resolved is None or not resolved.is_private:
        return error
    reason = "a rule of its table; the row is not shown, since it may hold personal fields"
    return RowsRefused(error.projection, reason)


def shown(columns: Sequence[Column[Any]], values: Sequence[Any]) -> str:
    """Columns with their values, as a refusal names a row."""
    return ", ".join(f"{column.name} = {reprlib.repr(value)}" for column, value in zip(columns, values, strict=True))


def _reason(error: Exception, row: str) -> str:
    lines = [str(error), row]
    if isinstance(error, psycopg.Error):
        lines = [error.diag.message_primary or str(error), error.diag.message_detail or "", row]
    return "; ".join(line.strip().rstrip(".") for line in lines if line.strip())


def say_left(name: str, error: SQLAlchemyError) -> None:
    """Log that what a run made is still there."""
    reason = str(error.orig if isinstance(error, DBAPIError) else error)
    logs.REMAINS_LEFT.tell(_log, name=name, reason="; ".join(line for line in reason.splitlines() if line))


def columns_alone(table: Table, name: str) -> Table:
    """A table beside another one, of the same columns, without any constraint or index."""
    columns = [Column(one.name, one.type, key=one.key, nullable=one.nullable) for one in table.columns]
    return Table(name, MetaData(), *columns, schema=table.schema)


def new_run() -> str:
    """A name that no other run has."""
    return secrets.token_hex(8)


def open_run(connection: Connection, run: str, resolved: AnyResolved) -> None:
    """Announce a run before anything of it exists, so that it can be found and cleared away."""
    values = {"run": run, "part": _SELF, "projection": resolved.name, "revision": resolved.revision}
    connection.execute(insert(rebuilds).values(**values, lease_until=Clock() + LEASE_S))


def close_run(connection: Connection, run: str) -> None:
    """Forget a run of which nothing is left."""
    connection.execute(delete(rebuilds).where(rebuilds.c.run == run))


def known_runs(connection: Connection) -> list[tuple[str, bool]]:
    """Every run that left a trace, and whether its lease has ended."""
    ended = rebuilds.c.lease_until < Clock()
    query = select(rebuilds.c.run, ended).where(rebuilds.c.part == _SELF)
    # A run names a schema or a file, so nothing but a name of ours may pass.
    return [(run, bool(over)) for run, over in connection.execute(query) if RUN.fullmatch(run)]


def hold(connection: Connection, run: str) -> None:
    """Extend the lease and lock its row to the end of the transaction; raises `LeaseEnded`.

    Whoever clears a run away deletes its row together with what it made, so a run that has its row has everything.
    """
    own = (rebuilds.c.run == run) & (rebuilds.c.part == _SELF)
    if connection.execute(update(rebuilds).where(own).values(lease_until=Clock() + LEASE_S)).rowcount != 1:
        raise LeaseEnded


def release(connection: Connection, run: str) -> None:
    """Let anyone clear away what is left of a run."""
    connection.execute(update(rebuilds).where(rebuilds.c.run == run).values(lease_until=0))


@contextmanager
def renewed(engine: Engine, run: str, stop: Callable[[], None], every_s: float = RENEW_S) -> Generator[None]:
    """Renew the lease of a run that is open, in a thread; raises `LeaseEnded` where it has ended.

    Then `stop`, called from that thread, ends what goes on meanwhile. A renewal that fails otherwise is tried again.
    """
    done = threading.Event()
    lost: list[LeaseEnded] = []

    def renew() -> None:
        while not done.wait(every_s):
            try:
                with engine.begin() as connection:
                    hold(connection, run)
            except LeaseEnded as error:
                lost.append(error)
                stop()
                return
            except Exception as error:  # noqa: BLE001 - the thread that renews must not end before the run does
                logs.REBUILD_LEASE_WAITS.tell(_log, run=run, reason=reason_of(error))

    thread = threading.Thread(target=renew, name="eventjet-rebuild-lease", daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        if lost:
            raise lost[0] from error  # which only says that it was stopped
        raise
    finally:
        done.set()
        thread.join(LEASE_S)
    if lost:
        raise lost[0]
