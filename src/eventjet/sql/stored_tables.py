"""The tables of SQL by hand as a database holds them."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import CheckConstraint, Column, MetaData, Table, Text, and_, not_, type_coerce
from sqlalchemy import types as sa
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement

from eventjet.projections.sql_projection import ResolvedSql
from eventjet.projections.storage import SQLITE, ExactNumeric, storage_type


def stored_tables(resolved: ResolvedSql, dialect: str) -> list[Table]:
    """The tables as they are created and read in a database, in the order in which they can be created."""
    together = MetaData()
    made = [table.to_metadata(together) for table in resolved.tables]
    for declared, stored in zip(resolved.tables, made, strict=True):
        for column in declared.columns:
            stored.columns[column.key].type = storage_type(column.type, dialect)
        if dialect == SQLITE:
            for check in [_exact(column) for column in stored.columns if _is_scaled(column)]:
                stored.append_constraint(check)
    return made


def creation(tables: Iterable[Table]) -> list[ExecutableDDLElement]:
    """Statements that make the tables with all their constraints and indexes, and nothing else."""
    found: list[ExecutableDDLElement] = []
    for table in tables:
        found.append(CreateTable(table))
        found += [CreateIndex(index) for index in sorted(table.indexes, key=lambda one: str(one.name))]
    return found


def _is_scaled(column: Column[object]) -> bool:
    return isinstance(column.type, ExactNumeric) and column.type.precision is not None


def _exact(column: Column[object]) -> CheckConstraint:
    """SQLite would compute with such text as with a float; what then differs from the exact form is refused."""
    kind = column.type
    assert isinstance(kind, ExactNumeric | sa.Numeric)
    scale = kind.scale or 0
    plain = type_coerce(column, Text())
    digits = "." + "[0-9]" * scale if scale else ""
    return CheckConstraint(
        and_(
            plain.bool_op("glob")(f"*[0-9]{digits}"),
            not_(plain.bool_op("glob")("*[^-.0-9]*" if scale else "*[^-0-9]*")),
        )
    )
