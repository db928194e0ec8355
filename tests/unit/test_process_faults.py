"""All faults of processes and reactors are reported at once when an app is built."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from typing import Any, Protocol

import pytest

from eventjet import (
    App,
    Deadline,
    DefinitionError,
    Incoming,
    Reaction,
    Recorded,
    Retry,
    Step,
    UsageError,
    after,
    aggregate,
    at,
    do,
    event,
    inbox,
    listens,
    process,
    projection,
    reactor,
)
from eventjet.domain.process import deadlines_of, step_of
from eventjet.examples.bank.account import Account, Deposited, Opened, Withdrawn
from eventjet.examples.bank.read_models import balances
from eventjet.examples.transfer.transfers import Transfer


@event("loan.asked")
class Asked:
    pass


@event("loan.given")
class Given:
    pass


@event("other.happened")
class Elsewhere:
    pass


def loan_of(event: Recorded[Deposited]) -> str:
    return event.aggregate_id


def unannotated(event) -> str:  # type: ignore[no-untyped-def]
    return ""


@process("loan")
class Loan:
    n: int = 0

    def step(self) -> Step[Loan, Asked | Elsewhere] | None:
        return None

    def deadline(self) -> list[Deadline[Account, Asked]]:
        return []

    @listens(loan_of)
    def heard(self, event: Recorded[Deposited | Withdrawn]) -> Asked | None:
        return None

    @listens()
    def heard_as_well(self, event: Recorded[Deposited | Elsewhere]) -> Asked | None:
        return None

    @listens()
    def own(self, event: Recorded[Given]) -> Asked | None:
        return None

    @listens(unannotated)
    def unsaid(self, event: Recorded[Opened]) -> Asked | None:
        return None

    @listens()
    async def waits(self, event: Recorded[Opened]) -> Asked | None:
        return None

    def evolve(self, event: Asked | Given) -> Loan:
        return self


@process("strange")
class Strange:
    def step(self) -> int:
        return 0

    async def deadline(self) -> None: ...

    def evolve(self, event: Elsewhere) -> Strange:
        return self


@aggregate("plain")
class Plain:
    def evolve(self, event: Asked) -> Plain:
        return self


async def named_late(event: Recorded[Opened]) -> str:
    return event.aggregate_id


def named_by_keyword(*, event: Recorded[Deposited]) -> str:
    return event.aggregate_id


@process("unplain")
class Unplain:
    """A process whose functions are async, generators or want keywords, which their annotations do not show."""

    async def step(self) -> None:  # type: ignore[misc]
        yield

    @listens(named_late)  # type: ignore[arg-type]
    def on_opened(self, event: Recorded[Opened]) -> Asked | None:
        return None

    @listens(named_by_keyword)  # type: ignore[arg-type]
    def on_deposited(self, event: Recorded[Deposited]) -> Asked | None:
        return None

    @listens()
    def on_withdrawn(self, event: Recorded[Withdrawn]) -> Iterator[Asked]:
        yield Asked()

    def evolve(self, event: Given) -> Unplain:
        return self


def refusal_of(**arguments: Any) -> str:
    with pytest.raises(DefinitionError) as caught:
        App("bank", **{"aggregates": [Account], **arguments})
    return str(caught.value)


def test_all_faults_of_processes_are_reported_at_once() -> None:
    text = refusal_of(processes=[Loan, Strange, Plain, Unplain])
    for part in (
        "process 'unplain': `step` is async or a generator",
        "Unplain.on_opened: named_late names the process, so it has to be a plain function of one event",
        "Unplain.on_deposited: named_by_keyword names the process, so it has to be a plain function of one event",
        "Unplain.on_withdrawn is not a plain method that takes (self, event)",
        "process 'loan': `step` may record Elsewhere, which its `evolve` does not take",
        "process 'loan': `deadline` returns what is of Account; write Deadline[Loan, …]",
        "Loan.heard and loan_of, which names its process, take different events",
        "Loan.heard_as_well hears Deposited, and so does heard; one listener hears an event",
        "Loan.own hears Given, which is its own; let `step` follow from it",
        "unannotated: its parameter `event` has no annotation",
        "Loan.waits is not a plain method that takes (self, event)",
        "process 'strange': `step` is annotated to return int; write Step[Strange, …] or None",
        "process 'strange': `deadline` is async or a generator",
        "Plain is not a process: decorate it with @process(…)",
    ):
        assert part in text, part


def test_a_process_among_the_aggregates_is_refused() -> None:
    assert "Loan is a process: list it in App(processes=[…])" in refusal_of(aggregates=[Account, Loan])


def test_a_listener_of_an_event_that_no_aggregate_folds_is_refused() -> None:
    assert "Loan.heard_as_well hears Elsewhere, which no aggregate of the app folds" in refusal_of(processes=[Loan])


def test_a_process_without_a_step_is_refused_at_its_declaration() -> None:
    with pytest.raises(DefinitionError, match="return None there if it only listens"):

        @process("idle")
        class Idle:  # pyright: ignore[reportUnusedClass]
            def evolve(self, event: Asked) -> Idle:
                return self


@reactor("Bad Name", revision=0, start=-1, retry=Retry(tries=0, never=ValueError))  # type: ignore[arg-type]
def not_async(event: Recorded[Elsewhere]) -> None:  # type: ignore[arg-type,misc]
    """A handler that is neither async nor has a second parameter."""


@reactor("keyword", revision="2", partitions=1.5, retry=3)  # type: ignore[arg-type]
async def keyword(event: Recorded[Deposited], *, to: Reaction) -> None: ...


@reactor("mails")
async def mails(event: Recorded[Deposited], to: Reaction) -> None: ...


@reactor("mails")
async def more_mails(event, to: Reaction) -> None: ...  # type: ignore[no-untyped-def]


@reactor("typo", start="latest", on_error="skip", partitions=0)  # type: ignore[arg-type]
async def typo(event: Deposited, to: Reaction) -> None:  # type: ignore[arg-type,misc]
    """A handler of an event that is not recorded, either."""


@reactor("stream")
async def streams(event: Recorded[Deposited], to: Reaction) -> AsyncIterator[int]:  # type: ignore[arg-type,misc]
    yield 1


def test_all_faults_of_reactors_are_reported_at_once() -> None:
    text = refusal_of(reactors=[not_async, mails, more_mails, streams, typo, reactor, "receipts", keyword])
    for part in (
        "keyword does not take (event, reaction)",
        "its revision is '2'; give a whole number, 1 or more",
        "it has 1.5 partitions; give a whole number, 1 to 64",
        "its retry is 3; give a Retry(…)",
        "the reactor's name 'Bad Name' is not",
        "not_async is not an `async def`",
        "not_async does not take (event, reaction)",
        "its revision is 0; give a whole number, 1 or more",
        "it starts after position -1",
        "give at least one try",
        "`never` of its retry is <class 'ValueError'>; give a tuple of exception classes",
        "not_async takes Elsewhere, which no aggregate of the app folds",
        "two reactors are called 'mails'",
        "its parameter `event` has no annotation",
        "streams is not an `async def`",
        "receipts is not a reactor",
        'reactor is not a reactor: decorate it with `@reactor("name")`',
        'it starts at \'latest\'; give "new", "beginning" or a position',
        'its on_error is \'skip\'; give "quarantine" or "stop"',
        "it has 0 partitions; give a whole number, 1 to 64",
        "typo is given a `Recorded`: write `event: Recorded[Deposited]`",
    ):
        assert part in text, part


def test_projections_and_reactors_share_their_names() -> None:
    @reactor("balances")
    async def also(event: Recorded[Deposited], to: Reaction) -> None: ...

    assert "a projection and a reactor are both called 'balances'" in refusal_of(
        projections=[balances], reactors=[also]
    )
    assert projection  # the name of a projection is checked, too


@process("alarm")
class Alarm:
    """A process whose deadlines have the fault that `fault` names."""

    fault: str = ""

    def ring(self, at: datetime | None = None) -> Asked:
        return Asked()

    def step(self) -> None:
        return None

    def deadline(self) -> list[Deadline[Alarm, Asked]]:
        noon, second = datetime(2030, 1, 1, 12, tzinfo=UTC), timedelta(seconds=1)
        match self.fault:
            case "time":
                return [at(noon, Alarm.ring), at(datetime.now(UTC) + second, Alarm.ring)]
            case "argument":
                return [after(second, Alarm.ring, at=datetime.now(UTC))]
            case "number":
                return [after(second, Alarm.ring)] * next(COUNT)
            case _:
                return [at(noon, Alarm.ring), after(second, lambda state: Asked())]

    def evolve(self, event: Asked) -> Alarm:
        return self


COUNT = itertools.count(1)


@pytest.mark.parametrize("fault", ["time", "argument", "number"])
def test_a_deadline_that_depends_on_more_than_the_state_is_refused(fault: str) -> None:
    with pytest.raises(UsageError, match=r"Alarm.deadline of the process 'alarm' .*`event.recorded_at`"):
        deadlines_of(Alarm(fault=fault))


def test_a_step_or_a_deadline_that_is_something_else_is_refused() -> None:
    class Unfinished(Alarm):
        def step(self) -> Any:
            return do(Account, "a-1", Account.open, "ada")

        def deadline(self) -> Any:
            return {after(timedelta(1), Alarm.ring)}

    with pytest.raises(UsageError, match=r"Unfinished.step of the process 'alarm' returned an object of the class Req"):
        step_of(Unfinished())
    with pytest.raises(UsageError, match=r"Unfinished.deadline of the process 'alarm' .* the class set. Return what"):
        deadlines_of(Unfinished())
    assert (step_of(Alarm()), step_of(Transfer())) == (None, None)


def test_what_is_no_decision_or_no_error_is_refused_where_it_is_given() -> None:
    request = do(Account, "a-1", Account.open, "ada")
    for give in (
        lambda: do(Account, "a-1", "open"),  # type: ignore[arg-type]
        lambda: request.then(Asked),  # type: ignore[arg-type]
        lambda: request.then_with(Asked()),  # type: ignore[arg-type]
        lambda: after(timedelta(1), Asked()),  # type: ignore[arg-type]
    ):
        with pytest.raises(
            UsageError, match=r"(Asked|class (Asked|str)) is given where a decision belongs. Give a func"
        ):
            give()
    with pytest.raises(UsageError, match=r"`refused` is given ValueError\('x'\) as its error. Give a class"):
        request.then(Alarm.ring).refused(ValueError("x"), Alarm.ring)  # type: ignore[arg-type]


def test_a_deadline_without_a_time_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="2030-01-01 is no datetime with a time zone"):
        at(date(2030, 1, 1), Alarm.ring)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"30 is no timedelta. Give one, as in timedelta\(seconds=30\)"):
        after(30, Alarm.ring)  # type: ignore[arg-type]


def test_deadlines_that_depend_on_the_state_alone_are_accepted() -> None:
    assert len(deadlines_of(Alarm())) == 2


class Mailer:
    """Deps that a reactor may want."""


class SentBy(Protocol):
    def send(self) -> None: ...


@asynccontextmanager
async def mailer() -> AsyncIterator[Mailer]:
    yield Mailer()


@asynccontextmanager
async def undeclared():  # type: ignore[no-untyped-def]
    yield 1


class OwnClient:
    """Deps that are their own context manager, as a client of HTTP is."""

    async def __aenter__(self) -> OwnClient:
        return self

    async def __aexit__(self, *_: object) -> None: ...


class WebClient(OwnClient):
    """Deps that inherit an `__aenter__` annotated with the base class."""


async def wants_below(event: Recorded[Asked], to: Reaction[WebClient]) -> None: ...
async def wants_nothing(event: Recorded[Asked], to: Reaction[None]) -> None: ...
async def wants_mailer(event: Recorded[Asked], to: Reaction[Mailer]) -> None: ...
async def may_want_mailer(event: Recorded[Asked], to: Reaction[Mailer | None]) -> None: ...
async def wants_sent_by(event: Recorded[Asked], to: Reaction[SentBy]) -> None: ...
async def wants_list(event: Recorded[Asked], to: Reaction[list[str]]) -> None: ...
async def takes_message(message: Incoming[Asked], to: Reaction[list[str]]) -> None: ...


@pytest.mark.parametrize(
    ("handle", "deps", "fault"),
    [
        (wants_mailer, None, "wants_mailer wants deps of the type Mailer, and the app has none; give App(deps=…)"),
        (wants_sent_by, None, "wants_sent_by wants deps of the type SentBy, and the app has none"),
        (wants_list, mailer, "wants deps of the type list, and mailer, which App(deps=…) names, opens Mailer"),
        (wants_nothing, None, None),
        (may_want_mailer, None, None),
        (wants_mailer, mailer, None),
        (wants_nothing, mailer, None),
        (wants_sent_by, mailer, None),  # left to a type checker
        (wants_list, undeclared, None),
        (wants_below, WebClient, None),
        (wants_below, OwnClient, "opens OwnClient"),
    ],
)
def test_a_reactor_with_other_deps_than_those_of_the_app_is_refused(handle: Any, deps: Any, fault: str | None) -> None:
    wanting: Any = reactor("wanting")(handle)
    if fault is None:
        assert App("bank", aggregates=[Plain], reactors=[wanting], deps=deps)
    else:
        assert fault in refusal_of(aggregates=[Plain], reactors=[wanting], deps=deps)


def test_an_inbox_with_deps_is_refused_in_an_app_without_deps() -> None:
    taking: Any = inbox("taking", stream="S", subject="s.>")(takes_message)
    assert "takes_message wants deps of the type list, and the app has none" in refusal_of(
        aggregates=[Plain], reactors=[taking]
    )
