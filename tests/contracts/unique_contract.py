"""The promises of unique values, over any store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from eventjet import App, Imported, Repository, aggregate, event, unique
from eventjet.codec.catalog import Catalog, EncodedEvent
from eventjet.commands.execute import transact
from eventjet.commands.importing import Importer
from eventjet.commands.repository import Repositories
from eventjet.commands.unique import check_claims
from eventjet.domain.identity import new_event_id
from eventjet.domain.unique import CLAIMS
from eventjet.errors import NotUnique, Refused, UniqueNotBuilt, UsageError
from eventjet.log.store import EventStore, NewEvent
from eventjet.testing.store_contract import write


@event("user.called")
class Called:
    email: str


@event("user.left")
class Left:
    pass


@event("user.phones_set")
class PhonesSet:
    phones: tuple[str, ...]


UserEvent = Called | Left | PhonesSet


@aggregate("user")
class User:
    email: str | None = None
    phones: tuple[str, ...] = ()

    @unique("email")
    def folded_email(self) -> str | None:
        return self.email and self.email.casefold()

    @unique("phone")
    def every_phone(self) -> frozenset[str]:
        return frozenset(self.phones)

    def call(self, email: str) -> Called | None:
        return None if email == self.email else Called(email=email)

    def leave(self) -> list[Left | PhonesSet]:
        return [Left(), PhonesSet(phones=())]

    def phone(self, *phones: str) -> PhonesSet:
        return PhonesSet(phones=phones)

    def evolve(self, event: UserEvent) -> User:
        match event:
            case Called(email=email):
                return replace(self, email=email)
            case Left():
                return replace(self, email=None)
            case PhonesSet(phones=phones):
                return replace(self, phones=phones)


Users = Repository[User, UserEvent]


def repository(app: str, store: EventStore) -> Users:
    """Return a repository whose catalog knows nothing of claims, as no command needs to."""
    return Repository(app, store, Catalog([Called, Left, PhonesSet]), User)


def called(email: str) -> NewEvent:
    """Return an event as a release without the constraint records it."""
    return NewEvent(new_event_id(), EncodedEvent("user.called", 1, b'{"email":"%b"}' % email.encode()))


async def sound(users: Users) -> bool:
    """Return whether all claims fit all states, read without a cache."""
    return all([(await check_claims(users.unique, constraint)).sound for constraint in ("email", "phone")])


class UniqueContract:
    @pytest.fixture
    def users(self, app: str, store: EventStore) -> Users:
        return repository(app, store)

    @pytest.fixture
    def elsewhere(self, app: str, store: EventStore) -> Users:
        """The same aggregates in another process, as far as the store can tell."""
        return repository(app, store)

    async def test_a_claimed_value_is_refused_to_others_until_it_is_released(
        self, users: Users, elsewhere: Users, store: EventStore
    ) -> None:
        await users.execute("ada", User.call, "Ada@bank")
        before = (await store.state()).last
        for those in (users, elsewhere):
            with pytest.raises(NotUnique) as caught:
                await those.execute("eve", User.call, "ada@bank")
            refused = caught.value
            assert (refused.aggregate, refused.constraint, refused.aggregate_id) == ("user", "email", "eve")
            assert refused.holder == "ada"
            assert "bank" not in str(refused), "a message repeats no value"
        assert (await store.state()).last == before, "what is refused stores nothing"
        await elsewhere.execute("ada", User.leave)
        done = await users.execute("eve", User.call, "ada@bank")
        assert (done.version, done.position) == (1, (await store.state()).last)
        assert await sound(elsewhere)

    async def test_one_of_many_rivals_gets_a_value(self, app: str, store: EventStore) -> None:
        processes = [repository(app, store) for _ in range(4)]
        outcomes = await asyncio.gather(
            *(processes[n % 4].execute(f"u-{n}", User.call, "prize@bank") for n in range(16)), return_exceptions=True
        )
        winners = [n for n, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)]
        assert len(winners) == 1
        for n, outcome in enumerate(outcomes):
            if n not in winners:
                assert isinstance(outcome, NotUnique), outcome
                assert outcome.holder == f"u-{winners[0]}"
        assert await sound(repository(app, store))

    async def test_a_save_without_a_change_of_unique_values_is_plain(self, users: Users, store: EventStore) -> None:
        await users.execute("ada", User.call, "ada@bank")
        before = (await store.state()).last
        await users.execute("ada", User.call, "ADA@bank")
        assert (await store.state()).last == before + 1

    async def test_each_of_several_values_is_claimed(self, users: Users, elsewhere: Users) -> None:
        await users.execute("ada", User.phone, "1", "2")
        with pytest.raises(NotUnique) as caught:
            await elsewhere.execute("eve", User.phone, "3", "2")
        assert caught.value.constraint == "phone"
        await users.execute("ada", User.phone, "1", "4")
        await elsewhere.execute("eve", User.phone, "3", "2")
        assert await sound(users)
        with pytest.raises(Refused, match="101 values"):
            await users.execute("many", User.phone, *map(str, range(101)))

    async def test_a_transaction_hands_a_value_on_and_swaps_two(self, users: Users, store: EventStore) -> None:
        await users.execute("ada", User.call, "ada@bank")
        await users.execute("bob", User.call, "bob@bank")
        await transact(store, [users.decide("ada", User.call, "bob@bank"), users.decide("bob", User.call, "ada@bank")])
        await transact(store, [users.decide("ada", User.leave), users.decide("eve", User.call, "bob@bank")])
        assert [(await users.load(name)).email for name in ("ada", "bob", "eve")] == [None, "ada@bank", "bob@bank"]
        assert await sound(users)

    async def test_two_members_of_a_transaction_cannot_claim_one_value(self, users: Users, store: EventStore) -> None:
        before = (await store.state()).last
        with pytest.raises(NotUnique) as caught:
            await transact(store, [users.decide("a", User.call, "x@bank"), users.decide("b", User.call, "X@bank")])
        assert (caught.value.holder, caught.value.aggregate_id) == ("a", "b")
        assert (await store.state()).last == before

    async def test_a_repeated_command_gets_its_first_answer_after_the_value_has_moved(
        self, users: Users, elsewhere: Users
    ) -> None:
        first = await users.command("c").execute("ada", User.call, "ada@bank")
        await users.execute("ada", User.leave)
        await users.execute("eve", User.call, "ada@bank")
        assert await elsewhere.command("c").execute("ada", User.call, "ada@bank") == first

    async def test_no_refusal_rests_on_a_state_that_is_not_the_newest(self, users: Users, elsewhere: Users) -> None:
        await users.execute("ada", User.call, "ada@bank")
        await elsewhere.load("ada")
        await users.execute("eve", User.call, "eve@bank")
        with pytest.raises(NotUnique):
            await elsewhere.execute("bob", User.call, "eve@bank")  # knows the claim now
        await users.execute("eve", User.leave)
        await users.execute("bob", User.call, "bob@bank")

        def take_unless_named(user: User) -> Called | None:
            return Called(email="ada@bank") if user.email is None else None

        done = await elsewhere.execute("bob", take_unless_named)
        assert (done.events, done.state.email) == ((), "bob@bank")
        assert (await elsewhere.execute("new", User.call, "eve@bank")).version == 1

    async def test_older_aggregates_are_claimed_before_a_value_is_taken(
        self, users: Users, elsewhere: Users, store: EventStore
    ) -> None:
        for n in range(3):
            await store.append([write(f"u-{n}", 0, 0, called(f"u-{n}@bank"), aggregate="user")])
        with pytest.raises(UniqueNotBuilt, match="eventjet unique build user email"):
            await users.execute("new", User.call, "u-1@bank")
        assert (await users.execute("u-2", User.leave)).state.email is None, "giving up is no danger"
        assert not (await check_claims(users.unique, "email")).sound
        report = await check_claims(users.unique, "email", repairs=True)
        assert (report.built, report.aggregates, report.values, report.missing.count) == (True, 3, 2, 2)
        for those in (users, elsewhere):
            with pytest.raises(NotUnique):
                await those.execute("new", User.call, "u-1@bank")
        await elsewhere.execute("new", User.call, "u-2@bank")
        again = await check_claims(elsewhere.unique, "email", repairs=True)
        assert (again.missing.count, again.stale.count, again.sound) == (0, 0, True)

    async def test_values_that_were_shared_before_are_reported_and_refused_to_others(
        self, users: Users, store: EventStore
    ) -> None:
        for n in range(2):
            await store.append([write(f"twin-{n}", 0, 0, called("twin@bank"), aggregate="user")])
        report = await check_claims(users.unique, "email", repairs=True)
        assert (report.built, report.shared.count, report.shared.examples) == (False, 1, ["twin-0, twin-1"])
        with pytest.raises(UniqueNotBuilt):
            await users.execute("new", User.call, "new@bank")
        report_of_build = await check_claims(users.unique, "email", keep_shared=True, repairs=True)
        assert (report_of_build.built, report_of_build.sound) == (True, False), (
            "it is kept from here on, and two have one value still"
        )
        for twin in ("twin-1", "twin-0"):
            with pytest.raises(NotUnique):
                await users.execute("new", User.call, "twin@bank")
            await users.execute(twin, User.leave)
        await users.execute("new", User.call, "twin@bank")
        assert (await check_claims(users.unique, "email")).sound

    async def test_events_of_a_release_without_the_constraint_are_found_and_repaired(
        self, users: Users, store: EventStore
    ) -> None:
        ada = await users.execute("ada", User.call, "ada@bank")
        await store.append([write("ada", ada.position, 1, called("new@bank"), aggregate="user")])
        report = await check_claims(users.unique, "email")
        assert (report.missing.examples, report.stale.examples) == (["user 'ada'"], ["user 'ada'"])
        before = (await store.state()).last
        assert not (await check_claims(users.unique, "email")).sound
        assert (await store.state()).last == before, "a check changes nothing"
        await check_claims(users.unique, "email", repairs=True)
        assert await sound(users)
        assert (await users.execute("bob", User.call, "ada@bank")).version == 1
        with pytest.raises(NotUnique):
            await users.execute("eve", User.call, "new@bank")

    async def test_a_build_beside_writers_leaves_claims_that_fit(
        self, app: str, users: Users, elsewhere: Users, store: EventStore
    ) -> None:
        for n in range(6):
            await store.append([write(f"u-{n}", 0, 0, called(f"u-{n}@bank"), aggregate="user")])
        await check_claims(users.unique, "email", repairs=True)
        for n in range(6):  # once more written without the constraint
            position = await store.last("user", f"u-{n}")
            await store.append([write(f"u-{n}", position, 1, called(f"v-{n}@bank"), aggregate="user")])

        async def move(n: int) -> None:
            for email in (f"u-{n}@bank", f"v-{n}@bank", f"w-{n}@bank", f"v-{n}@bank"):
                await elsewhere.execute(f"u-{n}", User.call, email)

        await asyncio.gather(
            *map(move, range(6)),
            check_claims(users.unique, "email", repairs=True),
            check_claims(users.unique, "email", repairs=True),
        )
        await check_claims(users.unique, "email", repairs=True)
        assert (await check_claims(repository(app, store).unique, "email")).sound

    async def test_an_import_is_accepted_before_the_first_claim_and_refused_after(
        self, app: str, store: EventStore
    ) -> None:
        declared = Repositories(App(app, aggregates=[User]), store)
        users: Users = declared.of(User)

        def imported(*ids: str) -> Sequence[Imported]:
            return [Imported(User, user_id, Called(email=f"{user_id}@bank")) for user_id in ids]

        async def run(source: str, *ids: str) -> int:
            return (await Importer(declared, source).run(imported(*ids), None)).stored

        assert await run("old", "ada", "bob") == 2
        assert await run("old", "ada", "bob") == 0
        with pytest.raises(UniqueNotBuilt):
            await users.execute("eve", User.call, "ada@bank")
        for constraint in ("email", "phone"):
            assert (await check_claims(users.unique, constraint, repairs=True)).built
        with pytest.raises(NotUnique):
            await users.execute("eve", User.call, "ada@bank")
        assert await run("old", "ada", "bob") == 0, "what is stored is stored"
        with pytest.raises(Refused, match="its email is unique, and an import claims no values"):
            await run("more", "eve")

    async def test_a_value_of_a_type_that_cannot_be_unique_is_refused(self, app: str, store: EventStore) -> None:
        users = repository(app, store)
        odd: Any = {"email": lambda _: None, "phone": lambda user: 0.5 if user.email else None}
        for name, by in odd.items():
            users.unique.constraints[name] = replace(users.unique.constraints[name], by=by)
        with pytest.raises(UsageError, match="gave a float that cannot be unique"):
            await users.execute("ada", User.call, "ada@bank")

    async def test_claims_are_events_for_every_reader(self, app: str, users: Users, store: EventStore) -> None:
        await users.execute("ada", User.call, "ada@bank")
        kinds = [record[2].decode().split(".")[1] async for record in store.records()]
        assert sorted(kinds) == [CLAIMS, CLAIMS, CLAIMS, "user"], "both registers, the claim, and the event last"
        assert kinds[-1] == "user"
        assert b"ada@bank" not in b"".join([record[2] + record[4] async for record in store.records()][:-1])
