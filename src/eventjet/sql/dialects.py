"""The supported dialects, by the name that SQLAlchemy gives their database."""

from __future__ import annotations

from functools import cache

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from eventjet.errors import UsageError
from eventjet.sql.dialect import Dialect, Fault
from eventjet.sql.postgres import POSTGRES
from eventjet.sql.sqlite import SQLITE


@cache
def _dialects() -> dict[str, Dialect]:
    return {dialect.name: dialect for dialect in (POSTGRES, SQLITE)}


def dialect_named(name: str) -> Dialect:
    """Return the dialect of a database by SQLAlchemy's name for it; raises `UsageError` for an unsupported database."""
    dialect = _dialects().get(name)
    if dialect is None:
        raise UsageError(f"eventjet does not support the database {name!r}. Use one of {', '.join(_dialects())}.")
    return dialect


def dialect_of(connection: Connection | Engine) -> Dialect:
    """Return the dialect of the database to which a connection or an engine connects."""
    return dialect_named(connection.dialect.name)


def declared_names(name: str) -> set[str]:
    """Return the declared names that a table of this name may have, in any kind of database."""
    return {dialect.declared_name(name) for dialect in _dialects().values()}


def is_about_data(error: DBAPIError) -> bool:
    """Whether a value or a row broke a rule of the database, so that trying again cannot help."""
    return any(Fault.DATA in dialect.faults(error) for dialect in _dialects().values())


def is_transient(error: DBAPIError) -> bool:
    """Whether the connection, a lock or the server failed, so that another try may succeed."""
    dialects = _dialects().values()
    return error.connection_invalidated or any(Fault.TRANSIENT in dialect.faults(error) for dialect in dialects)
