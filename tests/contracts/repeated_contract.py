"""The promises of repeated commands, alone and in transactions, over any store."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import pytest

from eventjet.commands import Committed, Planned, Repository
from eventjet.commands.execute import transact
from eventjet.commands.loading import Snapshots
from eventjet.domain.recorded import Metadata
from eventjet.errors import CommandReused, OutcomeUnknown, Refused, UsageError
from eventjet.examples.bank.account import Account, AccountEvent, Deposited, InsufficientFunds, Opened
from eventjet.log.store import EventStore
from tests.contracts.repository_contract import Accounts, catalog, repository

Done = tuple[Committed[Account, AccountEvent], ...]


def payment(accounts: Accounts, payer: str, payee: str, amount: int = 3, name: str = "t-1") -> list[Planned[Any, Any]]:
    command = accounts.command(name, metadata=Metadata(actor="ada"))
    return [
        command.decide(payer, Account.withdraw, Decimal(amount)),
        command.decide(payee, Account.deposit, Decimal(amount)),
    ]


async def opened(accounts: Accounts, *names: str) -> None:
    for name in names:
        await accounts.execute(name, Account.deposit, Decimal(10))


def twice(state: Account) -> list[AccountEvent]:
    return [Opened(owner="ada"), Deposited(amount=Decimal(1))]


class NoSnapshots:
    async def get(self, *_: object) -> None:
        return None

    def keep(self, *_: object) -> None:
        return None


class LosesItsAnswer:
    """A store whose next append is stored and whose answer is lost."""

    def __init__(self, store: EventStore) -> None:
        self._inner = store
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def append(self, writes: Any) -> int:
        await self._inner.append(writes)
        self.lost += 1
        raise OutcomeUnknown([], [], "the answer was lost", writes)


class RepeatedContract:
    @pytest.fixture
    def accounts(self, app: str, store: EventStore) -> Accounts:
        return repository(app, store)

    @pytest.fixture
    def elsewhere(self, app: str, store: EventStore) -> Accounts:
        """The same aggregates in another process, as far as the store can tell."""
        return repository(app, store)

    async def test_a_transaction_of_commands_is_recorded_once(
        self, store: EventStore, accounts: Accounts, elsewhere: Accounts
    ) -> None:
        await opened(accounts, "p1", "q1")
        first = await transact(store, payment(accounts, "p1", "q1"))
        assert [committed.state.balance for committed in first] == [Decimal(7), Decimal(13)]
        await accounts.execute("p1", Account.withdraw, Decimal(7))  # what came since does not change the answer
        before = (await store.state()).last
        for again in (accounts, elsewhere):
            assert await transact(store, payment(again, "p1", "q1")) == first
            assert (await transact(store, payment(again, "p1", "q1")[::-1])) == first[::-1]
        assert (await store.state()).last == before
        recorded = (await accounts.history("q1"))[-1]
        assert (recorded.command_id, recorded.metadata.actor) == ("t-1", "ada")
        with pytest.raises(InsufficientFunds):  # another id is another payment
            await transact(store, payment(elsewhere, "p1", "q1", name="t-2"))

    async def test_members_may_have_ids_of_their_own(self, store: EventStore, accounts: Accounts) -> None:
        await opened(accounts, "p2", "q2")

        def plans() -> list[Planned[Any, Any]]:
            return [
                accounts.command("out").decide("p2", Account.withdraw, Decimal(1)),
                accounts.command("in").decide("q2", Account.deposit, Decimal(1)),
            ]

        assert await transact(store, plans()) == await transact(store, plans())
        assert (await accounts.load("q2")).balance == Decimal(11)

    async def test_a_repeated_transaction_returns_the_lost_answer(
        self, app: str, store: EventStore, accounts: Accounts
    ) -> None:
        await opened(accounts, "p3", "q3")
        losing: Any = LosesItsAnswer(store)
        unlucky = repository(app, losing)
        with pytest.raises(OutcomeUnknown):
            await transact(losing, payment(unlucky, "p3", "q3"))
        repeated = await transact(losing, payment(unlucky, "p3", "q3"))
        assert [committed.version for committed in repeated] == [2, 2]
        assert losing.lost == 1, "the second one only read"
        assert repeated == await transact(store, payment(accounts, "p3", "q3"))

    async def test_a_transaction_repeated_by_many_at_once_is_recorded_once(
        self, app: str, store: EventStore, accounts: Accounts
    ) -> None:
        await opened(accounts, "p4", "q4")
        everywhere = [repository(app, store) for _ in range(6)]
        for account_repository in everywhere:
            await account_repository.load("p4")  # cached without the payment; "q4" is not cached
        done = await asyncio.gather(
            *(transact(store, payment(account_repository, "p4", "q4")) for account_repository in everywhere)
        )
        assert len(set(map(repr, done))) == 1
        assert len(await accounts.history("p4")) == 2

    async def test_another_request_under_the_same_id_is_refused(self, store: EventStore, accounts: Accounts) -> None:
        await opened(accounts, "p5", "q5")
        await transact(store, payment(accounts, "p5", "q5"))
        with pytest.raises(CommandReused, match="account 'p5'"):
            await transact(store, payment(accounts, "p5", "q5", amount=4))
        with pytest.raises(CommandReused, match=r"'t-1' on account 'q5'.*withdraw"):
            await transact(store, payment(accounts, "q5", "p5"))
        assert len(await accounts.history("p5")) == 2

    async def test_an_argument_may_be_ignored_in_a_transaction(self, store: EventStore, accounts: Accounts) -> None:
        def plans(reason: str) -> list[Planned[Any, Any]]:
            payment = accounts.command("t-1", ignoring="reason")
            return [
                payment.decide("p11", Account.withdraw, Decimal(3), reason=reason),
                accounts.command("t-1").decide("q11", Account.deposit, Decimal(3)),
            ]

        await opened(accounts, "p11", "q11")
        assert await transact(store, plans("today")) == await transact(store, plans("tomorrow"))

    async def test_a_domain_error_comes_before_a_member_that_records_nothing(
        self, store: EventStore, accounts: Accounts
    ) -> None:
        def nothing(state: Account) -> None:
            return None

        plans = [
            accounts.decide("p12", nothing),
            accounts.decide("q12", Account.withdraw, Decimal(3)),
        ]
        for members in (plans, plans[::-1]):
            with pytest.raises(InsufficientFunds):
                await transact(store, members)
        with pytest.raises(Refused, match=r"account 'p12'.* records nothing"):
            await transact(store, plans[:1])

    async def test_a_partly_recorded_transaction_is_refused(
        self, store: EventStore, accounts: Accounts, elsewhere: Accounts
    ) -> None:
        await opened(accounts, "p6", "q6", "r6")
        await transact(store, payment(accounts, "p6", "q6"))
        before = (await store.state()).last
        for again in (accounts, elsewhere):
            for plans in (payment(again, "p6", "r6"), payment(again, "r6", "q6")):
                with pytest.raises(Refused, match=r"recorded its command 't-1' .* 'r6' never recorded"):
                    await transact(store, plans)
        assert (await store.state()).last == before

    async def test_commands_of_several_saves_are_not_a_transaction(self, store: EventStore, accounts: Accounts) -> None:
        await opened(accounts, "p7", "q7", "r7")
        command = accounts.command("t-1")
        await command.execute("p7", Account.withdraw, Decimal(3))
        await command.execute("q7", Account.deposit, Decimal(3))
        with pytest.raises(Refused, match="in another save"):
            await transact(store, payment(accounts, "p7", "q7"))
        await transact(store, payment(accounts, "r7", "p7", name="t-2"))
        await transact(store, payment(accounts, "q7", "x7", name="t-2"))
        with pytest.raises(Refused, match="in another save"):
            await transact(store, payment(accounts, "r7", "x7", name="t-2"))

    async def test_concurrent_saves_are_not_a_transaction(self, store: EventStore, accounts: Accounts) -> None:
        command, names = accounts.command("t-1"), [f"s{number}" for number in range(6)]
        await asyncio.gather(*(command.execute(name, twice) for name in names))
        with pytest.raises(Refused, match="in another save"):
            await transact(store, [command.decide(name, twice) for name in names[-2:]])
        for name in names:
            assert (await command.execute(name, twice)).events == (Opened(owner="ada"), Deposited(amount=Decimal(1)))
            assert len(await accounts.history(name)) == 2

    async def test_a_command_that_one_member_has_forgotten_is_found_through_another(
        self, app: str, store: EventStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("eventjet.domain.history.COMMANDS_MAX", 3)

        class Forgets(Repository[Account, AccountEvent]):
            """With a snapshot policy, and no snapshot kept: the newest ids are all that it knows."""

            def __init__(self) -> None:
                none: Any = NoSnapshots()
                super().__init__(app, store, catalog(), Account, Snapshots(none, none, 100))

        busy = Forgets()
        await opened(busy, "p10", "q10")
        first = await transact(store, payment(busy, "p10", "q10"))
        for number in range(4):
            await busy.command(f"c-{number}").execute("q10", Account.deposit, Decimal(1))
        for accounts in (busy, Forgets()):
            assert await transact(store, payment(accounts, "p10", "q10")) == first
            with pytest.raises(Refused, match="'r10' never recorded"):
                await transact(store, payment(accounts, "p10", "r10"))

    async def test_a_single_member_may_be_repeated_as_a_command(self, store: EventStore, accounts: Accounts) -> None:
        await opened(accounts, "p8", "q8")
        paid, _ = await transact(store, payment(accounts, "p8", "q8"))
        assert await accounts.command("t-1").execute("p8", Account.withdraw, Decimal(3)) == paid

    async def test_a_member_without_an_id_among_others_is_refused(self, store: EventStore, accounts: Accounts) -> None:
        plans = payment(accounts, "p9", "q9")
        with pytest.raises(UsageError, match="without a command id, account 'q9'"):
            await transact(store, [plans[0], accounts.decide("q9", Account.deposit, Decimal(3))])
        only_metadata = accounts.command(metadata=Metadata(actor="ada"))
        done = await transact(
            store,
            [
                only_metadata.decide("p9", Account.deposit, Decimal(3)),
                accounts.decide("q9", Account.deposit, Decimal(3)),
            ],
        )
        assert [committed.version for committed in done] == [1, 1]
