"""Actions of people on a revision: pause or resume it, promote it, reset it, or drop its tables.

A promoted revision takes the declared location, and the revision that had it moves to its own, in one transaction. Each
action deposes the owner of the revision, so that its worker begins a new lease session and looks up where its tables
are. The batch in progress is not lost: the next owner reads it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, delete
from sqlalchemy.exc import DBAPIError

from eventjet import failpoints
from eventjet.domain.position import FAILED, PAUSE, PAUSED, RESET, RETIRED
from eventjet.errors import CheckpointFenced, PromotionRefused, TableLost, UsageError
from eventjet.observability import logs
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql import checkpoint, locations, migrations
from eventjet.sql.checkpoint import DECLARED, Checkpoint, ensure, lock, names_of, revisions
from eventjet.sql.database import COMMAND, Database, dialect_of
from eventjet.sql.dialect import Fault, TableName, TableRef
from eventjet.sql.locations import check_owner, holders
from eventjet.sql.own_tables import quarantine
from eventjet.sql.quarantine import of
from eventjet.sql.table_moves import Exchange, Move, NotNow, bounded, dependents, lock_as_workers, retried, undeclared
from eventjet.text import listed

TAIL_S = 1.0
"""How long the revision in the declared location may be kept from writing while the promoted one catches up."""
TAIL_MAX = 2_000
"""The most events that the promoted revision may lack when it is tried."""
_POLL_S = 0.02
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Promoted:
    """The result of a promotion: revisions that left the declared location, in order, and the new one's position."""

    previous_revisions: tuple[int, ...]
    position: int


def stored_checkpoints(database: Database, app: str, purpose: str) -> list[Checkpoint]:
    """Return the checkpoints of an app, of all revisions; none where the database lacks eventjet's present tables."""
    with database.reaching_sync(), database.read_only(purpose) as connection:
        if connection is None or migrations.version(connection) != migrations.HEAD:
            return []
        return [row for row, _ in checkpoint.read_all(connection) if row.app in ("", app)]


def freeze(connection: Connection, resolved: AnyResolved) -> int:
    """Keep the revisions in the declared location from writing until the transaction ends.

    Returns the position that the promoted revision must reach. For PostgreSQL, where that revision can go on meanwhile;
    readers go on too. Raises as `attempt`.
    """
    with _limited(connection, resolved):
        check_owner(connection, resolved.name, resolved.app)
        checkpoints = revisions(connection, resolved.name)
        promoted, displaced = _checkpoint_of(checkpoints, resolved), holders(checkpoints, resolved)
        numbers = [holder.revision for holder in displaced]
        locked = lock_as_workers(
            connection,
            resolved,
            _exchange(connection, promoted, displaced).lock_leaving,
            lambda: revisions(connection, resolved.name, lock=True, only=numbers),
        )
        return promoted.position + _lag(promoted, locked)


def attempt(connection: Connection, resolved: AnyResolved, *, epoch: int | None = None) -> Promoted | None:
    """Give a revision the declared location within the caller's transaction; returns None when it has it already.

    A worker passes its `epoch`: it is fenced like any writer, and takes nothing from a newer revision. Waits for no
    lock longer than readers may be kept waiting. Raises `NotNow`, `PromotionRefused` and `CheckpointFenced`; then the
    caller must roll back.
    """
    with _limited(connection, resolved):
        check_owner(connection, resolved.name, resolved.app)
        checkpoints = revisions(connection, resolved.name)
        promoted = _checkpoint_of(checkpoints, resolved)
        if promoted.location == DECLARED:
            return None
        exchange = _exchange(connection, promoted, holders(checkpoints, resolved))
        locked = lock_as_workers(
            connection, resolved, exchange.lock, lambda: revisions(connection, resolved.name, lock=True)
        )
        if [_assignment(row) for row in locked] != [_assignment(row) for row in checkpoints]:
            raise NotNow("another process moved its tables meanwhile")
        exchange.look_again()
        checkpoints = revisions(connection, resolved.name)
        promoted, displaced = _checkpoint_of(checkpoints, resolved), holders(checkpoints, resolved)
        if epoch is not None and promoted.epoch != epoch:
            raise CheckpointFenced(resolved.name, f"its epoch is no longer {epoch}")
        if epoch is not None and any(holder.revision > promoted.revision for holder in displaced):
            # The newer revision came after the worker looked. Only a person gives the location back to an older one.
            raise NotNow(f"revision {displaced[-1].revision} took over meanwhile")
        events_behind = _lag(promoted, displaced)
        if events_behind:
            raise NotNow(f"it is {events_behind} events behind revision {displaced[-1].revision}")
        _check_promotion(connection, resolved, promoted, exchange)
        broken = dialect_of(connection).broken_by_name(connection)
        exchange.carry_out()
        broken = dialect_of(connection).broken_by_name(connection) - broken
        if broken:
            raise PromotionRefused(resolved, f"{listed(sorted(broken))} could not be used with its table")
        failpoints.reach("takeover.moved")
        for holder in displaced:
            location = dialect_of(connection).own_location(holder.name, holder.revision)
            checkpoint.displace(connection, holder.name, holder.revision, location)
        checkpoint.promote(connection, promoted.name, promoted.revision)
        return Promoted(tuple(holder.revision for holder in displaced), promoted.position)


def promote(database: Database, resolved: AnyResolved, *, patience_s: float = 60.0) -> Promoted | None:
    """Call `attempt` until it succeeds; blocks. Raises `PromotionRefused`, also when `patience_s` seconds are over."""
    engine = database.sync_engine("eventjet promote", existing=True)

    def try_once() -> Promoted | None:
        with engine.begin() as connection:
            _check_has_tables(connection, resolved)
            if database.dialect.is_concurrent:
                _await_worker(connection, resolved, min(TAIL_S, patience_s))
            return attempt(connection, resolved)

    try:
        return retried(try_once, patience_s)
    except NotNow as error:
        raise PromotionRefused(resolved, str(error)) from None


def _check_has_tables(connection: Connection, resolved: AnyResolved) -> None:
    """Raise `PromotionRefused` for a revision that `eventjet init` has not made, or whose tables were dropped."""
    check_owner(connection, resolved.name, resolved.app)
    (row,) = [row for row in revisions(connection, resolved.name) if row.revision == resolved.revision] or [None]
    if row is None or row.state == RETIRED:
        reason = "it has no tables yet" if row is None else "its tables were dropped"
        raise PromotionRefused(resolved, f"{reason}; `eventjet init` makes them, and a worker or a rebuild fills them")


def lag(connection: Connection, resolved: AnyResolved) -> int:
    """Return how many events a revision is behind the one that readers see; locks nothing."""
    checkpoints = revisions(connection, resolved.name)
    return _lag(_checkpoint_of(checkpoints, resolved), holders(checkpoints, resolved))


def _await_worker(connection: Connection, resolved: AnyResolved, patience_s: float) -> None:
    """Keep the revision that readers see from writing, and wait for the promoted one's worker to catch up with it."""
    target = freeze(connection, resolved)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if _checkpoint_of(revisions(connection, resolved.name), resolved).position >= target:
            return
        time.sleep(_POLL_S)


@contextmanager
def _limited(connection: Connection, resolved: AnyResolved) -> Generator[None]:
    try:
        with bounded(connection):
            yield
    except DBAPIError as error:
        if Fault.FORBIDDEN not in dialect_of(connection).faults(error):
            raise
        raise PromotionRefused(resolved, str(error.orig).partition("\n")[0]) from error


def _exchange(connection: Connection, promoted: Checkpoint, displaced: Sequence[Checkpoint]) -> Exchange:
    """Return the exchange: tables of `displaced` go to their own locations, those of `promoted` come from its own."""
    dialect = dialect_of(connection)
    leaving = [
        Move(name, DECLARED, dialect.own_location(holder.name, holder.revision))
        for holder in displaced
        for name in names_of(holder.tables)
    ]
    return Exchange(
        connection, leaving, [Move(name, promoted.location, DECLARED) for name in names_of(promoted.tables)]
    )


def _check_promotion(connection: Connection, resolved: AnyResolved, promoted: Checkpoint, exchange: Exchange) -> None:
    """Raise `PromotionRefused` for what depends on a leaving table, or is in the way; log lost features."""
    dialect = dialect_of(connection)
    if len(exchange.coming) < len(names_of(promoted.tables)):
        raise PromotionRefused(resolved, f"its own tables are not in {promoted.location}")
    try:
        locations.check_identity(connection, promoted)
    except TableLost as error:
        raise PromotionRefused(resolved, error.reason) from None
    unknown_tables = [
        name[1]
        for name in exchange.coming
        if name not in exchange.leaving and dialect.find_table(connection, name, DECLARED)
    ]
    if unknown_tables:
        raise PromotionRefused(resolved, f"no checkpoint knows whose {listed(unknown_tables)} is")
    blockers = dependents(connection, exchange.leaving)
    if blockers:
        raise PromotionRefused(resolved, f"{listed(blockers)} would stay with the table that leaves")
    features_left = [
        f"{feature} of {name[1]}"
        for name, table in exchange.leaving.items()
        if name in exchange.coming
        for feature in undeclared(
            dialect.features(connection, table), dialect.features(connection, exchange.coming[name])
        )
    ]
    if features_left:
        logs.FEATURES_LEFT.log(_log, name=resolved.name, features=listed(features_left))


def _checkpoint_of(checkpoints: Sequence[Checkpoint], resolved: AnyResolved) -> Checkpoint:
    for row in checkpoints:
        if row.revision == resolved.revision:
            return row
    raise CheckpointFenced(resolved.name, "its checkpoint is gone")


def _assignment(row: Checkpoint) -> tuple[object, ...]:
    """Return the parts of a checkpoint that must not change between reading and locking; positions may."""
    return row.revision, row.location, row.tables, row.state == RETIRED


def _lag(promoted: Checkpoint, displaced: Sequence[Checkpoint]) -> int:
    """Return by how many events `promoted` is behind; 0 where none is ahead.

    Positions in another log do not count. A revision without a log has not begun, and lacks every event.
    """
    return max([0, *(row.position - promoted.position for row in displaced if promoted.log in ("", row.log))])


def reset(database: Database, resolved: AnyResolved, log: str = "") -> list[str]:
    """Empty a revision's tables, or make those that are missing, so that a worker begins with the first event; blocks.

    Returns the names of the tables. What hangs on them stays. Raises `UsageError` for a revision that is paused, whose
    tables the database does not empty, or whose tables others keep locked, and raises as `create_tables`; then nothing
    has changed.
    """
    engine = database.sync_engine("eventjet init")

    def attempt() -> list[str]:
        with engine.begin() as connection:
            locations.create_tables(connection)
            with bounded(connection):
                check_owner(connection, resolved.name, resolved.app, log)
                emptied = _empty(connection, resolved)
                return emptied + locations.prepare(connection, resolved, log=log)

    try:
        return retried(attempt)
    except NotNow as error:
        raise UsageError(f"{resolved.name} is not reset: {error}. Try again.") from None


def _empty(connection: Connection, resolved: AnyResolved) -> list[str]:
    """Reset a revision's checkpoint, and delete its rows and its quarantine; return the names of the emptied tables."""
    name, revision, dialect = resolved.name, resolved.revision, dialect_of(connection)
    current = checkpoint.read(connection, name, revision)
    if current is None or current.state == RETIRED:
        return []  # It begins anew in any case.
    _check_resettable(current)
    tables = list(_existing_tables(connection, current).values())
    (locked,) = lock_as_workers(
        connection,
        resolved,
        lambda: dialect.lock(connection, tables, readers=True),
        lambda: revisions(connection, name, lock=True, only=[revision]),
    )
    is_same = (locked.location, locked.tables, locked.identities) == (
        current.location, current.tables, current.identities
    )  # fmt: skip
    if not is_same or list(_existing_tables(connection, locked).values()) != tables:
        raise NotNow("its tables were swapped or moved meanwhile")
    if checkpoint.reset(connection, locked) is None:
        _check_resettable(locked)
    connection.execute(delete(quarantine).where(of(name, revision)))
    try:
        dialect.empty(connection, tables)
    except DBAPIError as error:
        if dialect.faults(error) & (Fault.LOCKED_OUT | Fault.TRANSIENT | Fault.FORBIDDEN):
            raise
        reason = str(error.orig).partition("\n")[0].rstrip(".")
        raise UsageError(f"{name} is not reset: {reason}. Drop what keeps its tables from being emptied.") from error
    return [table.name for table in tables]


def _check_resettable(row: Checkpoint) -> None:
    if row.state not in RESET.states:
        raise UsageError(f"{row.name} is not reset: it is {row.state}. Run `eventjet resume {row.name}` first.")


@dataclass(frozen=True, slots=True)
class Unused:
    """A revision that has a checkpoint, is not retired, and is not declared by the app."""

    projection: str
    revision: int
    state: str
    location: str
    """The location of its tables; empty for the declared one."""
    tables: tuple[str, ...]
    """The names in SQL of its tables that exist."""
    rows: int
    """The approximate number of their rows."""
    position: int
    owner: str | None
    """The worker that has its lease now, since another deploy still declares it."""
    in_use: str | None
    """Why it cannot be dropped now; None when it can."""


def unused(connection: Connection, declared: Collection[AnyResolved], app: str = "") -> list[Unused]:
    """Return the unused revisions of this app, by its log if they name no app, ordered by name and revision."""
    checkpoints = checkpoint.read_all(connection)
    declared_revisions = {(resolved.name, resolved.revision) for resolved in declared}
    # A row of an older eventjet names no app; its log tells the app where another row names both.
    logs = {
        row.log for row, _ in checkpoints if (row.app == app if app else (row.name, row.revision) in declared_revisions)
    }
    result: list[Unused] = []
    for row, left_s in checkpoints:
        is_of_app = row.app == app if row.app and app else not row.log or row.log in logs
        if (row.name, row.revision) in declared_revisions or row.state == RETIRED or not is_of_app:
            continue
        tables = _existing_tables(connection, row)
        owner = row.owner if left_s > 0 else None
        result.append(
            Unused(
                row.name,
                row.revision,
                row.state,
                row.location,
                tuple(table.quoted() for table in tables.values()),
                sum(dialect_of(connection).count_rows(connection, table) for table in tables.values()),
                row.position,
                owner,
                _use_of(connection, row, owner, tables, declared),
            )
        )
    return result


def retire(
    connection: Connection, name: str, revision: int, declared: Collection[AnyResolved], app: str = ""
) -> Unused:
    """Drop an unused revision's tables and location in the caller's transaction; raises `UsageError`."""
    dropped = _droppable(connection, name, revision, declared, app)
    (current,) = [row for row in revisions(connection, name) if row.revision == revision]
    # Tables before checkpoints, as workers lock them.
    dialect = dialect_of(connection)
    try:
        with bounded(connection):
            tables = list(_existing_tables(connection, current).values())
            dialect.lock(connection, tables, readers=False)
            dialect.drop(connection, tables)
    except NotNow as error:
        raise UsageError(f"{name}:{revision} is not dropped: {error}. Try again.") from None
    locked = checkpoint.lock(connection, name, revision)
    if locked is None or (locked.location, locked.tables) != (current.location, current.tables):
        raise UsageError(f"{name}:{revision} was moved meanwhile. Look again with `eventjet db unused`.")
    # Checks once more, now that no worker can take the lease.
    _droppable(connection, name, revision, declared, app)
    dialect.drop_location(connection, dialect.own_location(name, revision))
    connection.execute(delete(quarantine).where(of(name, revision)))
    checkpoint.retire(connection, name, revision)
    return dropped


def _droppable(connection: Connection, name: str, revision: int, declared: Collection[AnyResolved], app: str) -> Unused:
    unused_revisions = {(entry.projection, entry.revision): entry for entry in unused(connection, declared, app)}
    candidate = unused_revisions.get((name, revision))
    if candidate is not None and candidate.in_use is None:
        return candidate
    if candidate is not None:
        raise UsageError(f"{name}:{revision} is not dropped: {candidate.in_use}")
    if any((resolved.name, resolved.revision) == (name, revision) for resolved in declared):
        raise UsageError(
            f"{name}:{revision} is declared by the app, so it is not dropped. Take it out of the app first."
        )
    listing = ", ".join(f"{projection}:{number}" for projection, number in sorted(unused_revisions)) or "none"
    raise UsageError(f"There is no unused revision {name}:{revision}. Unused are: {listing}.")


def _use_of(
    connection: Connection,
    row: Checkpoint,
    owner: str | None,
    tables: Mapping[TableName, TableRef],
    declared: Collection[AnyResolved],
) -> str | None:
    """Return why a revision cannot be dropped now; None when it can."""
    if owner is not None:
        return f"the worker {owner} keeps it. Stop the workers that still list it."
    successor = next((resolved for resolved in declared if resolved.name == row.name), None)
    if successor is not None and row in holders(revisions(connection, row.name), successor):
        return f"readers see its rows until revision {successor.revision} takes over from it."
    blockers = dependents(connection, tables, for_good=True)
    return f"{listed(blockers)} would be lost or broken. Drop that first." if blockers else None


def _existing_tables(connection: Connection, row: Checkpoint) -> dict[TableName, TableRef]:
    """Return the tables of a revision that exist."""
    return dialect_of(connection).find_tables(connection, names_of(row.tables), row.location)


@dataclass(frozen=True, slots=True)
class Paused:
    """The result of pausing or resuming one subscription."""

    name: str
    revision: int
    state: str
    position: int
    changed: bool
    """False where it was in this state already."""


async def pause(
    database: str, chosen: Sequence[tuple[str, int]], *, app: str = "", declared: bool = True
) -> list[Paused]:
    """Pause (name, revision) pairs of an app, all or none.

    With `declared`, a revision may be one that has no checkpoint yet: it is created. Raises `UsageError` for a revision
    that failed or is retired, and `Unreachable`, also as `check_owner`.
    """
    return await _change(database, _pause, chosen, app=app, declared=declared)


async def resume(
    database: str, chosen: Sequence[tuple[str, int]], *, app: str = "", declared: bool = True
) -> list[Paused]:
    """Resume (name, revision) pairs of an app, all or none; raises as `pause`, and for one that is not paused."""
    return await _change(database, _resume, chosen, app=app, declared=declared)


async def _change(
    database: str,
    change: Callable[[Connection, Checkpoint], Checkpoint | None],
    chosen: Sequence[tuple[str, int]],
    *,
    app: str,
    declared: bool,
) -> list[Paused]:
    target = Database(database)
    engine = target.engine("eventjet pause", COMMAND, existing=True)

    def change_all(connection: Connection) -> list[Paused]:
        results: list[Paused] = []
        for name, revision in sorted(chosen):
            check_owner(connection, name, app)
            if declared:
                ensure(connection, name, revision, app)
            before = lock(connection, name, revision)
            if before is None:
                raise UsageError(f"There is no revision {revision} of projection {name!r}. See `eventjet status`.")
            after = change(connection, before)
            results.append(Paused(name, revision, (after or before).state, before.position, changed=after is not None))
        return results

    try:
        async with target.reaching(), engine.begin() as connection:
            return await connection.run_sync(change_all)
    finally:
        await engine.dispose()


def _pause(connection: Connection, row: Checkpoint) -> Checkpoint | None:
    if row.state != PAUSED and row.state not in PAUSE.states:
        reason = f" ({' '.join(row.reason.split()).rstrip('.')})" if row.reason else ""
        subject = f"Revision {row.revision} of projection {row.name!r} is {row.state}{reason}"
        raise UsageError(f"{subject}, so nothing advances it. There is nothing to pause.")
    return checkpoint.pause(connection, row)


def _resume(connection: Connection, row: Checkpoint) -> Checkpoint | None:
    if row.state != PAUSED:
        remedy = "Start a worker that takes it, or rebuild it." if row.state == FAILED else "Nothing to resume."
        subject = f"Revision {row.revision} of projection {row.name!r} is {row.state}"
        raise UsageError(f"{subject}, not paused. {remedy}")
    return checkpoint.resume(connection, row)
