"""Runs: what they load where, their leases, and how a database's refusal of a row is reported.

A run announces itself in the table of rebuilds before it makes anything, and renews its lease there. The workspace of a
run whose lease has ended may be cleared away by anybody. Time is the database's.
"""

from __future__ import annotations

import logging
import re
import reprlib
import secrets
import sqlite3
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from sqlalchemy import Column, Connection, Engine, delete, insert, select, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from eventjet.codec.reasons import reason_of
from eventjet.domain.parked import Parked
from eventjet.errors import RebuildOvertaken, RowsRefused
from eventjet.observability import logs
from eventjet.projections.app_ref import Application
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql.database import Database
from eventjet.sql.own_tables import Clock, rebuilds

PURPOSE = "eventjet rebuild"
"""What a database shows of sessions that are not one run's own, or outlive it."""
LEASE_S = 30.0
RENEW_S = 5.0
RUN = re.compile(r"[0-9a-f]{16}")

_log = logging.getLogger(__name__)
_SELF = -1
"""The part in the table of rebuilds that stands for the run itself."""
_ROW_ERRORS = (psycopg.IntegrityError, psycopg.DataError, sqlite3.IntegrityError, sqlite3.DataError)
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
    """Events that the projection could not take."""


def new_run() -> str:
    """Return a name that no other run has."""
    return secrets.token_hex(8)


def open_run(connection: Connection, run: str, resolved: AnyResolved) -> None:
    """Announce a run before anything of it exists, so that it can be found and cleared away."""
    values = {"run": run, "part": _SELF, "projection": resolved.name, "revision": resolved.revision}
    connection.execute(insert(rebuilds).values(**values, lease_until=Clock() + LEASE_S))


def close_run(connection: Connection, run: str) -> None:
    """Forget a run of which nothing is left."""
    connection.execute(delete(rebuilds).where(rebuilds.c.run == run))


def known_runs(connection: Connection) -> dict[str, bool]:
    """Return every announced run, and whether its lease has ended."""
    ended = rebuilds.c.lease_until < Clock()
    query = select(rebuilds.c.run, ended).where(rebuilds.c.part == _SELF)
    # A run names a schema or a file, so nothing but a name of ours may pass.
    return {run: bool(over) for run, over in connection.execute(query) if RUN.fullmatch(run)}


def hold(connection: Connection, run: str) -> None:
    """Extend the lease and lock its row to the end of the transaction; raises `RebuildOvertaken`.

    Whoever clears a run away deletes its row together with what it made, so a run that has its row has everything.
    """
    own = (rebuilds.c.run == run) & (rebuilds.c.part == _SELF)
    if connection.execute(update(rebuilds).where(own).values(lease_until=Clock() + LEASE_S)).rowcount != 1:
        raise RebuildOvertaken("This rebuild stood still for so long that its lease ended, and its shadow may be gone")


def release(connection: Connection, run: str) -> None:
    """Let anyone clear away what is left of a run."""
    connection.execute(update(rebuilds).where(rebuilds.c.run == run).values(lease_until=0))


@contextmanager
def renewed(engine: Engine, run: str, stop: Callable[[], None], every_s: float = RENEW_S) -> Generator[None]:
    """Renew the lease of a run in a thread; raises `RebuildOvertaken` where it has ended.

    Then `stop`, called from that thread, ends the work. A renewal that fails for another reason is tried again.
    """
    done = threading.Event()
    lost: list[RebuildOvertaken] = []

    def renew() -> None:
        while not done.wait(every_s):
            try:
                with engine.begin() as connection:
                    hold(connection, run)
            except RebuildOvertaken as error:
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


def log_leftover(name: str, error: SQLAlchemyError) -> None:
    """Log that what a run made is still there."""
    reason = str(error.orig if isinstance(error, DBAPIError) else error)
    logs.REMAINS_LEFT.tell(_log, name=name, reason="; ".join(line for line in reason.splitlines() if line))


@contextmanager
def refusals(projection: str, find_row: Callable[[], str] = str) -> Generator[None]:
    """Turn what a driver raises about a row into `RowsRefused`; `find_row` names the row where the driver does not."""
    try:
        yield
    except DBAPIError as error:
        if not isinstance(error.orig, _ROW_ERRORS):
            raise
        raise RowsRefused(projection, _reason(error.orig, find_row())) from error
    except _ROW_ERRORS as error:
        raise RowsRefused(projection, _reason(error, find_row())) from error


def _reason(error: Exception, row: str) -> str:
    lines = [str(error), row]
    if isinstance(error, psycopg.Error):
        lines = [error.diag.message_primary or str(error), error.diag.message_detail or "", row]
    return "; ".join(line.strip().rstrip(".") for line in lines if line.strip())


def redacted(error: RowsRefused, app: Application) -> RowsRefused:
    """Return the refusal as it may be shown: the database repeats a row's values, and some may be personal."""
    resolved = app.projections.get(error.projection)
    if resolved is None or not resolved.is_private:
        return error
    reason = "a rule of its table; the row is not shown, since it may hold personal fields"
    return RowsRefused(error.projection, reason)


def columns_in_words(columns: Sequence[Column[Any]], values: Sequence[Any]) -> str:
    """Return columns with their values, as a refusal names a row."""
    return ", ".join(f"{column.name} = {reprlib.repr(value)}" for column, value in zip(columns, values, strict=True))
