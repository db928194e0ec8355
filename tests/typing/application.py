"""An application's code as both type checkers must see it: clean, with these types inferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, assert_type

from sqlalchemy import Column, MetaData, Numeric, String, Table, insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from eventjet import (
    App,
    BlockingJet,
    BlockingRepository,
    Committed,
    Jet,
    Key,
    LogState,
    Personal,
    Planned,
    Projection,
    Recorded,
    Repository,
    Settings,
    SqlProjection,
    Topology,
    aggregate,
    by_state,
    event,
    projection,
    unique,
)
from eventjet.testing import on, projected, scenario


@event("a.opened")
class Opened:
    owner: str


@event("a.deposited")
class Deposited:
    amount: Decimal


@event("a.withdrawn", schema=2)
class Withdrawn:
    amount: Decimal
    reason: str = "cash"


AccountEvent = Opened | Deposited | Withdrawn


@aggregate("account", snapshot_every=100)
class Account:
    owner: str | None = None
    balance: Decimal = Decimal(0)

    def open(self, owner: str) -> Opened | None:
        return None if self.owner else Opened(owner=owner)

    def deposit(self, amount: Decimal) -> Deposited:
        return Deposited(amount=amount)

    def withdraw(self, amount: Decimal, *, reason: str = "cash") -> Withdrawn:
        return Withdrawn(amount=amount, reason=reason)

    def evolve(self, event: AccountEvent) -> Account:
        match event:
            case Opened(owner=owner):
                return replace(self, owner=owner)
            case Deposited(amount=amount):
                return replace(self, balance=self.balance + amount)
            case Withdrawn(amount=amount):
                return replace(self, balance=self.balance - amount)


@event("n.added")
class Added:
    n: int


@aggregate("counter", revision=2)
class Counter:
    n: int = 0

    @unique("sum")
    def sum_so_far(self) -> int | None:
        return self.n or None

    @unique("several")
    def several(self) -> frozenset[tuple[str, int]]:
        return frozenset({("n", self.n)})

    def add(self, n: int) -> Added:
        return Added(n=n)

    def evolve(self, event: Added) -> Counter:
        return replace(self, n=self.n + event.n)


def many(account: Account, count: int) -> list[Deposited]:
    return [Deposited(amount=Decimal(1))] * count


def pair(account: Account) -> tuple[Opened, Deposited]:
    return Opened(owner="x"), Deposited(amount=Decimal(1))


@dataclass(frozen=True, slots=True)
class Balance:
    account_id: str
    amount: Decimal = Decimal(0)


table = Table("b", MetaData(), Column("account_id", String, primary_key=True), Column("amount", Numeric(12, 2)))


@projection("balances", table=table, on_error="quarantine")
def balances(row: Balance | None, event: Recorded[AccountEvent]) -> Balance | None:
    return row


def by_owner(event: Recorded[Opened]) -> str:
    return event.data.owner


@projection("owners", table=table, key=by_owner)
def owners(row: Balance | None, event: Recorded[Opened]) -> Balance | None:
    return row


def owner_of(account: Account) -> str | None:
    return account.owner


def month_of(account: Account, event: Recorded[AccountEvent]) -> list[tuple[str, int]]:
    return [(account.owner or "", event.recorded_at.month)]


@projection("held", table=table, key=by_state(Account, owner_of, on_change="keep"))
def held(row: Balance | None, event: Recorded[Deposited], account: Account) -> Balance | None:
    return row or Balance(account.owner or "")


@projection("seen", table=table, key=by_state(Account, lambda account: account.owner, on_change="both"))
def seen(row: Balance | None, event: Recorded[Deposited], owner: str, account: Account) -> Balance | None:
    return row or Balance(owner)


@projection("mixed", table=table, key=[by_state(Account, month_of, on_change="keep"), by_owner])
def mixed(row: Balance | None, event: Recorded[Deposited], account: Account | None) -> Balance | None:
    return row


def account_of(event: Recorded[Added]) -> str | None:
    return event.aggregate_id


@projection("named", table=table, key=by_state(Account, owner_of, on_change="keep", via=account_of))
def named(row: Balance | None, event: Recorded[Added], account: Account) -> Balance | None:
    return row or Balance(account.owner or "")


assert_type(named, Projection[Balance, Added])
assert_type(held, Projection[Balance, Deposited])
assert_type(mixed, Projection[Balance, Deposited])

lines = Table("lines", MetaData(), Column("account_id", String, primary_key=True))
ledger = SqlProjection("ledger", tables=[lines], revision=2)


@ledger.handler
async def post(event: Recorded[Deposited | Withdrawn], connection: AsyncConnection) -> None:
    assert_type(event.data, Deposited | Withdrawn)
    await connection.execute(insert(lines).values(account_id=event.aggregate_id))


@ledger.handler
async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
    assert_type(event.data.owner, str)


@ledger.handler
async def post_all(events: Sequence[Recorded[Deposited | Withdrawn]], connection: AsyncConnection) -> None:
    for recorded in events:
        assert_type(recorded.data, Deposited | Withdrawn)
    await connection.execute(insert(lines), [{"account_id": recorded.aggregate_id} for recorded in events])


class Base(DeclarativeBase):
    pass


class Line(Base):
    __tablename__ = "orm_lines"

    account_id: Mapped[str] = mapped_column(primary_key=True)


@dataclass(frozen=True, slots=True)
class Declared:
    account_id: Annotated[Key[str], String(40)]
    at: Key[datetime]


@dataclass(frozen=True, slots=True)
class LineRow:
    account_id: str


def by_time(event: Recorded[Opened]) -> tuple[str, datetime]:
    return event.aggregate_id, event.recorded_at


@projection("declared", key=by_time)
def declared(row: Declared | None, event: Recorded[Opened]) -> Declared | None:
    return row or Declared(*by_time(event))


@projection("orm_lines", table=Line)
def orm_lines(row: LineRow | None, event: Recorded[Opened]) -> LineRow | None:
    return row or LineRow(event.aggregate_id)


assert_type(declared.table, Table)
by_session = SqlProjection("by_session", tables=[Line, lines])


@by_session.handler
async def add_line(event: Recorded[Opened], session: AsyncSession) -> None:
    session.add(Line(account_id=event.aggregate_id))


@by_session.handler
async def add_lines(events: Sequence[Recorded[Deposited]], session: AsyncSession) -> None:
    session.add_all([Line(account_id=recorded.aggregate_id) for recorded in events])


async def use(jet: Jet) -> None:
    accounts = jet.repository(Account)
    counters = jet.repository(Counter)
    assert_type(accounts, Repository[Account, Opened | Deposited | Withdrawn])
    assert_type(balances, Projection[Balance, Opened | Deposited | Withdrawn])
    done = await accounts.execute("a", Account.withdraw, Decimal(1), reason="x")
    assert_type(done, Committed[Account, Opened | Deposited | Withdrawn])
    assert_type(done.state, Account)
    await accounts.execute("a", many, 3)
    await accounts.execute("a", pair)
    await accounts.command("c-1").execute("a", Account.deposit, Decimal(1))
    assert_type(await accounts.load("a", version=1), Account)
    first, second = await jet.transact(
        accounts.decide("a", Account.deposit, Decimal(1)), counters.decide("b", Counter.add, 1)
    )
    assert_type(first.state, Account)
    assert_type(second, Committed[Counter, Added])
    four = await jet.transact(
        *(accounts.command("c-2").decide("a", Account.deposit, Decimal(1)), counters.decide("b", Counter.add, 1)),
        accounts.decide("g", many, count=3),
        counters.command().decide("f", Counter.add, n=1),
    )
    assert_type(four[1], Committed[Counter, Added])
    assert_type(four[2], Committed[Account, Opened | Deposited | Withdrawn])
    plans: list[Planned[Any, Any]] = [accounts.decide(str(number), many, 1) for number in range(9)]
    await jet.transact(*plans)
    await jet.caught_up(balances, position=done.position)
    await jet.caught_up("ledger", token=done.token, timeout_s=1)
    assert_type(await jet.init(), Topology)
    assert_type(await jet.log(), LogState)


def use_blocking(jet: BlockingJet) -> None:
    accounts = jet.repository(Account)
    counters = jet.repository(Counter)
    assert_type(accounts, BlockingRepository[Account, Opened | Deposited | Withdrawn])
    done = accounts.execute("a", Account.withdraw, Decimal(1), reason="x")
    assert_type(done, Committed[Account, Opened | Deposited | Withdrawn])
    accounts.execute("a", many, 3)
    assert_type(accounts.command("c-1").execute("a", Account.open, "ada").state, Account)
    assert_type(accounts.load("a", version=1), Account)
    assert_type(accounts.history("a", limit=1), list[Recorded[Opened | Deposited | Withdrawn]])
    first, second = jet.transact(
        accounts.decide("a", Account.deposit, Decimal(1)), counters.command("c").decide("b", Counter.add, n=1)
    )
    assert_type(first.state, Account)
    assert_type(second, Committed[Counter, Added])
    jet.caught_up(balances, position=done.position)
    jet.caught_up("ledger", token=done.token, timeout_s=1)
    assert_type(jet.log(), LogState)
    for recorded in jet.tail("new", follow=True):
        assert_type(recorded, Recorded[Any])


def connected_blocking() -> None:
    with app.connect_blocking(servers="nats://127.0.0.1:4222", user="ada", request_timeout_s=2) as jet:
        use_blocking(jet)
    jet = app.in_memory_blocking()
    use_blocking(jet)
    jet.close()


async def connected() -> None:
    async with app.connect(servers="nats://127.0.0.1:4222", user="ada", credentials=None, request_timeout_s=2) as jet:
        await use(jet)
    async with app.connect(Settings.load({"servers": ["nats://a:4222"]}), replicas=3) as jet:
        await use(jet)
    async with app.in_memory() as jet:
        await use(jet)


def test() -> None:
    scenario(Account).given(Opened(owner="ada")).when(Account.deposit, Decimal(1)).then(Deposited(amount=Decimal(1)))
    projected(balances, on("a", Opened(owner="ada"), Deposited(amount=Decimal(1)))).rows(Balance("a", Decimal(1)))

    projected(ledger, on("a", Deposited(amount=Decimal(1)))).rows(lines, {"account_id": "a"})


app = App("x", aggregates=[Account, Counter], projections=[balances, owners, ledger])


@event("person.joined")
class Joined:
    email: Personal[str]
    others: list[Personal[str]]
    age: Personal[int] | None = None


@aggregate("person")
class Person:
    email: Personal[str] = ""

    def join(self, email: Personal[str], age: Personal[int] | None = None) -> Joined:
        return Joined(email=email.lower(), others=[email], age=age)

    def evolve(self, event: Joined) -> Person:
        return Person(email=event.email)


@dataclass(frozen=True, slots=True)
class Contact:
    person_id: str
    email: Personal[str]


def contacts(row: Contact | None, event: Recorded[Joined]) -> Contact | None:
    email: str = event.data.email
    return Contact(event.aggregate_id, email)


async def joined(repository: Repository[Person, Joined]) -> str:
    await repository.execute("p-1", Person.join, "ada@example.org", age=36)
    return (await repository.load("p-1")).email
