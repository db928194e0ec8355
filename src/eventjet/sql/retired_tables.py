"""Tables of revisions that an app no longer declares: listed, and dropped when somebody asks for it by name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, delete

from eventjet.errors import UsageError
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import RETIRED, Checkpoint, names_of, revisions
from eventjet.sql.dialect import TableName, TableRef, dialect_of, listed
from eventjet.sql.exchange import NotNow, bounded, dependents
from eventjet.sql.locations import holders
from eventjet.sql.own_tables import quarantine


@dataclass(frozen=True, slots=True)
class Unused:
    """A revision with a checkpoint that is not retired and that the app does not declare."""

    projection: str
    revision: int
    state: str
    location: str
    """Where its tables are; empty where they are declared."""
    tables: tuple[str, ...]
    """Those that are there, as SQL names them."""
    rows: int
    """About how many they hold."""
    position: int
    owner: str | None
    """The worker that holds its lease now: somebody still lists it."""
    in_use: str | None
    """Why it cannot be dropped now; None when it can."""


def unused(connection: Connection, declared: Collection[AnyResolved], app: str = "") -> list[Unused]:
    """By name and revision. Those of another app are left out, and those of no app that are of no log of this one."""
    found = checkpoint.read_all(connection)
    own = {(resolved.name, resolved.revision) for resolved in declared}
    # A row of an older eventjet does not say whose it is; its log does, once a row that does is of that log.
    logs = {one.log for one, _ in found if (one.app == app if app else (one.name, one.revision) in own)}
    return [
        _described(connection, one, left_s, declared)
        for one, left_s in found
        if (one.name, one.revision) not in own
        and one.state != RETIRED
        and (one.app == app if one.app and app else not one.log or one.log in logs)
    ]


def retire(
    connection: Connection, name: str, revision: int, declared: Collection[AnyResolved], app: str = ""
) -> Unused:
    """Drop the tables and the location of a revision, within the caller's transaction; what was there is returned.

    Raises `UsageError` for one that is declared, in use, or unknown, or that something depends on. Declared again, it
    begins anew.
    """
    dropped = _droppable(connection, name, revision, declared, app)
    (held,) = [one for one in revisions(connection, name) if one.revision == revision]
    # Tables before checkpoints, as workers lock them.
    dialect = dialect_of(connection)
    try:
        with bounded(connection):
            dialect.drop_tables(connection, list(_there(connection, held).values()))
    except NotNow as later:
        raise UsageError(f"{name}:{revision} is not dropped: {later}. Try again.") from None
    locked = checkpoint.lock(connection, name, revision)
    if locked is None or (locked.location, locked.tables) != (held.location, held.tables):
        raise UsageError(f"{name}:{revision} was moved meanwhile. Look again with `eventjet db unused`.")
    # Once more, now that nobody can take it.
    _droppable(connection, name, revision, declared, app)
    dialect.drop_location(connection, dialect.own_location(name, revision))
    of_it = (quarantine.c.projection == name) & (quarantine.c.revision == revision)
    connection.execute(delete(quarantine).where(of_it))
    checkpoint.retire(connection, name, revision)
    return dropped


def _droppable(connection: Connection, name: str, revision: int, declared: Collection[AnyResolved], app: str) -> Unused:
    known = {(one.projection, one.revision): one for one in unused(connection, declared, app)}
    one = known.get((name, revision))
    if one is not None and one.in_use is None:
        return one
    if one is not None:
        raise UsageError(f"{name}:{revision} is not dropped: {one.in_use}")
    if any((resolved.name, resolved.revision) == (name, revision) for resolved in declared):
        raise UsageError(
            f"{name}:{revision} is declared by the app, so it is not dropped. Take it out of the app first."
        )
    shown = ", ".join(f"{other}:{number}" for other, number in sorted(known)) or "none"
    raise UsageError(f"There is no unused revision {name}:{revision}. Unused are: {shown}.")


def _described(connection: Connection, one: Checkpoint, left_s: float, declared: Collection[AnyResolved]) -> Unused:
    tables = _there(connection, one)
    owner = one.owner if left_s > 0 else None
    in_use = None
    successor = next((resolved for resolved in declared if resolved.name == one.name), None)
    if owner is not None:
        in_use = f"the worker {owner} keeps it. Stop the workers that still list it."
    elif successor is not None and one in holders(revisions(connection, one.name), successor):
        in_use = f"readers see its rows until revision {successor.revision} takes over from it."
    elif hanging := dependents(connection, tables, for_good=True):
        in_use = f"{listed(hanging)} would be lost or broken. Drop that first."
    return Unused(
        one.name,
        one.revision,
        one.state,
        one.location,
        tuple(table.quoted() for table in tables.values()),
        sum(dialect_of(connection).count_rows(connection, table) for table in tables.values()),
        one.position,
        owner,
        in_use,
    )


def _there(connection: Connection, one: Checkpoint) -> dict[TableName, TableRef]:
    """The tables of a revision that are there."""
    return dialect_of(connection).find_tables(connection, names_of(one.tables), one.location)
