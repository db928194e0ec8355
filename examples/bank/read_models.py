"""What the bank reads: balances, and postings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Annotated

from sqlalchemy import Numeric, String
from sqlalchemy.orm import mapped_column

from eventjet import Key, Recorded, entries, projection
from eventjet.examples.bank.account import AccountEvent, Deposited, Opened, Withdrawn


@dataclass(frozen=True, slots=True)
class Balance:
    account_id: Annotated[Key[str], String(200)]
    owner: Annotated[str, mapped_column(String(100), index=True)]
    amount: Annotated[Decimal, Numeric(12, 2)] = Decimal(0)


@projection("balances", revision=1)
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


@dataclass(frozen=True, slots=True)
class Posting:
    position: Key[int]
    account_id: Annotated[str, mapped_column(String(200), index=True)]
    amount: Annotated[Decimal, Numeric(12, 2)]


@entries("postings")
def postings(event: Recorded[Deposited | Withdrawn]) -> Posting | list[Posting] | None:
    match event.data:
        case Deposited(amount=amount):
            return Posting(event.position, event.aggregate_id, amount)
        case Withdrawn(amount=amount):
            return Posting(event.position, event.aggregate_id, -amount)
