"""Column types: which are supported, what each takes, and how it goes to a driver and comes back.

`normaliser` is the same for every database, so what one refuses, all refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, cast
from uuid import UUID

from sqlalchemy import types as sa
from sqlalchemy.dialects import postgresql

from eventjet.projections import values
from eventjet.projections.json_values import canonical, dumps, loads
from eventjet.projections.storage import (
    SQLITE,
    ExactNumeric,
    JsonText,
    UtcDateTime,
    date_to_text,
    datetime_to_text,
    decimal_to_text,
)
from eventjet.projections.values import Convert

POSTGRESQL = "postgresql"
_SINGLE_BITS = 24
_BITS = ((sa.SmallInteger, 16), (sa.BigInteger, 64), (sa.Integer, 32))
_SUPPORTED = frozenset[type[Any]]((
    sa.String, sa.Text, sa.Unicode, sa.UnicodeText, sa.VARCHAR, sa.NVARCHAR, sa.TEXT,
    postgresql.TEXT, postgresql.VARCHAR,
    sa.Integer, sa.BigInteger, sa.SmallInteger, sa.INTEGER, sa.BIGINT, sa.SMALLINT,
    sa.Numeric, sa.NUMERIC, sa.DECIMAL, sa.Float, sa.FLOAT, sa.Double, sa.DOUBLE, sa.DOUBLE_PRECISION,
    sa.Boolean, sa.BOOLEAN, sa.DateTime, sa.DATETIME, sa.TIMESTAMP, sa.Date, sa.DATE,
    sa.Uuid, sa.UUID, sa.JSON, postgresql.JSON, postgresql.JSONB, sa.LargeBinary, sa.BLOB, sa.Enum,
    ExactNumeric, UtcDateTime,
))  # fmt: skip
_SQLITE: tuple[tuple[tuple[type[Any], ...], Convert, Convert], ...] = (
    ((sa.Float,), float, float),
    ((sa.Numeric, ExactNumeric), decimal_to_text, Decimal),
    ((sa.DateTime, UtcDateTime), datetime_to_text, datetime.fromisoformat),
    ((sa.Date,), date_to_text, date.fromisoformat),
    ((sa.Uuid,), lambda value: cast(UUID, value).hex, UUID),
    ((sa.Boolean,), int, bool),
)


def unsupported(kind: sa.TypeEngine[Any]) -> str | None:
    """Why values of this type could not be kept exactly; None when they can."""
    if type(kind) not in _SUPPORTED:
        return f"has the type {kind!r}, which eventjet cannot keep exactly"
    variants: Mapping[str, Any] = getattr(kind, "_variant_mapping", {})
    if any(not isinstance(other, sa.JSON | ExactNumeric | UtcDateTime | JsonText) for other in variants.values()):
        return "has a type with variants, which could differ between databases"
    if isinstance(kind, sa.Float):
        if kind.asdecimal:
            return "is a Float with asdecimal, which rounds; use Numeric"
        if kind.precision is not None and kind.precision <= _SINGLE_BITS:
            return f"is a Float of at most {_SINGLE_BITS} bits, which rounds; use Double"
    elif isinstance(kind, sa.Numeric):
        if not kind.asdecimal:
            return "is a Numeric without asdecimal, which rounds; use Numeric or Double"
        if kind.scale is not None and kind.scale < 0:
            return "is a Numeric of negative scale, which rounds"
    elif isinstance(kind, sa.Uuid) and not kind.as_uuid:
        return "is a Uuid without as_uuid; use String"
    return None


def normaliser(kind: sa.TypeEngine[Any]) -> Convert:
    """The form in which a value (None excepted) is read back; raises `ValueError` when it would not be equal."""
    if isinstance(kind, sa.Enum):
        return values.one_of(_labels(kind))
    if isinstance(kind, sa.String):
        return values.text(kind.length)
    if isinstance(kind, sa.Float):
        return values.double
    if isinstance(kind, sa.Numeric | ExactNumeric):
        return values.any_numeric if kind.precision is None else values.numeric(kind.precision, kind.scale or 0)
    for known, bits in _BITS:
        if isinstance(kind, known):
            return values.integer(bits)
    if isinstance(kind, sa.DateTime | UtcDateTime):
        return values.instant if _has_zone(kind) else values.wall_time
    return next(convert for known, convert in _SIMPLE if isinstance(kind, known))


def dumper(kind: sa.TypeEngine[Any], dialect: str) -> Convert | None:
    """From the normal form to what the driver takes; None when they are the same."""
    if isinstance(kind, sa.Enum):
        return {value: label for label, value in reversed(_labels(kind).items())}.__getitem__
    if isinstance(kind, sa.JSON):
        return dumps
    if dialect == SQLITE:
        return next((dump for known, dump, _ in _SQLITE if isinstance(kind, known)), None)
    return None


def loader(kind: sa.TypeEngine[Any], dialect: str) -> Convert | None:
    """From what the driver gives to the normal form; None when they are the same."""
    if isinstance(kind, sa.Enum):
        return _labels(kind).__getitem__
    if isinstance(kind, sa.JSON):
        return loads if dialect == SQLITE else canonical
    if dialect == SQLITE:
        return next((load for known, _, load in _SQLITE if isinstance(kind, known)), None)
    return _to_utc if _has_zone(kind) else None


def _json(value: Any) -> Any:
    """None is NULL, not the JSON null."""
    if value is None:
        raise ValueError("it takes JSON")
    return canonical(value)


def _has_zone(kind: sa.TypeEngine[Any]) -> bool:
    return isinstance(kind, UtcDateTime) or (isinstance(kind, sa.DateTime) and kind.timezone)


def _to_utc(value: datetime) -> datetime:
    return value.astimezone(UTC)


def _labels(kind: sa.Enum) -> dict[str, Any]:
    """Stored label → value."""
    if kind.enum_class is None:
        return {label: label for label in kind.enums}
    members = cast("dict[str, Any]", kind.enum_class.__members__)
    return dict(zip(kind.enums, members.values(), strict=True))


_SIMPLE: tuple[tuple[type[Any], Convert], ...] = (
    (sa.Boolean, values.boolean),
    (sa.Date, values.day),
    (sa.Uuid, values.uuid),
    (sa.JSON, _json),
    (sa.LargeBinary, values.blob),
)
