"""The shadow on SQLite: a database file of the run's own beside the live one, copied into it in one transaction.

A file of its own keeps the load away from the live database's one writer lock.
"""

from __future__ import annotations

import fcntl
import glob
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from sqlalchemy import Connection, Engine, Table, func, make_url, select
from sqlalchemy.dialects.sqlite import dialect as sqlite_dialect
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import CreateIndex, CreateTable

from eventjet import failpoints
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import storage_table
from eventjet.projections.sql_projection import AnyResolved
from eventjet.projections.storage import SQLITE
from eventjet.rebuild import decided, runs
from eventjet.rebuild.decided import Remembered, remembered
from eventjet.rebuild.load import Target
from eventjet.rebuild.obstacles import check_obstacles
from eventjet.rebuild.refused import double, refusals
from eventjet.rebuild.shadow import TAIL_MAX, NotYet, Swapped, check_kept
from eventjet.sql import checkpoint, transitions
from eventjet.sql.checkpoint import DECLARED, Checkpoint
from eventjet.sql.database import Database
from eventjet.sql.location_assignment import create_tables
from eventjet.sql.locations import located, recorded
from eventjet.sql.own_tables import metadata, projections
from eventjet.sql.sqlite_tables import quoted

_LIVE, _OWN = f"main.{decided.TABLE}", f"shadow.{decided.TABLE}"
_STEPS = 100_000
_NAMED = sqlite_dialect(paramstyle="named")
"""Steps of SQLite's machine between two looks: some milliseconds."""
_SUFFIXES = ("", "-wal", "-shm", "-journal", ".lock")
_CLAIM_TRIES = 750
_CLAIM_S = 0.02
_FILE = re.compile(rf"ej_({runs.RUN.pattern})(?:{'|'.join(map(re.escape, _SUFFIXES))})")


class InFile(Protocol):
    """A shadow in a file of its run."""

    run: str
    path: Path
    stopped: threading.Event
    """Set when what runs on the live database is to end soon, undone."""

    @property
    def resolved(self) -> AnyResolved: ...

    def engine(self) -> Engine:
        """Connections to that file."""
        ...


class SqliteShadow:
    """See the module."""

    def __init__(self, database: Database, resolved: ResolvedProjection, run: str) -> None:
        self.resolved = resolved
        self.run = run
        self.path = shadow_path(database, run)
        self.stopped = threading.Event()
        self._database = database
        self._engine = database.sync_engine("eventjet rebuild")
        self._own = Database(make_url(database.url).set(database=str(self.path)).render_as_string(hide_password=False))
        self._remembered: Remembered | None = None
        self.table = storage_table(resolved.table, SQLITE)
        self.target = Target(
            run=run,
            purpose="eventjet rebuild",
            projection=resolved.name,
            revision=resolved.revision,
            database=self._own,
            schema=None,
            table=self.table.name,
            columns=tuple(column.name for column in self.table.columns),
        )

    def create(self, *, to_swap: bool = True) -> None:
        with self._engine.begin() as connection:
            create_tables(connection, [self.resolved] if to_swap else ())
            if to_swap:
                self.check_swappable(connection)
            runs.open_run(connection, self.run, self.resolved)
        failpoints.reach("rebuild.announced")
        with self.engine().begin() as connection:
            metadata.create_all(connection)
            # The live table has the indexes; here they would only be in the way.
            connection.execute(CreateTable(self.table))

    def check_swappable(self, connection: Connection) -> None:
        held = checkpoint.read(connection, self.resolved.name, self.resolved.revision)
        live = located(self.resolved.table, held.location if held else DECLARED, SQLITE)
        check_obstacles(connection, self.resolved, live, None)

    def remember(self) -> None:
        with closing(self._database.connect_sqlite()) as connection:
            connection.execute("attach database ? as shadow", (str(self.path),))
            connection.execute("begin")
            decided.copy(connection.execute, _LIVE, _OWN, self.resolved)
            self._remembered = remembered(connection.execute, _LIVE, self.resolved)
            connection.execute("commit")
        self.target = replace(self.target, known=self._remembered.known)

    def copy_live(self) -> Checkpoint | None:
        """Only the run's file is written to, so nobody waits."""
        with closing(self._database.connect_sqlite()) as connection:
            stop_when(connection, self.stopped)
            connection.execute("attach database ? as shadow", (str(self.path),))
            connection.execute("begin")
            found = read_checkpoint(connection, "main", self.resolved)
            if found is None or not found.log:
                return None
            live = located(self.resolved.table, found.location, SQLITE).name
            if not _shape(connection, "main", live):
                return None
            columns = ", ".join(map(quoted, self.target.columns))
            connection.execute(f"create table shadow.eventjet_live as select {columns} from main.{quoted(live)}")
            if self.resolved.quarantines:
                known = remembered(connection.execute, _LIVE, self.resolved).known
                self.target = replace(self.target, known=known)
            connection.execute("commit")
            return found

    def copied(self) -> str:
        return "eventjet_live"

    def made(self) -> str:
        return quoted(self.table.name)

    def count(self) -> int:
        with self.engine().begin() as connection:
            return connection.scalar(select(func.count()).select_from(self.table)) or 0

    def finish(self) -> None:
        """Find rows that a unique index forbids before the live database is locked; durability comes with the swap."""
        with self.engine().begin() as connection:
            for index in self.table.indexes:
                if index.unique:
                    twice = partial(double, connection, list(index.expressions))
                    with refusals(self.resolved.name, twice), connection.begin_nested():
                        connection.execute(CreateIndex(index))

    def engine(self) -> Engine:
        return self._own.sync_engine("eventjet rebuild")

    def live_checkpoint(self) -> Checkpoint | None:
        with self._engine.begin() as connection:
            return checkpoint.read(connection, self.resolved.name, self.resolved.revision)

    def swap(self, log: str, tail: Callable[[int], None] | None) -> Swapped | NotYet:
        """The live database is locked for writers, not for readers, while the rows are copied."""
        return swapped_in(self, self._database, log, self._replace, tail)

    def _replace(self, connection: sqlite3.Connection, location: str, *, bound_to_live: bool) -> None:
        before = self._remembered if bound_to_live else None
        decided.give_back(connection.execute, _OWN, _LIVE, self.resolved, before)
        self._replace_rows(connection, located(self.resolved.table, location, SQLITE))

    def _replace_rows(self, connection: sqlite3.Connection, live: Table) -> None:
        name, made = quoted(live.name), quoted(self.table.name)
        if _shape(connection, "main", live.name) == _shape(connection, "shadow", self.table.name):
            connection.execute(f"delete from main.{name}")
        else:
            connection.execute(f"drop table if exists main.{name}")
            create = [CreateTable(live), *map(CreateIndex, live.indexes)]
            for statement in create:
                connection.execute(str(statement.compile(dialect=self._engine.dialect)))
        columns = ", ".join(map(quoted, self.target.columns))
        connection.execute(f"insert into main.{name} ({columns}) select {columns} from shadow.{made}")

    def interrupt(self) -> None:
        self.stopped.set()

    def drop(self) -> None:
        remove(self.path)
        with suppress(SQLAlchemyError), self._engine.begin() as connection:
            runs.close_run(connection, self.run)


class Replace(Protocol):
    """Puts the rows of a shadow into a location of the live database; nothing is committed by it."""

    def __call__(self, connection: sqlite3.Connection, location: str, *, bound_to_live: bool) -> None: ...


def read_checkpoint(connection: sqlite3.Connection, schema: str, resolved: AnyResolved) -> Checkpoint | None:
    """The one in the live database (`main`) or in the run's file (`shadow`)."""
    fields = ", ".join(column.name for column in projections.columns)
    query = f"select {fields} from {schema}.eventjet_projection where name = ? and revision = ?"
    row = connection.execute(query, (resolved.name, resolved.revision)).fetchone()
    return Checkpoint(*row) if row else None


def stop_when(connection: sqlite3.Connection, stopped: threading.Event) -> None:
    """End its statements with an error soon after the event is set: one that copies a large table takes seconds."""
    connection.set_progress_handler(lambda: int(stopped.is_set()), _STEPS)


def swapped_in(
    shadow: InFile, database: Database, log: str, replace_rows: Replace, tail: Callable[[int], None] | None
) -> Swapped | NotYet:
    """Replace rows and checkpoint of the live database by those of the run's file, in one transaction."""
    with closing(database.connect_sqlite()) as connection:
        stop_when(connection, shadow.stopped)
        try:
            connection.execute("begin immediate")
        except sqlite3.OperationalError as error:
            return NotYet(f"another process writes to it ({error})")
        try:
            outcome = _swap(connection, shadow, log, replace_rows, tail)
            connection.execute("rollback" if isinstance(outcome, NotYet) else "commit")
            return outcome
        except BaseException:
            # A statement that is interrupted has ended the transaction.
            if connection.in_transaction:
                connection.execute("rollback")
            raise


def _swap(
    connection: sqlite3.Connection,
    shadow: InFile,
    log: str,
    replace_rows: Replace,
    tail: Callable[[int], None] | None,
) -> Swapped | NotYet:
    held = connection.execute("select 1 from main.eventjet_rebuild where run = ? and part = -1", (shadow.run,))
    if held.fetchone() is None:
        raise runs.LeaseEnded
    live = read_checkpoint(connection, "main", shadow.resolved)
    assert live is not None
    check_kept(shadow.resolved, live)
    if tail is not None:
        with shadow.engine().begin() as made:
            found = checkpoint.read(made, shadow.resolved.name, shadow.resolved.revision)
        behind = live.position - found.position if found else 0
        if behind > TAIL_MAX:
            return NotYet(f"the live read model is {behind} events ahead")
        if behind > 0:
            tail(live.position)
    # Only now: the transaction would have locked the shadow too, which the tail is written to.
    connection.execute("attach database ? as shadow", (str(shadow.path),))
    own = read_checkpoint(connection, "shadow", shadow.resolved)
    assert own is not None
    assert tail is None or own.position >= live.position
    replace_rows(connection, live.location, bound_to_live=tail is not None)
    # The names of the live database come before those of the one that is attached.
    swap = transitions.swapping_in(live, own, log, recorded(shadow.resolved)).compile(
        dialect=_NAMED, compile_kwargs={"render_postcompile": True}
    )
    connection.execute(str(swap), swap.params).fetchone()
    failpoints.reach("rebuild.inside_swap")
    return Swapped(own.position, live.generation + 1, live.location)


def shadow_path(database: Database, run: str) -> Path:
    """The run's file, in the folder of the live database: what may write there may write here."""
    live = Path(str(make_url(database.url).database))
    return live.with_name(f"{live.name}.ej_{run}")


@contextmanager
def claimed(database: Database, run: str) -> Generator[None]:
    """Hold what tells other processes that this run's process lives: a lock on a file, which goes with the process."""
    lock = _lock_path(database, run)
    with _claim(lock):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _claim(lock: Path) -> IO[bytes]:
    """The file, locked. Whoever clears away may hold it for a moment, or remove it before it is locked."""
    for _ in range(_CLAIM_TRIES):
        file = lock.open("wb")
        held = _try_lock(file)
        if lock.exists() and held:
            return file
        file.close()
        time.sleep(_CLAIM_S)
    raise runs.LeaseEnded


def clear_abandoned(database: Database) -> list[str]:
    """Remove the shadows of runs whose lease has ended or whose process is gone; return their names."""
    engine = database.sync_engine("eventjet rebuild")
    with engine.begin() as connection:
        create_tables(connection)
        found = runs.known_runs(connection)
    cleared: list[str] = []
    for run, ended in found:
        if ended or not is_claimed(database, run):
            remove(shadow_path(database, run))
            with engine.begin() as connection:
                runs.close_run(connection, run)
            cleared.append(run)
    # A run is killed before it is announced, too.
    for run in {run for _, run in found_files(database)} - {run for run, _ in found}:
        if not is_claimed(database, run):
            remove(shadow_path(database, run))
            cleared.append(run)
    return cleared


def found_files(database: Database) -> list[tuple[str, str]]:
    """(name, run) of the files of all runs, by their names alone."""
    live = Path(str(make_url(database.url).database))
    names = [path.name.removeprefix(f"{live.name}.") for path in live.parent.glob(f"{glob.escape(live.name)}.ej_*")]
    return [(name, found[1]) for name in names if (found := _FILE.fullmatch(name))]


def drop_run(database: Database, run: str) -> None:
    """Remove what is left of a run that is over."""
    remove(shadow_path(database, run))


def is_claimed(database: Database, run: str) -> bool:
    """Whether the run's process lives."""
    try:
        with _lock_path(database, run).open("r+b") as file:
            return not _try_lock(file)
    except OSError:
        return False


def _try_lock(file: IO[bytes]) -> bool:
    """Lock the file if nobody has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _lock_path(database: Database, run: str) -> Path:
    path = shadow_path(database, run)
    return path.with_name(path.name + ".lock")


def remove(path: Path) -> None:
    """Delete the run's file and what SQLite keeps beside it."""
    for suffix in _SUFFIXES:
        with suppress(OSError):
            path.with_name(path.name + suffix).unlink(missing_ok=True)


def _shape(connection: sqlite3.Connection, schema: str, table: str) -> Sequence[tuple[object, ...]]:
    """Columns in order: name, type, whether null, location in the key."""
    found = connection.execute('select name, type, "notnull", pk from pragma_table_info(?, ?)', (table, schema))
    return found.fetchall()
