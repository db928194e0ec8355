"""Columns of values as PostgreSQL array literals, an order of magnitude quicker than one adapter call a value. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from sqlalchemy import types as sa
from sqlalchemy.dialects import postgresql

from eventjet.projections.columns import plain

Literal: TypeAlias = Callable[[Iterable[Any]], str]

_NAMES: tuple[tuple[type[Any], str], ...] = (
    (sa.SmallInteger, "int2"),
    (sa.BigInteger, "int8"),
    (sa.Integer, "int4"),
    (sa.Float, "float8"),
    (sa.Numeric, "numeric"),
    (sa.Boolean, "bool"),
    (sa.Date, "date"),
    (sa.Uuid, "uuid"),
    (sa.LargeBinary, "bytea"),
)
_BARE = (sa.Integer, sa.Float, sa.Numeric)
_DIALECT = postgresql.dialect()


def element_type(kind: sa.TypeEngine[Any]) -> str:
    """The SQL name of the array's element type, without a length or scale that could cut a value."""
    kind = plain(kind)
    if isinstance(kind, sa.Enum):
        return kind.compile(_DIALECT) if kind.native_enum else "text"
    if isinstance(kind, sa.String):
        return "text"
    if isinstance(kind, sa.JSON):
        return kind.compile(_DIALECT)
    if isinstance(kind, sa.DateTime):
        return "timestamptz" if kind.timezone else "timestamp"
    return next(name for known, name in _NAMES if isinstance(kind, known))


def literal(kind: sa.TypeEngine[Any]) -> Literal:
    """How dumped values of this type become one literal."""
    kind = plain(kind)
    if isinstance(kind, _BARE):
        return _bare
    if isinstance(kind, sa.LargeBinary):
        return _bytes
    return _quoted if isinstance(kind, sa.String | sa.JSON) else _unescaped


def _bare(values: Iterable[Any]) -> str:
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


def _unescaped(values: Iterable[Any]) -> str:
    """Of types whose text has neither quotes nor backslashes."""
    return "{" + ",".join(["NULL" if value is None else f'"{value}"' for value in values]) + "}"


def _bytes(values: Iterable[bytes | None]) -> str:
    return "{" + ",".join(["NULL" if value is None else f'"\\\\x{value.hex()}"' for value in values]) + "}"


def _quoted(values: Iterable[str | None]) -> str:
    return "{" + ",".join(["NULL" if value is None else _quote(value) for value in values]) + "}"


def _quote(value: str) -> str:
    if '"' in value or "\\" in value:
        value = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{value}"'
