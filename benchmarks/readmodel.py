"""The read model of subjects that write their own SQL, and the check that every subject's rows are right.

On SQLite they keep cents, as it has no exact decimals; on PostgreSQL whole numbers are cents.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from decimal import Decimal
from urllib.parse import urlsplit

POSTGRESQL = (
    "create table account_balance "
    "(account_id varchar(40) primary key, balance numeric(14, 2) not null, postings integer not null)"
)
SQLITE = (
    "create table account_balance "
    "(account_id text primary key, balance integer not null, postings integer not null) without rowid"
)
_ROWS = "select account_id, balance, postings from account_balance"


def cents(amount: Decimal) -> int:
    return int(amount.scaleb(2))


def path_of(url: str) -> str:
    """The file of a SQLite URL."""
    return urlsplit(url).path[1:]


def libpq(url: str) -> str:
    """The URL as libpq takes it."""
    return url.replace("+psycopg", "", 1)


def check(url: str, expected: Mapping[str, tuple[Decimal, int]], *, in_cents: bool) -> None:
    """Raise `RuntimeError` unless the read model holds exactly these rows."""
    rows = _from_sqlite(path_of(url), in_cents) if url.startswith("sqlite") else _from_postgres(libpq(url))
    if rows == expected:
        return
    wrong = [key for key in expected.keys() | rows.keys() if expected.get(key) != rows.get(key)]
    first = min(wrong)
    raise RuntimeError(
        f"{len(wrong)} of {len(expected)} rows are wrong, {len(rows)} were found; "
        f"{first} is {rows.get(first)} and must be {expected.get(first)}"
    )


def _from_postgres(url: str) -> dict[str, tuple[Decimal, int]]:
    import psycopg

    with psycopg.connect(url) as connection:
        rows = connection.execute(_ROWS).fetchall()
    return {str(key): (_amount(balance, in_cents=isinstance(balance, int)), count) for key, balance, count in rows}


def _from_sqlite(path: str, in_cents: bool) -> dict[str, tuple[Decimal, int]]:
    connection = sqlite3.connect(path)
    try:
        rows = connection.execute(_ROWS).fetchall()
    finally:
        connection.close()
    return {key: (_amount(value, in_cents=in_cents), count) for key, value, count in rows}


def _amount(value: int | str | Decimal, *, in_cents: bool) -> Decimal:
    return Decimal(value).scaleb(-2) if in_cents else Decimal(value)
