"""A transfer: withdraw, deposit; try again while the target is frozen; refund what is refused, or too late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum

from eventjet import Deadline, Step, after, at, do, event, process
from eventjet.examples.transfer.accounts import Account, AccountClosed, AccountFrozen, InsufficientFunds

RETRY_AFTER = timedelta(seconds=2)
"""How long a frozen account is left alone before the next try."""


@event("transfer.requested")
class Requested:
    id: str
    source: str
    target: str
    amount: Decimal
    until: datetime


@event("transfer.debited")
class Debited:
    pass


@event("transfer.failed")
class Failed:
    reason: str


@event("transfer.postponed")
class Postponed:
    reason: str


@event("transfer.resumed")
class Resumed:
    pass


@event("transfer.credit_refused")
class CreditRefused:
    reason: str


@event("transfer.completed")
class Completed:
    pass


@event("transfer.refunded")
class Refunded:
    pass


TransferEvent = Requested | Debited | Failed | Postponed | Resumed | CreditRefused | Completed | Refunded


class Stage(Enum):
    """Where a transfer stands."""

    NONE = "none"
    REQUESTED = "requested"
    DEBITED = "debited"
    WAITING = "waiting"
    REFUNDING = "refunding"
    ENDED = "ended"


@process("transfer")
class Transfer:
    """Takes money from one account to another, or gives it back."""

    id: str = ""
    source: str = ""
    target: str = ""
    amount: Decimal = Decimal(0)
    until: datetime = datetime.max.replace(tzinfo=UTC)
    stage: Stage = Stage.NONE

    # Decisions

    def request(self, id: str, source: str, target: str, amount: Decimal, *, until: datetime) -> Requested | None:
        new = self.stage is Stage.NONE
        return Requested(id=id, source=source, target=target, amount=amount, until=until) if new else None

    def debited(self) -> Debited:
        return Debited()

    def failed(self, error: InsufficientFunds) -> Failed:
        return Failed(reason="insufficient funds")

    def completed(self) -> Completed:
        return Completed()

    def postponed(self, error: AccountFrozen) -> Postponed:
        return Postponed(reason="the target is frozen")

    def credit_refused(self, error: AccountClosed) -> CreditRefused:
        return CreditRefused(reason="the target is closed")

    def refunded(self) -> Refunded:
        return Refunded()

    def try_again(self) -> Resumed:
        return Resumed()

    def gave_up(self) -> CreditRefused:
        return CreditRefused(reason="it took too long")

    # What it does next, and until when

    def step(self) -> Step[Transfer, TransferEvent] | None:
        match self.stage:
            case Stage.REQUESTED:
                return (
                    do(Account, self.source, Account.withdraw, self.amount, transfer=self.id)
                    .then(Transfer.debited)
                    .refused(InsufficientFunds, Transfer.failed)
                )
            case Stage.DEBITED:
                return (
                    do(Account, self.target, Account.deposit, self.amount, transfer=self.id)
                    .then(Transfer.completed)
                    .refused(AccountClosed, Transfer.credit_refused)
                    .refused(AccountFrozen, Transfer.postponed)
                )
            case Stage.REFUNDING:
                return do(Account, self.source, Account.refund, self.amount, transfer=self.id).then(Transfer.refunded)
            case _:
                return None

    def deadline(self) -> Sequence[Deadline[Transfer, TransferEvent]]:
        if self.stage is not Stage.WAITING:
            return ()
        return [after(RETRY_AFTER, Transfer.try_again), at(self.until, Transfer.gave_up)]

    # Evolution

    def evolve(self, event: TransferEvent) -> Transfer:
        match event:
            case Requested(id=id, source=source, target=target, amount=amount, until=until):
                return replace(
                    self, id=id, source=source, target=target, amount=amount, until=until, stage=Stage.REQUESTED
                )
            case Debited() | Resumed():
                return replace(self, stage=Stage.DEBITED)
            case Postponed():
                return replace(self, stage=Stage.WAITING)
            case CreditRefused():
                return replace(self, stage=Stage.REFUNDING)
            case Completed() | Refunded() | Failed():
                return replace(self, stage=Stage.ENDED)
