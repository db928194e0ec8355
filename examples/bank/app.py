"""The bank, wired: everything it declares, in explicit lists."""

from __future__ import annotations

from eventjet import App, upcaster
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.read_models import balances, postings


@upcaster("account.withdrawn", schema=1)
def withdrawn_has_a_reason(body: dict[str, object]) -> dict[str, object]:
    """Withdrawals of schema 1 were all in cash."""
    return {**body, "reason": "cash"}


bank = App("bank", aggregates=[Account], projections=[balances, postings], upcasters=[withdrawn_has_a_reason])
