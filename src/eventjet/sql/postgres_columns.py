"""PURE: how PostgreSQL's column types take each other's values. It rounds, pads and refuses by the column's type."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, cast

from sqlalchemy import types as sa
from sqlalchemy.dialects import postgresql

from eventjet.projections.columns import element, stored
from eventjet.sql.column_fit import Fit

_DIALECT = postgresql.dialect()
_SINGLE_BITS, _DOUBLE_BITS = 24, 53
_MICROSECONDS = 6
_INTEGERS = ((sa.SmallInteger, 16), (sa.BigInteger, 64), (sa.Integer, 32))
_SIMPLE = (
    (sa.Boolean, "truth"),
    (sa.Date, "day"),
    (sa.Uuid, "uuid"),
    (sa.LargeBinary, "bytes"),
    (postgresql.JSONB, "json"),
    (sa.JSON, "json"),
)


@dataclass(frozen=True, slots=True)
class _Room:
    """What a type takes: a kind of values, within limits of which each takes what a smaller one does."""

    kind: str
    limits: tuple[float, ...] = ()
    labels: frozenset[str] = frozenset()
    form: type[Any] | None = field(default=None, kw_only=True)
    """Tells types apart that take the same values."""

    def takes(self, other: _Room) -> bool:
        enough = all(own >= least for own, least in zip(self.limits, other.limits, strict=True))
        return enough and self.labels >= other.labels


def fit(found: sa.TypeEngine[Any], declared: sa.TypeEngine[Any]) -> Fit:
    """Of types that are written differently in SQL."""
    there, wanted = _room(found), _room(stored(declared, _DIALECT))
    if wanted is None:
        return Fit.OTHER
    if there == wanted:
        return Fit.SAME
    return Fit.OTHER if there is not None and there.kind == wanted.kind and there.takes(wanted) else Fit.LOSES


def missing_labels(found: sa.TypeEngine[Any], declared: sa.TypeEngine[Any]) -> list[str]:
    """The labels that an enum of the database lacks, or that of an array's elements; none of other types."""
    there, own = element(found, _DIALECT), element(declared, _DIALECT)
    if not (isinstance(there, sa.Enum) and isinstance(own, sa.Enum) and own.native_enum and there.name == own.name):
        return []
    return [label for label in own.enums if label not in there.enums]


def _room(kind: sa.TypeEngine[Any]) -> _Room | None:
    """None of a type that eventjet does not know; SQL by hand may declare such, and of a domain no limits are told."""
    if isinstance(kind, sa.ARRAY):
        each = _room(element(cast("sa.TypeEngine[Any]", kind), _DIALECT))
        return each and replace(each, kind=f"array of {each.kind}")
    if isinstance(kind, sa.String):
        return _text(kind)
    if isinstance(kind, sa.Float):
        single = isinstance(kind, sa.REAL) or (kind.precision is not None and kind.precision <= _SINGLE_BITS)
        return _Room("float", (_SINGLE_BITS if single else _DOUBLE_BITS,))
    if isinstance(kind, sa.Numeric):
        scale = kind.scale or 0
        return _Room("decimal", (inf, inf) if kind.precision is None else (kind.precision - scale, scale))
    if isinstance(kind, sa.DateTime):
        digits = getattr(kind, "precision", None)
        named = "instant" if kind.timezone else "wall time"
        return _Room(named, (_MICROSECONDS if digits is None else digits,))
    for known, bits in _INTEGERS:
        if isinstance(kind, known):
            return _Room("integer", (bits,))
    return next((_Room(name, form=known) for known, name in _SIMPLE if isinstance(kind, known)), None)


def _text(kind: sa.String) -> _Room | None:
    if isinstance(kind, sa.Enum) and kind.native_enum:
        return _Room(f"enum {kind.name}", (), frozenset(kind.enums))
    if isinstance(kind, postgresql.CITEXT):
        return _Room("text without case")
    return _Room("padded text" if isinstance(kind, sa.CHAR) else "text", (inf if kind.length is None else kind.length,))
