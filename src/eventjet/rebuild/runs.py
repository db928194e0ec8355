"""The runs of rebuilds: their targets and parts, their leases, and the report of a row that a database refuses.

A run inserts its row into the table of rebuilds before it creates anything, and renews its lease there. Any other
process may remove the workspace of a run whose lease has ended. All times are the database's.
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
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from sqlalchemy import Column, Connection, Engine, delete, insert, select, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from eventjet.codec.reasons import reason_of
from eventjet.domain.quarantined import Quarantined
from eventjet.errors import RebuildOvertaken, RowsRefused
from eventjet.observability import logs
from eventjet.projections.app_ref import Application
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql.database import Database
from eventjet.sql.own_tables import RUN_ITSELF, Clock, rebuilds

PURPOSE = "eventjet rebuild"
"""The application name of sessions that do not belong to one run only, or that outlive it."""
LEASE_S = 30.0
RENEW_S = 5.0
RUN = re.compile(r"[0-9a-f]{16}")

_log = logging.getLogger(__name__)
_ROW_ERRORS = (psycopg.IntegrityError, psycopg.DataError, sqlite3.IntegrityError, sqlite3.DataError)
"""The drivers' errors about values and rows."""


@dataclass(frozen=True, slots=True)
class Target:
    """The shadow table of one projection, into which rows are loaded; a value that can be pickled."""

    run: str
    projection: str
    revision: int
    database: Database
    """The database of the shadow: the live database on PostgreSQL, the run's own file on SQLite."""
    table: str
    columns: tuple[str, ...]
    resolutions: Mapping[int, str] = field(default_factory=dict[int, str], repr=False, hash=False)
    """The positions in the live quarantine and their resolutions; empty when nothing is quarantined."""
    state_table: tuple[str, tuple[str, ...]] | None = None
    """The name and columns of the shadow table of states, where the projection has `by_state`."""
    of_states: bool = False
    """Whether this is the table of states itself."""

    @property
    def states(self) -> Target | None:
        """The shadow table of states as a target; None where there is none."""
        if self.state_table is None:
            return None
        table, columns = self.state_table
        return replace(self, table=table, columns=columns, state_table=None, of_states=True)


@dataclass(frozen=True, slots=True)
class Part:
    """The events and rows of one projection that one task folded and loaded."""

    projection: str
    events: int
    rows: int
    quarantined: Sequence[Quarantined] = ()
    """Events that the projection quarantined."""
    of_states: bool = False
    """Whether the rows are those of the table of states."""


def new_run() -> str:
    """Return a new random name of a run."""
    return secrets.token_hex(8)


def open_run(connection: Connection, run: str, resolved: AnyResolved) -> None:
    """Insert the row of a run before anything of it exists, so that other processes can find and remove the run."""
    values = {"run": run, "part": RUN_ITSELF, "projection": resolved.name, "revision": resolved.revision}
    connection.execute(insert(rebuilds).values(**values, lease_until=Clock() + LEASE_S))


def close_run(connection: Connection, run: str) -> None:
    """Delete the rows of a run of which nothing is left."""
    connection.execute(delete(rebuilds).where(rebuilds.c.run == run))


def announced_runs(connection: Connection) -> dict[str, bool]:
    """Return every announced run, and whether its lease has ended."""
    query = select(rebuilds.c.run, rebuilds.c.lease_until < Clock()).where(rebuilds.c.part == RUN_ITSELF)
    # The name of a run becomes that of a schema or a file, so only names made by `new_run` may pass.
    return {run: bool(has_ended) for run, has_ended in connection.execute(query) if RUN.fullmatch(run)}


def renew(connection: Connection, run: str) -> None:
    """Renew the lease of a run, and lock its row until the end of the transaction.

    Raises `RebuildOvertaken` when the row is gone. A process that removes a run deletes its row in the transaction that
    removes its workspace, so a run whose row is there still has its workspace.
    """
    condition = (rebuilds.c.run == run) & (rebuilds.c.part == RUN_ITSELF)
    if connection.execute(update(rebuilds).where(condition).values(lease_until=Clock() + LEASE_S)).rowcount != 1:
        raise overtaken()


def overtaken() -> RebuildOvertaken:
    """Return the error for a run that another process may have removed."""
    return RebuildOvertaken("This rebuild stood still for so long that its lease ended, and its shadow may be gone")


def release(connection: Connection, run: str) -> None:
    """End the lease of a run, so that any process may remove what is left of it."""
    connection.execute(update(rebuilds).where(rebuilds.c.run == run).values(lease_until=0))


@contextmanager
def renewed(engine: Engine, run: str, stop: Callable[[], None], every_s: float = RENEW_S) -> Generator[None]:
    """Renew the lease of a run from a thread, every `every_s` seconds; raises `RebuildOvertaken` when it was lost.

    When the lease is lost, the thread calls `stop`, which ends the work. A renewal that fails for another reason is
    tried again.
    """
    done = threading.Event()
    lost: list[RebuildOvertaken] = []

    def keep_renewing() -> None:
        while not done.wait(every_s):
            try:
                with engine.begin() as connection:
                    renew(connection, run)
            except RebuildOvertaken as error:
                lost.append(error)
                stop()
                return
            except Exception as error:  # noqa: BLE001 - the thread that renews must not end before the run does
                logs.REBUILD_LEASE_WAITS.log(_log, run=run, reason=reason_of(error))

    thread = threading.Thread(target=keep_renewing, name="eventjet-rebuild-lease", daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        if lost:
            raise lost[0] from error  # `error` only says that the work was stopped
        raise
    finally:
        done.set()
        thread.join(LEASE_S)
    if lost:
        raise lost[0]


def log_leftover(name: str, error: SQLAlchemyError) -> None:
    """Log that the workspace of a run could not be removed, with the database's reason."""
    reason = str(error.orig if isinstance(error, DBAPIError) else error)
    logs.REMAINS_LEFT.log(_log, name=name, reason="; ".join(line for line in reason.splitlines() if line))


@contextmanager
def refusals(projection: str, find_row: Callable[[], str] = str) -> Generator[None]:
    """Turn a driver's error about a row into `RowsRefused`; `find_row` names the row when the driver does not."""
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
    """Return the error without the row if the projection has personal fields: the database's message repeats values."""
    resolved = app.projections.get(error.projection)
    if resolved is None or not resolved.is_private:
        return error
    reason = "a rule of its table; the row is not shown, since it may hold personal fields"
    return RowsRefused(error.projection, reason)


def columns_in_words(columns: Sequence[Column[Any]], values: Sequence[Any]) -> str:
    """Return columns with their values as text, as an error message names a row."""
    return ", ".join(f"{column.name} = {reprlib.repr(value)}" for column, value in zip(columns, values, strict=True))
