"""Supported column types, and the normal form of their values, in which every database gives them back. Pure.

A value that would not be read back equal raises `ValueError`. How a driver takes and gives values is for a dialect to
say: see `ColumnValues`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Context, Decimal, Inexact, InvalidOperation
from enum import Enum
from typing import Any, TypeAlias, cast
from uuid import UUID

from sqlalchemy import Column
from sqlalchemy import types as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Dialect

from eventjet.codec.leaves import LEAVES

Convert: TypeAlias = Callable[[Any], Any]

_UNCONSTRAINED_DIGITS = 131_072
_UNCONSTRAINED_SCALE = 16_383
_INTEGRAL = 1e16
"""From this size on a float is written with an exponent in JSON, which JSONB gives back as an integer."""
_SINGLE_BITS = 24
_KEY_BYTES = 2_600
_ENUM_LENGTH = 63
"""Characters of a column for an enum that says no length."""
_SUPPORTED = frozenset[type[Any]]((
    sa.String, sa.Text, sa.Unicode, sa.UnicodeText, sa.VARCHAR, sa.NVARCHAR, sa.TEXT,
    postgresql.TEXT, postgresql.VARCHAR,
    sa.Integer, sa.BigInteger, sa.SmallInteger, sa.INTEGER, sa.BIGINT, sa.SMALLINT,
    sa.Numeric, sa.NUMERIC, sa.DECIMAL, sa.Float, sa.FLOAT, sa.Double, sa.DOUBLE, sa.DOUBLE_PRECISION,
    sa.Boolean, sa.BOOLEAN, sa.DateTime, sa.DATETIME, sa.TIMESTAMP, sa.Date, sa.DATE,
    sa.Uuid, sa.UUID, sa.JSON, postgresql.JSON, postgresql.JSONB, sa.LargeBinary, sa.BLOB, sa.Enum,
))  # fmt: skip


_WIDEN = "Widen the column, or cut the value in the projection."
_ROUND = "Widen the column, or round in the projection."


class UnfitValue(ValueError):
    """A value would not be read back equal from its column; `way_out` is a sentence that says what helps."""

    def __init__(self, reason: str, way_out: str) -> None:
        super().__init__(reason)
        self.way_out = way_out


def way_out_of(error: ValueError) -> str:
    """Return the sentence that says what helps against the refusal of a value."""
    fallback = "Convert it in the projection, or declare a column for values like it."
    return error.way_out if isinstance(error, UnfitValue) else fallback


@dataclass(frozen=True, slots=True)
class Unread:
    """A value for which a driver has no Python value, such as `infinity`, as the database writes it."""

    text: str

    def __str__(self) -> str:
        return self.text


def plain(kind: sa.TypeEngine[Any]) -> sa.TypeEngine[Any]:
    """Return the declared type that a dialect's own type stands for (its `stands_for`); any other type unchanged."""
    return getattr(kind, "stands_for", kind)


def stored(kind: sa.TypeEngine[Any], dialect: Dialect) -> sa.TypeEngine[Any]:
    """Return the type that a database is asked for: its own variant, or the type that a decorator loads for it."""
    variants: Mapping[str, Any] = getattr(kind, "_variant_mapping", {})
    variant = variants.get(dialect.name, kind)
    return stored(variant.type_engine(dialect), dialect) if isinstance(variant, sa.TypeDecorator) else variant


def element(kind: sa.TypeEngine[Any], dialect: Dialect) -> sa.TypeEngine[Any]:
    """Return the type that a database stores; for an array, that of its elements."""
    stored_type = stored(kind, dialect)
    return stored(cast("Any", stored_type).item_type, dialect) if isinstance(stored_type, sa.ARRAY) else stored_type


def unsupported(kind: sa.TypeEngine[Any]) -> str | None:
    """Return why values of this type could not be stored exactly; None when they can."""
    kind = plain(kind)
    if type(kind) not in _SUPPORTED:
        return f"has the type {kind!r}, which eventjet cannot keep exactly; keep text, a number or JSON of it"
    variants: Mapping[str, Any] = getattr(kind, "_variant_mapping", {})
    if any(plain(variant) is variant and not isinstance(variant, sa.JSON) for variant in variants.values()):
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
    """Return the function that normalises values of this type, or raises `ValueError`; it never gets None."""
    column_type = column_type_of(kind)
    assert column_type is not None, kind
    return column_type.normaliser(plain(kind))


def key_check(column: Column[Any], parts: int) -> Convert:
    """Return the check of one column of a key of `parts` columns; PostgreSQL indexes at most about 2,700 bytes."""
    check = normaliser(column.type)
    max_bytes = _KEY_BYTES // parts
    short = max_bytes // 4
    length = column.type.length if isinstance(column.type, sa.String) and not isinstance(column.type, sa.Enum) else 0
    shortest = short if length is None else min(short, length)

    def check_key(value: Any) -> Any:
        # A short cut for nearly every key: the checks below would pass it too.
        if type(value) is str and len(value) <= shortest and value.isascii() and "\0" not in value:
            return value
        if value is None:
            raise UnfitValue(
                "a key has a value in each row", "Return a value for each event that the projection takes."
            )
        fitted = check(value)
        if type(fitted) is str and len(fitted) > short and len(fitted.encode()) > max_bytes:
            raise UnfitValue(
                f"a key of this table holds {max_bytes} bytes of text in each column", "Make the key shorter."
            )
        return fitted

    return check_key


def labels(kind: sa.Enum) -> dict[str, Any]:
    """Return the values of an enum by their stored label."""
    if kind.enum_class is None:
        return {label: label for label in kind.enums}
    members = cast("dict[str, Any]", kind.enum_class.__members__)
    return dict(zip(kind.enums, members.values(), strict=True))


def _json(value: Any) -> Any:
    """Normalise JSON; None is NULL, not the JSON null."""
    if value is None:
        raise ValueError("it takes JSON")
    return canonical(value)


def text(length: int | None) -> Convert:
    """Accept text of at most `length` characters, as PostgreSQL counts them."""

    longest = sys.maxsize if length is None else length

    def check(value: Any) -> str:
        if type(value) is str and len(value) <= longest and value.isascii() and "\0" not in value:
            return value
        if type(value) is not str:
            if not isinstance(value, str):
                raise ValueError(f"it takes text, not {_kind(value)}")
            value = str.__str__(value)
        if len(value) > longest:
            raise UnfitValue(f"it holds {length} characters and this has {len(value)}", _WIDEN)
        return storable(value)

    return check


def storable(value: str) -> str:
    """Return the text itself if a database can store it; raises `ValueError`."""
    if "\0" in value:
        raise UnfitValue("PostgreSQL keeps no NUL characters", "Remove them in the projection.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UnfitValue("a lone surrogate is not text", "Remove it in the projection.") from None
    return value


def integer(bits: int) -> Convert:
    """Accept signed integers of so many bits."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def check(value: Any) -> int:
        if type(value) is not int:
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"it takes integers, not {_kind(value)}")
            value = int(value)
        if not low <= value <= high:
            raise UnfitValue(f"it holds {bits} bits, from {low} to {high}", _ROUND)
        return value

    return check


def numeric(precision: int, scale: int) -> Convert:
    """Accept decimals of so many digits; give them exactly that scale, never rounded, and no negative zero."""
    step = Decimal(1).scaleb(-scale)
    high = Decimal("9" * precision).scaleb(-scale, Context(prec=precision + 1))
    low = high.copy_negate()
    exact = Context(prec=precision, traps=[Inexact, InvalidOperation])

    def check(value: Any) -> Decimal:
        if type(value) is Decimal and value.same_quantum(step) and value and low <= value <= high:
            return value
        value = _decimal(value)
        try:
            fitted = value.quantize(step, context=exact)
        except Inexact:
            raise UnfitValue(f"it keeps {scale} decimals, and this has more", _ROUND) from None
        except InvalidOperation:
            raise UnfitValue(f"it holds {precision} digits, {scale} of them decimals", _ROUND) from None
        return fitted or fitted.copy_abs()

    return check


def any_numeric(value: Any) -> Decimal:
    """Accept decimals of any scale; write out a positive exponent, and turn a negative zero into zero."""
    value = _decimal(value)
    exponent = cast(int, value.as_tuple().exponent)
    if exponent < -_UNCONSTRAINED_SCALE or value.adjusted() >= _UNCONSTRAINED_DIGITS:
        raise UnfitValue(f"it holds {_UNCONSTRAINED_DIGITS} digits and {_UNCONSTRAINED_SCALE} decimals", _ROUND)
    if exponent > 0:
        value = Decimal(int(value))
    return value or value.copy_abs()


def double(value: Any) -> float:
    """Accept doubles and numbers equal to one, but not NaN; turn a negative zero into zero."""
    if type(value) is not float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"it takes floats, not {_kind(value)}")
        try:
            fitted = float(value)
        except OverflowError:
            fitted = float("nan")
        if fitted != value:
            raise UnfitValue("a double would round it", "Declare a `Numeric` column, and give a Decimal.")
        value = fitted
    if value != value:
        raise UnfitValue("NaN is not equal to itself", "Give None, and declare a column that may be NULL.")
    return value or 0.0


def boolean(value: Any) -> bool:
    """Accept only True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"it takes bool, not {_kind(value)}")
    return value


def instant(value: Any) -> datetime:
    """Accept datetimes with a time zone, and convert them to UTC."""
    if not isinstance(value, datetime):
        raise ValueError(f"it takes datetimes, not {_kind(value)}")
    if value.tzinfo is UTC and type(value) is datetime and not value.fold:
        return value
    if value.utcoffset() is None:
        raise UnfitValue(
            "a datetime without a zone names no instant",
            "Give it its zone, as in `value.replace(tzinfo=UTC)`, or declare `DateTime()` for times without one.",
        )
    try:
        return _plain(value.astimezone(UTC))
    except OverflowError:
        raise ValueError("in UTC it is outside the years 1 to 9999") from None


def wall_time(value: Any) -> datetime:
    """Accept datetimes without a time zone."""
    if not isinstance(value, datetime):
        raise ValueError(f"it takes datetimes, not {_kind(value)}")
    if value.tzinfo is not None:
        raise UnfitValue(
            "the column has no time zone",
            "Declare `DateTime(timezone=True)`, or take the zone off, as in `value.replace(tzinfo=None)`.",
        )
    return value if type(value) is datetime and not value.fold else _plain(value)


def _plain(value: datetime) -> datetime:
    fitted = datetime(
        value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond, value.tzinfo
    )
    if fitted != value:
        raise ValueError("it holds microseconds")
    return fitted


def day(value: Any) -> date:
    """Accept dates, but not datetimes."""
    if not isinstance(value, date) or isinstance(value, datetime):
        raise ValueError(f"it takes dates, not {_kind(value)}")
    return value if type(value) is date else date(value.year, value.month, value.day)


def uuid(value: Any) -> UUID:
    """Accept UUIDs, but not their text."""
    if not isinstance(value, UUID):
        raise ValueError(f"it takes UUIDs, not {_kind(value)}")
    return value if type(value) is UUID else UUID(int=value.int)


def blob(value: Any) -> bytes:
    """Accept bytes and bytearrays."""
    if not isinstance(value, bytes | bytearray):
        raise ValueError(f"it takes bytes, not {_kind(value)}")
    return value if type(value) is bytes else bytes(value)


def enum_value(labels: Mapping[str, Any]) -> Convert:
    """Accept the values of an enum, given by stored label."""
    members = {value: value for value in labels.values()}

    def check(value: Any) -> Any:
        try:
            member = members[value]
        except (KeyError, TypeError):
            raise ValueError(f"it takes {', '.join(map(str, members))}") from None
        if isinstance(member, Enum) and not isinstance(value, Enum):
            raise ValueError(f"it takes {type(member).__name__}, not {_kind(value)}")
        return member

    return check


def canonical(value: Any) -> Any:
    """Return JSON as JSON, JSONB and text all give it back: keys sorted, large integral floats as integers."""
    if value is None or value is True or value is False:
        return value
    kind = cast("type[Any]", type(value))
    if kind is str:
        return storable(value)
    if kind is int:
        return value
    if kind is float:
        return _json_number(value)
    if kind is list:
        return [canonical(item) for item in cast("list[Any]", value)]
    if kind is dict:
        return _json_object(cast("dict[Any, Any]", value))
    raise ValueError(f"JSON would not give {kind.__name__} back as it is")


def dumps(value: Any) -> str:
    """Write a value in canonical form as JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def loads(stored: str) -> Any:
    """Read stored JSON into its canonical form."""
    return canonical(json.loads(stored))


def _json_number(value: float) -> int | float:
    if not math.isfinite(value):
        raise ValueError("JSON holds finite numbers only")
    return int(value) if abs(value) >= _INTEGRAL else value or 0.0


def _json_object(value: dict[Any, Any]) -> dict[str, Any]:
    for name in value:
        if type(name) is not str:
            raise ValueError(f"a JSON object has text as keys, not {type(name).__name__}")
    return {storable(name): canonical(value[name]) for name in sorted(cast("dict[str, Any]", value))}


def _decimal(value: Any) -> Decimal:
    if type(value) is int:
        return Decimal(value)
    if not isinstance(value, Decimal):
        reason = f"it takes Decimal or int, not {_kind(value)}"
        if isinstance(value, float):
            raise UnfitValue(reason, "Give `Decimal(str(value))`, or declare a `Double` column.")
        raise ValueError(reason)
    if not value.is_finite():
        raise ValueError("it holds finite numbers only")
    return value if type(value) is Decimal else Decimal(value)


def _kind(value: Any) -> str:
    return type(value).__name__


@dataclass(frozen=True, slots=True)
class ColumnType:
    """One type of column that can store rows; `COLUMN_TYPES` is the table."""

    base: type[sa.TypeEngine[Any]]
    normaliser: Callable[[Any], Convert]
    """Returns the function that gives values their normal form, from the declared type."""
    is_key: bool = False
    """Whether a part of a key may have the type."""
    default: Callable[[Any], sa.TypeEngine[Any]] | None = None
    """Returns the type of a column that is declared by a Python type alone; None for `base` without arguments."""

    @property
    def accepted(self) -> tuple[type, ...]:
        """The Python types that it takes; first those whose preferred column it is."""
        leaves = [leaf for leaf in LEAVES.values() if self.base.__name__ in leaf.columns]
        types = tuple(leaf.python for leaf in sorted(leaves, key=lambda leaf: leaf.columns[0] != self.base.__name__))
        return (*types, tuple, list, dict) if self.base is sa.JSON else types


def _integer_of(kind: sa.Integer) -> Convert:
    return integer(16 if isinstance(kind, sa.SmallInteger) else 64 if isinstance(kind, sa.BigInteger) else 32)


def _numeric_of(kind: sa.Numeric[Any]) -> Convert:
    return any_numeric if kind.precision is None else numeric(kind.precision, kind.scale or 0)


def _enum_default(cls: type[Enum]) -> sa.Enum:
    """Return a column of text for the names of an enum, wide enough for members that come later."""
    return sa.Enum(cls, native_enum=False, length=max(_ENUM_LENGTH, *map(len, cls.__members__)))


COLUMN_TYPES = (
    ColumnType(sa.Enum, lambda kind: enum_value(labels(kind)), is_key=True, default=_enum_default),
    ColumnType(sa.String, lambda kind: text(kind.length), is_key=True),
    ColumnType(sa.Float, lambda _: double, default=lambda _: sa.Double()),
    ColumnType(sa.Numeric, _numeric_of, is_key=True),
    ColumnType(sa.Integer, _integer_of, is_key=True, default=lambda _: sa.BigInteger()),
    ColumnType(sa.Boolean, lambda _: boolean),
    ColumnType(
        sa.DateTime,
        lambda kind: instant if kind.timezone else wall_time,
        is_key=True,
        default=lambda _: sa.DateTime(timezone=True),
    ),
    ColumnType(sa.Date, lambda _: day, is_key=True),
    ColumnType(sa.Uuid, lambda _: uuid, is_key=True),
    ColumnType(sa.JSON, lambda _: _json),
    ColumnType(sa.LargeBinary, lambda _: blob),
)
"""The types of columns; of several that fit, the first counts: a `Float` is a `Numeric`, and an `Enum` a `String`."""


def column_type_of(kind: sa.TypeEngine[Any]) -> ColumnType | None:
    """Return the row of the table for a declared type; None for one that cannot store rows."""
    return next((row for row in COLUMN_TYPES if isinstance(plain(kind), row.base)), None)


def default_type(cls: Any) -> sa.TypeEngine[Any] | None:
    """Return the type of column for values of a Python type; None where there is none, or more than one would fit."""
    if not isinstance(cls, type):
        return None
    if issubclass(cls, Enum):
        return _enum_default(cls)
    if cls in (tuple, list, dict, Sequence, Mapping):
        return sa.JSON()
    names = next((leaf.columns for leaf in LEAVES.values() if leaf.python is cls and leaf.columns), ("",))
    column_type = next((row for row in COLUMN_TYPES if row.base.__name__ == names[0]), None)
    if column_type is None:
        return None
    return column_type.base() if column_type.default is None else column_type.default(cls)


def key_type(kind: sa.TypeEngine[Any]) -> type | None:
    """Return the Python type of a key's part in a column; None for a type that keys cannot have.

    A decimal needs a precision: 1.0 and 1.00 are one key in Python and on PostgreSQL, and two texts on SQLite.
    """
    kind, column_type = plain(kind), column_type_of(kind)
    if column_type is None or not column_type.is_key:
        return None
    if isinstance(kind, sa.Enum):
        return kind.enum_class or str
    if isinstance(kind, sa.Numeric) and kind.precision is None:
        return None
    return column_type.accepted[0]


def key_forms(column: Column[Any]) -> tuple[Convert, Convert]:
    """Return (how a part of a key becomes text or a number, and how it comes back); for tasks that send keys on."""
    kind = plain(column.type)
    if isinstance(kind, sa.Enum):
        by_label = labels(kind)
        return {value: label for label, value in reversed(by_label.items())}.__getitem__, by_label.__getitem__
    for column_type, load in _KEYS_AS_TEXT:
        if isinstance(kind, column_type):
            return str, load
    return _unchanged, _unchanged


def _unchanged(part: Any) -> Any:
    return part


_KEYS_AS_TEXT: tuple[tuple[type[Any], Convert], ...] = (
    (sa.Numeric, Decimal),
    (sa.DateTime, datetime.fromisoformat),
    (sa.Date, date.fromisoformat),
    (sa.Uuid, UUID),
)


def key_labels(columns: Iterable[Column[Any]], key: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key as it is shown and typed: the members of enums as the labels that the database has of them."""
    return tuple(_label(plain(column.type), part) for column, part in zip(columns, key, strict=True))


def _label(kind: sa.TypeEngine[Any], part: Any) -> Any:
    if not isinstance(part, Enum) or not isinstance(kind, sa.Enum):
        return part
    return next((label for label, member in labels(kind).items() if member is part), part)
