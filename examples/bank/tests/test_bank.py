"""The bank's own tests: no server, no database."""

from __future__ import annotations

from decimal import Decimal

from eventjet.examples.bank.account import Account, Deposited, InsufficientFunds, Opened, Withdrawn
from eventjet.examples.bank.read_models import Balance, Posting, balances, postings
from eventjet.testing import on, projected, scenario


def test_a_withdrawal_takes_from_the_balance() -> None:
    (
        scenario(Account)
        .given(Opened(owner="ada"), Deposited(amount=Decimal(10)))
        .when(Account.withdraw, Decimal(4), reason="rent")
        .then(Withdrawn(amount=Decimal(4), reason="rent"))
    )


def test_a_withdrawal_beyond_the_balance_is_refused() -> None:
    scenario(Account).given(Opened(owner="ada")).when(Account.withdraw, Decimal(4)).then_raises(InsufficientFunds)


def test_an_account_is_opened_once() -> None:
    scenario(Account).given(Opened(owner="ada")).when(Account.open, "bob").then_nothing()


def test_a_deposit_shows_in_the_balance() -> None:
    projected(balances, on("a-1", Opened(owner="ada"), Deposited(amount=Decimal(10)))).rows(
        Balance("a-1", "ada", Decimal(10))
    )


def test_every_movement_is_a_posting() -> None:
    projected(
        postings, on("a-1", Opened(owner="ada"), Deposited(amount=Decimal(10)), Withdrawn(amount=Decimal(3)))
    ).rows(Posting(2, "a-1", Decimal(10)), Posting(3, "a-1", Decimal(-3)))
