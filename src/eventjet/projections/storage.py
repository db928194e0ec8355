"""Column types that SQLite lacks, so that both databases give back equal Python values."""

from __future__ import annotations

from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import Table
from sqlalchemy import types as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import ArgumentError

from eventjet.projections.json_values import canonical, dumps, loads
from eventjet.projections.values import any_numeric, instant, numeric

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

    def load_dialect_impl(self, dialect: Dialect) -> sa.TypeEngine[Any]:
        if dialect.name == SQLITE:
            return dialect.type_descriptor(sa.Text())
        return dialect.type_descriptor(sa.Numeric(self.precision, self.scale))

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

    def load_dialect_impl(self, dialect: Dialect) -> sa.TypeEngine[Any]:
        return dialect.type_descriptor(sa.Text() if dialect.name == SQLITE else sa.DateTime(timezone=True))

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return datetime_to_text(instant(value)) if value is not None and dialect.name == SQLITE else value

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return datetime.fromisoformat(value) if value is not None and dialect.name == SQLITE else value


class JsonText(sa.TypeDecorator[Any]):
    """JSON in a column of text: one declared JSON would turn the text `12` into a number."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002 - SQLAlchemy's signature
        return None if value is None else dumps(canonical(value))

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002 - SQLAlchemy's signature
        return None if value is None else loads(value)


def storage_type(kind: sa.TypeEngine[Any], dialect: str) -> sa.TypeEngine[Any]:
    """The type that holds this one exactly in a database: another than declared only on SQLite."""
    if dialect != SQLITE or isinstance(kind, sa.Float):
        return kind
    if isinstance(kind, sa.Numeric):
        return ExactNumeric(kind.precision, kind.scale)
    if isinstance(kind, sa.DateTime) and kind.timezone:
        return UtcDateTime()
    return JsonText() if isinstance(kind, sa.JSON) else kind


def make_readable(table: Table) -> None:
    """Let the application's own `select(table)` read on SQLite what eventjet writes there; declared types stay."""
    for column in table.columns:
        stored = storage_type(column.type, SQLITE)
        if stored is not column.type and not isinstance(column.type, ExactNumeric | UtcDateTime | JsonText):
            with suppress(ArgumentError):  # it has been told already
                column.type = column.type.with_variant(stored, SQLITE)


def decimal_to_text(value: Decimal) -> str:
    """Digits without exponent; the scale is the value's own."""
    return format(value, "f")


def datetime_to_text(value: datetime) -> str:
    """Of fixed width, so that the text sorts by time; as SQLAlchemy writes and reads it."""
    return value.isoformat(" ", "microseconds")


def date_to_text(value: date) -> str:
    """ISO 8601."""
    return value.isoformat()
