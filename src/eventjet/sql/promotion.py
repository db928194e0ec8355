"""A revision takes the declared location, and whoever held it goes to its own home, in one transaction.

Readers see the one table or the other, never none. Both epochs rise, so that the workers of both begin a new term and
look where their tables are. Locks are taken in the order in which its worker takes them: of a fold tables first, then
checkpoints; of SQL by hand checkpoints first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, select
from sqlalchemy.exc import DBAPIError

from eventjet import failpoints
from eventjet.errors import CannotMove, CheckpointFenced
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.sql import checkpoint, postgres_tables, sqlite_tables, transitions
from eventjet.sql.checkpoint import DECLARED, Checkpoint, revisions
from eventjet.sql.database import Database
from eventjet.sql.location_assignment import holders
from eventjet.sql.locations import name_in, names_of, own_location
from eventjet.sql.obstacles import listed, obstacles, undeclared_indexes
from eventjet.sql.own_tables import projections
from eventjet.sql.postgres_tables import Found

TAIL_S = 1.0
"""How long the holder of the declared location may be kept from writing while the other one catches up with it."""
TAIL_MAX = 2_000
"""Events that may be missing when that is tried."""
_PAUSE_S = 0.3
_POLL_S = 0.02
_log = logging.getLogger(__name__)


class NotNow(Exception):
    """Nothing has changed; it is to be tried again soon."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Who left the declared location, in which order of revisions, and the position of who took it."""

    left: tuple[int, ...]
    position: int


def freeze(connection: Connection, resolved: AnyResolved) -> int:
    """Let whoever holds the declared location write nothing until the transaction ends; the position to be reached.

    For PostgreSQL, where the revision itself can go on meanwhile. Readers go on too. Raises as `attempt`.
    """
    with _limited(connection, resolved):
        found = revisions(connection, resolved.name)
        own, there = _own(found, resolved), holders(found, resolved)
        numbers = [one.revision for one in there]
        query = select(projections).where(projections.c.name == resolved.name, projections.c.revision.in_(numbers))
        query = query.order_by(projections.c.revision).with_for_update()
        there = _locked(
            connection,
            resolved,
            _Tables(connection, resolved, own, there).lock_leaving,
            lambda: [Checkpoint(*row) for row in connection.execute(query)],
        )
        return own.position + _behind(own, there)


def attempt(connection: Connection, resolved: AnyResolved, *, epoch: int | None = None) -> Exchanged | None:
    """`exchange` that waits for no lock longer than readers may be kept, and says what the database forbids."""
    with _limited(connection, resolved):
        return exchange(connection, resolved, epoch=epoch)


@contextmanager
def _limited(connection: Connection, resolved: AnyResolved) -> Generator[None]:
    if connection.dialect.name == POSTGRESQL:
        postgres_tables.bound_waits(connection)
    try:
        yield
    except DBAPIError as error:
        state = getattr(error.orig, "sqlstate", None)
        if state in postgres_tables.LOCKED:
            raise NotNow("another transaction holds one of the tables or checkpoints") from error
        if state == postgres_tables.FORBIDDEN:
            raise CannotMove(resolved, str(error.orig).partition("\n")[0]) from error
        raise


def promote(database: Database, resolved: AnyResolved, *, patience_s: float = 60.0) -> Exchanged | None:
    """`attempt` until it succeeds; blocks. Raises `CannotMove`, also for what did not become possible in time."""
    engine = database.sync_engine("eventjet promote")
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with engine.begin() as connection:
                if database.dialect.name == POSTGRESQL:
                    _await_worker(connection, resolved, min(TAIL_S, patience_s))
                return attempt(connection, resolved)
        except NotNow as later:
            if time.monotonic() > deadline:
                raise CannotMove(resolved, str(later)) from None
        time.sleep(_PAUSE_S)


def _await_worker(connection: Connection, resolved: AnyResolved, patience_s: float) -> None:
    """Give the revision's own worker time to reach what readers see, while that does not move on."""
    target = freeze(connection, resolved)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if _own(revisions(connection, resolved.name), resolved).position >= target:
            return
        time.sleep(_POLL_S)


def behind(connection: Connection, resolved: AnyResolved) -> int:
    """How many events a revision lacks of what readers see already; nothing is locked."""
    found = revisions(connection, resolved.name)
    own = _own(found, resolved)
    return _behind(own, holders(found, resolved))


def exchange(connection: Connection, resolved: AnyResolved, *, epoch: int | None = None) -> Exchanged | None:
    """Give a revision the declared location within the caller's transaction; None when it has it already.

    `epoch` is that of the worker that asks, who then is fenced like any writer, and takes nothing from a newer
    revision. Raises `NotNow`, `CannotMove`, `CheckpointFenced`
    and what SQLAlchemy raises; the caller rolls back.
    """
    found = revisions(connection, resolved.name)
    own = _own(found, resolved)
    if own.location == DECLARED:
        return None
    there = holders(found, resolved)
    tables = _Tables(connection, resolved, own, there)
    locked = _locked(connection, resolved, tables.lock, lambda: revisions(connection, resolved.name, lock=True))
    if [_standing(one) for one in locked] != [_standing(one) for one in found]:
        raise NotNow("another process moved its tables meanwhile")
    tables.look_again()
    found = revisions(connection, resolved.name)
    own, there = _own(found, resolved), holders(found, resolved)
    if epoch is not None and own.epoch != epoch:
        raise CheckpointFenced(resolved.name, f"its epoch is no longer {epoch}")
    if epoch is not None and any(one.revision > own.revision for one in there):
        # It came after the worker looked. Only a person gives the location back to an older one.
        raise NotNow(f"revision {there[-1].revision} took over meanwhile")
    missing = _behind(own, there)
    if missing:
        raise NotNow(f"it is {missing} events behind revision {there[-1].revision}")
    tables.check()
    tables.move()
    failpoints.reach("takeover.moved")
    _note(connection, own, there)
    return Exchanged(tuple(one.revision for one in there), own.position)


def _locked(
    connection: Connection,
    resolved: AnyResolved,
    tables: Callable[[], None],
    checkpoints: Callable[[], list[Checkpoint]],
) -> list[Checkpoint]:
    """Lock both in the order in which workers do; the checkpoints."""
    if not isinstance(resolved, ResolvedSql):
        tables()
        return checkpoints()
    on_postgres = connection.dialect.name == POSTGRESQL
    found = postgres_tables.patiently(connection, checkpoints) if on_postgres else checkpoints()
    tables()
    return found


def _own(found: Sequence[Checkpoint], resolved: AnyResolved) -> Checkpoint:
    for one in found:
        if one.revision == resolved.revision:
            return one
    raise CheckpointFenced(resolved.name, "its checkpoint is gone")


def _standing(one: Checkpoint) -> tuple[object, ...]:
    """What must not have changed between looking and locking; positions may."""
    return one.revision, one.location, one.tables, one.state == checkpoint.RETIRED


def _behind(own: Checkpoint, there: Sequence[Checkpoint]) -> int:
    """A position in another log says nothing; a revision without a log has not begun, and lacks everything."""
    return max([0, *(one.position - own.position for one in there if own.log in ("", one.log))])


def _note(connection: Connection, own: Checkpoint, there: Sequence[Checkpoint]) -> None:
    for one in there:
        location = own_location(one.name, one.revision, connection.dialect.name)
        transitions.displace(connection, one.name, one.revision, location)
    transitions.promote(connection, own.name, own.revision)


class _Tables:
    """The tables of an exchange. On SQLite the transaction has the whole database to itself."""

    def __init__(
        self, connection: Connection, resolved: AnyResolved, own: Checkpoint, there: Sequence[Checkpoint]
    ) -> None:
        self.connection = connection
        self.resolved = resolved
        self.own = own
        self.there = there
        self.dialect = connection.dialect.name
        self.leaving = [(one, schema, name) for one in there for schema, name in names_of(one.tables)]
        self.coming = names_of(own.tables)
        self.found: dict[tuple[str | None, str], Found] = {}
        """PostgreSQL's tables in the declared location."""
        self.incoming: dict[tuple[str | None, str], Found] = {}
        """PostgreSQL's tables in the revision's own location."""

    def lock_leaving(self) -> None:
        """Keep the writers of what leaves out; nothing on SQLite."""
        if self.dialect == POSTGRESQL:
            self._look()
            for found in self.found.values():
                postgres_tables.lock_table(self.connection, found, "exclusive")

    def lock(self) -> None:
        """Keep writers out and let readers in."""
        if self.dialect == POSTGRESQL:
            self._look()
            for found in (*self.found.values(), *self.incoming.values()):
                postgres_tables.lock_table(self.connection, found, "exclusive")

    def look_again(self) -> None:
        """Now that the checkpoints are locked: a rebuild may have swapped a table in before."""
        if self.dialect == POSTGRESQL:
            before = self.found, self.incoming
            self._look()
            if (self.found, self.incoming) != before:
                raise NotNow("a rebuild swapped a table in meanwhile")

    def check(self) -> None:
        """Raise `CannotMove` when something hangs on a table that leaves, or a stranger is in the way."""
        left = {(schema, name) for _, schema, name in self.leaving}
        strangers = [name for schema, name in self.coming if (schema, name) not in left and self._exists(schema, name)]
        if strangers:
            raise CannotMove(self.resolved, f"no checkpoint knows whose {listed(strangers)} is")
        names = {name: self.found.get((schema, name)) for _, schema, name in self.leaving}
        along = [found.oid for found in self.found.values()]
        hanging = [
            f"{one} on {name}"
            for name, found in names.items()
            for one in obstacles(self.connection, name, found.oid if found else None, along)
        ]
        if hanging:
            raise CannotMove(self.resolved, f"{listed(hanging)} would stay with the table that leaves")
        declared = {str(index.name) for table in self.resolved.tables for index in table.indexes}
        for name, found in names.items():
            lost = undeclared_indexes(self.connection, name, found.oid if found else None, list(declared))
            if lost:
                _log.warning("%s: %s stay with the table that leaves", self.resolved.name, listed(lost))

    def move(self) -> None:
        """Out first, then in."""
        if self.dialect == POSTGRESQL:
            self._move_on_postgres()
        else:
            leaving = [
                sqlite_tables.Rename(
                    name, name, name_in(name, own_location(one.name, one.revision, self.dialect), self.dialect)
                )
                for one, _, name in self.leaving
                if sqlite_tables.has_table(self.connection, name)
            ]
            coming = [
                sqlite_tables.Rename(name, name_in(name, self.own.location, self.dialect), name)
                for _, name in self.coming
            ]
            sqlite_tables.rename(self.connection, [*leaving, *coming])

    def _move_on_postgres(self) -> None:
        connection = self.connection
        for found in (*self.found.values(), *self.incoming.values()):
            postgres_tables.lock_table(connection, found, "access exclusive")
        for key, found in self.found.items():
            if key in self.incoming:
                postgres_tables.inherit(connection, found.oid, self.incoming[key].quoted(connection))
        for one, schema, name in self.leaving:
            if (schema, name) in self.found:
                location = own_location(one.name, one.revision, self.dialect)
                postgres_tables.ensure_schema(connection, location)
                postgres_tables.move(connection, self.found[schema, name], location)
        for (schema, name), found in self.incoming.items():
            taken = self.found.get((schema, name))
            target = taken.schema if taken else schema or postgres_tables.default_schema(connection)
            postgres_tables.move(connection, found, target)

    def _look(self) -> None:
        look = postgres_tables.find
        there = [((schema, name), look(self.connection, schema, name)) for _, schema, name in self.leaving]
        own = [((schema, name), look(self.connection, schema, name, self.own.location)) for schema, name in self.coming]
        if None in (found for _, found in own):
            raise CannotMove(self.resolved, f"its own tables are not in {self.own.location}")
        self.found = {key: found for key, found in there if found is not None}
        self.incoming = {key: found for key, found in own if found is not None}

    def _exists(self, schema: str | None, name: str) -> bool:
        if self.dialect == POSTGRESQL:
            return postgres_tables.find(self.connection, schema, name) is not None
        return sqlite_tables.has_table(self.connection, name)
