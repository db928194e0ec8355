"""The workload "bank" as an application of eventjet writes it."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from sqlalchemy import Column, Integer, MetaData, Numeric, String, Table

from eventjet import App, Recorded, aggregate, event, projection


@event("account.deposited")
class Deposited:
    tx_id: str
    amount: Decimal
    currency: str
    memo: str


@event("account.withdrawn")
class Withdrawn:
    tx_id: str
    amount: Decimal
    currency: str
    memo: str


AccountEvent = Deposited | Withdrawn


@aggregate("account")
class Account:
    balance: Decimal = Decimal(0)

    def deposit(self, tx_id: str, amount: Decimal, currency: str, memo: str) -> Deposited:
        return Deposited(tx_id=tx_id, amount=amount, currency=currency, memo=memo)

    def withdraw(self, tx_id: str, amount: Decimal, currency: str, memo: str) -> Withdrawn:
        return Withdrawn(tx_id=tx_id, amount=amount, currency=currency, memo=memo)

    def evolve(self, event: AccountEvent) -> Account:
        match event:
            case Deposited(amount=amount):
                return Account(balance=self.balance + amount)
            case Withdrawn(amount=amount):
                return Account(balance=self.balance - amount)


metadata = MetaData()

balances_table = Table(
    "account_balance",
    metadata,
    Column("account_id", String(40), primary_key=True),
    Column("balance", Numeric(14, 2), nullable=False),
    Column("postings", Integer, nullable=False),
)


@dataclass(frozen=True, slots=True)
class Balance:
    account_id: str
    balance: Decimal
    postings: int


@projection("account_balance", table=balances_table)
def balances(row: Balance | None, event: Recorded[AccountEvent]) -> Balance:
    data = event.data
    amount = data.amount if type(data) is Deposited else -data.amount
    if row is None:
        return Balance(event.aggregate_id, amount, 1)
    return Balance(row.account_id, row.balance + amount, row.postings + 1)


bank = App("benchbank", aggregates=[Account], projections=[balances])
