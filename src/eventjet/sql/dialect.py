"""`Dialect`: the port to one kind of database. Whatever differs between databases is asked of it.

To add a database, write its class in a file of its own, add it to `_DIALECTS`, and run the contract test for it.
"""

from __future__ import annotations

from typing import Protocol

from sqlalchemy import Connection, Engine

from eventjet.errors import UsageError
from eventjet.sql.postgres import Postgres
from eventjet.sql.sqlite import Sqlite


class Dialect(Protocol):
    """What differs between databases."""

    @property
    def name(self) -> str:
        """As SQLAlchemy calls it."""
        ...

    @property
    def clock(self) -> str:
        """`Clock` as text."""
        ...


_DIALECTS: dict[str, Dialect] = {one.name: one for one in (Postgres(), Sqlite())}


def dialect_named(name: str) -> Dialect:
    """The dialect that SQLAlchemy calls so; raises `UsageError` for one that is not supported."""
    found = _DIALECTS.get(name)
    if found is None:
        raise UsageError(f"eventjet does not support the database {name!r}. Use one of {', '.join(_DIALECTS)}.")
    return found


def dialect_of(connection: Connection | Engine) -> Dialect:
    """The dialect of the database at the other end."""
    return dialect_named(connection.dialect.name)
