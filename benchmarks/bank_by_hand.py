"""The read model of the workload "bank" as SQL by hand: `writes` only writes, and `asks` reads before it writes.

Each over a log of its own. Balances are in cents, which both databases can add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from benchmarks.bank import Account, Deposited, Withdrawn
from benchmarks.readmodel import cents
from eventjet import App, Recorded, SqlProjection

table = Table(
    "account_balance",
    MetaData(),
    Column("account_id", String(40), primary_key=True),
    Column("balance", BigInteger, nullable=False),
    Column("postings", Integer, nullable=False),
)
_ADD = text(
    "insert into account_balance as b (account_id, balance, postings) values (:account_id, :balance, 1) "
    "on conflict (account_id) do update set balance = b.balance + excluded.balance, postings = b.postings + 1"
)

writing = SqlProjection("account_balance", tables=[table])
asking = SqlProjection("account_balance", tables=[table])


@writing.handler
async def posted(events: Sequence[Recorded[Deposited | Withdrawn]], connection: AsyncConnection) -> None:
    await connection.execute(
        _ADD, [{"account_id": event.aggregate_id, "balance": _signed(event.data)} for event in events]
    )


def _signed(posting: Deposited | Withdrawn) -> int:
    return cents(posting.amount) if isinstance(posting, Deposited) else -cents(posting.amount)


@asking.handler
async def deposited_and_asked(event: Recorded[Deposited], connection: AsyncConnection) -> None:
    await _ask_and_add(event.aggregate_id, event.data.amount, connection)


@asking.handler
async def withdrawn_and_asked(event: Recorded[Withdrawn], connection: AsyncConnection) -> None:
    await _ask_and_add(event.aggregate_id, -event.data.amount, connection)


async def _ask_and_add(account_id: str, amount: Decimal, connection: AsyncConnection) -> None:
    own = table.c.account_id == account_id
    row = (await connection.execute(select(table.c.balance, table.c.postings).where(own))).one_or_none()
    if row is None:
        await connection.execute(insert(table).values(account_id=account_id, balance=cents(amount), postings=1))
        return
    changed = {"balance": row.balance + cents(amount), "postings": row.postings + 1}
    await connection.execute(update(table).where(own).values(changed))


writes = App("benchwrites", aggregates=[Account], projections=[writing])
asks = App("benchasks", aggregates=[Account], projections=[asking])
