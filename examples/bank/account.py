"""A bank account."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

from eventjet import aggregate, event


class InsufficientFunds(Exception):
    """The withdrawal exceeds the balance."""


@event("account.opened")
class Opened:
    owner: str


@event("account.deposited")
class Deposited:
    amount: Decimal


@event("account.withdrawn", schema=2)
class Withdrawn:
    amount: Decimal
    reason: str = "cash"


AccountEvent = Opened | Deposited | Withdrawn


@aggregate("account", snapshot_every=100, revision=1)
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
