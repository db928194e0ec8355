"""What must be so of the bank whatever happens, with histories that Hypothesis writes."""

from __future__ import annotations

from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.examples.bank.read_models import balances, postings
from eventjet.testing import AggregateLaws, CodecLaws, ProjectionLaws


class TestAccount(AggregateLaws):
    aggregate = Account


class TestBalances(ProjectionLaws):
    projection = balances


class TestPostings(ProjectionLaws):
    projection = postings


class TestEvents(CodecLaws):
    app = bank
