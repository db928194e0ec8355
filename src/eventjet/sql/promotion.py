"""Promotion: a revision takes the declared location, and whoever held it goes to its own, in one transaction.

Both are deposed, so that their workers begin a new term and look where their tables are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from eventjet import failpoints
from eventjet.errors import CheckpointFenced, PromotionRefused, TableLost
from eventjet.observability import logs
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql import checkpoint, table_identity
from eventjet.sql.checkpoint import DECLARED, Checkpoint, names_of, revisions
from eventjet.sql.database import Database
from eventjet.sql.dialect import dialect_of, listed
from eventjet.sql.exchange import Exchange, Move, NotNow, bounded, dependents, lock_as_workers, retried, undeclared
from eventjet.sql.locations import check_owner, holders

TAIL_S = 1.0
"""How long the holder of the declared location may be kept from writing while the other one catches up with it."""
TAIL_MAX = 2_000
"""Events that may be missing when that is tried."""
_POLL_S = 0.02
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Promoted:
    """Who left the declared location, in the order of revisions, and the position of who took it."""

    left: tuple[int, ...]
    position: int


def freeze(connection: Connection, resolved: AnyResolved) -> int:
    """Let whoever holds the declared location write nothing until the transaction ends; the position to be reached.

    For PostgreSQL, where the revision itself can go on meanwhile. Readers go on too. Raises as `attempt`.
    """
    with _limited(connection, resolved):
        check_owner(connection, resolved.name, resolved.app)
        found = revisions(connection, resolved.name)
        own, there = _own(found, resolved), holders(found, resolved)
        numbers = [one.revision for one in there]
        locked = lock_as_workers(
            connection,
            resolved,
            _exchange(connection, own, there).lock_leaving,
            lambda: revisions(connection, resolved.name, lock=True, only=numbers),
        )
        return own.position + _lag(own, locked)


def attempt(connection: Connection, resolved: AnyResolved, *, epoch: int | None = None) -> Promoted | None:
    """Give a revision the declared location within the caller's transaction; None when it has it already.

    `epoch` is that of the worker that asks, who then is fenced like any writer, and takes nothing from a newer
    revision. No lock is waited for longer than readers may be kept. Raises `NotNow`, `PromotionRefused` and
    `CheckpointFenced`; the caller rolls back.
    """
    with _limited(connection, resolved):
        check_owner(connection, resolved.name, resolved.app)
        found = revisions(connection, resolved.name)
        own = _own(found, resolved)
        if own.location == DECLARED:
            return None
        exchange = _exchange(connection, own, holders(found, resolved))
        locked = lock_as_workers(
            connection, resolved, exchange.lock, lambda: revisions(connection, resolved.name, lock=True)
        )
        if [_assignment(one) for one in locked] != [_assignment(one) for one in found]:
            raise NotNow("another process moved its tables meanwhile")
        exchange.look_again()
        found = revisions(connection, resolved.name)
        own, there = _own(found, resolved), holders(found, resolved)
        if epoch is not None and own.epoch != epoch:
            raise CheckpointFenced(resolved.name, f"its epoch is no longer {epoch}")
        if epoch is not None and any(one.revision > own.revision for one in there):
            # It came after the worker looked. Only a person gives the location back to an older one.
            raise NotNow(f"revision {there[-1].revision} took over meanwhile")
        missing = _lag(own, there)
        if missing:
            raise NotNow(f"it is {missing} events behind revision {there[-1].revision}")
        _check(connection, resolved, own, exchange)
        broken = dialect_of(connection).broken_by_name(connection)
        exchange.carry_out()
        broken = dialect_of(connection).broken_by_name(connection) - broken
        if broken:
            raise PromotionRefused(resolved, f"{listed(sorted(broken))} could not be used with its table")
        failpoints.reach("takeover.moved")
        for one in there:
            location = dialect_of(connection).own_location(one.name, one.revision)
            checkpoint.displace(connection, one.name, one.revision, location)
        checkpoint.promote(connection, own.name, own.revision)
        return Promoted(tuple(one.revision for one in there), own.position)


def promote(database: Database, resolved: AnyResolved, *, patience_s: float = 60.0) -> Promoted | None:
    """`attempt` until it succeeds; blocks. Raises `PromotionRefused`, also for what did not become possible in time."""
    engine = database.sync_engine("eventjet promote")

    def try_once() -> Promoted | None:
        with engine.begin() as connection:
            if database.dialect.is_concurrent:
                _await_worker(connection, resolved, min(TAIL_S, patience_s))
            return attempt(connection, resolved)

    try:
        return retried(try_once, patience_s)
    except NotNow as later:
        raise PromotionRefused(resolved, str(later)) from None


def lag(connection: Connection, resolved: AnyResolved) -> int:
    """How many events a revision lacks of what readers see already; nothing is locked."""
    found = revisions(connection, resolved.name)
    return _lag(_own(found, resolved), holders(found, resolved))


def _await_worker(connection: Connection, resolved: AnyResolved, patience_s: float) -> None:
    """Give the revision's own worker time to reach what readers see, while that does not move on."""
    target = freeze(connection, resolved)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if _own(revisions(connection, resolved.name), resolved).position >= target:
            return
        time.sleep(_POLL_S)


@contextmanager
def _limited(connection: Connection, resolved: AnyResolved) -> Generator[None]:
    try:
        with bounded(connection):
            yield
    except DBAPIError as error:
        if not dialect_of(connection).is_forbidden(error):
            raise
        raise PromotionRefused(resolved, str(error.orig).partition("\n")[0]) from error


def _exchange(connection: Connection, own: Checkpoint, there: Sequence[Checkpoint]) -> Exchange:
    """The tables of those that are there go to their own locations, and those of `own` come from its own."""
    dialect = dialect_of(connection)
    leaving = [
        Move(name, DECLARED, dialect.own_location(one.name, one.revision))
        for one in there
        for name in names_of(one.tables)
    ]
    return Exchange(connection, leaving, [Move(name, own.location, DECLARED) for name in names_of(own.tables)])


def _check(connection: Connection, resolved: AnyResolved, own: Checkpoint, exchange: Exchange) -> None:
    """Raise `PromotionRefused` when something depends on a table that leaves, or a stranger is in the way.

    What the revision that leaves has and the other one lacks, it may have been meant to lack: that is logged.
    """
    dialect = dialect_of(connection)
    if len(exchange.coming) < len(names_of(own.tables)):
        raise PromotionRefused(resolved, f"its own tables are not in {own.location}")
    try:
        table_identity.check(connection, own)
    except TableLost as error:
        raise PromotionRefused(resolved, error.reason) from None
    strangers = [
        name[1]
        for name in exchange.coming
        if name not in exchange.leaving and dialect.find_table(connection, name, DECLARED)
    ]
    if strangers:
        raise PromotionRefused(resolved, f"no checkpoint knows whose {listed(strangers)} is")
    hanging = dependents(connection, exchange.leaving)
    if hanging:
        raise PromotionRefused(resolved, f"{listed(hanging)} would stay with the table that leaves")
    left = [
        f"{one} of {name[1]}"
        for name, table in exchange.leaving.items()
        if name in exchange.coming
        for one in undeclared(dialect.features(connection, table), dialect.features(connection, exchange.coming[name]))
    ]
    if left:
        logs.FEATURES_LEFT.tell(_log, name=resolved.name, features=listed(left))


def _own(found: Sequence[Checkpoint], resolved: AnyResolved) -> Checkpoint:
    for one in found:
        if one.revision == resolved.revision:
            return one
    raise CheckpointFenced(resolved.name, "its checkpoint is gone")


def _assignment(one: Checkpoint) -> tuple[object, ...]:
    """What must not have changed between looking and locking; positions may."""
    return one.revision, one.location, one.tables, one.state == checkpoint.RETIRED


def _lag(own: Checkpoint, there: Sequence[Checkpoint]) -> int:
    """A position in another log says nothing; a revision without a log has not begun, and lacks everything."""
    return max([0, *(one.position - own.position for one in there if own.log in ("", one.log))])
