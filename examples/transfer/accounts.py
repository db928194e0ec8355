"""The accounts that money is moved between, and the book that receipts are noted in."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

from eventjet import aggregate, event


class InsufficientFunds(Exception):
    """The withdrawal exceeds the balance."""


class AccountClosed(Exception):
    """A closed account takes nothing."""


class AccountFrozen(Exception):
    """A frozen account takes nothing now; it may later."""


@event("account.opened")
class Opened:
    owner: str


@event("account.deposited")
class Deposited:
    amount: Decimal
    transfer: str = ""


@event("account.withdrawn")
class Withdrawn:
    amount: Decimal
    transfer: str = ""


@event("account.frozen")
class Frozen:
    pass


@event("account.thawed")
class Thawed:
    pass


@event("account.closed")
class Closed:
    pass


AccountEvent = Opened | Deposited | Withdrawn | Frozen | Thawed | Closed


@aggregate("account", snapshot_every=100)
class Account:
    """What a customer may withdraw, and whether the account takes deposits."""

    owner: str | None = None
    balance: Decimal = Decimal(0)
    frozen: bool = False
    closed: bool = False

    def open(self, owner: str) -> Opened | None:
        return None if self.owner else Opened(owner=owner)

    def deposit(self, amount: Decimal, *, transfer: str = "") -> Deposited:
        if self.closed:
            raise AccountClosed
        if self.frozen:
            raise AccountFrozen
        return Deposited(amount=amount, transfer=transfer)

    def refund(self, amount: Decimal, *, transfer: str) -> Deposited:
        """What was withdrawn comes back, whatever became of the account."""
        return Deposited(amount=amount, transfer=transfer)

    def withdraw(self, amount: Decimal, *, transfer: str = "") -> Withdrawn:
        if amount > self.balance:
            raise InsufficientFunds(amount, self.balance)
        return Withdrawn(amount=amount, transfer=transfer)

    def freeze(self) -> Frozen | None:
        return None if self.frozen else Frozen()

    def thaw(self) -> Thawed | None:
        return Thawed() if self.frozen else None

    def close(self) -> Closed | None:
        return None if self.closed else Closed()

    def evolve(self, event: AccountEvent) -> Account:
        match event:
            case Opened(owner=owner):
                return replace(self, owner=owner)
            case Deposited(amount=amount):
                return replace(self, balance=self.balance + amount)
            case Withdrawn(amount=amount):
                return replace(self, balance=self.balance - amount)
            case Frozen():
                return replace(self, frozen=True)
            case Thawed():
                return replace(self, frozen=False)
            case Closed():
                return replace(self, closed=True)


@event("book.noted")
class Noted:
    transfer: str


@aggregate("book")
class Book:
    """Every transfer that came to an end."""

    notes: int = 0

    def note(self, transfer: str) -> Noted:
        return Noted(transfer=transfer)

    def evolve(self, event: Noted) -> Book:
        return replace(self, notes=self.notes + 1)
