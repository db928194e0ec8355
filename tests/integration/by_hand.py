"""Helpers for the tests of SQL projections: three related tables, their handlers, and the expected rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    String,
    Table,
    Uuid,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded, SqlProjection
from eventjet.dev.nats import NatsServer
from eventjet.projections.sql_projection import ResolvedSql, resolve_sql
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.dialect import READ_ONLY
from eventjet.sql.sqlite import make_readable
from eventjet.subscriptions.context import WorkerOptions
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import CATALOG, Added, Closed, Opened, database_with

metadata = MetaData()
accounts_table = Table(
    "accounts",
    metadata,
    Column("account_id", String(40), primary_key=True),
    Column("owner", String(40), unique=True),
    Column("amount", Numeric(12, 2), nullable=False),
    Column("last_at", DateTime(timezone=True), nullable=False),
    Column("notes", JSON, nullable=False),
)
lines_table = Table(
    "lines",
    metadata,
    Column("id", Integer, Identity(), primary_key=True),
    Column("position", BigInteger, nullable=False, unique=True),
    Column("account_id", ForeignKey("accounts.account_id"), nullable=False),
    Column("amount", Numeric(12, 2), nullable=False),
    Index("ix_lines_account", "account_id"),
)
totals_table = Table(
    "totals",
    metadata,
    Column("name", String(20), primary_key=True),
    Column("n", Integer, nullable=False),
)

ledger = SqlProjection("ledger", tables=[totals_table, lines_table, accounts_table])


@ledger.handler
async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
    await _keep(event, connection, Decimal(0), event.data.owner)
    await _count(connection, "opened")


@ledger.handler
async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
    await _keep(event, connection, event.data.amount, None)
    values = {"position": event.position, "account_id": event.aggregate_id, "amount": event.data.amount}
    await connection.execute(insert(lines_table).values(**values))
    await _count(connection, "added")


@ledger.handler
async def closed(event: Recorded[Closed], connection: AsyncConnection) -> None:
    for table in (lines_table, accounts_table):
        await connection.execute(delete(table).where(table.c.account_id == event.aggregate_id))
    await _count(connection, "closed")


async def _keep(event: Recorded[Any], connection: AsyncConnection, amount: Decimal, owner: str | None) -> None:
    own = accounts_table.c.account_id == event.aggregate_id
    row = (await connection.execute(select(accounts_table).where(own))).one_or_none()
    values: dict[str, Any] = {"amount": amount, "last_at": event.recorded_at, "notes": [event.position]}
    if owner is not None:
        values["owner"] = owner
    if row is None:
        await connection.execute(insert(accounts_table).values(account_id=event.aggregate_id, **values))
        return
    values |= {"amount": row.amount + amount, "notes": [*row.notes, event.position][-3:]}
    await connection.execute(update(accounts_table).where(own).values(**values))


async def _count(connection: AsyncConnection, name: str) -> None:
    """Count an event; the count shows an event that is handled twice or not at all."""
    own = totals_table.c.name == name
    done = await connection.execute(update(totals_table).where(own).values(n=totals_table.c.n + 1))
    if not done.rowcount:
        await connection.execute(insert(totals_table).values(name=name, n=1))


def resolved(declared: SqlProjection) -> ResolvedSql:
    """Resolve a declaration as an `App` does."""
    resolution = resolve_sql(declared, CATALOG)
    for table in resolution.tables:
        make_readable(table)
    return resolution


LEDGER = resolved(ledger)

TableRows = dict[str, list[tuple[Any, ...]]]


def expected(events: Iterable[Recorded[Any]]) -> TableRows:
    """Return the expected rows, by a plain loop; `lines` without the ids that the database gave."""
    accounts: dict[str, list[Any]] = {}
    lines: list[tuple[int, str, Decimal]] = []
    totals: dict[str, int] = {}
    for event in events:
        account_id = event.aggregate_id
        if not isinstance(event.data, Opened | Added | Closed):
            continue
        name = type(event.data).__name__.lower()
        totals[name] = totals.get(name, 0) + 1
        if isinstance(event.data, Closed):
            accounts.pop(account_id, None)
            lines = [line for line in lines if line[1] != account_id]
            continue
        amount = event.data.amount if isinstance(event.data, Added) else Decimal(0)
        _, owner, before, _, notes = accounts.get(account_id, [account_id, None, Decimal(0), None, []])
        owner = event.data.owner if isinstance(event.data, Opened) else owner
        accounts[account_id] = [account_id, owner, before + amount, event.recorded_at, [*notes, event.position][-3:]]
        if isinstance(event.data, Added):
            lines.append((event.position, account_id, amount))
    return {
        "accounts": sorted(tuple(row) for row in accounts.values()),
        "lines": lines,
        "totals": sorted(totals.items()),
    }


def table_rows(where: Database, *, tables: Sequence[Table] = (accounts_table, lines_table, totals_table)) -> TableRows:
    """Return the rows that an application's select gives, without the ids that the database gave."""
    engine = where.sync_engine()
    rows: TableRows = {}
    with engine.connect().execution_options(**{READ_ONLY: True}) as connection:
        for table in tables:
            columns = [column for column in table.columns if column.name != "id"]
            rows[table.name] = sorted(tuple(row) for row in connection.execute(select(*columns)))
    engine.dispose()
    return rows


def bound_with(*handlers: Any, tables: Sequence[Table] = ledger.tables, name: str = "ledger") -> ResolvedSql:
    """Return a projection with the tables of `ledger` and these handlers."""
    projection = SqlProjection(name, tables=tables)
    for handler in handlers:
        projection.handler(handler)
    return resolved(projection)


kinds_table = Table(
    "kinds",
    MetaData(),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("money", Numeric(20, 4)),
    Column("any", Numeric),
    Column("at", DateTime(timezone=True)),
    Column("wall", DateTime),
    Column("day", Date),
    Column("doc", JSON),
    Column("id", Uuid),
    Column("raw", LargeBinary),
    Column("flag", Boolean),
    Column("seen", DateTime(timezone=True), nullable=False),
)


QUICK = WorkerOptions(lease_s=1.5, poll_s=0.1)


def log_of(nats: NatsServer, database: str, resolved: ResolvedSql = LEDGER) -> Ledger:
    """Return a new log, and create the tables in the database."""
    database_with(database, resolved)
    log = Ledger(Settings(servers=(nats.url,), database=database), projections={"ledger": resolved})
    log.create()
    return log


def changed(log: Ledger, resolved: ResolvedSql) -> Ledger:
    """Return the same log with other handlers."""
    return Ledger(log.settings, log.name, projections={"ledger": resolved})
