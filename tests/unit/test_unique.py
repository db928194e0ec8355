"""Unique values: which values are allowed, how claims are named, and that claims follow the states."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, date, datetime
from enum import StrEnum
from typing import Any, Literal
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventjet import App, Step, aggregate, do, event, process, unique
from eventjet.codec.headers import RawRecord
from eventjet.commands.execute import transact
from eventjet.commands.repository import Repositories
from eventjet.commands.unique import check_claims
from eventjet.domain.identity import ENCODED_MAX, encode_id
from eventjet.domain.unique import CLAIMS, VALUES_MAX, claim_id, claims_of, uniques_of
from eventjet.errors import ConcurrencyConflict, DefinitionError, NotUnique, UniqueNotBuilt, UsageError
from eventjet.log.memory import MemoryStore
from eventjet.log.store import Append
from eventjet.serving.service import problem
from eventjet.testing import world
from eventjet.testing.store_contract import write
from tests.contracts.unique_contract import User, called, repository

values: Any = st.recursive(
    st.text(alphabet=st.characters(exclude_categories=["Cs"])) | st.integers() | st.uuids() | st.dates(),
    lambda parts: st.lists(parts, max_size=3).map(tuple),
    max_leaves=1,
)


@given(values, values)
def test_two_values_have_one_claim_exactly_if_they_are_equal_and_of_one_type(value: Any, other: Any) -> None:
    same = (type(value), value) == (type(other), other)
    assert (claim_id("user", "email", value) == claim_id("user", "email", other)) == same


def test_the_id_of_a_claim_can_be_computed_in_other_languages() -> None:
    # printf '["user","email",["text","ada@bank"]]' | sha256sum
    assert claim_id("user", "email", "ada@bank") == "user-email-5c2c7589440b337a614521759b94be09"
    assert claim_id("user", "email", ("de", 7)) != claim_id("user", "email", ("de", "7"))
    assert claim_id("user", "email", "x") != claim_id("user", "phone", "x")


def test_the_longest_names_of_a_claim_fit_into_a_subject() -> None:
    assert len(encode_id(claim_id("a" * 63, "b" * 63, "x"))) <= ENCODED_MAX


def test_a_member_of_a_text_enum_has_the_claim_of_its_text() -> None:
    class Country(StrEnum):
        DE = "de"

    assert claim_id("user", "land", Country.DE) == claim_id("user", "land", "de")


_NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("odd", [True, 0.5, _NOW, b"x", ("a", ("b",)), ("a", None), "\ud800", [], {}])
def test_a_value_without_a_stable_comparison_is_refused(odd: Any) -> None:
    with pytest.raises(UsageError, match=r"constraint 'email' of 'user' gave a \w+ that cannot be unique"):
        claim_id("user", "email", odd)


def test_values_of_different_types_have_different_claims() -> None:
    day = date(2026, 1, 1)
    distinct: list[Any] = [day, day.isoformat(), 1, "1", (1,), ("1",), UUID(int=1), str(UUID(int=1)), ()]
    assert len({claim_id("user", "email", value) for value in distinct}) == len(distinct)


@event("odd.done")
class Done:
    pass


def test_an_app_names_every_fault_of_its_constraints() -> None:
    @aggregate("odd")
    class Odd:
        n: int = 0

        @unique("Sum")
        def sum(self) -> int:
            return self.n

        @unique("twice")
        def once(self) -> int:
            return self.n

        @unique("twice")
        def again(self, of: int) -> int:
            return self.n + of

        def evolve(self, event: Done) -> Any:
            return self

    @aggregate("eventjet_unique")
    class Mine:
        def evolve(self, event: Done) -> Any:
            return self

    @process("late")
    class Late:
        @unique("one")
        def one(self) -> int:
            return 1

        def step(self) -> None:
            return None

        def evolve(self, event: Done) -> Any:
            return self

    with pytest.raises(DefinitionError) as caught:
        App("odd", aggregates=[Odd, Mine], processes=[Late])
    faults = "\n".join(caught.value.faults)
    for fault in (
        "the constraint 'Sum' of 'odd' is not called [a-z][a-z0-9_]*",
        "'odd' has two constraints called 'twice'",
        "Odd.again has to be a method that takes no arguments",
        "the aggregate's name 'eventjet_unique' is eventjet's own",
        "the process 'late' has unique values",
    ):
        assert fault in faults


def test_a_response_of_a_service_does_not_name_the_holder_of_a_value() -> None:
    response = problem(NotUnique("user", "email", "eve", "ada"), [NotUnique])
    assert (response.status, response.type) == (409, "NotUnique")
    assert "ada" not in response.detail + str(response.more)


@pytest.mark.parametrize(
    ("races", "is_unseen", "says"),
    [
        (1, False, "Another was quicker."),
        (7, False, "Others were quicker, 7 times."),
        (3, True, "The log refuses it as if another was quicker."),
    ],
)
def test_a_response_of_a_service_says_how_often_others_were_quicker(races: int, is_unseen: bool, says: str) -> None:
    response = problem(ConcurrencyConflict("bank.account.a-1", 3, races=races, is_unseen=is_unseen))
    assert (response.status, response.detail) == (409, f"{says} Try again.")


# The model: no two users have the same e-mail, whatever is tried and in whatever order.

_USERS, _EMAILS = ("ada", "bob", "eve"), ("x@bank", "X@bank", "y@bank", "z@bank")
_call = st.tuples(st.just("call"), st.sampled_from(_USERS), st.sampled_from(_EMAILS))
_leave = st.tuples(st.just("leave"), st.sampled_from(_USERS), st.just(""))
_swap = st.tuples(st.just("swap"), st.permutations(_USERS).map(lambda two: tuple(two[:2])), st.sampled_from(_EMAILS))
Act = tuple[Literal["call", "leave", "swap"], Any, str]


@settings(max_examples=60, deadline=None)
@given(st.lists(_call | _leave | _swap, max_size=12), st.booleans())
def test_claims_equal_the_values_of_the_states(acts: list[Act], forgetful: bool) -> None:
    asyncio.run(_follow(acts, forgetful))


async def _follow(acts: list[Act], forgetful: bool) -> None:
    store = MemoryStore("bank")
    users = repository("bank", store)
    model: dict[str, str] = {}
    for act, user, email in acts:
        if forgetful:
            users = repository("bank", store)
        changed = dict(model)
        match act:
            case "call":
                changed[user] = email
                work: Any = users.execute(user, User.call, email)
            case "leave":
                changed.pop(user, None)
                work = users.execute(user, User.leave)
            case "swap":
                giver, taker = user
                changed.pop(giver, None)
                changed[taker] = email
                taker_decision = users.decide(taker, lambda user, email=email: [*user.leave(), User().call(email)])
                work = transact(store, [users.decide(giver, User.leave), taker_decision])
        if len({address.casefold() for address in changed.values()}) == len(changed):
            await work
            model = changed
        else:
            with pytest.raises(NotUnique) as caught:
                await work
            assert model[str(caught.value.holder)].casefold() == email.casefold()
    assert {user: (await users.load(user)).email for user in _USERS} == {user: model.get(user) for user in _USERS}
    report = await check_claims(repository("bank", store).unique, "email")
    assert report.sound
    assert report.values == len(model)


def test_the_constraints_of_a_class_are_listed_by_name_and_allow_the_most_values() -> None:
    assert [constraint.name for constraint in uniques_of(User)] == ["email", "phone"]
    _, phone = uniques_of(User)
    assert len(claims_of("user", phone, User(phones=tuple(map(str, range(VALUES_MAX)))))) == VALUES_MAX


class Lagging(MemoryStore):
    """A store whose claims come from a replica that is one record behind the leader."""

    lags = 0

    async def pages(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        page = await self.history(aggregate, aggregate_id, after=after)
        if aggregate == CLAIMS and self.lags:
            self.lags -= 1
            page = page[:-1]
        yield page


async def test_a_claim_from_a_lagging_replica_refuses_no_command() -> None:
    store = Lagging("bank")
    users, elsewhere = repository("bank", store), repository("bank", store)
    await users.execute("ada", User.call, "ada@bank")
    await users.execute("bob", User.call, "bob@bank")
    await users.execute("ada", User.leave)
    assert await elsewhere.unique.is_built("email")
    store.lags = 3
    assert (await elsewhere.execute("eve", User.call, "ada@bank")).version == 1
    assert store.lags == 0
    with pytest.raises(NotUnique):
        await elsewhere.execute("late", User.call, "ada@bank")


# A step of a process asks for a value that another aggregate has: the process may declare what follows.


@event("hire.begun")
class Begun:
    email: str


@event("hire.ended")
class Ended:
    why: str = ""


@process("hire")
class Hire:
    email: str | None = None

    def begin(self, email: str) -> Begun:
        return Begun(email=email)

    def done(self) -> Ended:
        return Ended()

    def refused(self, error: NotUnique) -> Ended:
        return Ended(why=f"{error.constraint} of {error.holder}")

    def step(self) -> Step[Hire, Ended] | None:
        if self.email is None:
            return None
        return (
            do(User, self.email.partition("@")[0], User.call, self.email)
            .then(Hire.done)
            .refused(NotUnique, Hire.refused)
        )

    def evolve(self, event: Begun | Ended) -> Hire:
        return Hire(email=event.email if isinstance(event, Begun) else None)


async def test_a_process_declares_what_follows_when_a_value_is_taken() -> None:
    app = App("bank", aggregates=[User], processes=[Hire])
    async with world(app, now=datetime(2026, 1, 1, tzinfo=UTC)) as w:
        users, hires = w.jet.repository(User), w.jet.repository(Hire)
        await users.execute("first", User.call, "eve@bank")
        await hires.execute("h-1", Hire.begin, "eve@bank")
        await hires.execute("h-2", Hire.begin, "bob@bank")
        await w.settle()
        last_events = [(await hires.history(process_id))[-1].data for process_id in ("h-1", "h-2")]
        assert last_events == [Ended(why="email of first"), Ended()]
        assert [(await users.load(user)).email for user in ("eve", "bob")] == [None, "bob@bank"]


async def test_a_torn_save_leaves_a_stale_claim_and_never_a_missing_claim() -> None:
    store = MemoryStore("bank")
    await repository("bank", store).execute("ada", User.call, "ada@bank")
    torn = MemoryStore("bank")
    torn._records = store._records[:-1]  # pyright: ignore[reportPrivateUsage]
    torn._last = {record[2].decode(): record[0] for record in torn._records}  # pyright: ignore[reportPrivateUsage]
    users = repository("bank", torn)
    with pytest.raises(NotUnique):
        await users.execute("eve", User.call, "ada@bank")
    assert (await check_claims(users.unique, "email")).stale.examples == ["user 'ada'"]
    await check_claims(users.unique, "email", repairs=True)
    assert (await users.execute("eve", User.call, "ada@bank")).version == 1


class Interrupted(MemoryStore):
    """A store that runs `meanwhile` once before its next read of a claim or its next save."""

    meanwhile: Callable[[], Awaitable[object]] | None = None
    before = ""

    async def _let_in(self, before: str) -> None:
        if self.meanwhile is not None and before == self.before:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()

    async def pages(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        if aggregate == CLAIMS:
            await self._let_in("a claim")
        async for page in super().pages(aggregate, aggregate_id, after=after):
            yield page

    async def append(self, writes: Sequence[Append]) -> int:
        await self._let_in("a save")
        return await super().append(writes)


@pytest.mark.parametrize("before", ["a claim", "a save"])
async def test_a_repair_does_not_claim_a_value_that_is_given_up_meanwhile(before: str) -> None:
    store = Interrupted("bank")
    users = repository("bank", store)
    await store.append([write("ada", 0, 0, called("ada@bank"), aggregate="user")])
    store.before, store.meanwhile = before, lambda: repository("bank", store).execute("ada", User.leave)
    report = await check_claims(users.unique, "email", repairs=True)
    assert store.meanwhile is None
    assert (report.built, report.missing.count) == (True, 0)
    assert (await check_claims(repository("bank", store).unique, "email")).sound
    assert (await users.execute("eve", User.call, "ada@bank")).version == 1


async def test_remembered_claims_are_dropped_when_the_log_is_replaced() -> None:
    class Replaced:
        def __init__(self) -> None:
            self.inner = MemoryStore("bank")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    store: Any = Replaced()
    declared = Repositories(App("bank", aggregates=[User]), store)
    for name in ("ada", "eve"):
        await declared.of(User).execute(name, User.call, f"{name}@bank")
    store.inner = MemoryStore("bank")
    await store.append([write("bob", 0, 0, called("bob@bank"), aggregate="user")])
    declared.forget()
    with pytest.raises(UniqueNotBuilt):
        await declared.of(User).execute("eve", User.call, "bob@bank")
