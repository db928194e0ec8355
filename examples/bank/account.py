"""A bank account."""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal

from eventjet import aggregate, event

BALANCE_MAX = Decimal("9999999999.99")
OWNER_MAX = 100
"""What the columns of the read models hold."""
NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""What no column of text holds: NUL, and halves of characters."""


class InsufficientFunds(Exception):
    """The withdrawal exceeds the balance."""


class InvalidInput(Exception):
    """The bank keeps no such owner, or no such amount."""


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
        if not 0 < len(owner) <= OWNER_MAX or NO_TEXT.search(owner):
            raise InvalidInput(owner)
        return None if self.owner else Opened(owner=owner)

    def deposit(self, amount: Decimal) -> Deposited:
        return Deposited(amount=checked(amount, BALANCE_MAX - self.balance))

    def withdraw(self, amount: Decimal, *, reason: str = "cash") -> Withdrawn:
        if checked(amount, BALANCE_MAX) > self.balance:
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


def checked(amount: Decimal, most: Decimal) -> Decimal:
    """Return the amount. Raise `InvalidInput` unless it is a number of whole cents above zero, and at most `most`."""
    if not (amount.is_finite() and 0 < amount <= most and amount % Decimal("0.01") == 0):
        raise InvalidInput(amount)
    return amount
