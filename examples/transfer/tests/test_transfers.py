"""Transfers without a server: the next step of one, and the whole app with a clock that is moved by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from eventjet import DefinitionError
from eventjet.examples.transfer.accounts import Account, AccountClosed, AccountFrozen, Book, InsufficientFunds
from eventjet.examples.transfer.app import receipts, transfers
from eventjet.examples.transfer.transfers import (
    RETRY_AFTER,
    Completed,
    CreditRefused,
    Debited,
    Failed,
    Postponed,
    Refunded,
    Requested,
    Resumed,
    Stage,
    Transfer,
)
from eventjet.testing import reacted, story, world

NOW = datetime(2030, 1, 1, tzinfo=UTC)
REQUEST = Requested(id="t", source="ada", target="bob", amount=Decimal(5), until=NOW)


@dataclass
class SentMails:
    """Mails that were sent, by key."""

    keys: list[str] = field(default_factory=list[str])

    async def send(self, text: str, *, key: str) -> None:
        self.keys.append(key)


@dataclass
class Fakes:
    mails: SentMails = field(default_factory=SentMails)


def test_a_transfer_withdraws_and_deposits() -> None:
    (
        story(Transfer)
        .when(Transfer.request, "t", "ada", "bob", Decimal(5), until=NOW)
        .then(REQUEST)
        .does(Account, "ada", Account.withdraw, Decimal(5), transfer="t")
        .done()
        .then(Debited())
        .does(Account, "bob", Account.deposit, Decimal(5), transfer="t")
        .done()
        .then(Completed())
        .rests()
        .waits_for_nothing()
        .when(Transfer.request, "t", "ada", "bob", Decimal(5), until=NOW)
        .then_nothing()
    )


def test_a_transfer_without_funds_fails() -> None:
    transfer = story(Transfer).given(REQUEST).does(Account, "ada", Account.withdraw, Decimal(5), transfer="t")
    transfer.refused(InsufficientFunds(5, 3)).then(Failed(reason="insufficient funds")).rests()
    with pytest.raises(AssertionError, match="does not say what follows AccountClosed"):
        transfer.refused(AccountClosed())


def test_a_refused_deposit_is_refunded() -> None:
    (
        story(Transfer)
        .given(REQUEST, Debited())
        .does(Account, "bob", Account.deposit, Decimal(5), transfer="t")
        .refused(AccountClosed())
        .then(CreditRefused(reason="the target is closed"))
        .does(Account, "ada", Account.refund, Decimal(5), transfer="t")
        .done()
        .then(Refunded())
        .rests()
    )


def test_a_frozen_target_is_tried_again_until_it_is_too_late() -> None:
    waiting = (
        story(Transfer)
        .given(REQUEST, Debited())
        .does(Account, "bob", Account.deposit, Decimal(5), transfer="t")
        .refused(AccountFrozen())
        .then(Postponed(reason="the target is frozen"))
        .rests()
        .waits_for(RETRY_AFTER)
    )
    early, late = NOW - timedelta(hours=1), NOW - timedelta(seconds=1)
    waiting.waits_until(early + RETRY_AFTER, last_event=early)
    waiting.due(early + RETRY_AFTER, last_event=early).then(Resumed()).does(
        Account, "bob", Account.deposit, Decimal(5), transfer="t"
    )
    waiting.waits_until(NOW, last_event=late).due(NOW, last_event=late).then(CreditRefused(reason="it took too long"))
    with pytest.raises(AssertionError, match="nothing is due"):
        waiting.due(early, last_event=early)


def test_a_story_names_what_differs() -> None:
    waiting = story(Transfer).given(REQUEST, Debited(), Postponed(reason="the target is frozen"))
    with pytest.raises(AssertionError, match=r"give `last_event=…`, or take `due_after\(delay\)`"):
        waiting.due(NOW)
    with pytest.raises(DefinitionError, match="Account is not a process: test an aggregate with `scenario`"):
        story(Account)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    transfer = story(Transfer).given(REQUEST)
    with pytest.raises(AssertionError, match=r"it asks Account 'ada': withdraw\(Decimal\('5'\), transfer='t'\)"):
        transfer.does(Account, "ada", Account.withdraw, Decimal(6), transfer="t")
    with pytest.raises(AssertionError, match="it does not rest"):
        transfer.rests()
    with pytest.raises(AssertionError, match="its deadlines: none"):
        transfer.waits_for(RETRY_AFTER)
    with pytest.raises(AssertionError, match="it rests"):
        transfer.given(Failed(reason="")).does(Account, "ada", Account.withdraw, Decimal(5), transfer="t")


async def test_money_comes_back_when_the_target_stays_frozen() -> None:
    fakes = Fakes()
    async with world(transfers, now=NOW, deps=fakes) as here:
        accounts, requested = here.jet.repository(Account), here.jet.repository(Transfer)
        await accounts.execute("ada", Account.deposit, Decimal(10))
        await accounts.execute("bob", Account.freeze)
        until = NOW + timedelta(minutes=1)
        await requested.execute("t", Transfer.request, "t", "ada", "bob", Decimal(4), until=until)
        await here.settle()
        assert (await requested.load("t")).stage is Stage.WAITING
        assert (await accounts.load("ada")).balance == 6
        await here.pass_time(timedelta(seconds=59))
        assert (await requested.load("t")).stage is Stage.WAITING
        await here.pass_time(timedelta(seconds=1))
        assert (await requested.load("t")).stage is Stage.ENDED
        assert (await accounts.load("ada")).balance == 10
        assert (await here.jet.repository(Book).load("all")).notes == 1
        assert len(fakes.mails.keys) == len(set(fakes.mails.keys)) == 1


async def test_a_thawed_account_is_paid_at_the_next_try() -> None:
    async with world(transfers, now=NOW, deps=Fakes()) as here:
        accounts, requested = here.jet.repository(Account), here.jet.repository(Transfer)
        await accounts.execute("ada", Account.deposit, Decimal(10))
        await accounts.execute("bob", Account.freeze)
        until = NOW + timedelta(minutes=1)
        await requested.execute("t", Transfer.request, "t", "ada", "bob", Decimal(4), until=until)
        await here.pass_time(timedelta(seconds=3))
        await accounts.execute("bob", Account.thaw)
        await here.pass_time(RETRY_AFTER)
        assert (await accounts.load("bob")).balance == 4
        history = await requested.history("t")
        assert [event.data for event in history[-2:]] == [Resumed(), Completed()]
        # Both sides of a step can be told from others' commands, and lead back to the request.
        (paid,) = [event for event in await accounts.history("bob") if event.command_id is not None]
        assert (paid.command_id, paid.metadata.actor) == (history[-1].command_id, "process:transfer")
        assert paid.metadata.causation == history[-2].event_id


async def test_a_receipt_is_mailed_under_the_key_and_noted_once() -> None:
    fakes = Fakes()
    done = await reacted(receipts, Completed(), aggregate_id="t", deps=fakes)
    done.executed(Book, "all", Book.note, "t").nothing_more()
    assert fakes.mails.keys == [done.key]
    with pytest.raises(AssertionError, match=r"it executed book 'all': note\('t'\)"):
        done.executed(Book, "all", Book.note, "other")
    with pytest.raises(AssertionError, match="as well"):
        done.nothing_more()
