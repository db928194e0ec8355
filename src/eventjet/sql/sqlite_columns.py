"""PURE: how SQLite's column types take values: by its name a type turns them into others, and no length is kept."""

from __future__ import annotations

from typing import Any

from sqlalchemy import types as sa
from sqlalchemy.dialects import sqlite

from eventjet.projections.columns import plain, stored
from eventjet.sql.column_fit import Fit

_DIALECT = sqlite.dialect()
_ANY = "any"
"""A column without a type keeps each value as it is given."""
_KINDS = (
    (sa.NullType, _ANY),
    (sa.String, "text"),
    (sa.Float, "float"),
    (sa.Numeric, "number"),
    (sa.Boolean, "truth"),
    (sa.Integer, "integer"),
    (sa.DateTime, "time"),
    (sa.Date, "day"),
    (sa.Uuid, "text"),
    (sa.JSON, "json"),
    (sa.LargeBinary, "bytes"),
)
"""Of two that fit, the first counts."""
_ALSO = {"time": "text", "day": "text"}
"""What is no number is kept as it is under either name."""


def fit(found: sa.TypeEngine[Any], declared: sa.TypeEngine[Any]) -> Fit:
    """Of types that are written differently in SQL."""
    there, wanted = _kind(found), _kind(stored(declared, _DIALECT))
    if wanted is None:
        return Fit.OTHER
    if there == wanted:
        return Fit.SAME
    # An instant is kept as text, and stays that where a migration of somebody's declares it as such.
    also = "time" if isinstance(plain(declared), sa.DateTime) else _ALSO.get(wanted)
    return Fit.OTHER if there in (_ANY, also, _ALSO.get(wanted)) else Fit.LOSES


def _kind(kind: sa.TypeEngine[Any]) -> str | None:
    return next((name for known, name in _KINDS if isinstance(kind, known)), None)
