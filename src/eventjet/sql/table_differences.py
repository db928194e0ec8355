"""How the tables of a read model differ from their declaration, as Alembic compares them. Only looks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Connection, MetaData, Table

from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql.dialect import dialect_of
from eventjet.sql.locations import located_tables


@dataclass(frozen=True, slots=True)
class TableDifference:
    """One thing."""

    what: str
    cost: str
    breaks: bool
    """Whether rows cannot be written for it."""


def differences(connection: Connection, resolved: AnyResolved, location: str) -> list[TableDifference]:
    """Of tables that are there: columns, types, nullability, keys and indexes. What is missing whole is not told."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    tables = located_tables(resolved, location, dialect_of(connection))
    own = {(table.schema, table.name) for table in tables}
    schemas = {table.schema for table in tables}

    def include_name(name: str | None, kind: str, parents: Any) -> bool:
        if kind == "schema":
            return name in schemas
        return kind != "table" or (parents.get("schema_name"), name) in own

    options = {"compare_type": True, "include_schemas": schemas != {None}, "include_name": include_name}
    context = MigrationContext.configure(connection, opts=options)
    # In another location they have other names than those under which their copies are known together.
    named = MetaData()
    for table in tables:
        table.to_metadata(named)
    return _told(compare_metadata(context, named))


def _told(diffs: Iterable[Any]) -> list[TableDifference]:
    found: list[TableDifference] = []
    for diff in diffs:
        # What is altered of one column comes as a list.
        for one in cast("Sequence[Any]", diff) if isinstance(diff, list) else [diff]:
            told = _one(one)
            if told is not None:
                found.append(told)
    return found


def _one(diff: Any) -> TableDifference | None:
    match diff:
        case ("remove_column", _, table, column):
            if column.nullable or column.server_default is not None:
                return None
            what = f"the column {table}.{column.name} is not declared, and must have a value"
            return TableDifference(what, "no row can be written", breaks=True)
        case ("add_column", _, table, column):
            what = f"the column {table}.{column.name} is missing"
            return TableDifference(what, "no row can be written", breaks=True)
        case ("modify_type", _, table, column, _, found, declared):
            what = f"the column {table}.{column} is {found!s}, declared is {declared!s}"
            return TableDifference(what, "values may be refused, cut or changed", breaks=False)
        case ("modify_nullable", _, table, column, _, _, may_be_null):
            what = (
                f"the column {table}.{column} {'may not' if may_be_null else 'may'} be null, and is declared otherwise"
            )
            return TableDifference(what, "rows may be refused, or lack what readers expect", breaks=bool(may_be_null))
        case (str() as action, item, *_) if action.startswith("add_") and not isinstance(item, Table):
            kind = action.removeprefix("add_").replace("_", " ").replace("fk", "foreign key")
            what = f"the {kind} {getattr(item, 'name', None) or ''} is missing".replace("  ", " ")
            return TableDifference(what, "queries are slower, or doubles are not refused", breaks=False)
        case _:
            return None
