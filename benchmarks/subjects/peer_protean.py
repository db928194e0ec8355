"""Protean on Message DB: `python -m benchmarks.subjects.peer_protean commands|fill|run <store> <read model> <count>`.

Commands go through its handlers (`domain.process`); the read model is a projector's, made by `rebuild_projection`. Both
as its documentation has them. In an environment of its own; nothing of eventjet is imported here.
"""

# No postponed annotations here: it reads its fields from them.
import logging
import sys
import time
from decimal import Decimal as Number
from importlib.metadata import version
from typing import Any

from protean import Domain, apply, handle
from protean.core.projector import on
from protean.exceptions import ObjectNotFoundError
from protean.fields import Decimal, Identifier, Integer, String
from protean.utils.globals import current_domain

from benchmarks.postings import CURRENCY, Posting, balances, postings
from benchmarks.subjects.clock import Clock

BATCH = 500
command_line = sys.argv[1:]
_job, _store, _view = command_line[:3]
_CONFIG: dict[str, Any] = {
    "databases": {"default": {"provider": "memory"}},
    "event_store": {"provider": "message_db", "database_uri": _store.replace("+psycopg", "")},
    "event_processing": "async",
    "command_processing": "sync",
    "enable_outbox": False,
}
if _job == "run":
    _CONFIG["databases"]["default"] = {"provider": "postgresql", "database_uri": _view.replace("+psycopg", "")}

domain = Domain(name="bank", config=_CONFIG)


@domain.event(part_of="Account")
class Deposited:
    account_id: Identifier(required=True)
    tx_id: String(required=True)
    amount: Decimal(required=True)
    currency: String()
    memo: String()


@domain.event(part_of="Account")
class Withdrawn:
    account_id: Identifier(required=True)
    tx_id: String(required=True)
    amount: Decimal(required=True)
    currency: String()
    memo: String()


@domain.aggregate(event_sourced=True)
class Account:
    balance: Decimal(default=Number(0))

    @classmethod
    def opened_by(cls, command: Any) -> Any:
        """By its first posting, so that there are as many events as postings."""
        account = cls._create_new(id=command.account_id)
        account.post(command)
        return account

    def post(self, command: Any) -> None:
        event_class = Deposited if isinstance(command, Deposit) else Withdrawn
        self.raise_(
            event_class(
                account_id=str(command.account_id),
                tx_id=command.tx_id,
                amount=command.amount,
                currency=command.currency,
                memo=command.memo,
            )
        )

    @apply
    def deposited(self, event: Deposited) -> None:
        self.id = event.account_id
        self.balance = (self.balance or Number(0)) + event.amount

    @apply
    def withdrawn(self, event: Withdrawn) -> None:
        self.id = event.account_id
        self.balance = (self.balance or Number(0)) - event.amount


@domain.command(part_of=Account)
class Deposit:
    account_id: Identifier(required=True)
    tx_id: String(required=True)
    amount: Decimal(required=True)
    currency: String()
    memo: String()


@domain.command(part_of=Account)
class Withdraw:
    account_id: Identifier(required=True)
    tx_id: String(required=True)
    amount: Decimal(required=True)
    currency: String()
    memo: String()


@domain.command_handler(part_of=Account)
class Teller:
    @handle(Deposit)
    def deposit(self, command: Deposit) -> None:
        self._post(command)

    @handle(Withdraw)
    def withdraw(self, command: Withdraw) -> None:
        self._post(command)

    def _post(self, command: Any) -> None:
        accounts = current_domain.repository_for(Account)
        try:
            account = accounts.get(command.account_id)
            account.post(command)
        except ObjectNotFoundError:
            account = Account.opened_by(command)
        accounts.add(account)


@domain.projection
class AccountBalance:
    account_id: Identifier(identifier=True, required=True)
    balance: Decimal(default=Number(0))
    postings: Integer(default=0)


@domain.projector(projector_for=AccountBalance, aggregates=[Account])
class Balances:
    @on(Deposited)
    def deposited(self, event: Deposited) -> None:
        self._add(event.account_id, event.amount)

    @on(Withdrawn)
    def withdrawn(self, event: Withdrawn) -> None:
        self._add(event.account_id, -event.amount)

    def _add(self, account_id: str, amount: Number) -> None:
        rows = current_domain.repository_for(AccountBalance)
        try:
            row = rows.get(account_id)
        except ObjectNotFoundError:
            row = AccountBalance(account_id=account_id)
        row.balance += amount
        row.postings += 1
        rows.add(row)


def post(posting: Posting) -> None:
    account, is_deposit, tx_id, amount, memo = posting
    command_class = Deposit if is_deposit else Withdraw
    command = command_class(account_id=str(account), tx_id=tx_id, amount=Number(amount), currency=CURRENCY, memo=memo)
    domain.process(command, asynchronous=False)


def commands(count: int) -> None:
    latencies: list[float] = []
    work = list(postings(count))
    clock = Clock()
    clock.start()
    for posting in work:
        started = time.perf_counter()
        post(posting)
        latencies.append(time.perf_counter() - started)
    clock.stop(len(latencies), latencies)
    for account, (balance, _) in list(balances(count).items())[:100]:
        loaded = domain.repository_for(Account).get(account).balance
        if Number(str(loaded)) != balance:
            raise RuntimeError(f"{account} holds {loaded} and must hold {balance}")


def fill(count: int) -> None:
    for posting in postings(count):
        post(posting)
    print(version("protean"))


def run(count: int) -> None:
    domain.setup_database()
    clock = Clock()
    clock.start()
    done = domain.rebuild_projection(AccountBalance, batch_size=BATCH)
    clock.stop(done.events_dispatched)
    if done.events_dispatched != count or done.events_skipped:
        raise RuntimeError(f"it dispatched {done.events_dispatched} of {count} and skipped {done.events_skipped}")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    domain.init(traverse=False)
    with domain.domain_context():
        {"commands": commands, "fill": fill, "run": run}[_job](int(command_line[3]))
