"""Differences between the tables of a read model and their declaration. Only reads, and locks nothing.

Columns are compared by their effect on values, so an equivalent type is no difference. Keys and indexes are compared by
Alembic, which is not imported for columns: workers compare those when they start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Column, Connection, Inspector, MetaData, Table, inspect
from sqlalchemy import types as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import NoSuchTableError

from eventjet.projections.columns import element, plain, stored
from eventjet.sql.database import dialect_of
from eventjet.sql.dialect import TypeMatch, qualified
from eventjet.text import cut

_CHANGES = "values may be rounded, cut or refused, or come back as others"


@dataclass(frozen=True, slots=True)
class TableDifference:
    """One difference between a table and its declaration."""

    what: str
    cost: str
    breaks: bool
    """Whether rows cannot be written because of it, or could be read back as other rows."""
    statement: str = ""
    """The SQL that mends it, where a rebuild does not; else empty."""


def differences(connection: Connection, tables: Sequence[Table]) -> list[TableDifference]:
    """Return the differences of located tables: columns, keys and indexes. Tables that do not exist are left out."""
    return [*column_differences(connection, tables), *_key_and_index_differences(connection, tables)]


def column_differences(connection: Connection, tables: Sequence[Table]) -> list[TableDifference]:
    """Return how the columns of located tables that exist differ: their types, and whether they may be null."""
    inspector = inspect(connection)
    result: list[TableDifference] = []
    for table in tables:
        with suppress(NoSuchTableError):
            existing = {column["name"]: column for column in inspector.get_columns(table.name, schema=table.schema)}
            result += _of_table(connection, table, existing)
            result += _of_checks(inspector, table)
    return result


def _of_table(connection: Connection, table: Table, existing: Mapping[str, Any]) -> Iterator[TableDifference]:
    for column in table.columns:
        subject = f"the column {table.name}.{column.name}"
        if column.name not in existing:
            yield TableDifference(f"{subject} is missing", "no row can be written", breaks=True)
            continue
        yield from _of_type(connection, column, existing[column.name]["type"], subject)
        # Not for keys: SQLite lets a key be null, and such a row is refused before it is written.
        if not column.primary_key and bool(column.nullable) != existing[column.name]["nullable"]:
            yield _of_null(column, subject)
    declared = {column.name for column in table.columns}
    for name, details in existing.items():
        fills_itself = (
            details["nullable"] or details.get("default") is not None or "identity" in details or "computed" in details
        )
        if name not in declared and not fills_itself:
            what = f"the column {table.name}.{name} is not declared, and must have a value"
            yield TableDifference(what, "no row can be written", breaks=True)


def _type_text(kind: sa.TypeEngine[Any], dialect: Dialect) -> str:
    """Return a type as SQL writes it, an enum type with its labels; name both types where it is stored as another."""
    stored_type, item_type = stored(kind, dialect), element(kind, dialect)
    if isinstance(stored_type, sa.NullType):
        return "of no type that is known"
    if isinstance(item_type, sa.Enum) and item_type.native_enum:
        suffix = "" if item_type is stored_type else "[]"
        return cut(f"{item_type.name} ENUM{suffix} ({', '.join(map(repr, item_type.enums))})")
    text = str(stored_type.compile(dialect=dialect))
    return text if plain(kind) is kind else f"{plain(kind)!s}, kept as {text}"


def _of_type(
    connection: Connection, column: Column[Any], existing_type: Any, subject: str
) -> Iterator[TableDifference]:
    dialect = connection.dialect
    existing_text = _type_text(existing_type, dialect)
    if existing_text == _type_text(stored(column.type, dialect), dialect):
        return
    match = dialect_of(connection).type_match(existing_type, column.type)
    if match is not TypeMatch.SAME:
        loses = match is TypeMatch.LOSES
        cost = _CHANGES if loses else "as far as is known it holds every value"
        what = f"{subject} is {existing_text}, declared is {_type_text(column.type, dialect)}"
        labels = [
            label.replace("'", "''") for label in dialect_of(connection).missing_labels(existing_type, column.type)
        ]
        kind: Any = element(existing_type, dialect)
        statement = "; ".join(f"alter type {qualified(kind.schema, kind.name)} add value '{label}'" for label in labels)
        yield TableDifference(what, cost, breaks=loses, statement=statement)


def _of_checks(inspector: Inspector, table: Table) -> Iterator[TableDifference]:
    """Yield the labels that the CHECK constraint of an enum lacks; the type of its column does not show them."""
    dialect = inspector.dialect
    kinds = (stored(column.type, dialect) for column in table.columns)
    checked = [kind for kind in kinds if isinstance(kind, sa.Enum) and kind.create_constraint and kind.name]
    constraints = inspector.get_check_constraints(table.name, schema=table.schema) if checked else []
    for kind in checked:
        for check in (constraint for constraint in constraints if constraint["name"] == kind.name):
            lacking = [label for label in kind.enums if "'" + label.replace("'", "''") + "'" not in check["sqltext"]]
            if lacking:
                what = f"the check {kind.name} of {table.name} lacks {', '.join(map(repr, lacking))}"
                yield TableDifference(what, "rows are refused", breaks=True)


def _of_null(column: Column[Any], subject: str) -> TableDifference:
    if column.nullable:
        return TableDifference(
            f"{subject} may not be null, and is declared otherwise", "rows may be refused", breaks=True
        )
    cost = "rows may lack what folds and readers expect"
    return TableDifference(f"{subject} may be null, and is declared NOT NULL", cost, breaks=True)


def _key_and_index_differences(connection: Connection, tables: Sequence[Table]) -> list[TableDifference]:
    """Return the missing keys and indexes."""
    if not tables:
        return []
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    included = {(table.schema, table.name) for table in tables}
    schemas = {table.schema for table in tables}

    def include_name(name: str | None, kind: str, parents: Any) -> bool:
        if kind == "schema":
            return name in schemas
        return kind != "table" or (parents.get("schema_name"), name) in included

    options = {"compare_type": False, "include_schemas": schemas != {None}, "include_name": include_name}
    context = MigrationContext.configure(connection, opts=options)
    # In another location the tables have other names than those under which their own `MetaData` knows them.
    metadata = MetaData()
    for table in tables:
        table.to_metadata(metadata)
    return [
        difference for difference in map(_missing, _flat(compare_metadata(context, metadata))) if difference is not None
    ]


def _flat(diffs: Iterable[Any]) -> Iterator[Any]:
    """Yield Alembic's differences one by one; it puts the changes of a column into a list."""
    for diff in diffs:
        if isinstance(diff, list):
            yield from cast("list[Any]", diff)
        else:
            yield diff


def _missing(diff: Any) -> TableDifference | None:
    action, item = str(diff[0]), diff[1]
    if not action.startswith("add_") or action == "add_column" or isinstance(item, Table):
        return None
    kind = action.removeprefix("add_").replace("_", " ").replace("fk", "foreign key")
    what = f"the {kind} {getattr(item, 'name', None) or ''} is missing".replace("  ", " ")
    return TableDifference(what, "queries are slower, or doubles are not refused", breaks=False)
