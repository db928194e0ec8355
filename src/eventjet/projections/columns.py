"""Column types: which of them can be kept exactly, and what each takes. Pure, and the same for every database.

How values go to a driver and come back is a dialect's: see `ColumnValues`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from sqlalchemy import Column
from sqlalchemy import types as sa
from sqlalchemy.dialects import postgresql

from eventjet.projections import values
from eventjet.projections.values import Convert

_SINGLE_BITS = 24
_KEY_BYTES = 2_600
_BITS = ((sa.SmallInteger, 16), (sa.BigInteger, 64), (sa.Integer, 32))
_SUPPORTED = frozenset[type[Any]]((
    sa.String, sa.Text, sa.Unicode, sa.UnicodeText, sa.VARCHAR, sa.NVARCHAR, sa.TEXT,
    postgresql.TEXT, postgresql.VARCHAR,
    sa.Integer, sa.BigInteger, sa.SmallInteger, sa.INTEGER, sa.BIGINT, sa.SMALLINT,
    sa.Numeric, sa.NUMERIC, sa.DECIMAL, sa.Float, sa.FLOAT, sa.Double, sa.DOUBLE, sa.DOUBLE_PRECISION,
    sa.Boolean, sa.BOOLEAN, sa.DateTime, sa.DATETIME, sa.TIMESTAMP, sa.Date, sa.DATE,
    sa.Uuid, sa.UUID, sa.JSON, postgresql.JSON, postgresql.JSONB, sa.LargeBinary, sa.BLOB, sa.Enum,
))  # fmt: skip


def plain(kind: sa.TypeEngine[Any]) -> sa.TypeEngine[Any]:
    """The type that a dialect's own one stands for (as its `stands_for` says); any other type is itself."""
    return getattr(kind, "stands_for", kind)


def unsupported(kind: sa.TypeEngine[Any]) -> str | None:
    """Why values of this type could not be kept exactly; None when they can."""
    kind = plain(kind)
    if type(kind) not in _SUPPORTED:
        return f"has the type {kind!r}, which eventjet cannot keep exactly"
    variants: Mapping[str, Any] = getattr(kind, "_variant_mapping", {})
    if any(plain(other) is other and not isinstance(other, sa.JSON) for other in variants.values()):
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
    kind = plain(kind)
    if isinstance(kind, sa.Enum):
        return values.one_of(labels(kind))
    if isinstance(kind, sa.String):
        return values.text(kind.length)
    if isinstance(kind, sa.Float):
        return values.double
    if isinstance(kind, sa.Numeric):
        return values.any_numeric if kind.precision is None else values.numeric(kind.precision, kind.scale or 0)
    for known, bits in _BITS:
        if isinstance(kind, known):
            return values.integer(bits)
    if isinstance(kind, sa.DateTime):
        return values.instant if kind.timezone else values.wall_time
    return next(convert for known, convert in _SIMPLE if isinstance(kind, known))


def key_check(column: Column[Any], parts: int) -> Convert:
    """The check of one column of a key of so many: PostgreSQL indexes no more than about 2,700 bytes."""
    check = normaliser(column.type)
    most = _KEY_BYTES // parts
    short = most // 4
    length = column.type.length if isinstance(column.type, sa.String) and not isinstance(column.type, sa.Enum) else 0
    shortest = short if length is None else min(short, length)

    def check_key(value: Any) -> Any:
        # What nearly every key is; the checks below would pass it.
        if type(value) is str and len(value) <= shortest and value.isascii() and "\0" not in value:
            return value
        if value is None:
            raise ValueError("a key cannot be None")
        fitted = check(value)
        if type(fitted) is str and len(fitted) > short and len(fitted.encode()) > most:
            raise ValueError(f"a key of this table holds {most} bytes of text in each column")
        return fitted

    return check_key


def labels(kind: sa.Enum) -> dict[str, Any]:
    """Stored label → value."""
    if kind.enum_class is None:
        return {label: label for label in kind.enums}
    members = cast("dict[str, Any]", kind.enum_class.__members__)
    return dict(zip(kind.enums, members.values(), strict=True))


def _json(value: Any) -> Any:
    """None is NULL, not the JSON null."""
    if value is None:
        raise ValueError("it takes JSON")
    return values.canonical(value)


_SIMPLE: tuple[tuple[type[Any], Convert], ...] = (
    (sa.Boolean, values.boolean),
    (sa.Date, values.day),
    (sa.Uuid, values.uuid),
    (sa.JSON, _json),
    (sa.LargeBinary, values.blob),
)
