"""The bank's own tests: no server, no database."""

from __future__ import annotations

from decimal import Decimal

import pytest

from eventjet.examples.bank.account import (
    BALANCE_MAX,
    Account,
    Deposited,
    InsufficientFunds,
    InvalidInput,
    Opened,
    Withdrawn,
)
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


@pytest.mark.parametrize("amount", ["0", "-1", "0.001", "1e400", "NaN", "Infinity", "9999999999.99"])
def test_an_amount_that_an_account_cannot_hold_is_refused(amount: str) -> None:
    opened = scenario(Account).given(Opened(owner="ada"), Deposited(amount=Decimal(1)))
    opened.when(Account.deposit, Decimal(amount)).then_raises(InvalidInput)


def test_a_negative_withdrawal_is_refused() -> None:
    scenario(Account).given(Opened(owner="ada")).when(Account.withdraw, Decimal(-4)).then_raises(InvalidInput)


def test_a_full_account_shows_in_the_balance() -> None:
    opened = scenario(Account).given(Opened(owner="ada"))
    opened.when(Account.deposit, BALANCE_MAX).then(Deposited(amount=BALANCE_MAX))
    projected(balances, on("a-1", Opened(owner="ada"), Deposited(amount=BALANCE_MAX))).rows(
        Balance("a-1", "ada", BALANCE_MAX)
    )


@pytest.mark.parametrize("owner", ["", "x" * 101, "a\x00b", "a\ud800"])
def test_a_name_that_no_owner_has_is_refused(owner: str) -> None:
    scenario(Account).when(Account.open, owner).then_raises(InvalidInput)


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
