"""Checks whether a table can store the rows of a fold: its columns, and the dataclass whose fields go into them. Pure.

A field's annotation is compared with what `columns.normaliser` accepts for its column, so that a row that could never
be stored is refused when an `App` is built instead of at the first event.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import date, datetime
from typing import Any, cast

from sqlalchemy import Column, Index, Table
from sqlalchemy import types as sa
from sqlalchemy.dialects import postgresql

from eventjet.domain.personal import field_hint, is_private
from eventjet.domain.state import field_names, is_frozen, value_faults
from eventjet.domain.subscription import raw_annotations, shown_name, union_members
from eventjet.projections.columns import column_type_of, element, plain, unsupported

OWN_TABLES = ("eventjet_projection", "eventjet_rebuild", "eventjet_quarantine", "eventjet_action")
"""The names of eventjet's own tables: see `eventjet.sql.own_tables`."""

_SHOWN_AS = {list: Sequence, dict: Mapping}
"""The class that a message names instead of a class that can be changed in place."""
_NAME_BYTES = 63
_POSTGRES = postgresql.dialect()
_EXCLUDED_BASES = {bool: int, datetime: date}
"""Classes that a column of their base class does not take."""


def declaration_faults(table: Table) -> Iterator[str]:
    """Yield names that are eventjet's own or that a database would cut, and indexes that no transaction can create."""
    if table.name in OWN_TABLES:
        yield f"the table {table.name!r} is eventjet's own"
    for noun, name in _names(table):
        if len(name.encode()) > _NAME_BYTES:
            yield (
                f"{noun} {name!r} has {len(name.encode())} bytes in its name, and PostgreSQL cuts names after "
                f"{_NAME_BYTES}; give it a shorter one"
            )
    for column, kind in _enums(table):
        for label in kind.enums:
            size = len(label.encode())
            if size > _NAME_BYTES:
                yield (
                    f"the enum of {table.name}.{column.name} has the label {label!r} of {size} bytes, and PostgreSQL "
                    f"takes {_NAME_BYTES} at most; give it a shorter one, or declare it with native_enum=False"
                )
    for index in table.indexes:
        if index.dialect_options["postgresql"]["concurrently"]:
            yield (
                f"the index {str(index.name)!r} of {table.name!r} is declared with postgresql_concurrently, which no "
                "transaction allows; leave it out: nobody waits for an index of a table that is being made"
            )


def _names(table: Table) -> Iterator[tuple[str, str]]:
    """Yield (what it is, its name) of everything in the declaration that is given a name in the database."""
    yield "the table", table.name
    if table.schema is not None:
        yield f"the schema of the table {table.name!r},", table.schema
    for column in table.columns:
        yield f"the column of {table.name!r}", column.name
    for column, kind in _enums(table):
        if kind.name is not None:
            yield f"the enum of {table.name}.{column.name}", str(kind.name)
    for item in (*table.indexes, *table.constraints):
        if isinstance(item.name, str):
            yield f"the {'index' if isinstance(item, Index) else 'constraint'} of {table.name!r}", str(item.name)


def _enums(table: Table) -> Iterator[tuple[Column[Any], sa.Enum]]:
    """Yield the columns for which PostgreSQL creates an enum type, with that type."""
    for column in table.columns:
        kind = element(column.type, _POSTGRES)
        if isinstance(kind, sa.Enum) and kind.native_enum:
            yield column, kind


def table_faults(table: Table) -> Iterator[str]:
    """Yield the faults of a fold's table: its names, and columns whose values the database would change or generate."""
    yield from declaration_faults(table)
    for column in table.columns:
        reason = unsupported(column.type)
        if reason is not None:
            yield f"column {table.name}.{column.name} {reason}"
        if column.computed is not None or column.identity is not None:
            yield f"column {table.name}.{column.name} is made by the database, not by the rows"


def row_faults(row_type: type, table: Table) -> Iterator[str]:
    """Yield fields and columns that do not match, and faults of rows that could be changed in place unnoticed."""
    is_model = hasattr(row_type, "model_fields")
    if not is_frozen(row_type):
        how = "@dataclass(frozen=True), and return replace(row, …)"
        if is_model:
            how = "ConfigDict(frozen=True), and return row.model_copy(update=…)"
        yield (
            f"{row_type.__qualname__} is not frozen, and a row that is changed in place is not seen to have changed; "
            f"declare it with {how}"
        )
    row_fields = set(field_names(row_type))
    columns = {column.key: column for column in table.columns}
    subject = f"{row_type.__qualname__} and the table {table.name!r} differ"
    if row_fields - columns.keys():
        yield f"{subject}: the table has no column {listed_names(row_fields - columns.keys())}"
    if columns.keys() - row_fields:
        yield f"{subject}: the row has no field {listed_names(columns.keys() - row_fields)}"
    fixed = set[str]() if is_model else {field.name for field in fields(cast("Any", row_type)) if not field.init}
    if fixed:
        yield f"{row_type.__qualname__} cannot be made with {listed_names(fixed)}: init=False"
    for name in field_names(row_type):
        if name in columns and columns[name].primary_key and is_private(field_hint(row_type, name)):
            yield f"{row_type.__qualname__}.{name} is personal and a key, and keys are shown: take an id of the person"
        if name in columns:
            faults = [*_type_faults(row_type, name, table, columns[name])]
            yield from faults or value_faults(annotated(row_type, name), f"{row_type.__qualname__}.{name}")


def listed_names(names: set[str]) -> str:
    """Return the names as text, quoted and in alphabetical order."""
    return ", ".join(repr(name) for name in sorted(names))


def _type_faults(row_type: type, name: str, table: Table, column: Column[Any]) -> Iterator[str]:
    accepted = _accepted_types(column.type)
    misfits = [cls for cls in _classes(annotated(row_type, name)) if accepted and not fits(cls, accepted)]
    if misfits:
        names = " | ".join(map(shown_name, misfits))
        takes = " or ".join(shown_name(_SHOWN_AS.get(cls, cls)) for cls in accepted)
        field = f"{row_type.__qualname__}.{name}"
        yield f"{field} is {names}, and column {table.name}.{column.name} ({column.type!r}) takes {takes}"


def _accepted_types(kind: sa.TypeEngine[Any]) -> tuple[type, ...]:
    kind = plain(kind)
    if isinstance(kind, sa.Enum):
        return (kind.enum_class or str,)
    column_type = column_type_of(kind)
    return () if column_type is None else column_type.accepted


def fits(cls: type, accepted: tuple[type, ...]) -> bool:
    """Whether values of a class may be stored; a protocol may always be, an abstract class where a subclass may be."""
    if getattr(cls, "_is_protocol", False) or cls is object:
        return True
    if inspect.isabstract(cls):
        return any(issubclass(accepted_type, cls) for accepted_type in accepted)
    if cls is not tuple and issubclass(cls, tuple):
        return False
    base = _EXCLUDED_BASES.get(cast("Any", cls))
    return any(accepted_type is not base and issubclass(cls, accepted_type) for accepted_type in accepted)


def _classes(hint: Any) -> Iterator[type]:
    """Yield the classes of an annotation's values, without None and without those of which nothing is known."""
    for member in union_members(hint):
        origin = typing.get_origin(member)
        if isinstance(member, typing.NewType):
            yield from _classes(member.__supertype__)
        elif type(member).__name__ == "TypeAliasType":
            yield from _classes(member.__value__)
        elif origin is typing.Literal:
            yield from {type(value) for value in typing.get_args(member) if value is not None}
        elif origin is typing.Final:
            yield from _classes(typing.get_args(member)[0])
        elif isinstance(cls := origin or member, type) and cls is not Any:
            yield cls


def annotated(row_type: type, name: str, *, include_extras: bool = False) -> Any:
    """Return the annotation of a field as an object; Any where it cannot be evaluated."""
    owner = next(cls for cls in row_type.__mro__ if name in raw_annotations(cls))
    probe = types.SimpleNamespace(__annotations__={name: raw_annotations(owner)[name]})
    try:
        return typing.get_type_hints(
            probe, globalns=vars(sys.modules[owner.__module__]), include_extras=include_extras
        )[name]
    except Exception:  # noqa: BLE001 - whatever an annotation raises that only checkers read
        return Any
