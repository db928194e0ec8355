"""The table of leaf types of a body, from which readers, writers, exports and trials of each type are built. PURE.

A leaf is a value that JSON keeps as one text, number or word. `LEAVES` has a row for each type that pydantic's core
schema names; to support another type, add its row. Who reads which column:

| column | read by |
|---|---|
| `wire`, `key` | `codec.bodies`: the validator and the serializer of a stored body |
| `is_text` | `codec.unions`: which types JSON tells apart |
| `schema`, `key_pattern` | `codec.shape`: JSON Schema |
| `title`, `samples` | `contracts.compare` and `contracts.samples` |
| `python`, `columns` | `projections.row_type`: which SQL columns take it |
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from types import NoneType
from typing import Any, TypeAlias, cast
from uuid import UUID

from pydantic_core import PydanticSerializationUnexpectedValue, SchemaValidator, core_schema

from eventjet.text import utc_text

Node: TypeAlias = dict[str, Any]
"""A part of a core schema or of a JSON Schema."""

SAFE_INTEGER = 2**53
"""Integers beyond this value lose digits as JSON numbers in many languages (RFC 8259, section 6)."""
EXPONENT_MAX = 999_999
"""The largest exponent of a Decimal, beyond which arithmetic in Python's default context overflows."""

DECIMAL_TEXT = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?(E[+-]?[0-9]+)?$"
BASE64_TEXT = "^[A-Za-z0-9+/]*={0,2}$"
DURATION_TEXT = "^-?P([0-9]+Y)?([0-9]+D)?(T([0-9]+H)?([0-9]+M)?([0-9.]+S)?)?$"
TIME_TEXT = r"^[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}:[0-9]{2})?$"
LARGE_TEXT = "[1-9][0-9]{15,}$"
"""The end of the pattern of an integer beyond 2^53."""

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_DATETIME = re.compile(rf"{_DATE.pattern}[Tt ][0-9]{{2}}:[0-9]{{2}}.*")
_TIME = re.compile(r"[0-9]{2}:[0-9]{2}.*")
_DURATION = re.compile(r"-?P.*")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_DECIMAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:E[+-]?[0-9]{1,7})?")
_DECIMAL_FORM = "a Decimal is written as Python writes it: 12.50, -3, 1E+3, exponents up to 999999"
_INTEGER_KEY = re.compile(r"-?(?:0|[1-9][0-9]{0,3999})")
_FLOAT_KEY = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


def _same(node: Node) -> Any:
    return node


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One type of value; `kind` is its name in pydantic's core schema."""

    kind: str
    python: type
    title: str
    """The name of such a value in messages."""
    wire: Callable[[Node], Any] = _same
    """Returns the core schema that validates and serializes the JSON of the type, from the type's own core schema."""
    key: Callable[[str], Any] | None = None
    """Reads a key of a JSON object, if pydantic takes no text for the type; raises `ValueError`."""
    is_key_rewritten: bool = False
    """Whether a key is compared with its written form, since the type is read in several forms."""
    is_text: Callable[[str], Any] | None = None
    """Returns whether a JSON text may be a value of the type; None for a type that is never text."""
    schema: Node = field(default_factory=dict[str, Any])
    """The JSON Schema of the type; empty if pydantic's own is right."""
    key_pattern: str = ""
    """The pattern of a key in JSON Schema."""
    samples: tuple[Any, ...] = ()
    """JSON values of the type for trials, the plainest first."""
    columns: tuple[str, ...] = ()
    """Names of the SQLAlchemy column types that take the type, the usual first."""


def decimal_from_json(text: str) -> Decimal:
    """Return the Decimal of a text in Python's form, without extra signs, zeros or blanks; raises `ValueError`."""
    try:
        value = Decimal(text)
    except ArithmeticError:
        raise ValueError(_DECIMAL_FORM) from None
    if (
        (str(value) == text or _DECIMAL.fullmatch(text))  # `1E3` equals `1E+3`
        and value.is_finite()
        and -EXPONENT_MAX <= value.adjusted() <= EXPONENT_MAX
    ):
        return value
    raise ValueError(_DECIMAL_FORM)


def bytes_from_json(value: Any) -> bytes:
    """Return the bytes of a base64 text; raises `ValueError` for any other value."""
    if not isinstance(value, str):
        raise ValueError("bytes travel as base64")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"bytes travel as base64: {error}") from None


def _reads(convert: Callable[[str], Any]) -> Callable[[str], bool]:
    """Return a function that says whether `convert` takes a text."""

    def is_text(text: str) -> bool:
        try:
            convert(text)
        except ValueError:
            return False
        return True

    return is_text


def datetime_to_json(value: datetime) -> str:
    """Return a datetime as RFC 3339 text in UTC; raises `ValueError` for a datetime without a zone."""
    if value.tzinfo is None:
        raise ValueError("a datetime needs a time zone, as datetime.now(UTC) has one")
    return utc_text(value)


def in_utc(value: datetime) -> datetime:
    """Return the datetime with the object `datetime.UTC` as its zone; raises `ValueError` outside the years 1-9999."""
    try:
        return value.replace(tzinfo=UTC) if value.tzinfo == UTC else value.astimezone(UTC)
    except OverflowError:
        raise ValueError("in UTC it is outside the years 1 to 9999") from None


def of_enum(schema: Node) -> Any:
    """Return the wire schema of an enum, which refuses `true` and `1.0` for a member with the equal value 1."""
    return _of_choice(schema, [member.value for member in schema["members"]])


def of_literal(schema: Node) -> Any:
    """Return the wire schema of a literal, which refuses `true` and `1.0` for 1 as an enum does."""
    values = [value.value if isinstance(value, Enum) else value for value in schema["expected"]]
    return schema if all(isinstance(value, str) for value in values) else _of_choice(schema, values)


def _of_choice(schema: Node, values: Sequence[Any]) -> Any:
    kinds = {next((kind for kind in _ALIKE if isinstance(value, kind)), None) for value in values}
    refused = tuple(kind for kind, alike in _ALIKE.items() if not kinds & alike)

    def check(value: Any) -> Any:
        if type(value) in refused:
            raise ValueError("a member of an enum or of a literal travels as its value, of the same type")
        return value

    return core_schema.no_info_before_validator_function(check, cast("core_schema.AnySchema", schema))


def of_time(schema: Node) -> Any:
    """Return the wire schema of a time, with its offset as Python's `datetime.timezone`."""
    return core_schema.no_info_after_validator_function(_in_fixed_zone, cast("core_schema.AnySchema", schema))


def of_datetime(schema: Node) -> Any:
    """Return the wire schema of a datetime, which needs a zone and is converted to UTC."""
    serialization = core_schema.plain_serializer_function_ser_schema(datetime_to_json, when_used="json")
    aware = cast("core_schema.AnySchema", {**schema, "tz_constraint": "aware"})
    return core_schema.no_info_after_validator_function(
        in_utc, aware, serialization=schema.get("serialization", serialization)
    )


_ALIKE: dict[type, set[Any]] = {bool: {bool}, int: {int, float}, float: {float}}
"""JSON number type → types of the values it may stand for; `bool` is first since it is a subclass of `int`."""


def _in_fixed_zone(value: time) -> time:
    offset = value.utcoffset()
    return value if offset is None else value.replace(tzinfo=timezone(offset))


def _converted(read: Callable[[Any], Any], write: Callable[[Any], Any]) -> Callable[[Node], Any]:
    """Return a `wire` that converts JSON by `read` before validation, and values to JSON by `write`."""
    serialization = core_schema.plain_serializer_function_ser_schema(write, when_used="json")
    return lambda schema: core_schema.no_info_before_validator_function(
        read, cast("core_schema.AnySchema", schema), serialization=serialization
    )


def _formed(form: re.Pattern[str], reason: str, kind: core_schema.CoreSchema) -> Callable[[Node], Any]:
    """Return a `wire` for text of one form, since pydantic also takes others, such as the seconds since 1970."""
    read = SchemaValidator(kind).validate_python

    def check(value: Any) -> Any:
        if not isinstance(value, str):
            return value  # a strict class refuses it
        if form.fullmatch(value) is None:
            raise ValueError(reason)
        return read(value)

    return lambda schema: core_schema.no_info_before_validator_function(check, cast("core_schema.AnySchema", schema))


_datetime_text = _formed(_DATETIME, "a datetime is written as 2026-01-31T12:00:00Z", core_schema.datetime_schema())
_time_text = _formed(_TIME, "a time is written as 09:30:00", core_schema.time_schema())


def _of_decimal(schema: Node) -> Any:
    def check(value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError("a Decimal travels as a string")
        decimal_from_json(value)
        return value

    return core_schema.no_info_before_validator_function(check, {**schema, "strict": False})  # type: ignore[typeddict-item]  of any kind


def decimal_outside_unions(schema: Node) -> Any:
    """Return a quicker wire schema of a Decimal, which pydantic would prefer to text in a union."""

    def convert(value: Any) -> Decimal:
        if not isinstance(value, str):
            raise ValueError("a Decimal travels as a string")
        return decimal_from_json(value)

    return core_schema.no_info_before_validator_function(convert, cast("core_schema.AnySchema", schema))


def _integer_from_json(value: Any) -> Any:
    if isinstance(value, str):
        digits = value.removeprefix("-")
        is_plain = digits.isascii() and digits.isdigit() and len(digits) < 4_000 and digits[0] != "0"
        if not (is_plain and abs(int(value)) > SAFE_INTEGER):
            raise ValueError("it is stored as text and declared as int; only integers beyond 2^53 are stored as text")
        return int(value)
    return value


def _integer_to_json(value: Any) -> Any:
    if not isinstance(value, int):
        raise PydanticSerializationUnexpectedValue("no integer")  # in a union pydantic then tries the next member
    return value if -SAFE_INTEGER <= value <= SAFE_INTEGER else str(value)


def _integer_key(text: str) -> int:
    if not _INTEGER_KEY.fullmatch(text):
        raise ValueError("an integer that is a key is written with its digits alone")
    return int(text)


def _float_key(text: str) -> float:
    if not _FLOAT_KEY.fullmatch(text) or not math.isfinite(number := float(text)):
        raise ValueError("a number that is a key is written as JSON writes it")
    return number


def _bool_key(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("a bool that is a key is true or false")
    return text == "true"


def _row(*rows: Leaf) -> dict[str, Leaf]:
    return {row.kind: row for row in rows}


LEAVES: dict[str, Leaf] = _row(
    Leaf(
        kind="str",
        python=str,
        title="text",
        is_text=lambda _: True,
        samples=("text", "", "a", "Ä b", "0", "abc-1", "AAA", "x" * 300),
        columns=("String", "JSON"),
    ),
    Leaf(
        kind="int",
        python=int,
        title="an integer",
        wire=_converted(_integer_from_json, _integer_to_json),
        key=_integer_key,
        is_text=lambda text: text.removeprefix("-").isdecimal(),
        key_pattern="^-?[0-9]+$",
        samples=(1, 0, -1, 42, 2**31, 2**53, -(2**53)),
        columns=("Integer", "Float", "Numeric", "JSON"),
    ),
    Leaf(
        kind="float",
        python=float,
        title="a number",
        wire=lambda schema: {**schema, "allow_inf_nan": False},
        key=_float_key,
        key_pattern="^-?[0-9]",
        samples=(1.5, 0, -2.25, 7, 1e300),
        columns=("Float", "JSON"),
    ),
    Leaf(
        kind="bool",
        python=bool,
        title="true or false",
        key=_bool_key,
        key_pattern="^(true|false)$",
        samples=(True, False),
        columns=("Boolean", "JSON"),
    ),
    Leaf(kind="none", python=NoneType, title="null", samples=(None,)),
    Leaf(
        kind="decimal",
        python=Decimal,
        title="a Decimal",
        wire=_of_decimal,
        key=decimal_from_json,
        is_text=_reads(decimal_from_json),
        schema={"type": "string", "pattern": DECIMAL_TEXT},
        key_pattern=DECIMAL_TEXT,
        samples=("1.50", "0", "-12.5", "0.001", "1000000", "1E+3", "99.99"),
        columns=("Numeric",),
    ),
    Leaf(
        kind="datetime",
        python=datetime,
        title="a date-time",
        wire=lambda schema: _datetime_text(of_datetime(schema)),
        is_key_rewritten=True,
        is_text=_DATETIME.fullmatch,
        schema={"type": "string", "format": "date-time"},
        samples=("2026-01-02T03:04:05Z", "1999-12-31T23:59:59.000001Z"),
        columns=("DateTime",),
    ),
    Leaf(
        kind="date",
        python=date,
        title="a date",
        wire=_formed(_DATE, "a date is written as 2026-01-31", core_schema.date_schema()),
        is_key_rewritten=True,
        is_text=_DATE.fullmatch,
        schema={"type": "string", "format": "date"},
        samples=("2026-01-02", "1999-12-31"),
        columns=("Date",),
    ),
    Leaf(
        kind="time",
        python=time,
        title="a time",
        wire=lambda schema: _time_text(of_time(schema)),
        is_key_rewritten=True,
        is_text=_TIME.fullmatch,
        schema={"type": "string", "pattern": TIME_TEXT},
        samples=("12:30:00", "01:02:03.000004Z"),
    ),
    Leaf(
        kind="timedelta",
        python=timedelta,
        title="a timedelta",
        wire=_formed(_DURATION, "a timedelta is written as P1DT2H", core_schema.timedelta_schema()),
        is_key_rewritten=True,
        is_text=_DURATION.fullmatch,
        schema={"type": "string", "pattern": DURATION_TEXT},
        samples=("PT1.5S", "-P1DT2H", "PT0S"),
    ),
    Leaf(
        kind="uuid",
        python=UUID,
        title="a uuid",
        wire=_formed(_UUID, "a UUID is written in five groups of hexadecimal digits", core_schema.uuid_schema()),
        is_key_rewritten=True,
        is_text=_UUID.fullmatch,
        schema={"type": "string", "format": "uuid"},
        samples=("0197f3a0-0000-7000-8000-000000000001",),
        columns=("Uuid",),
    ),
    Leaf(
        kind="bytes",
        python=bytes,
        title="bytes",
        wire=_converted(bytes_from_json, lambda value: base64.b64encode(value).decode()),
        is_text=_reads(bytes_from_json),
        schema={"type": "string", "contentEncoding": "base64", "pattern": BASE64_TEXT},
        samples=("YWJj", "", "/w=="),
        columns=("LargeBinary",),
    ),
)
"""The leaf types by their names in pydantic's core schema; enums and literals are choices of values: see `of_enum`."""


def leaf_of(schema: Mapping[str, Any]) -> Leaf | None:
    """Return the leaf type of a JSON Schema of text; None for plain text and for other text formats."""
    return _BY_SCHEMA.get(
        (schema.get("contentEncoding"), schema.get("format"), None if "format" in schema else schema.get("pattern"))
    )


_BY_SCHEMA = {
    (leaf.schema.get("contentEncoding"), leaf.schema.get("format"), leaf.schema.get("pattern")): leaf
    for leaf in LEAVES.values()
    if leaf.schema
}
