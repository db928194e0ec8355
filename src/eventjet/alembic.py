"""Let an application use Alembic for its own tables in the database where eventjet keeps read models. In `env.py`:

    context.configure(..., include_object=include_object(bank, connection))

Read models are created, moved and dropped by eventjet. Without this, autogenerate writes migrations that drop them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from sqlalchemy import Connection, Table, select
from sqlalchemy.schema import SchemaItem

from eventjet.projections.app_ref import Application
from eventjet.sql import migrations
from eventjet.sql.checkpoint import names_of
from eventjet.sql.database import declared_names
from eventjet.sql.own_tables import projections

Kind: TypeAlias = Literal["schema", "table", "column", "index", "unique_constraint", "foreign_key_constraint"]
IncludeObject: TypeAlias = Callable[[SchemaItem, str | None, Kind, bool, SchemaItem | None], bool]

OWN_TABLES = "eventjet_"
OWN_SCHEMAS = "ej_"


def include_object(app: Application, connection: Connection | None = None) -> IncludeObject:
    """Return an `include_object` for `context.configure` with which autogenerate ignores the tables of eventjet.

    These are tables whose names begin with `eventjet_`, tables in schemas whose names begin with `ej_`, and the tables
    of the app's projections, whether or not they are in the `target_metadata`. If the `connection` of the migration is
    given, tables of revisions and projections that this app no longer declares are ignored too: other processes may.

    ```python
    mine = include_object(bank)
    assert not mine(balances.table, "balances", "table", False, None)
    ```
    """
    app_tables = {(table.schema, table.name) for resolved in app.projections.values() for table in resolved.tables}
    ignored_tables = app_tables if connection is None else app_tables | _recorded_tables(connection)

    def include(
        object: SchemaItem,  # noqa: A002 - Alembic's name for it
        name: str | None,
        type_: Kind,
        reflected: bool,
        compare_to: SchemaItem | None,  # noqa: ARG001 - Alembic's signature
    ) -> bool:
        if type_ != "table" or not isinstance(object, Table) or name is None:
            return True
        if name.startswith(OWN_TABLES) or (object.schema or "").startswith(OWN_SCHEMAS):
            return False
        if (object.schema, name) in app_tables:
            return False
        # A table that exists, and is not declared by the application, may be a read model in any location.
        return not (reflected and any((object.schema, declared) in ignored_tables for declared in declared_names(name)))

    return include


def _recorded_tables(connection: Connection) -> set[tuple[str | None, str]]:
    """Return the tables of all recorded revisions. A transaction begun here is ended, since Alembic begins its own."""
    in_transaction = connection.in_transaction()
    try:
        if migrations.version(connection) is None:
            return set()
        return {name for recorded in connection.scalars(select(projections.c.tables)) for name in names_of(recorded)}
    finally:
        if not in_transaction:
            connection.rollback()
