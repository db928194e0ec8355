"""`@process`: an aggregate that acts by itself. What it does next, and until when, are functions of its state. PURE.

A process asks nobody and waits for nothing here: `step` and `deadline` only say what is to be done. Whoever runs it
decides on the newest states and records both sides of a step in one atomic append.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, dataclass_transform, overload

from eventjet.domain.aggregate import AggregateType, aggregate
from eventjet.domain.decision import check_decision
from eventjet.domain.moment import in_utc, later
from eventjet.domain.recorded import Recorded
from eventjet.domain.state import own_copy
from eventjet.domain.subscription import shown_name
from eventjet.errors import DefinitionError

C = TypeVar("C")
T = TypeVar("T")
F = TypeVar("F")
S = TypeVar("S")
E = TypeVar("E")
S_co = TypeVar("S_co", covariant=True)
E_co = TypeVar("E_co", covariant=True)
E2 = TypeVar("E2")
H = TypeVar("H")
X = TypeVar("X", bound=Exception)
P = ParamSpec("P")

LISTENS = "__eventjet_listens__"
"""Where a listener keeps the function that names its process."""
PROCESS = "__eventjet_process__"
"""The mark of a class that is a process."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[S_co, E_co]):
    """What a step did to the other aggregate, for a decision that wants to know: see `do`."""

    state: S_co
    """After its events."""
    events: tuple[E_co, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A decision with its arguments; equal when it would decide the same."""

    decide: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, decide: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return cls(decide, args, tuple(sorted(kwargs.items())))

    def on(self, state: Any, *first: Any) -> Any:
        """What is decided on a state, given `first` before the other arguments."""
        args, kwargs = own_copy((self.args, dict(self.kwargs)), whole=False)
        return self.decide(state, *first, *args, **kwargs)

    @property
    def name(self) -> str:
        return str(getattr(self.decide, "__name__", self.decide))

    def __str__(self) -> str:
        """Without its arguments, which may be anybody's."""
        return self.name

    def whole(self) -> str:
        """With its arguments: for tests, whose values are nobody's."""
        told = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs)]
        return f"{self.name}({', '.join(told)})"


@dataclass(frozen=True, slots=True)
class Asked(Generic[T, F]):
    """A decision asked of another aggregate; `then` says what the process records together with it."""

    aggregate: Any
    aggregate_id: str
    call: Call

    @overload
    def then(
        self, decide: Callable[Concatenate[S, P], Sequence[E]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Step[S, E]: ...
    @overload
    def then(
        self, decide: Callable[Concatenate[S, P], E | None], /, *args: P.args, **kwargs: P.kwargs
    ) -> Step[S, E]: ...
    def then(self, decide: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The process's own decision, recorded in the same atomic append; it must record something."""
        made: Step[Any, Any] = Step(cast("Asked[Any, Any]", self), Call.of(decide, args, kwargs))
        return made

    def then_with(self, decide: Callable[[S, Outcome[T, F]], E | None], /) -> Step[S, E]:
        """As `then`, for a decision that is given what the other aggregate recorded."""
        return Step(cast("Asked[Any, Any]", self), Call(decide), tells=True)

    def __str__(self) -> str:
        name = getattr(self.aggregate, "__name__", self.aggregate)
        return f"{name} {self.aggregate_id!r}: {self.call}"


@dataclass(frozen=True, slots=True)
class Step(Generic[S_co, E_co]):
    """What `do` and `then` make: a decision of another aggregate and one of the process, in one atomic append."""

    asked: Asked[Any, Any]
    done: Call
    """The process's own decision."""
    refusals: tuple[tuple[type[Exception], Call], ...] = ()
    """What it decides when the other's decision raises; the first error that matches counts."""
    tells: bool = False
    """Whether `done` is given an `Outcome`."""

    def refused(self: Step[S, E], error: type[X], decide: Callable[[S, X], E2 | None], /) -> Step[S, E | E2]:
        """What the process records when the other aggregate's decision raises this error of the domain."""
        refusals = (*self.refusals, (error, Call(decide)))
        return cast("Any", Step(self.asked, self.done, refusals, self.tells))

    def after_refusal(self, error: Exception) -> Call | None:
        """The decision that follows an error; None where the step names none."""
        return next((call for kind, call in self.refusals if isinstance(error, kind)), None)


def do(
    target: AggregateType[T, F],
    aggregate_id: str,
    decide: Callable[Concatenate[T, P], F | Sequence[F] | None],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Asked[T, F]:
    """Ask an aggregate of the same app for a decision.

    Nothing happens here: a `step` returns what `then` makes of it, a `Step`, and a worker carries that out. `then_with`
    hands on the `Outcome`. Raises `UsageError` for what is no decision.

    ```python
    asked = do(Account, "a-1", Account.withdraw, Decimal(5))
    step = asked.then(Transfer.debited).refused(InsufficientFunds, Transfer.failed)
    assert str(step.asked) == "Account 'a-1': withdraw"
    ```
    """
    check_decision(target, decide, aggregate_id)
    return Asked(target, aggregate_id, Call.of(decide, args, kwargs))


@dataclass(frozen=True, slots=True)
class Deadline(Generic[S_co, E_co]):
    """What `after` and `at` make: when a process decides unasked. It comes and goes with the state that names it."""

    call: Call
    when: datetime | None = None
    delay: timedelta | None = None

    def due_at(self, last_event: datetime) -> datetime:
        """When it is due, in UTC, given when the process's last event was recorded.

        Where Python has no such time, it is the first or the last there is: the past is due, the future is not.
        """
        return in_utc(self.when) if self.when is not None else later(last_event, cast("timedelta", self.delay))


def at(
    when: datetime, decide: Callable[Concatenate[S, P], E | None], /, *args: P.args, **kwargs: P.kwargs
) -> Deadline[S, E]:
    """A deadline at a time, which needs a zone; raises `ValueError` without one.

    ```python
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    assert at(noon, Transfer.gave_up).due_at(datetime(2029, 1, 1, tzinfo=UTC)) == noon
    ```
    """
    if when.utcoffset() is None:
        raise ValueError(f"{when.isoformat()} has no time zone. Give a time with its zone.")
    return Deadline(Call.of(decide, args, kwargs), when=when)


def after(
    delay: timedelta, decide: Callable[Concatenate[S, P], E | None], /, *args: P.args, **kwargs: P.kwargs
) -> Deadline[S, E]:
    """A deadline so long after the process's last event, by the log's clock.

    ```python
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    assert after(timedelta(minutes=15), Transfer.try_again).due_at(noon) == noon + timedelta(minutes=15)
    ```
    """
    return Deadline(Call.of(decide, args, kwargs), delay=delay)


class ProcessType(Protocol[S, E]):  # type: ignore[misc]  # pyright: ignore[reportInvalidTypeVarUse]  variance is of the class object
    """The class object of a process: its events and its steps fit together."""

    def evolve(self, instance: S, event: E, /) -> object: ...
    def step(self, instance: S, /) -> Step[S, E] | None: ...


class Hears(Protocol[H]):
    """Declares a listener to some events."""

    def __call__(self, handler: Callable[[S, Recorded[H]], E], /) -> Callable[[S, Recorded[H]], E]: ...


class HearsAny(Protocol):
    """Declares a listener to whatever it is annotated with."""

    def __call__(self, handler: Callable[[S, Recorded[H]], E], /) -> Callable[[S, Recorded[H]], E]: ...


@overload
def listens() -> HearsAny: ...
@overload
def listens(by: Callable[[Recorded[H]], str | None], /) -> Hears[H]: ...
def listens(by: Any = None, /) -> Any:
    """The decorated decision is made on the process that `by` names, once for each of these events and in their order.

    `by` is a named, annotated, pure function; None means that no process is meant. Without it, it is the process with
    the id of the aggregate whose event it is. The decision may return None: then nothing follows from that event.
    Raises `DefinitionError` for a `by` that is no function of an event.

    ```python
    @event("greeting.noted")
    class Noted:
        account: str

    @process("greeting")
    class Greeting:
        account: str | None = None

        @listens()
        def note(self, event: Recorded[Opened]) -> Noted | None:
            return None if self.account else Noted(account=event.aggregate_id)

        def step(self) -> None:
            return None

        def evolve(self, event: Noted) -> Greeting:
            return replace(self, account=event.account)

    bank = App("bank", aggregates=[Account], processes=[Greeting], upcasters=[withdrawn_has_a_reason])
    async with world(bank, now=datetime(2030, 1, 1, tzinfo=UTC)) as there:
        await there.jet.repository(Account).execute("a-1", Account.open, "ada")
        await there.settle()
        assert (await there.jet.repository(Greeting).load("a-1")).account == "a-1"
    ```
    """

    if by is not None and not _takes_an_event_alone(by):
        fault = "write `@listens()`, or `@listens(by)` with a function of the event that says whose it is"
        raise DefinitionError([f"{shown_name(by)}: {fault}"])

    def mark(handler: Any, /) -> Any:
        setattr(handler, LISTENS, by or same_id)
        return handler

    return mark


def _takes_an_event_alone(by: Any) -> bool:
    """Whether it may name a process, and is no listener whose decorator was left without parentheses."""
    if not callable(by):
        return False
    try:
        parameters = inspect.signature(by).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return True
    return len([one for one in parameters if one.default is one.empty]) == 1


def same_id(event: Recorded[Any]) -> str:
    """The correlation of `listens()`."""
    return event.aggregate_id


@dataclass(frozen=True, slots=True)
class Listener:
    """One decision of a process that others' events lead to."""

    handler: Callable[[Any, Recorded[Any]], Any]
    by: Callable[[Recorded[Any]], str | None]
    events: tuple[type, ...]

    @property
    def name(self) -> str:
        return str(getattr(self.handler, "__name__", self.handler))


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process as an app has resolved it."""

    name: str
    revision: int
    events: tuple[type, ...]
    """Its own."""
    listeners: tuple[Listener, ...]
    has_deadlines: bool

    def listener_to(self, event: type) -> Listener | None:
        return next((listener for listener in self.listeners if event in listener.events), None)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def process(name: str, /, *, snapshot_every: int | None = None, revision: int = 1) -> Callable[[type[C]], type[C]]:
    """As `@aggregate`, with a `step`, perhaps a `deadline`, and methods that `listens`. Listed in `App(processes=[…])`.

    `step(self) -> Step[…] | None` says what to do next; None is rest. `deadline(self)` says until when: one `Deadline`,
    several, or None. Both are pure, and called whenever somebody wants to know. Raises `DefinitionError` without a
    `step`.

    ```python
    @event("gift.asked")
    class GiftAsked:
        account: str

    @event("gift.given")
    class GiftGiven:
        pass

    @process("gift")
    class Gift:
        account: str | None = None

        def ask(self, account: str) -> GiftAsked:
            return GiftAsked(account=account)

        def give(self) -> GiftGiven:
            return GiftGiven()

        def step(self) -> Step[Gift, GiftGiven] | None:
            if self.account is None:
                return None
            return do(Account, self.account, Account.deposit, Decimal(5)).then(Gift.give)

        def evolve(self, event: GiftAsked | GiftGiven) -> Gift:
            return replace(self, account=event.account if isinstance(event, GiftAsked) else None)

    asked = story(Gift).given(GiftAsked(account="a-1"))
    asked.does(Account, "a-1", Account.deposit, Decimal(5)).done().then(GiftGiven()).rests()
    ```
    """

    def declare(cls: type[C]) -> type[C]:
        made = aggregate(name, snapshot_every=snapshot_every, revision=revision)(cls)
        if not callable(getattr(made, "step", None)):
            raise DefinitionError([f"{cls.__qualname__} has no `step(self)`; return None there if it only listens"])
        setattr(made, PROCESS, name)
        return made

    return declare


def is_process(cls: Any) -> bool:
    """Whether a class is declared as a process."""
    return getattr(cls, PROCESS, None) is not None


def listeners_of(cls: type) -> list[tuple[str, Callable[..., Any]]]:
    """The methods of a process that listen, by name."""
    return [(name, member) for name, member in inspect.getmembers(cls, inspect.isfunction) if hasattr(member, LISTENS)]


def deadlines_of(state: Any) -> tuple[Deadline[Any, Any], ...]:
    """What a state says; none when its class has no `deadline`."""
    deadline = getattr(state, "deadline", None)
    told = None if deadline is None else own_copy(state).deadline()
    if told is None:
        return ()
    return tuple(cast("Sequence[Any]", told)) if isinstance(told, list | tuple) else (told,)
