"""A bank: accounts, and a table of their balances."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Annotated

from sqlalchemy import Numeric

from eventjet import App, Key, Recorded, aggregate, event, projection


class InsufficientFunds(Exception):
    """The withdrawal exceeds the balance."""


@event("account.opened")
class Opened:
    owner: str


@event("account.deposited")
class Deposited:
    amount: Decimal


@event("account.withdrawn")
class Withdrawn:
    amount: Decimal
    reason: str = "cash"


AccountEvent = Opened | Deposited | Withdrawn


@aggregate("account")
class Account:
    """What a customer may still withdraw."""

    owner: str | None = None
    balance: Decimal = Decimal(0)

    # Decisions: pure, return what follows.

    def open(self, owner: str) -> Opened | None:
        return None if self.owner else Opened(owner=owner)

    def deposit(self, amount: Decimal) -> Deposited:
        return Deposited(amount=amount)

    def withdraw(self, amount: Decimal, *, reason: str = "cash") -> Withdrawn:
        if amount > self.balance:
            raise InsufficientFunds(amount, self.balance)
        return Withdrawn(amount=amount, reason=reason)

    # Evolution: total, never refuses.

    def evolve(self, event: AccountEvent) -> Account:
        match event:
            case Opened(owner=owner):
                return replace(self, owner=owner)
            case Deposited(amount=amount):
                return replace(self, balance=self.balance + amount)
            case Withdrawn(amount=amount):
                return replace(self, balance=self.balance - amount)


@dataclass(frozen=True, slots=True)
class Balance:
    """A row of the table `balances`."""

    account_id: Key[str]
    owner: str
    amount: Annotated[Decimal, Numeric(12, 2)] = Decimal(0)


@projection("balances")
def balances(row: Balance | None, event: Recorded[AccountEvent]) -> Balance | None:
    match row, event.data:
        case _, Opened(owner=owner):
            return Balance(event.aggregate_id, owner)
        case Balance(amount=balance), Deposited(amount=amount):
            return replace(row, amount=balance + amount)
        case Balance(amount=balance), Withdrawn(amount=amount):
            return replace(row, amount=balance - amount)
        case _:
            return row


bank = App("bank", aggregates=[Account], projections=[balances])
