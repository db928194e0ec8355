"""`rendered`: what SQLAlchemy would hand its driver for a statement that only writes, without executing it.

The one place that reaches below SQLAlchemy's public surface. Its `Connection.execute` takes the same steps, and then a
cursor, an answer and several times as long.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from sqlalchemy import Connection, TextClause
from sqlalchemy.sql.dml import UpdateBase

Rendered: TypeAlias = tuple[str, Sequence[Any]]
"""(text for the driver, its parameters once for each row)."""

ROWS_MAX = 200
"""Rows of one statement, at most; more are quick enough by themselves."""
_PARAMETERS_MAX = 1_000
"""Of one row: PostgreSQL takes 65,535, and whoever comes near is told of it by the driver at once."""
_WRITES = re.compile(r"\s*(insert|update|delete)\b(?![^;]*(;|\breturning\b))", re.IGNORECASE | re.DOTALL)
"""Text by hand that writes, and nothing else as far as can be seen."""
_ASKED_FOR = ("_returning", "_return_defaults", "_execution_options", "_with_options", "_propagate_attrs")
"""What a statement has that returns rows, is to be executed otherwise, or belongs to the ORM."""
_OPTIONS = ("schema_translate_map", "compiled_cache", "no_parameters")
"""Options of a connection that change how a statement is rendered."""


class _NoCursor:
    """Stands for the connection while defaults are computed: none of them may ask the database."""

    @staticmethod
    def cursor(*_: object) -> None:
        return None


def rendered(connection: Connection, statement: Any, parameters: Any) -> Rendered | None:
    """None for what has to be executed at once: its rows are asked for, or it is none of the simple ones.

    Raises whatever a column's type or default raises of a value.
    """
    if not (isinstance(statement, UpdateBase) or _is_text_that_writes(statement)):
        return None
    if any(getattr(statement, name, None) for name in _ASKED_FOR):
        return None
    options = connection.get_execution_options()
    rows = _rows(parameters)
    if rows is None or any(name in options for name in _OPTIONS):
        return None
    dialect: Any = connection.dialect
    found: Any = statement
    compiled, extracted, given, hit = found._compile_w_cache(
        dialect=dialect,
        compiled_cache=connection.engine._compiled_cache,  # pyright: ignore[reportPrivateUsage]
        column_keys=sorted(rows[0]) if rows else [],
        for_executemany=len(rows) > 1,
        schema_translate_map=None,
    )
    if not _has_simple_defaults(compiled):
        return None
    context = dialect.execution_ctx_cls._init_compiled(
        dialect, connection, _NoCursor, options, compiled, rows, statement, extracted, cache_hit=hit, param_dict=given
    )
    if len(context.parameters[0]) > _PARAMETERS_MAX:
        return None
    return context.statement, context.parameters


def _is_text_that_writes(statement: object) -> bool:
    return isinstance(statement, TextClause) and _WRITES.match(statement.text) is not None


def _rows(parameters: Any) -> Sequence[Any] | None:
    if parameters is None:
        return ()
    if isinstance(parameters, Mapping):
        return (cast("Any", parameters),) if parameters else ()
    rows = cast("list[Any]", parameters) if isinstance(parameters, list) else []
    return rows if 0 < len(rows) <= ROWS_MAX and all(isinstance(one, Mapping) for one in rows) else None


def _has_simple_defaults(compiled: Any) -> bool:
    """Whether Python alone computes what the statement leaves out."""
    defaults = [one.default for one in compiled.insert_prefetch] + [one.onupdate for one in compiled.update_prefetch]
    return all(default is not None and (default.is_scalar or default.is_callable) for default in defaults)
