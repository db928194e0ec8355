"""Helpers for the tests of writers and workers: a ledger of events, its projections, and two databases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Index, Integer, MetaData, Numeric, String, Table, select

from eventjet.codec.catalog import Catalog
from eventjet.domain.aggregate import event
from eventjet.domain.recorded import Recorded
from eventjet.projections.projection import entries, projection
from eventjet.projections.resolve import ResolvedProjection, resolve
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql.checkpoint import DECLARED
from eventjet.sql.database import Database, dialect_of
from eventjet.sql.locations import create_tables, located


@event("ledger.opened")
class Opened:
    owner: str


@event("ledger.added")
class Added:
    amount: Decimal


@event("ledger.closed")
class Closed:
    pass


@event("ledger.noted")
class Noted:
    """An event to which no projection subscribes."""

    text: str


CATALOG = Catalog([Opened, Added, Closed, Noted])

metadata = MetaData()
balances_table = Table(
    "balances",
    metadata,
    Column("account_id", String(40), primary_key=True),
    Column("owner", String(20)),
    Column("amount", Numeric(12, 2), nullable=False),
    Column("events", Integer, nullable=False),
    Column("last", BigInteger, nullable=False),
    Index("ix_balances_owner", "owner"),
)
movements_table = Table(
    "movements",
    metadata,
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("account_id", String(40), nullable=False),
    Column("amount", Numeric(12, 2), nullable=False),
)


@dataclass(frozen=True, slots=True)
class Balance:
    account_id: str
    owner: str | None = None
    amount: Decimal = Decimal(0)
    events: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class Movement:
    position: int
    account_id: str
    amount: Decimal


@projection("balances", table=balances_table)
def balances(row: Balance | None, event: Recorded[Opened | Added | Closed]) -> Balance | None:
    row = row or Balance(event.aggregate_id)
    row = replace(row, events=row.events + 1, last=event.position)
    match event.data:
        case Opened(owner=owner):
            return replace(row, owner=owner)
        case Added(amount=amount):
            return replace(row, amount=row.amount + amount)
        case Closed():
            return None


@entries("movements", table=movements_table)
def movements(event: Recorded[Added]) -> Movement | None:
    return Movement(event.position, event.aggregate_id, event.data.amount)


BALANCES = resolve(balances, CATALOG)
MOVEMENTS = resolve(movements, CATALOG)

START = datetime(2026, 1, 1, tzinfo=UTC)


def on(position: int, data: Any, aggregate_id: str = "a-1") -> Recorded[Any]:
    """Return a recorded event, as the log would give it."""
    return Recorded(
        data, aggregate_id, position, position, START + timedelta(seconds=position), f"id-{position}", "ledger"
    )


def database_with(database: str, *resolved: AnyResolved) -> Database:
    """Create the tables of these projections, and return the database."""
    where = Database(database)
    engine = where.sync_engine()
    try:
        create_tables(engine, resolved)
    finally:
        engine.dispose()
    return where


def rows_of(connection: Connection, resolved: ResolvedProjection) -> list[Any]:
    """Return all rows of a read model by key, as an application reads them."""
    table = located(resolved.table, DECLARED, dialect_of(connection))
    query = select(table).order_by(*table.primary_key.columns)
    return [resolved.row_type(*row) for row in connection.execute(query)]


def folded(events: Iterable[Recorded[Any]]) -> list[Balance]:
    """Return the expected balances, by a plain loop."""
    rows: dict[str, Balance | None] = {}
    for recorded in events:
        if isinstance(recorded.data, Opened | Added | Closed):
            rows[recorded.aggregate_id] = balances(rows.get(recorded.aggregate_id), recorded)
    return sorted((row for row in rows.values() if row is not None), key=lambda row: row.account_id)
