"""A bank's branch for the console: accounts, transfers, a reactor, and three read models, one of which quarantines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal

from sqlalchemy import BigInteger, Boolean, Column, Date, Integer, MetaData, Numeric, String, Table

from eventjet import App, Recorded, entries, projection
from eventjet.examples.transfer.accounts import Account, AccountEvent, Book, Closed, Deposited, Opened, Withdrawn
from eventjet.examples.transfer.app import outside, receipts
from eventjet.examples.transfer.transfers import Completed, Failed, Refunded, Requested, Transfer

metadata = MetaData()

POISON = Decimal("0.005")
"""A deposit that the table of balances cannot hold."""


@dataclass(frozen=True, slots=True)
class Balance:
    account_id: str
    owner: str
    amount: Decimal = Decimal(0)
    closed: bool = False


balances_table = Table(
    "balances",
    metadata,
    Column("account_id", String(200), primary_key=True),
    Column("owner", String(100), nullable=False, index=True),
    Column("amount", Numeric(12, 2), nullable=False),
    Column("closed", Boolean, nullable=False),
)


class HalfACent(ValueError):
    """Balances are kept in whole cents."""


@projection("balances", table=balances_table, on_error="quarantine")
def balances(row: Balance | None, event: Recorded[AccountEvent]) -> Balance | None:
    match row, event.data:
        case _, Opened(owner=owner):
            return Balance(event.aggregate_id, owner)
        case Balance(amount=balance), Deposited(amount=amount):
            if amount != round(amount, 2):
                raise HalfACent(f"{amount} is no whole number of cents")
            return replace(row, amount=balance + amount)
        case Balance(amount=balance), Withdrawn(amount=amount):
            return replace(row, amount=balance - amount)
        case Balance(), Closed():
            return replace(row, closed=True)
        case _:
            return row


@dataclass(frozen=True, slots=True)
class Turnover:
    day: date
    deposits: int = 0
    amount: Decimal = Decimal(0)


turnover_table = Table(
    "turnover",
    metadata,
    Column("day", Date, primary_key=True),
    Column("deposits", Integer, nullable=False),
    Column("amount", Numeric(14, 2), nullable=False),
)


def day_of(event: Recorded[Deposited]) -> date:
    return event.recorded_at.date()


@projection("turnover", table=turnover_table, key=day_of)
def turnover(row: Turnover | None, event: Recorded[Deposited]) -> Turnover:
    row = row or Turnover(day_of(event))
    return replace(row, deposits=row.deposits + 1, amount=row.amount + round(event.data.amount, 2))


@dataclass(frozen=True, slots=True)
class Ended:
    position: int
    transfer_id: str
    how: str


ended_table = Table(
    "ended_transfers",
    metadata,
    Column("position", BigInteger, primary_key=True),
    Column("transfer_id", String(200), nullable=False, index=True),
    Column("how", String(40), nullable=False),
)


@entries("ended_transfers", table=ended_table)
def ended_transfers(event: Recorded[Completed | Failed | Refunded]) -> Ended:
    return Ended(event.position, event.aggregate_id, type(event.data).__name__.lower())


branch = App(
    "branch",
    aggregates=[Account, Book],
    processes=[Transfer],
    reactors=[receipts],
    projections=[balances, turnover, ended_transfers],
    deps=outside,
)

__all__ = ["Requested", "balances_table", "branch"]
