"""Mistakes of newcomers in calls are refused with the name of the thing and a fix."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack
from copy import copy
from dataclasses import replace
from decimal import Decimal
from typing import Any
from unittest.mock import create_autospec
from uuid import uuid4

import pytest

from eventjet import App, Imported, Metadata, Recorded, aggregate, entries, event, listens, process, projection, reactor
from eventjet.codec.catalog import Catalog
from eventjet.domain.aggregate import event_info
from eventjet.errors import DefinitionError, Refused, UsageError
from eventjet.examples.bank.account import Account, Deposited, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.examples.bank.read_models import balances
from eventjet.testing import scenario


@event("customer.renamed")
class Renamed:
    name: str


@aggregate("customer")
class Customer:
    name: str = ""

    def rename(self, name: str) -> Renamed | None:
        return None if name == self.name else Renamed(name=name)

    def evolve(self, event: Renamed) -> Customer:
        return replace(self, name=event.name)


class Pricing:
    """A class that is no aggregate, with a method that decides."""

    def deposit(self, account: Account, amount: Decimal) -> Deposited:
        return Deposited(amount=amount)


SECRET = "ada@example.org"
BANK = App("bank", aggregates=[Account, Customer], projections=[balances], upcasters=[withdrawn_has_a_reason])


async def test_a_function_or_a_method_of_another_class_can_decide() -> None:
    async with BANK.in_memory() as jet:
        accounts = jet.repository(Account)
        await accounts.execute("a-1", lambda account: Deposited(amount=Decimal(1)))
        execution = await accounts.execute("a-1", Pricing().deposit, Decimal(2))
        assert execution.state.balance == Decimal(3)


def test_what_is_no_decision_is_refused_in_a_test_as_on_a_server() -> None:
    mistakes: list[Any] = ["open", Account.open(Account(), "ada"), Account().open]
    for mistake in mistakes:
        with pytest.raises(UsageError, match=r"A decision is given as a function.*Account\.open"):
            scenario(Account).when(mistake)


async def test_an_id_that_is_missing_is_not_to_be_written_as_text() -> None:
    nothing: Any = None
    async with BANK.in_memory() as jet:
        with pytest.raises(Refused, match=r"The id None was refused: it is not text\. Give the id\.$"):
            await jet.repository(Account).load(nothing)


async def test_a_type_error_within_a_decision_passes_through() -> None:
    def decide(account: Account) -> Opened:
        return Opened(owner=len(5))  # type: ignore[arg-type]

    async with BANK.in_memory() as jet:
        with pytest.raises(TypeError, match="has no len"):
            await jet.repository(Account).execute("a-1", decide)
    scenario(Account).when(decide).then_raises(TypeError)


@pytest.mark.parametrize(
    ("command_id", "says"),
    [
        ("", "The command id was refused: it is empty. Give text that this command has each time it is repeated"),
        ("x" * 3_000, "it takes 3,000 bytes as a header and 1,000 is the limit. Use a shorter one, a UUID"),
        ("\ud800", "it holds a lone surrogate, which is not text"),
    ],
)
async def test_a_bad_command_id_is_refused_by_name(command_id: Any, says: str) -> None:
    async with BANK.in_memory() as jet:
        with pytest.raises(Refused, match="The command id") as refused:
            jet.repository(Account).command(command_id)
        assert says in str(refused.value)
        assert len(str(refused.value)) < 400
        assert "Ej-" not in str(refused.value)


async def test_control_characters_in_a_command_id_are_stored_and_read_back() -> None:
    command_id = "a\r\nEj-Type: x\0\x1b[2J%"
    async with BANK.in_memory() as jet:
        await jet.repository(Account).command(command_id).execute("a-1", Account.open, "ada")
        assert (await jet.repository(Account).history("a-1"))[0].command_id == command_id


@pytest.mark.parametrize(
    ("metadata", "error", "says"),
    [
        (Metadata(actor=""), Refused, "The metadata's actor was refused: it is empty. Give text, or leave it out"),
        (Metadata(extra={"Till": "4"}), Refused, "The metadata key 'Till'"),
    ],
)
async def test_bad_metadata_is_refused_by_name(metadata: Any, error: type[Exception], says: str) -> None:
    async with BANK.in_memory() as jet:
        with pytest.raises(error, match=says):
            jet.repository(Account).command("c-1", metadata=metadata)


async def test_a_wrong_type_in_a_call_is_refused_with_the_right_type() -> None:
    async def tail(**arguments: Any) -> None:
        async for _ in jet.tail(**arguments):
            pass

    async with BANK.in_memory() as jet:
        accounts: Any = jet.repository(Account)
        anything: Any = jet
        opened = Opened(owner=SECRET)
        committed = await jet.repository(Account).execute("a-1", Account.open, SECRET)
        for say, call in {
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
            "Committed is not a position": lambda: anything.caught_up("balances", position=committed),
            "`timeout_s` is None. Give seconds; `math.inf`": lambda: anything.caught_up(
                "balances", position=1, timeout_s=None
            ),
            "`timeout_s` is '5'. Give seconds": lambda: anything.settled(Account, "a-1", timeout_s="5"),
            "The version is given as '1'. Give a whole number": lambda: accounts.load("a-1", version="1"),
            "`tail` cannot deliver 'everything'. Give one of all, last, new": lambda: tail(deliver="everything"),
            "'5' is not a position": lambda: tail(position="5"),
            "A decision, adec, returned a coroutine": lambda: accounts.execute("a-1", adec),
            "The decision returns_class of 'account' returned the class Opened itself": lambda: accounts.execute(
                "a-1", returns_class
            ),
        }.items():
            with pytest.raises(UsageError) as refused:
                await call()
            assert say in str(refused.value)
            assert SECRET not in str(refused.value), "what is personal may be anywhere"
        for argument in (Account(owner=SECRET), "account", []):
            with pytest.raises(
                UsageError, match=r"asked for with a .*Give the class of the aggregate"
            ) as repository_refused:
                jet.repository(argument)  # type: ignore[arg-type]
            assert SECRET not in str(repository_refused.value)


async def adec(account: Account) -> None:
    """A decision that is async by mistake."""


adec.__qualname__ = "adec"


def returns_class(account: Account) -> Any:
    return Opened


def test_an_unknown_setting_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"no setting 'server'. Did you mean 'servers'"):
        BANK.connect(server="nats://127.0.0.1:4222")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"aggregates": [balances]},
            "an object of the class Projection is not an aggregate: give a class decorated with @aggregate(…)",
        ),
        (
            {"aggregates": [Account(owner="ada")]},
            "an object of the class Account is not an aggregate: give the class itself",
        ),
        ({"retired_events": [""]}, "the retired event '' is not "),
        ({"retired_events": ["account opened"]}, "the retired event 'account opened' is not "),
        ({"retired_events": ["account.opened\n"]}, "the retired event 'account.opened\\n' is not "),
        ({"retired_events": "account.opened"}, "`retired_events` is given as str and not as a list"),
        ({"retired_aggregates": [""]}, "the retired aggregate '' is not"),
        ({"retired_aggregates": ["account.opened"]}, "the retired aggregate 'account.opened' is not"),
        ({"retired_aggregates": ["account"]}, "the aggregate 'account' is both declared and retired"),
        ({"name": None}, "the app's name None is not"),
        ({"deps": {}}, "App(deps=…) is given a dict; give a function that returns an async context manager"),
        ({"aggregates": Account}, "is given as class and not as a list; give a list: aggregates=[Account]"),
        ({"processes": Account}, "is given as class and not as a list; give a list: processes=[Account]"),
        ({"reactors": open}, "is given as builtin_function_or_method and not as a list; give a list: reactors=[open]"),
        ({"projections": balances}, "`projections` is given as Projection and not as a list"),
        ({"publications": None}, "`publications` is given as NoneType and not as a list"),
        ({"served": 1}, "`served` is given as int and not as a list"),
        ({"upcasters": withdrawn_has_a_reason}, "`upcasters` is given as Upcaster and not as a list"),
        ({"aggregates": (cls for cls in [Account])}, "`aggregates` is given as generator and not as a list"),
        ({"projections": [open]}, 'open is not a projection: decorate it with `@projection("name", …)`'),
        ({"upcasters": [open]}, 'open is not an upcaster: decorate it with `@upcaster("name", schema=…)`'),
    ],
)
def test_a_wrong_argument_of_an_app_is_refused_with_its_name(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(DefinitionError) as refused:
        App(**({"name": "bank", "aggregates": [Account], "upcasters": [withdrawn_has_a_reason]} | arguments))
    assert says in str(refused.value)
    assert "ada" not in str(refused.value)


def plain() -> None:
    """A function that a decorator is applied to."""


@pytest.mark.parametrize("decorator", [projection, entries, reactor])
def test_a_decorator_without_a_name_is_refused_with_the_name_of_the_function(decorator: Any) -> None:
    with pytest.raises(DefinitionError, match=rf'@{decorator.__name__} of plain lacks its name; write .*\("'):
        decorator(plain)


@pytest.mark.parametrize("number", [0, -1, 1.5, "1", True, None])
def test_a_schema_or_a_revision_that_is_no_whole_number_is_refused(number: Any) -> None:
    @event("door.shut", schema=number)
    class Shut:
        pass

    def evolve(self: Any, event: Any) -> Any:
        return self

    evolve.__annotations__["event"] = Shut
    door = aggregate("door", revision=number, snapshot_every=number)(type("Door", (), {"evolve": evolve}))
    with pytest.raises(DefinitionError) as refused:
        App("bank", aggregates=[door])
    for part in ("the event 'door.shut' has schema", "the revision of 'door' is"):
        assert f"{part} {number!r}; give a whole number, 1 or more" in str(refused.value)


@pytest.mark.parametrize("number", [0, 1.5, "1", True])
def test_a_number_of_versions_between_snapshots_that_is_none_is_refused(number: Any) -> None:
    eager = aggregate("door", snapshot_every=number)(type("Door", (), {"evolve": lambda self, event: self}))
    eager.evolve.__annotations__["event"] = Renamed
    with pytest.raises(DefinitionError, match=f"snapshot_every of 'door' is {number!r}; give a whole number, 1 or"):
        App("bank", aggregates=[eager])


async def no_row(row: Any, event: Recorded[Opened]) -> Any:
    """A fold that is async by mistake."""


def test_an_async_projection_is_refused() -> None:
    with pytest.raises(DefinitionError, match="no_row is async or a generator; write a plain `def`"):
        App(
            "bank",
            aggregates=[Account],
            upcasters=[withdrawn_has_a_reason],
            projections=[projection("no_rows")(no_row)],
        )


def test_an_async_evolve_is_refused() -> None:
    @aggregate("till")
    class Till:
        n: int = 0

        async def evolve(self, event: Renamed) -> Till:
            return self

    with pytest.raises(DefinitionError, match=r"Till\.evolve is async or a generator"):
        App("bank", aggregates=[Till])


def test_an_event_class_in_a_history_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"the class Opened is not an event.*in no list"):
        scenario(Account).given(Opened)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [("",), ("door opened",), ("door.opened", "d" * 101)])
def test_an_invalid_former_name_is_refused(names: Any) -> None:
    @event("door.moved", formerly=names)
    class Moved:
        n: int

    assert any("former name" in fault for fault in Catalog([Moved]).faults())


@pytest.mark.parametrize("bad", [17, uuid4(), b"bytes", None])
async def test_an_id_or_metadata_that_is_not_text_is_refused(bad: Any) -> None:
    async with BANK.in_memory() as jet:
        accounts = jet.repository(Account)
        with pytest.raises(Refused, match="text"):
            await accounts.execute(bad, Account.open, "ada")
        if bad is not None:
            with pytest.raises(Refused, match="text"):
                accounts.command(bad)
        with pytest.raises(Refused, match="text"):
            accounts.command("c", metadata=Metadata(extra={"k": bad}))


def test_a_class_decorator_without_a_name_is_refused() -> None:
    class Plain:
        pass

    bare: Any
    for bare in (event, aggregate, process):
        with pytest.raises(DefinitionError, match="lacks its name"):
            bare(Plain)
    without_parentheses: Any = listens
    with pytest.raises(DefinitionError, match=r"write `@listens\(\)`"):
        without_parentheses(Customer.rename)


def test_a_single_former_name_can_be_given_as_text() -> None:
    former: Any = "customer.called"

    @event("customer.titled", formerly=former)
    class Titled:
        title: str

    assert Catalog([Titled]).faults() == []
    assert event_info(Titled).formerly == ("customer.called",)


async def test_using_a_block_before_it_is_entered_is_refused_with_a_fix() -> None:
    for name, block in (("connect", BANK.connect()), ("in_memory", BANK.in_memory())):
        wrong: Any = block
        way = rf"write `async with bank\.{name}\(\) as jet:`"
        with pytest.raises(AttributeError, match=f"no 'repository' before the block is entered: {way}"):
            wrong.repository(Account)
        with pytest.raises(UsageError, match=way):
            await wrong
        blocking = rf"{way}, or `with bank\.{name}_blocking\(\) as jet:` in code without `await`"
        with pytest.raises(UsageError, match=blocking), wrong:
            pass
        with pytest.raises(UsageError, match=blocking), ExitStack() as stack:
            stack.enter_context(wrong)
        assert not hasattr(block, "repository")
        assert not isinstance(block, AbstractContextManager)


async def test_a_block_can_be_inspected_copied_and_stacked() -> None:
    assert dict(inspect.getmembers(BANK.connect()))["__exit__"] is None
    assert copy(BANK.connect()) is not None
    assert create_autospec(BANK.in_memory(), instance=True) is not None
    async with AsyncExitStack() as stack:
        jet = await stack.enter_async_context(BANK.in_memory())
        assert (await jet.repository(Account).execute("a-1", Account.open, "ada")).version == 1
