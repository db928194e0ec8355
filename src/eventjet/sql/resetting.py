"""A projection begins anew: its tables, its quarantine and its position go together, and its worker is deposed."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, delete

from eventjet.errors import UsageError
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql import checkpoint, locations
from eventjet.sql.checkpoint import RESET, RETIRED, Checkpoint, names_of
from eventjet.sql.database import Database
from eventjet.sql.dialect import TableName, TableRef, dialect_of, listed
from eventjet.sql.exchange import UNDECLARED_REMEDY, NotNow, bounded, dependents, lock_as_workers, retried, undeclared
from eventjet.sql.own_tables import quarantine

_ASIDE = "ej_reset"
"""The location of tables that are about to be dropped; it is there within one transaction."""


def reset(database: Database, resolved: AnyResolved, log: str = "") -> list[str]:
    """Drop what a revision has made and make its tables anew, for a worker to begin with the first event; blocks.

    Returns the names of the tables made. Raises `UsageError` for one that is paused, whose tables something depends
    on, or that others do not let go of, and as `check_owner`; then nothing has changed.
    """
    engine = database.sync_engine("eventjet init")

    def attempt() -> list[str]:
        with engine.begin() as connection:
            locations.create_tables(connection)
            with bounded(connection):
                locations.check_owner(connection, resolved.name, resolved.app, log)
                old = _forget(connection, resolved)
                made = locations.prepare(connection, resolved, log=log)
                _drop(connection, resolved, old)
            return made

    try:
        return retried(attempt)
    except NotNow as later:
        raise UsageError(f"{resolved.name} is not reset: {later}. Try again.") from None


def _forget(connection: Connection, resolved: AnyResolved) -> Mapping[TableName, TableRef]:
    """Move the tables out of the way and forget what they hold; where they are now."""
    name, revision = resolved.name, resolved.revision
    held = checkpoint.read(connection, name, revision)
    if held is None or held.state == RETIRED:
        return {}  # It begins anew anyway.
    _check_state(held)
    dialect = dialect_of(connection)
    tables = dialect.find_tables(connection, names_of(held.tables), held.location)
    _check_dependents(connection, resolved, tables)
    (locked,) = lock_as_workers(
        connection,
        resolved,
        lambda: dialect.lock_tables(connection, tables.values(), readers=False),
        lambda: checkpoint.revisions(connection, name, lock=True, only=[revision]),
    )
    if (locked.location, locked.tables, locked.identities) != (held.location, held.tables, held.identities):
        raise NotNow("its tables were swapped or moved meanwhile")
    _check_dependents(connection, resolved, tables)
    if checkpoint.reset(connection, locked) is None:
        _check_state(locked)
    own = (quarantine.c.projection == name) & (quarantine.c.revision == revision)
    connection.execute(delete(quarantine).where(own))
    for table, there in tables.items():
        dialect.ensure_location(connection, _ASIDE)
        dialect.move_table(connection, there, table, _ASIDE, None)
    return dialect.find_tables(connection, tables, _ASIDE)


def _drop(connection: Connection, resolved: AnyResolved, old: Mapping[TableName, TableRef]) -> None:
    """Drop the old tables once the new ones have inherited what they had; raises `UsageError` for what they cannot."""
    held = checkpoint.read(connection, resolved.name, resolved.revision)
    assert held is not None, "the caller has prepared it"
    dialect = dialect_of(connection)
    made = dialect.find_tables(connection, names_of(held.tables), held.location)
    added = dependents(connection, made)
    if added:
        what = f"{listed(added)} would come with the table that is made"
        raise UsageError(
            f"{resolved.name} is not reset: {what}. Keep from it what gives it to new tables, an event trigger say."
        )
    for name, heir in made.items():
        if name in old:
            lost = undeclared(dialect.features(connection, old[name]), dialect.features(connection, heir))
            if lost:
                what = f"{listed(lost)} of {heir.name}, which the table does not declare, would be lost"
                raise UsageError(f"{resolved.name} is not reset: {what}. {UNDECLARED_REMEDY}")
            dialect.inherit(connection, old[name], heir)
    dialect.drop_tables(connection, list(old.values()))
    dialect.drop_location(connection, _ASIDE)


def _check_dependents(connection: Connection, resolved: AnyResolved, tables: Mapping[TableName, TableRef]) -> None:
    hanging = dependents(connection, tables)
    if hanging:
        raise UsageError(f"{resolved.name} is not reset: {listed(hanging)} would be lost. Drop that first.")


def _check_state(held: Checkpoint) -> None:
    if held.state not in RESET.states:
        raise UsageError(f"{held.name} is not reset: it is {held.state}. Run `eventjet resume {held.name}` first.")
