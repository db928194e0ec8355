"""`Dialect`: the port to one kind of database. Whatever differs between databases is asked of it.

To add a database, write its class in a file of its own, add it to `_DIALECTS` here, and run the contract tests for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import CheckConstraint, Connection, Engine, Table
from sqlalchemy import types as sa
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from eventjet.errors import UsageError
from eventjet.projections.row_codec import ColumnValues, RowCodec
from eventjet.sql.postgres import POSTGRES
from eventjet.sql.quarantine_rows import Parked
from eventjet.sql.sqlite import SQLITE
from eventjet.sql.statements import Statements
from eventjet.sql.tables import Tables

if TYPE_CHECKING:
    from eventjet.sql.database import SessionLimits


class Dialect(ColumnValues, Protocol):
    """What differs between databases. Has no state, and can be pickled."""

    @property
    def name(self) -> str:
        """As SQLAlchemy calls it."""
        ...

    @property
    def clock(self) -> str:
        """`Clock` as text."""
        ...

    @property
    def is_concurrent(self) -> bool:
        """Whether others read and write while a transaction writes; if not, writers of one process take turns."""
        ...

    @property
    def relocates_handlers(self) -> bool:
        """Whether SQL by hand finds its tables in another location under the names that it uses."""
        ...

    @property
    def byte_order(self) -> str:
        """What makes `order by` sort text by code points, as Python does."""
        ...

    @property
    def look_options(self) -> Mapping[str, Any]:
        """Execution options of connections that only look, one statement at a time."""
        ...

    @property
    def tables(self) -> Tables:
        """What can be asked about tables, and done with them."""
        ...

    # Types

    def storage_type(self, kind: sa.TypeEngine[Any], /) -> sa.TypeEngine[Any]:
        """The type that holds this one exactly."""
        ...

    def exactness_checks(self, table: Table, /) -> list[CheckConstraint]:
        """What keeps handlers from storing values that are not exact."""
        ...

    # Statements

    def statements(self, table: Table, codec: RowCodec, /) -> Statements:
        """For one table and its checkpoint; `table` says where the rows are."""
        ...

    def park(self, connection: Connection, name: str, revision: int, parked: Sequence[Parked], /) -> None:
        """Insert into the quarantine what a bulk load could not take; nobody else writes there."""
        ...

    # Locations

    def own_location(self, name: str, revision: int, /) -> str:
        """The location that is this revision's own."""
        ...

    def name_in(self, name: str, location: str, /) -> str:
        """What a table of this declared name is called in a location."""
        ...

    def declared_name(self, name: str, /) -> str:
        """The declared name of a table that is called so in some location."""
        ...

    def relocate(self, tables: Sequence[Table], location: str, /) -> None:
        """Let these tables, which are copies of declared ones, stand in a location other than the declared one.

        They are renamed last: what SQLAlchemy calls indexes, and the schema of enum types, come from the declared one.
        """
        ...

    def lock_migrations(self, connection: Connection, /) -> None:
        """Let no other process create or alter tables of eventjet until this transaction ends."""
        ...

    # Connections

    def refusal_of(self, url: URL, /) -> str | None:
        """Why this database cannot be used; None when it can."""
        ...

    def async_engine(self, url: URL, purpose: str, limits: SessionLimits, pool: Mapping[str, Any], /) -> AsyncEngine:
        """An async engine, not connected yet."""
        ...

    def engine(self, url: URL, purpose: str, limits: SessionLimits, /) -> Engine:
        """A blocking engine without a pool, not connected yet."""
        ...

    def enforce_foreign_keys(self, engine: Engine, /) -> None:
        """For connections on which an application's own statements run: elsewhere rows are whole anyway."""
        ...

    # Errors

    def lacks_table(self, cause: object, /) -> bool:
        """Whether a driver's error says that a table is missing."""
        ...

    def remedy(self, cause: object, /) -> str:
        """What to do about a driver's error while connecting."""
        ...

    def is_about_data(self, error: DBAPIError, /) -> bool:
        """Whether a value or a row broke a rule of the database, so that trying again cannot help."""
        ...

    def is_transient(self, error: DBAPIError, /) -> bool:
        """Whether the connection, a lock, or the server failed, so that the same may succeed another time."""
        ...


_DIALECTS: dict[str, Dialect] = {one.name: one for one in (POSTGRES, SQLITE)}


def dialect_named(name: str) -> Dialect:
    """The dialect that SQLAlchemy calls so; raises `UsageError` for one that is not supported."""
    found = _DIALECTS.get(name)
    if found is None:
        raise UsageError(f"eventjet does not support the database {name!r}. Use one of {', '.join(_DIALECTS)}.")
    return found


def dialect_of(connection: Connection | Engine) -> Dialect:
    """The dialect of the database at the other end."""
    return dialect_named(connection.dialect.name)


def declared_names(name: str) -> set[str]:
    """The declared names that a table may have, whatever the database."""
    return {dialect.declared_name(name) for dialect in _DIALECTS.values()}


def is_about_data(error: DBAPIError) -> bool:
    """Whether a value or a row broke a rule of the database, so that trying again cannot help."""
    return any(dialect.is_about_data(error) for dialect in _DIALECTS.values())


def is_transient(error: DBAPIError) -> bool:
    """Whether the connection, a lock, or the server failed, so that the same may succeed another time."""
    return error.connection_invalidated or any(dialect.is_transient(error) for dialect in _DIALECTS.values())
