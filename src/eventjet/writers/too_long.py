"""Which column a text was too long for: PostgreSQL names the limit alone, and neither column nor length."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from sqlalchemy import Column, String, Table
from sqlalchemy.sql.dml import UpdateBase

from eventjet.sql.dialect import listed

_OF_MANY = re.compile(r"_m[0-9]+$")
"""What SQLAlchemy adds to a column's name where one statement has the values of several rows."""

Limited: TypeAlias = tuple[str, str, int]
"""(the column's key, its name with that of its table, the characters it holds)."""


def overlong(compiled: Any, parameters: Any, declared: Sequence[Table]) -> str:
    """What was too long, in words and without the text: of `compiled`, or of text by hand when that is None.

    `parameters` is one mapping, or one for each row. Where SQL computes the value, all columns are told that it may be.
    """
    several = cast("Sequence[Any]", parameters if isinstance(parameters, list | tuple) else [parameters])
    rows = [cast("Mapping[str, Any]", one) for one in several if isinstance(one, Mapping)]
    texts = [(name, len(value)) for row in rows for name, value in row.items() if isinstance(value, str)]
    statement = getattr(compiled, "statement", None)
    target: Any = statement.table if isinstance(statement, UpdateBase) else None
    if isinstance(target, Table):
        limits = _limits([cast("Table", target)])
        for name, length in texts:
            for key, column, limit in limits:
                if _OF_MANY.sub("", name) == key and length > limit:
                    return f"{column} holds {limit} characters, and {length} were given"
    else:
        limits = _limits(declared)
    known = listed([f"{column} holds {limit}" for _, column, limit in limits]) or "none is known"
    name, length = max(texts, key=lambda one: one[1], default=("", 0))
    given = f"; the longest text given is {name!r} with {length}" if name else ""
    return f"of the columns limited in characters {known}{given}"


def _limits(tables: Sequence[Table]) -> list[Limited]:
    columns: list[Column[Any]] = [column for table in tables for column in table.columns]
    return [
        (column.key, f"{column.table.name}.{column.name}", column.type.length)
        for column in columns
        if isinstance(column.type, String) and column.type.length is not None
    ]
