"""Column types that SQLite lacks, kept there as text, so that every database gives back equal Python values."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import CheckConstraint, Column, Dialect, Table, Text, and_, not_, type_coerce
from sqlalchemy import types as sa
from sqlalchemy.exc import ArgumentError

from eventjet.projections.columns import plain
from eventjet.projections.values import any_numeric, canonical, dumps, instant, loads, numeric

SQLITE = "sqlite"


class ExactNumeric(sa.TypeDecorator[Decimal]):
    """`Numeric(precision, scale)` that SQLite keeps exactly too, as text of fixed scale.

    eventjet stores every Numeric there in this way; `make_readable` lets an application read it.
    """

    impl = sa.Numeric
    cache_ok = True

    def __init__(self, precision: int | None = None, scale: int | None = None) -> None:
        super().__init__(precision, scale)
        self.precision = precision
        self.scale = scale

    @property
    def stands_for(self) -> sa.Numeric[Decimal]:
        return sa.Numeric(self.precision, self.scale)

    def load_dialect_impl(self, dialect: Dialect) -> sa.TypeEngine[Any]:
        return dialect.type_descriptor(sa.Text() if dialect.name == SQLITE else self.stands_for)

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        if value is None or dialect.name != SQLITE:
            return value
        fit = any_numeric if self.precision is None else numeric(self.precision, self.scale or 0)
        return decimal_to_text(fit(value))

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return Decimal(value) if value is not None and dialect.name == SQLITE else value


class UtcDateTime(sa.TypeDecorator[datetime]):
    """`DateTime(timezone=True)` that SQLite keeps as an instant too: text in UTC that sorts by time."""

    impl = sa.DateTime
    cache_ok = True

    def __init__(self) -> None:
        super().__init__(timezone=True)

    @property
    def stands_for(self) -> sa.DateTime:
        return sa.DateTime(timezone=True)

    def load_dialect_impl(self, dialect: Dialect) -> sa.TypeEngine[Any]:
        return dialect.type_descriptor(sa.Text() if dialect.name == SQLITE else self.stands_for)

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return datetime_to_text(instant(value)) if value is not None and dialect.name == SQLITE else value

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return datetime.fromisoformat(value) if value is not None and dialect.name == SQLITE else value


class JsonText(sa.TypeDecorator[Any]):
    """JSON in a column of text: one declared JSON would turn the text `12` into a number."""

    impl = sa.Text
    cache_ok = True

    @property
    def stands_for(self) -> sa.JSON:
        return sa.JSON()

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002 - SQLAlchemy's signature
        return None if value is None else dumps(canonical(value))

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002 - SQLAlchemy's signature
        return None if value is None else loads(value)


def storage_type(kind: sa.TypeEngine[Any]) -> sa.TypeEngine[Any]:
    """The type that holds this one exactly on SQLite."""
    if isinstance(kind, sa.Float):
        return kind
    if isinstance(kind, sa.Numeric):
        return ExactNumeric(kind.precision, kind.scale)
    if isinstance(kind, sa.DateTime) and kind.timezone:
        return UtcDateTime()
    return JsonText() if isinstance(kind, sa.JSON) else kind


def exactness_checks(table: Table) -> list[CheckConstraint]:
    """SQLite would compute with such text as with a float; what then differs from the exact form is refused."""
    return [
        _exact(column, column.type)
        for column in table.columns
        if isinstance(column.type, ExactNumeric) and column.type.precision is not None
    ]


def make_readable(table: Table) -> None:
    """Let the application's own `select(table)` read on SQLite what eventjet writes there; declared types stay."""
    for column in table.columns:
        stored = storage_type(column.type)
        if stored is not column.type and plain(column.type) is column.type:
            with suppress(ArgumentError):  # it has been told already
                column.type = column.type.with_variant(stored, SQLITE)


def decimal_to_text(value: Decimal) -> str:
    """Digits without exponent; the scale is the value's own."""
    return format(value, "f")


def datetime_to_text(value: datetime) -> str:
    """Of fixed width, so that the text sorts by time; as SQLAlchemy writes and reads it."""
    return value.isoformat(" ", "microseconds")


def _exact(column: Column[Any], kind: ExactNumeric) -> CheckConstraint:
    text = type_coerce(column, Text())
    digits = "." + "[0-9]" * kind.scale if kind.scale else ""
    return CheckConstraint(
        and_(
            text.bool_op("glob")(f"*[0-9]{digits}"),
            not_(text.bool_op("glob")("*[^-.0-9]*" if kind.scale else "*[^-0-9]*")),
        )
    )
