"""Tables and columns may have names with characters that are special to SQL, drivers and SQLAlchemy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import CheckConstraint, Column, ForeignKey, Index, Integer, MetaData, Numeric, String, Table, select
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded, SqlProjection, projection
from eventjet.dev.nats import NatsServer
from eventjet.projections.resolve import resolve
from eventjet.rebuild import rebuild, verify
from eventjet.settings import Settings
from eventjet.sql.checkpoint import DECLARED
from eventjet.sql.locations import located
from eventjet.sql.revisions import reset
from tests.integration import by_hand
from tests.integration.by_hand import QUICK
from tests.integration.ledger_log import Ledger, history
from tests.integration.projecting import CATALOG, Added, Closed
from tests.tables import reading

BOTH = ["amounts", "counted"]


@dataclass(frozen=True, slots=True)
class Amount:
    account_id: str
    amount: Decimal


def hostile(settings: Settings, odd: str) -> Ledger:
    """Return a log with a fold and an SQL projection whose tables and columns have such names."""
    metadata = MetaData()
    amounts_table = Table(
        f"amounts {odd}",
        metadata,
        Column(f"id {odd}", String(40), key="account_id", primary_key=True),
        Column(f"amount {odd}", Numeric(12, 2), key="amount", nullable=False),
        CheckConstraint("1 % 2 = 1", name=f"odd {odd}"),
    )
    Index(f"ix amounts {odd}", amounts_table.c.amount)
    accounts_table = Table(f"accounts {odd}", metadata, Column(f"id {odd}", String(40), key="id", primary_key=True))
    lines_table = Table(
        f"lines {odd}",
        metadata,
        Column(f"position {odd}", Integer, key="position", primary_key=True, autoincrement=False),
        Column(f"account {odd}", ForeignKey(accounts_table.c.id), key="account", nullable=False, index=True),
    )

    @projection("amounts", table=amounts_table)
    def amounts(row: Amount | None, event: Recorded[Added | Closed]) -> Amount | None:
        if isinstance(event.data, Closed):
            return None
        row = row or Amount(event.aggregate_id, Decimal(0))
        return replace(row, amount=row.amount + event.data.amount)

    counted = SqlProjection("counted", tables=[lines_table, accounts_table])

    @counted.handler
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        own = select(accounts_table).where(accounts_table.c.id == event.aggregate_id)
        if (await connection.execute(own)).one_or_none() is None:
            await connection.execute(accounts_table.insert().values(id=event.aggregate_id))
        await connection.execute(lines_table.insert().values(position=event.position, account=event.aggregate_id))

    resolved: dict[str, Any] = {"amounts": resolve(amounts, CATALOG), "counted": by_hand.resolved(counted)}
    return Ledger(settings, projections=resolved)


def rows(log: Ledger) -> list[list[tuple[Any, ...]]]:
    tables = [table for name in BOTH for table in log.projections[name].tables]
    with reading(log.settings.database) as connection:
        return [
            sorted(map(tuple, connection.execute(select(located(table, DECLARED, log.where.dialect)))))
            for table in tables
        ]


async def caught_up(log: Ledger, last: int) -> None:
    async with log.working(options=QUICK):
        for name in BOTH:
            await log.caught_up(last, log.projections[name])


@pytest.mark.parametrize("odd", ['50% %(x)s "a".b', "a :b ::c (d) '{\\:e"])
async def test_projections_and_rebuilds_work_with_hostile_table_and_column_names(
    nats: NatsServer, database: str, odd: str
) -> None:
    log = hostile(Settings(servers=(nats.url,), database=database), odd)
    log.create()
    log.init()
    last = log.append(history(150, accounts=20))
    await caught_up(log, last)
    before = rows(log)
    assert all(before)
    await rebuild(log, BOTH, log.settings, engine="local")
    assert rows(log) == before
    for name in BOTH:
        assert (await verify(log, name, log.settings)).differences == 0
        assert (await log.status(name)).state == "active"
    last = log.append(history(50, accounts=20, seed=8))
    await caught_up(log, last)
    expected = rows(log)
    for name in BOTH:
        reset(log.where, log.projections[name])
    await caught_up(log, last)
    assert rows(log) == expected
