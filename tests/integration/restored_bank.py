"""The bank with a read model of recorded times, which a restore must keep."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Column, DateTime, MetaData, String, Table

from eventjet import App, Recorded, projection
from eventjet.examples.bank.account import Account, AccountEvent
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.examples.bank.read_models import balances, postings

seen_table = Table(
    "seen",
    MetaData(),
    Column("account_id", String(200), primary_key=True),
    Column("last", DateTime(timezone=True), nullable=False),
)


@dataclass(frozen=True, slots=True)
class Seen:
    account_id: str
    last: datetime


@projection("seen", table=seen_table)
def seen(row: Seen | None, event: Recorded[AccountEvent]) -> Seen:
    return Seen(event.aggregate_id, event.recorded_at)


bank = App("bank", aggregates=[Account], projections=[balances, postings, seen], upcasters=[withdrawn_has_a_reason])
