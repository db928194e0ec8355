"""Column types that SQLite lacks, kept there as text, so that every database gives back equal Python values."""

from __future__ import annotations

from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, Column, Dialect, Table, Text, and_, not_, type_coerce
from sqlalchemy import types as sa
from sqlalchemy.exc import ArgumentError

from eventjet.projections.columns import normaliser, plain
from eventjet.projections.values import Convert, dumps, loads

SQLITE = "sqlite"


def decimal_to_text(value: Decimal) -> str:
    """Digits without exponent; the scale is the value's own."""
    return format(value, "f")


def datetime_to_text(value: datetime) -> str:
    """Of fixed width, so that the text sorts by time; as SQLAlchemy writes and reads it."""
    return value.isoformat(" ", "microseconds")


CONVERSIONS: tuple[tuple[type[Any], Convert, Convert], ...] = (
    (sa.Float, float, float),
    (sa.Numeric, decimal_to_text, Decimal),
    (sa.DateTime, datetime_to_text, datetime.fromisoformat),
    (sa.Date, date.isoformat, date.fromisoformat),
    (sa.Uuid, lambda value: value.hex, UUID),
    (sa.Boolean, int, bool),
    (sa.JSON, dumps, loads),
)
"""See `Dialect.conversions`."""


class StoredAsText(sa.TypeDecorator[Any]):
    """A declared type whose values are kept exactly, as text: one of SQLite's own would round or change them.

    Decimals have their fixed scale, and instants are in UTC, in a form that sorts by time. A column declared JSON would
    turn the text `12` into a number.
    """

    impl = sa.Text
    cache_ok = True

    def __init__(self, stands_for: sa.TypeEngine[Any]) -> None:
        super().__init__()
        self.stands_for = stands_for
        self._dump, self._load = next((dump, load) for kind, dump, load in CONVERSIONS if isinstance(stands_for, kind))

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002 - SQLAlchemy's signature
        return None if value is None else self._dump(normaliser(self.stands_for)(value))

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002 - SQLAlchemy's signature
        return None if value is None else self._load(value)


def storage_type(kind: sa.TypeEngine[Any]) -> sa.TypeEngine[Any]:
    """The type that holds this one exactly on SQLite."""
    is_decimal = isinstance(kind, sa.Numeric) and not isinstance(kind, sa.Float)
    is_instant = isinstance(kind, sa.DateTime) and kind.timezone
    return StoredAsText(kind) if is_decimal or is_instant or isinstance(kind, sa.JSON) else kind


def exactness_checks(table: Table) -> list[CheckConstraint]:
    """SQLite would compute with such text as with a float; what then differs from the exact form is refused."""
    kinds = [(column, plain(column.type)) for column in table.columns if isinstance(column.type, StoredAsText)]
    return [
        _exact(column, kind.scale or 0)
        for column, kind in kinds
        if isinstance(kind, sa.Numeric) and kind.precision is not None
    ]


def make_readable(table: Table) -> None:
    """Let the application's own `select(table)` read on SQLite what eventjet writes there; declared types stay."""
    for column in table.columns:
        stored = storage_type(column.type)
        if stored is not column.type:
            with suppress(ArgumentError):  # it has been told already
                column.type = column.type.with_variant(stored, SQLITE)


def _exact(column: Column[Any], scale: int) -> CheckConstraint:
    text = type_coerce(column, Text())
    digits = "." + "[0-9]" * scale if scale else ""
    return CheckConstraint(
        and_(
            text.bool_op("glob")(f"*[0-9]{digits}"),
            not_(text.bool_op("glob")("*[^-.0-9]*" if scale else "*[^-0-9]*")),
        )
    )
