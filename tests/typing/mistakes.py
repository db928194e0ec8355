"""Mistakes that both type checkers must report: each line that ends in `# wrong`, and no other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal

from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import App, BlockingJet, Jet, Recorded, Settings, aggregate, by_state, projection, unique
from eventjet.testing import scenario
from tests.typing.application import (
    Account,
    AccountEvent,
    Added,
    Balance,
    Counter,
    Deposited,
    Joined,
    Opened,
    Person,
    balances,
    ledger,
    table,
)


def rogue(account: Account) -> str:
    return "x"


def generates(account: Account) -> Iterator[Deposited]:
    yield Deposited(amount=Decimal(1))


def stranger(account: Account) -> Added:
    return Added(n=1)


async def waits(account: Account) -> Deposited:
    return Deposited(amount=Decimal(1))


async def use(jet: Jet) -> None:
    accounts = jet.repository(Account)
    counters = jet.repository(Counter)
    await accounts.execute("a", rogue)  # wrong
    await accounts.execute("a", generates)  # wrong
    await accounts.execute("a", stranger)  # wrong
    await accounts.execute("a", waits)  # wrong
    await accounts.execute("a", Account.withdraw)  # wrong
    await accounts.execute("a", Account.withdraw, "three")  # wrong
    await accounts.execute("a", Counter.add, 1)  # wrong
    counters.decide("a", Account.deposit, Decimal(1))  # wrong
    accounts.command("c").decide("a", Account.withdraw)  # wrong
    accounts.command("c").decide("a", Counter.add, 1)  # wrong
    accounts.command("c").decide("a", Account.deposit, amount="1")  # wrong
    accounts.command(17)  # wrong
    accounts.command("c", actor="ada")  # wrong
    await accounts.load("a", version="1")  # wrong
    paid, added = await jet.transact(
        accounts.decide("a", Account.deposit, Decimal(1)), counters.decide("b", Counter.add, 1)
    )
    str(paid.state.n)  # wrong
    str(added.state.balance)  # wrong
    *_, last = await jet.transact(*(counters.decide(str(n), Counter.add, 1) for n in range(9)))
    str(last.stat)  # wrong
    four = await jet.transact(
        counters.decide("a", Counter.add, 1),
        counters.decide("b", Counter.add, 1),
        counters.decide("c", Counter.add, 1),
        accounts.decide("f", Account.deposit, Decimal(1)),
    )
    str(four[2].state.balance)  # wrong
    str(four[3].state.n)  # wrong
    str(four[4])  # wrong
    await jet.transact(accounts.decide("a", Account.deposit, Decimal(1)), accounts)  # wrong
    await jet.transact(Account.deposit)  # wrong
    await jet.caught_up(Account, position=1)  # wrong
    await jet.caught_up(balances, position="1")  # wrong
    await jet.caught_up(balances, position=1, token="bank:1")  # wrong
    await jet.caught_up(balances, positon=1)  # wrong
    await jet.caught_up(balances)  # wrong


def use_blocking(jet: BlockingJet) -> None:
    accounts = jet.repository(Account)
    counters = jet.repository(Counter)
    accounts.execute("a", rogue)  # wrong
    accounts.execute("a", stranger)  # wrong
    accounts.execute("a", Account.withdraw)  # wrong
    accounts.execute("a", Account.withdraw, "three")  # wrong
    accounts.execute("a", Counter.add, 1)  # wrong
    counters.decide("a", Account.deposit, Decimal(1))  # wrong
    accounts.command("c").decide("a", Account.withdraw)  # wrong
    accounts.command("c").execute("a", Account.deposit, amount="1")  # wrong
    accounts.command(17)  # wrong
    accounts.load("a", version="1")  # wrong
    (paid,) = jet.transact(accounts.decide("a", Account.deposit, Decimal(1)))
    str(paid.state.n)  # wrong
    jet.transact(Account.deposit)  # wrong
    jet.caught_up(balances, position="1")  # wrong
    jet.caught_up(balances)  # wrong
    jet.tail("newest")  # wrong
    jet.repository(Balance)  # wrong


@aggregate("other")
class Other:
    balance: Decimal = Decimal(0)

    @unique("balance")  # wrong
    def exact(self) -> Decimal:
        return self.balance

    @unique("owner")  # wrong
    def among(self, others: int) -> str:
        return str(others)

    @unique("names")  # wrong
    def names(self) -> list[str]:
        return []


async def settings(app: App) -> None:
    async with app.connect(server="nats://127.0.0.1:4222"):  # wrong
        pass
    async with app.connect(replicas=1.5):  # wrong
        pass
    async with app.connect(databse="sqlite:///x.db"):  # wrong
        pass
    async with app.connect(servers=4222):  # wrong
        pass
    async with app.connect("nats://127.0.0.1:4222"):  # wrong
        pass
    async with app.connect(request_timeout_s=[2]):  # wrong
        pass
    Settings.load({"databse": "sqlite:///x.db"})  # wrong


def test() -> None:
    scenario(Account).given("not an event")  # wrong
    scenario(Account).given().when(Account.deposit, Decimal(1)).then("nope")  # wrong
    scenario(Account).then()  # wrong
    Deposited(Decimal(1))  # wrong
    Deposited(amont=Decimal(1))  # wrong
    Deposited(amount="1")  # wrong


@projection("d", table=table)  # wrong
def never_none(row: Balance, event: Recorded[AccountEvent]) -> Balance | None:
    return row


@projection("f", table=table)  # wrong
async def awaited(row: Balance | None, event: Recorded[Opened]) -> Balance | None:
    return row


@projection("g", table=table)  # wrong
def without_row(event: Recorded[Opened]) -> Balance | None:
    return None


def by_owner(event: Recorded[Opened]) -> str:
    return event.data.owner


@projection("e", table=table, key=by_owner, on_error="quarantine")  # wrong
def keyed(row: Balance | None, event: Recorded[Opened]) -> Balance | None:
    return row


@ledger.handler  # wrong
def not_awaited(event: Recorded[Opened], connection: AsyncConnection) -> None:
    return None


@ledger.handler  # wrong
async def without_connection(event: Recorded[Opened]) -> None:
    return None


@ledger.handler  # wrong
async def of_bare_events(events: Sequence[Opened], connection: AsyncConnection) -> None:
    return None


Joined(email=7, others=[])  # wrong
Person().join(7)  # wrong
App("x", aggregates=[Opened])  # wrong


def owner_of(account: Account) -> str | None:
    return account.owner


def owner_at(account: Account, event: Recorded[Opened]) -> str | None:
    return account.owner


by_state(Account, owner_of)  # wrong
by_state(Account, owner_of, on_change="stay")  # wrong
by_state(Account, owner_at, on_change="move")  # wrong
by_state(Counter, owner_of, on_change="keep")  # wrong
by_state(Account, owner_of, on_change="keep", via=owner_of)  # wrong
by_state(Account, lambda account: account.nothing, on_change="keep")  # wrong
by_state(Account, lambda account: {account.owner: 1}, on_change="keep")  # wrong
