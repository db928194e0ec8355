"""What a newcomer gets wrong in a call is told by the name of the thing, with the way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from eventjet import App, Imported, Metadata, aggregate, event, served, with_metadata
from eventjet.codec.catalog import Catalog
from eventjet.errors import DefinitionError, Refused, UsageError
from eventjet.examples.bank.account import Account, Deposited, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.examples.bank.read_models import balances
from eventjet.testing import on, projected, scenario


@event("customer.renamed")
class Renamed:
    name: str


@aggregate("customer")
class Customer:
    name: str = ""

    def rename(self, name: str) -> Renamed | None:
        return None if name == self.name else Renamed(name=name)

    def forgets_itself() -> Renamed:  # type: ignore[misc]
        return Renamed(name="")

    def evolve(self, event: Renamed) -> Customer:
        return replace(self, name=event.name)


class Pricing:
    """A decision may be a method of something else, which takes the state first."""

    def deposit(self, account: Account, amount: Decimal) -> Deposited:
        return Deposited(amount=amount)


SECRET = "ada@example.org"
BANK = App("bank", aggregates=[Account, Customer], projections=[balances], upcasters=[withdrawn_has_a_reason])

MISTAKES = [
    ("withdraw", (), r"'withdraw' is no decision of Account\. Hand over the function itself.*Account\.open, "),
    (None, (), "NoneType is no decision of Account"),
    (Deposited(amount=Decimal(3)), (), "Deposited is no decision of Account"),
    (Deposited, (Decimal(3),), "Deposited is no decision of Account"),
    (Account().deposit, (Decimal(3),), "method is no decision of Account.*bound to no state"),
    (Account.deposit, (), r"Account\.deposit cannot be called so: .*missing 1 required .*'amount'.*given as `self`"),
    (Account.deposit, (Decimal(3), "x"), r"Account\.deposit cannot be called so: .*3 were given, counting the state"),
    (Customer.forgets_itself, (), r"Customer\.forgets_itself takes no state\. Write the state as its first"),
    (
        Customer.rename,
        ("ada",),
        r"Customer\.rename decides on Customer, and was given the state of Account",
    ),
]


@pytest.mark.parametrize(("decide", "args", "says"), MISTAKES)
async def test_what_is_no_decision_is_told_with_the_one_to_hand_over(decide: Any, args: Any, says: str) -> None:
    async with BANK.in_memory() as jet:
        accounts = jet.repository(Account)
        for one in (accounts, accounts.command("c-1")):
            with pytest.raises(UsageError, match=says):
                await one.execute("a-1", decide, *args)
        with pytest.raises(UsageError, match=says):
            await jet.transact(accounts.decide("a-1", decide, *args))
        assert (await jet.log()).last == 0
    with pytest.raises(UsageError, match=says):
        scenario(Account).when(decide, *args)


async def test_a_function_or_a_method_of_something_else_may_decide() -> None:
    async with BANK.in_memory() as jet:
        accounts = jet.repository(Account)
        await accounts.execute("a-1", lambda account: Deposited(amount=Decimal(1)))
        done = await accounts.execute("a-1", Pricing().deposit, Decimal(2))
        assert done.state.balance == Decimal(3)


async def test_an_error_of_the_decision_itself_passes_through() -> None:
    def decide(account: Account) -> Opened:
        return Opened(owner=len(5))  # type: ignore[arg-type]

    async with BANK.in_memory() as jet:
        with pytest.raises(TypeError, match="has no len"):
            await jet.repository(Account).execute("a-1", decide)
    scenario(Account).when(decide).then_raises(TypeError)


def test_a_text_cannot_be_served() -> None:
    with pytest.raises(UsageError, match=r"Hand over the function itself.*Account\.withdraw"):
        served(Account, "withdraw")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("command_id", "says"),
    [
        ("", "The command id was refused: it is empty. Give text that this command has each time it is repeated"),
        ("x" * 3_000, "it takes 3,000 bytes as a header and 1,000 is the limit. Use a shorter one, a UUID"),
        ("\ud800", "it holds a lone surrogate, which is not text"),
        (7, "The command id 7 was refused: it is not text. Give it as text"),
    ],
)
async def test_a_bad_command_id_is_told_as_one(command_id: Any, says: str) -> None:
    async with BANK.in_memory() as jet:
        with pytest.raises(Refused, match="The command id") as refused:
            jet.repository(Account).command(command_id)
        assert says in str(refused.value)
        assert len(str(refused.value)) < 400
        assert "Ej-" not in str(refused.value)


async def test_control_characters_in_a_command_id_are_taken_and_come_back() -> None:
    command_id = "a\r\nEj-Type: x\0\x1b[2J%"
    async with BANK.in_memory() as jet:
        await jet.repository(Account).command(command_id).execute("a-1", Account.open, "ada")
        assert (await jet.repository(Account).history("a-1"))[0].command_id == command_id


@pytest.mark.parametrize(
    ("metadata", "error", "says"),
    [
        ({"actor": "ada"}, UsageError, r"The metadata is given as dict\. Give Metadata\(actor"),
        (Metadata(actor=""), Refused, "The metadata's actor was refused: it is empty. Give text, or leave it out"),
        (Metadata(extra={"till": 4}), Refused, "The metadata 'till' 4 was refused: it is not text"),  # type: ignore[dict-item]
        (Metadata(extra={4: "x"}), Refused, "The metadata key 4"),  # type: ignore[dict-item]
    ],
)
async def test_bad_metadata_is_told_by_its_name(metadata: Any, error: type[Exception], says: str) -> None:
    async with BANK.in_memory() as jet:
        with pytest.raises(error, match=says):
            jet.repository(Account).command("c-1", metadata=metadata)
        with pytest.raises(UsageError, match="The metadata is given as dict"), with_metadata({}):  # type: ignore[arg-type]
            pass


async def test_calls_of_a_connection_with_the_wrong_kind_are_told_what_to_give() -> None:
    async def tail(**given: Any) -> None:
        async for _ in jet.tail(**given):
            pass

    async with BANK.in_memory() as jet:
        accounts: Any = jet.repository(Account)
        anything: Any = jet
        opened = Opened(owner=SECRET)
        committed = await jet.repository(Account).execute("a-1", Account.open, SECRET)
        for say, call in {
            "The decision Account.open stands where the id belongs. Give the id first": lambda: accounts.execute(
                Account.open, "a-1", "ada"
            ),
            "Member 1 of the transaction is a coroutine": lambda: anything.transact(accounts.load("a-1")),
            "Member 1 of the transaction is a list. Give `transact`": lambda: anything.transact([1]),
            "The import gives a Opened. Give Imported(Account": lambda: anything.append_many([opened], source="x"),
            "the aggregate account, which this app does not have. Give its class, one of": lambda: jet.append_many(
                [Imported("account", "a", opened)],  # type: ignore[arg-type]
                source="x",
            ),
            "The import holds a Opened for customer 'a'": lambda: jet.append_many(
                [Imported(Customer, "a", opened)], source="x"
            ),
            "The source 5 of an import": lambda: anything.append_many([], source=5),
            "A Committed is not a position": lambda: anything.caught_up("balances", position=committed),
            "The token is given as int": lambda: anything.caught_up("balances", token=5),
            "The version is given as '1'. Give a whole number": lambda: accounts.load("a-1", version="1"),
            "The time to load at is '2020', a str": lambda: accounts.load("a-1", at="2020"),
            "`tail` cannot deliver 'everything'. Give one of all, last, new": lambda: tail(deliver="everything"),
            "'5' is not a position": lambda: tail(position="5"),
            "`since` is '2020', a str": lambda: tail(since="2020"),
            "`resolve` was given a ValueError": lambda: anything.resolve(ValueError()),
            "A decision, adec, returned a coroutine": lambda: accounts.execute("a-1", adec),
            "The decision returns_class of 'account' returned the class Opened itself": lambda: accounts.execute(
                "a-1", returns_class
            ),
        }.items():
            with pytest.raises(UsageError) as told:
                await call()
            assert say in str(told.value)
            assert SECRET not in str(told.value), "what is personal may be anywhere"
        for given in (Account(owner=SECRET), "account", []):
            with pytest.raises(UsageError, match=r"asked for with a .*Give the class of the aggregate") as asked:
                jet.repository(given)  # type: ignore[arg-type]
            assert SECRET not in str(asked.value)


async def adec(account: Account) -> None:
    """Not a plain function."""


adec.__qualname__ = "adec"


def returns_class(account: Account) -> Any:
    return Opened


async def test_a_connection_that_no_block_opened_says_how_to_open_it() -> None:
    how = r"Write `async with app\.connect\(…\) as jet:`"
    with pytest.raises(UsageError, match=how):
        await BANK.connect()  # type: ignore[misc]
    with pytest.raises(UsageError, match=how), BANK.connect():  # type: ignore[attr-defined]
        pass
    with pytest.raises(AttributeError, match=how):
        BANK.connect().repository(Account)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"Give them by name: connect\(servers="):
        BANK.connect("nats://127.0.0.1:4222")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"no setting 'server'. Did you mean 'servers'"):
        BANK.connect(server="nats://127.0.0.1:4222")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"aggregates": Account}, "`aggregates` is given as Account and not as a list; write aggregates=[…]"),
        ({"projections": balances}, "`projections` is given as Projection and not as a list; write projections=[…]"),
        ({"projections": [Account]}, "Account is not a projection: decorate it with @projection or @entries"),
        ({"projections": [replace(balances, table="balances")]}, "its table is 'balances'; give SQLAlchemy's Table"),
        ({"aggregates": [balances]}, "a Projection is not an aggregate"),
        ({"aggregates": [Account(owner="ada")]}, "a Account is not an aggregate"),
        ({"upcasters": [len]}, "len is not an upcaster"),
        ({"retired_events": [Opened]}, "Opened is not the name of an event"),
        ({"retired_events": [""]}, "the retired event '' is not "),
        ({"retired_events": ["account opened"]}, "the retired event 'account opened' is not "),
        ({"retired_events": ["account.opened\n"]}, "the retired event 'account.opened\\n' is not "),
        ({"retired_events": "account.opened"}, "`retired_events` is given as str and not as a list"),
        ({"retired_aggregates": [""]}, "'' is not the name of an aggregate"),
        ({"retired_aggregates": ["account.opened"]}, "'account.opened' is not the name of an aggregate"),
        ({"retired_aggregates": [Account]}, "Account is not the name of an aggregate"),
        ({"retired_aggregates": ["account"]}, "the aggregate 'account' is both declared and retired"),
        ({"name": None}, "the app's name None is not"),
    ],
)
def test_a_list_of_an_app_that_holds_something_else_is_told(given: dict[str, Any], says: str) -> None:
    with pytest.raises(DefinitionError) as told:
        App(**({"name": "bank", "aggregates": [Account], "upcasters": [withdrawn_has_a_reason]} | given))
    assert says in str(told.value)
    assert "ada" not in str(told.value)


def test_a_decorator_without_its_name_and_an_evolve_that_is_no_function_of_two_are_told() -> None:
    for decorator, example in ((event, "account.opened"), (aggregate, "account")):
        with pytest.raises(DefinitionError, match=rf'lacks its name; write @{decorator.__name__}\("{example}"\)'):
            decorator(Customer)  # type: ignore[arg-type]

    @aggregate("till")
    class Till:
        n: int = 0

        async def evolve(self, event: Renamed) -> Till:
            return self

    @aggregate("door")
    class Door:
        n: int = 0

        def evolve(event: Renamed) -> Door:  # type: ignore[misc]  # noqa: N805
            return Door()

    with pytest.raises(DefinitionError) as told:
        App("bank", aggregates=[Till, Door])  # type: ignore[list-item]
    assert "Till.evolve is async or a generator" in str(told.value)
    assert "Door.evolve takes (event), and is called with (self, event)" in str(told.value)


def test_a_test_that_gives_its_parts_in_another_order_is_told() -> None:
    calls: dict[str, Callable[[], object]] = {
        "`on` was given a Opened as the id": lambda: on(Opened(owner="x"), "a"),  # type: ignore[arg-type]
        "`projected` was given a Opened as a history": lambda: projected(balances, Opened(owner="x")),  # type: ignore[call-overload]
        "`projected` was given a list first": lambda: projected(on("a", Opened(owner="x")), balances),  # type: ignore[call-overload]
        "`then_raises` was given an instance. Give the class, ValueError": lambda: (
            scenario(Account).when(Account.withdraw, Decimal(1)).then_raises(ValueError("x"))  # type: ignore[arg-type]
        ),
    }
    for says, call in calls.items():
        with pytest.raises(UsageError) as told:
            call()
        assert says in str(told.value)
    with pytest.raises(AssertionError, match=r"the class Opened is not an event.*in no list"):
        scenario(Account).given(Opened)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [("",), ("door opened",), (None,), ("door.opened", "d" * 101)])
def test_a_former_name_that_no_event_can_have_is_told(names: Any) -> None:
    @event("door.moved", formerly=names)
    class Moved:
        n: int

    assert any("former name" in fault for fault in Catalog([Moved]).faults())


def test_a_former_name_given_as_text_is_that_name_and_not_its_letters() -> None:
    @event("door.moved", formerly="door.opened")  # type: ignore[arg-type]
    class Moved:
        n: int

    catalog = Catalog([Moved])
    assert catalog.named("door.opened") is not None
    assert catalog.named("d") is None
