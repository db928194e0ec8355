"""What becomes `RowsRefused`: rows that the log gives and a rule of the database forbids, named by rule and row."""

from __future__ import annotations

import reprlib
import sqlite3
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import CheckConstraint, Column, ColumnElement, Connection, Table, func, select, text
from sqlalchemy.exc import DBAPIError

from eventjet.errors import RowsRefused

RULES = (psycopg.IntegrityError, psycopg.DataError, sqlite3.IntegrityError, sqlite3.DataError)
"""What the drivers raise about values and rows."""


@contextmanager
def refusals(projection: str, find: Callable[[], str] = str) -> Generator[None]:
    """Turn what a driver raises about a rule into `RowsRefused`; `find` names the row where the driver does not."""
    try:
        yield
    except DBAPIError as error:
        if not isinstance(error.orig, RULES):
            raise
        raise RowsRefused(projection, _reason(error.orig, find())) from error
    except RULES as error:
        raise RowsRefused(projection, _reason(error, find())) from error


def breaker_of_check(connection: Connection, table: Table, rule: CheckConstraint) -> str:
    """One row that breaks a check."""
    keys = list(table.primary_key.columns)
    broken = text(f"not ({rule.sqltext.compile(dialect=connection.dialect, compile_kwargs={'literal_binds': True})})")
    found = connection.execute(select(*keys).where(broken).limit(1)).first()
    return "" if found is None else f"the row of {_shown(keys, tuple(found))}"


def double(connection: Connection, columns: Sequence[str | ColumnElement[Any]]) -> str:
    """Values of columns that several rows have, and should not."""
    plain = [one for one in columns if isinstance(one, Column)]
    if len(plain) < len(columns):
        return ""
    query = select(*plain).group_by(*plain).having(func.count() > 1).limit(1)
    found = connection.execute(query).first()
    return "" if found is None else f"several rows have {_shown(plain, tuple(found))}"


def row_of(values: Sequence[Any]) -> str:
    """A row whose columns everybody knows."""
    return f"the row is ({', '.join(map(reprlib.repr, values))})"


def _shown(columns: Sequence[Column[Any]], values: Sequence[Any]) -> str:
    return ", ".join(f"{column.name} = {reprlib.repr(value)}" for column, value in zip(columns, values, strict=True))


def _reason(error: Exception, row: str) -> str:
    lines = [str(error), row]
    if isinstance(error, psycopg.Error):
        lines = [error.diag.message_primary or str(error), error.diag.message_detail or "", row]
    return "; ".join(line.strip().rstrip(".") for line in lines if line.strip())
