"""A projection begins anew: its tables, its quarantine and its position go together, and its worker is deposed."""

from __future__ import annotations

from sqlalchemy import Connection, delete

from eventjet.errors import UsageError
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql import checkpoint, locations
from eventjet.sql.checkpoint import RESET, RETIRED, Checkpoint, names_of
from eventjet.sql.database import Database
from eventjet.sql.dialect import dialect_of, listed
from eventjet.sql.exchange import NotNow, bounded, lock_as_workers, retried
from eventjet.sql.own_tables import quarantine


def reset(database: Database, resolved: AnyResolved) -> list[str]:
    """Drop what a revision has made and make its tables anew, for a worker to begin with the first event; blocks.

    Returns the names of the tables made. Raises `UsageError` for one that is paused, whose tables something depends
    on, or that others do not let go of; then nothing has changed.
    """
    engine = database.sync_engine("eventjet init")

    def attempt() -> list[str]:
        with engine.begin() as connection:
            locations.create_tables(connection)
            with bounded(connection):
                _forget(connection, resolved)
            return locations.prepare(connection, resolved)

    try:
        return retried(attempt)
    except NotNow as later:
        raise UsageError(f"{resolved.name} is not reset: {later}. Try again.") from None


def _forget(connection: Connection, resolved: AnyResolved) -> None:
    name, revision = resolved.name, resolved.revision
    locations.check_owner(connection, name, resolved.app)
    held = checkpoint.read(connection, name, revision)
    if held is None or held.state == RETIRED:
        return  # It begins anew anyway.
    _check_state(held)
    dialect = dialect_of(connection)
    tables = list(dialect.find_tables(connection, names_of(held.tables), held.location).values())
    hanging = [f"{one} on {table.name}" for table in tables for one in dialect.obstacles(connection, table, tables)]
    if hanging:
        raise UsageError(f"{name} is not reset: {listed(hanging)} would be lost. Drop that first, or rebuild it.")
    (locked,) = lock_as_workers(
        connection,
        resolved,
        lambda: dialect.lock_tables(connection, tables, readers=False),
        lambda: checkpoint.revisions(connection, name, lock=True, only=[revision]),
    )
    if (locked.location, locked.tables, locked.identities) != (held.location, held.tables, held.identities):
        raise NotNow("its tables were swapped or moved meanwhile")
    if checkpoint.reset(connection, locked) is None:
        _check_state(locked)
    dialect.drop_tables(connection, tables)
    own = (quarantine.c.projection == name) & (quarantine.c.revision == revision)
    connection.execute(delete(quarantine).where(own))


def _check_state(held: Checkpoint) -> None:
    if held.state not in RESET.states:
        raise UsageError(f"{held.name} is not reset: it is {held.state}. Run `eventjet resume {held.name}` first.")
