"""Which tables a checkpoint is true for: known by an identity, since a table of the same name may be another one.

The identities are noted when a revision begins and whenever a rebuild swaps tables in. They hold in the database, or
the file, that gave them (`Dialect.home`): in one that was restored from a dump they are noted anew.
"""

from __future__ import annotations

import json

from sqlalchemy import Connection

from eventjet.errors import TableLost
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import Checkpoint, names_of
from eventjet.sql.dialect import dialect_of, listed


def identities(connection: Connection, tables: str, location: str) -> str:
    """Of tables that are there, as a checkpoint keeps them: JSON of their home and of each table.

    Notes an identity on those that have none, where the database gives none by itself.
    """
    dialect = dialect_of(connection)
    names = names_of(tables)
    found = dialect.find_tables(connection, names, location)
    known = [dialect.identify(connection, found[name]) for name in names if name in found]
    return json.dumps([dialect.home(connection), *known])


def are_noted(connection: Connection, held: Checkpoint) -> bool:
    """Whether its tables are known here; if not, it was restored from a dump."""
    home, *known = json.loads(held.identities) or [""]
    return len(known) == len(names_of(held.tables)) and home == dialect_of(connection).home(connection)


def check(connection: Connection, held: Checkpoint) -> None:
    """Raise `TableLost` when a revision has begun and its tables are not those that its checkpoint is true for.

    Nothing is locked: a swap that came in between is seen by the epoch, and looked at once more.
    """
    reason = _lost(connection, held)
    if reason is not None:
        again = checkpoint.read(connection, held.name, held.revision) or held
        reason = reason if again.epoch == held.epoch else _lost(connection, again)
    if reason is not None:
        raise TableLost(held.name, held.revision, reason)


def _lost(connection: Connection, held: Checkpoint) -> str | None:
    if not held.has_begun:
        return None
    dialect = dialect_of(connection)
    names = names_of(held.tables)
    found = dialect.find_tables(connection, names, held.location)
    missing = [repr(name[1]) for name in names if name not in found]
    if missing:
        return f"{listed(missing)} is not in the database"
    if not are_noted(connection, held):
        return None
    known = zip(names, json.loads(held.identities)[1:], strict=True)
    strange = [repr(name[1]) for name, identity in known if dialect.identity(connection, found[name]) != identity]
    return f"{listed(strange)} is another table than the one its rows were written to" if strange else None
