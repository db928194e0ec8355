"""PURE: whether a column of one type gives back every value of another type, as a dialect judges it."""

from __future__ import annotations

from enum import Enum
from typing import Any

from sqlalchemy import types as sa
from sqlalchemy.engine import Dialect as SqlalchemyDialect

from eventjet.projections.columns import element, plain, stored
from eventjet.shown import cut


class Fit(Enum):
    """How a column that is there takes the values of the type that is declared for it."""

    SAME = "same"
    OTHER = "other"
    """It is of another type, which gives every value back; or nobody can say."""
    LOSES = "loses"
    """It refuses some, or gives them back as others."""


def spoken(kind: sa.TypeEngine[Any], dialect: SqlalchemyDialect) -> str:
    """A type as SQL writes it; an enum of the database with its labels, and one that is kept as another with both."""
    own = stored(kind, dialect)
    if isinstance(own, sa.NullType):
        return "of no type that is known"
    each = element(own, dialect)
    if isinstance(each, sa.Enum) and each.native_enum:
        return cut(f"{each.name} ENUM{'' if each is own else '[]'} ({', '.join(map(repr, each.enums))})")
    told = str(own.compile(dialect=dialect))
    return told if plain(kind) is kind else f"{plain(kind)!s}, kept as {told}"
