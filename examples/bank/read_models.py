"""What the bank reads: balances, and postings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal

from sqlalchemy import BigInteger, Column, MetaData, Numeric, String, Table

from eventjet import Recorded, entries, projection
from eventjet.examples.bank.account import AccountEvent, Deposited, Opened, Withdrawn

metadata = MetaData()

balances_table = Table(
    "balances",
    metadata,
    Column("account_id", String(200), primary_key=True),
    Column("owner", String(100), nullable=False, index=True),
    Column("amount", Numeric(12, 2), nullable=False),
)

postings_table = Table(
    "postings",
    metadata,
    Column("position", BigInteger, primary_key=True),
    Column("account_id", String(200), nullable=False, index=True),
    Column("amount", Numeric(12, 2), nullable=False),
)


@dataclass(frozen=True, slots=True)
class Balance:
    account_id: str
    owner: str
    amount: Decimal = Decimal(0)


@projection("balances", table=balances_table, revision=1)
def balances(row: Balance | None, event: Recorded[AccountEvent]) -> Balance | None:
    match row, event.data:
        case _, Opened(owner=owner):
            return Balance(event.aggregate_id, owner)
        case Balance(amount=held), Deposited(amount=amount):
            return replace(row, amount=held + amount)
        case Balance(amount=held), Withdrawn(amount=amount):
            return replace(row, amount=held - amount)
        case _:
            return row


@dataclass(frozen=True, slots=True)
class Posting:
    position: int
    account_id: str
    amount: Decimal


@entries("postings", table=postings_table)
def postings(event: Recorded[Deposited | Withdrawn]) -> Posting | list[Posting] | None:
    match event.data:
        case Deposited(amount=amount):
            return Posting(event.position, event.aggregate_id, amount)
        case Withdrawn(amount=amount):
            return Posting(event.position, event.aggregate_id, -amount)
