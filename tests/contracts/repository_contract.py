"""The promises of a repository, over any store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import pytest

from eventjet.codec.catalog import Catalog, EncodedEvent
from eventjet.commands import Committed, Repository
from eventjet.domain.identity import new_event_id
from eventjet.errors import CommandReused, ConcurrencyConflict, HistoryBroken, UnknownEvent, UsageError
from eventjet.examples.bank.account import Account, AccountEvent, Deposited, InsufficientFunds, Opened, Withdrawn
from eventjet.log.store import EventStore, NewEvent
from eventjet.testing.store_contract import write

Accounts = Repository[Account, AccountEvent]


def catalog() -> Catalog:
    return Catalog([Opened, Deposited, Withdrawn])


def repository(app: str, store: EventStore) -> Accounts:
    return Repository(app, store, catalog(), Account)


class Counted:
    """A store that counts reads and lost races."""

    def __init__(self, store: EventStore) -> None:
        self._inner = store
        self.histories = self.pages_read = self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def history(self, *args: Any, **kwargs: Any) -> Any:
        self.histories += 1
        return await self._inner.history(*args, **kwargs)

    def pages(self, *args: Any, **kwargs: Any) -> Any:
        self.pages_read += 1
        return self._inner.pages(*args, **kwargs)

    async def append(self, writes: Any) -> int:
        try:
            return await self._inner.append(writes)
        except ConcurrencyConflict:
            self.lost += 1
            raise


class RepositoryContract:
    @pytest.fixture
    def accounts(self, app: str, store: EventStore) -> Accounts:
        return repository(app, store)

    @pytest.fixture
    def elsewhere(self, app: str, store: EventStore) -> Accounts:
        """The same aggregates in another process, as far as the store can tell."""
        return repository(app, store)

    async def test_a_decision_is_recorded_and_its_state_returned(self, accounts: Accounts) -> None:
        assert await accounts.load("a") == Account()
        done = await accounts.execute("a", Account.open, "ada")
        assert (done.events, done.state.owner, done.version) == ((Opened(owner="ada"),), "ada", 1)
        done = await accounts.execute("a", Account.deposit, Decimal(10))
        assert (done.state.balance, done.version) == (Decimal(10), 2)
        assert done.confirmed
        assert await accounts.load("a") == done.state

    async def test_racing_commands_record_one_event_each_and_the_loser_decides_again(
        self, app: str, store: EventStore, accounts: Accounts
    ) -> None:
        await accounts.execute("race", Account.open, "ada")
        await accounts.execute("race", Account.deposit, Decimal(10))
        balances: dict[str, list[Decimal]] = {"here": [], "there": []}
        both_decided = asyncio.Event()

        def withdraw(account: Account, where: str) -> Withdrawn:
            balances[where].append(account.balance)
            if all(balances.values()):
                both_decided.set()
            return account.withdraw(Decimal(4), reason=where)

        class Held:
            """A store that lets no save through before both have decided on the same state: the race is certain."""

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            async def append(self, writes: Any) -> int:
                async with asyncio.timeout(60):
                    await both_decided.wait()
                return await store.append(writes)

        waiting_store: Any = Held()
        here, there = repository(app, waiting_store), repository(app, waiting_store)
        first, second = sorted(
            await asyncio.gather(here.execute("race", withdraw, "here"), there.execute("race", withdraw, "there")),
            key=lambda done: done.version,
        )
        assert (first.version, second.version) == (3, 4)
        assert (first.state.balance, second.state.balance) == (Decimal(6), Decimal(2))
        loser = second.events[0]
        assert isinstance(loser, Withdrawn)
        assert balances[loser.reason] == [Decimal(10), Decimal(6)], "the loser decided again on the winner's state"
        history = await accounts.history("race")
        assert [recorded.version for recorded in history] == [1, 2, 3, 4]

    async def test_many_commands_on_one_account_are_all_recorded(self, accounts: Accounts, elsewhere: Accounts) -> None:
        await asyncio.gather(
            *(
                account_repository.execute("hot", Account.deposit, Decimal(1))
                for account_repository in (accounts, elsewhere)
                for _ in range(20)
            )
        )
        assert (await accounts.load("hot")).balance == Decimal(40)
        assert [recorded.version for recorded in await elsewhere.history("hot")] == list(range(1, 41))

    async def test_a_refusal_on_a_stale_state_is_decided_again(self, accounts: Accounts, elsewhere: Accounts) -> None:
        await accounts.execute("stale", Account.open, "ada")
        await elsewhere.execute("stale", Account.deposit, Decimal(10))
        done = await accounts.execute("stale", Account.withdraw, Decimal(10))
        assert done.state.balance == Decimal(0)
        with pytest.raises(InsufficientFunds):
            await elsewhere.execute("stale", Account.withdraw, Decimal(1))

    async def test_a_decision_that_records_nothing_is_checked_on_the_newest_state(
        self, accounts: Accounts, elsewhere: Accounts
    ) -> None:
        await accounts.load("once")
        await elsewhere.execute("once", Account.open, "bob")
        done = await accounts.execute("once", Account.open, "ada")
        assert (done.events, done.state.owner, done.version) == ((), "bob", 1)
        assert not done.confirmed, "only the leader's word"

    async def test_an_event_of_another_aggregate_is_refused(self, accounts: Accounts, store: EventStore) -> None:
        before = (await store.state()).last
        rogue: Callable[..., Any] = lambda account: "no event"  # noqa: E731
        with pytest.raises(UsageError, match="not one of its events"):
            await accounts.execute("a", rogue)

        async def slow(account: Account) -> Deposited:
            return Deposited(amount=Decimal(1))

        with pytest.raises(UsageError, match="coroutine"):
            await accounts.execute("a", slow)  # pyright: ignore[reportArgumentType]
        assert (await store.state()).last == before

    async def test_a_version_gap_is_an_error_and_not_a_state(self, accounts: Accounts, store: EventStore) -> None:
        opened = NewEvent(new_event_id(), EncodedEvent("account.opened", 1, b'{"owner":"ada"}'))
        await store.append([write("other", 0, 0, aggregate="account")])
        first = await store.append([write("gap", 0, 0, opened, aggregate="account")])
        again = NewEvent(new_event_id(), opened.encoded)
        await store.append([write("gap", first, 2, again, aggregate="account")])
        with pytest.raises(HistoryBroken, match="version 3 follows version 1"):
            await accounts.load("gap")

    async def test_an_unknown_event_in_a_history_is_an_error(self, accounts: Accounts, store: EventStore) -> None:
        position = await store.append([write("strange", 0, 0, aggregate="account")])
        with pytest.raises(UnknownEvent, match=f"position {position}"):
            await accounts.load("strange")

    async def test_an_exception_of_a_decision_passes_through(self, accounts: Accounts) -> None:
        with pytest.raises(InsufficientFunds):
            await accounts.execute("poor", Account.withdraw, Decimal(1))

    async def test_a_command_id_stands_for_one_request(self, accounts: Accounts, elsewhere: Accounts) -> None:
        await accounts.execute("reused", Account.deposit, Decimal(10))
        first = await accounts.command("c").execute("reused", Account.withdraw, Decimal("3.0"))
        for account in (accounts, elsewhere):
            again = account.command("c")
            assert await again.execute("reused", Account.withdraw, Decimal(3)) == first
            assert await again.execute("reused", Account.withdraw, amount=Decimal(3), reason="cash") == first
            with pytest.raises(CommandReused, match="version 2") as caught:
                await again.execute("reused", Account.withdraw, Decimal(4))
            assert caught.value.recorded != caught.value.asked
            assert caught.value.arguments == ("amount",)
            with pytest.raises(CommandReused) as caught:
                await again.execute("reused", Account.withdraw, Decimal(4), reason="a present")
            assert caught.value.arguments == ("amount", "reason")
            with pytest.raises(CommandReused) as caught:
                await again.execute("reused", Account.deposit, Decimal(3))
            assert caught.value.arguments == ()
            assert caught.value.recorded.startswith("withdraw:")
            assert caught.value.asked.startswith("deposit:")
        assert len(await accounts.history("reused")) == 2
        assert (await accounts.command("c").execute("other", Account.deposit, Decimal(1))).version == 1

    async def test_an_ignored_argument_may_be_another_when_the_command_comes_again(
        self, accounts: Accounts, elsewhere: Accounts
    ) -> None:
        def paid(amount: int, reason: str) -> Awaitable[Committed[Account, AccountEvent]]:
            withdrawals = repository.command("c", ignoring=("reason",))
            return withdrawals.execute("ignoring", Account.withdraw, Decimal(amount), reason=reason)

        await accounts.execute("ignoring", Account.deposit, Decimal(10))
        repository = accounts
        first = await paid(3, "at noon")
        for repository in (accounts, elsewhere):
            assert await paid(3, "a second later") == first
            with pytest.raises(CommandReused) as caught:
                await paid(4, "at noon")
            assert caught.value.arguments == ("amount",)
            with pytest.raises(CommandReused) as caught:  # an argument counts where it is not ignored
                await repository.command("c").execute("ignoring", Account.withdraw, Decimal(3), reason="at noon")
            assert caught.value.arguments == ("reason",)
            with pytest.raises(UsageError, match=r"no argument 'now' .* Its arguments are amount, reason"):
                await repository.command("c", ignoring=("now",)).execute("ignoring", Account.withdraw, Decimal(3))

    async def test_a_command_recorded_without_its_request_is_still_answered(
        self, accounts: Accounts, store: EventStore
    ) -> None:
        opened = NewEvent(new_event_id(), EncodedEvent("account.opened", 1, b'{"owner":"ada"}'), "Ej-Command: old\r\n")
        await store.append([write("old", 0, 0, opened, aggregate="account")])
        done = await accounts.command("old").execute("old", Account.deposit, Decimal(1))
        assert (done.events, done.version) == ((Opened(owner="ada"),), 1)

    async def test_an_old_command_is_found_and_a_new_one_needs_no_search(
        self, app: str, store: EventStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("eventjet.domain.history.COMMANDS_MAX", 3)
        counted: Any = Counted(store)
        accounts, elsewhere = repository(app, counted), repository(app, counted)
        done = [await accounts.command(f"c-{n}").execute("old", Account.deposit, Decimal(1)) for n in range(8)]
        assert counted.histories == 0
        await elsewhere.load("old")
        for number, there in enumerate((accounts, elsewhere)):
            for old, first in enumerate(done):
                assert await there.command(f"c-{old}").execute("old", Account.deposit, Decimal(1)) == first
            counted.histories = 0
            added = await there.command(f"new-{number}").execute("old", Account.deposit, Decimal(1))
            assert (added.version, counted.histories) == (9 + number, 0)
            with pytest.raises(CommandReused):
                await there.command("c-0").execute("old", Account.deposit, Decimal(2))
        assert len(await accounts.history("old")) == 10

    async def test_a_command_that_a_rival_recorded_is_found_despite_the_cache(
        self, store: EventStore, accounts: Accounts, elsewhere: Accounts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("eventjet.domain.history.COMMANDS_MAX", 3)
        for number in range(6):
            await accounts.command(f"a-{number}").execute("both", Account.deposit, Decimal(1))
        first = await elsewhere.command("theirs").execute("both", Account.deposit, Decimal(1))
        for number in range(6):
            await elsewhere.command(f"b-{number}").execute("both", Account.deposit, Decimal(1))
        # Here neither that command nor its mark is cached yet.
        assert await accounts.command("theirs").execute("both", Account.deposit, Decimal(1)) == first
        assert len(await accounts.history("both")) == 13

    async def test_a_contended_aggregate_is_read_before_a_decision(self, app: str, store: EventStore) -> None:
        counted: Any = Counted(store)
        here, there = repository(app, counted), repository(app, store)
        for _ in range(20):
            await here.execute("shared", Account.deposit, Decimal(1))
            await there.execute("shared", Account.deposit, Decimal(1))
        assert counted.lost <= 2
        await here.execute("mine", Account.deposit, Decimal(1))
        for most in (20, 0):  # reads become fewer, until there are none
            counted.pages_read = 0
            for _ in range(20):
                await here.execute("mine", Account.deposit, Decimal(1))
            assert counted.pages_read <= most
        assert (await here.load("shared")).balance == 40
