"""`@process`: an aggregate that acts by itself, whose next step and deadline are functions of its state. PURE.

Nothing here calls or waits: `step` and `deadline` only return what is to be done. The worker that runs a process makes
both decisions of a step on the newest states and records both in one atomic append.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, dataclass_transform, overload

from eventjet.domain.aggregate import AggregateType, aggregate, check_name
from eventjet.domain.moment import in_utc, later
from eventjet.domain.recorded import Recorded
from eventjet.domain.state import own_copy
from eventjet.domain.subscription import shown_name
from eventjet.errors import DefinitionError, UsageError

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
"""The attribute in which a listener keeps the function that returns the id of its process."""
PROCESS = "__eventjet_process__"
"""The attribute that marks a class as a process."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[S_co, E_co]):
    """The result of the other aggregate's decision in a step, passed to the decision of `then_with`; see `do`."""

    state: S_co
    """The other aggregate's state after its events."""
    events: tuple[E_co, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A decision with its arguments; calls are equal when decision and arguments are equal.

    Raises `UsageError` for a decision that is no function, such as an event or its class.
    """

    decide: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        decide: Any = self.decide
        if isinstance(decide, type) or not callable(decide):
            name = shown_name(decide) if isinstance(decide, type) else f"an object of the class {type(decide).__name__}"
            raise UsageError(
                f"{name} is given where a decision belongs. Give a function that is called with the state, such as "
                "`Account.withdraw`, and its arguments after it."
            )

    @classmethod
    def of(cls, decide: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return cls(decide, args, tuple(sorted(kwargs.items())))

    def on(self, state: Any, *first: Any) -> Any:
        """Return what the decision returns for a state, with `first` before the other arguments."""
        args, kwargs = own_copy((self.args, dict(self.kwargs)), copies_unknown=False)
        return self.decide(state, *first, *args, **kwargs)

    @property
    def name(self) -> str:
        return str(getattr(self.decide, "__name__", self.decide))

    def __str__(self) -> str:
        """Return the name without the arguments, which may be personal."""
        return self.name

    def with_arguments(self) -> str:
        """Return the call with its arguments, for tests, whose values are not personal."""
        arguments = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs)]
        return f"{self.name}({', '.join(arguments)})"


@dataclass(frozen=True, slots=True)
class Request(Generic[T, F]):
    """A decision to be made by another aggregate; `then` adds what the process records together with it."""

    aggregate: Any
    aggregate_id: str
    call: Call

    @overload
    def then(
        self, decide: Callable[Concatenate[S, P], Sequence[E] | None], /, *args: P.args, **kwargs: P.kwargs
    ) -> Step[S, E]: ...
    @overload
    def then(
        self, decide: Callable[Concatenate[S, P], E | Sequence[E] | None], /, *args: P.args, **kwargs: P.kwargs
    ) -> Step[S, E]: ...
    def then(self, decide: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Add the process's own decision, recorded in the same atomic append.

        It returns one event or several, and must record something.
        """
        step: Step[Any, Any] = Step(cast("Request[Any, Any]", self), Call.of(decide, args, kwargs))
        return step

    def then_with(self, decide: Callable[[S, Outcome[T, F]], E | Sequence[E] | None], /) -> Step[S, E]:
        """Do as `then`, for a decision that takes the `Outcome` of the other aggregate."""
        return Step(cast("Request[Any, Any]", self), Call(decide), takes_outcome=True)

    def __str__(self) -> str:
        name = getattr(self.aggregate, "__name__", self.aggregate)
        return f"{name} {self.aggregate_id!r}: {self.call}"


@dataclass(frozen=True, slots=True)
class Step(Generic[S_co, E_co]):
    """A decision of another aggregate and one of the process, in one atomic append; made by `do` and `then`."""

    request: Request[Any, Any]
    done: Call
    """The process's own decision."""
    refusals: tuple[tuple[type[Exception], Call], ...] = ()
    """The process's decisions for errors of the other aggregate's decision; the first error that matches counts."""
    takes_outcome: bool = False
    """Whether `done` takes an `Outcome`."""

    def refused(
        self: Step[S, E], error: type[X], decide: Callable[[S, X], E2 | Sequence[E2] | None], /
    ) -> Step[S, E | E2]:
        """Add what the process decides when the other aggregate's decision raises this domain error.

        Raises `UsageError` for what is no class of exceptions.
        """
        if not (isinstance(error, type) and issubclass(error, Exception)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"`refused` is given {error!r} as its error. Give a class of exceptions, then the decision."
            )
        refusals = (*self.refusals, (error, Call(decide)))
        return cast("Any", Step(self.request, self.done, refusals, self.takes_outcome))

    def after_refusal(self, error: Exception) -> Call | None:
        """Return the decision that follows an error; None if the step has no decision for it."""
        return next((call for kind, call in self.refusals if isinstance(error, kind)), None)


def do(
    target: AggregateType[T, F],
    aggregate_id: str,
    decide: Callable[Concatenate[T, P], F | Sequence[F] | None],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Request[T, F]:
    """Ask an aggregate of the same app for a decision.

    Nothing happens here: `then` makes it a `Step`, which the process's `step` returns and a worker carries out.
    `then_with` passes the `Outcome` on.

    ```python
    request = do(Account, "a-1", Account.withdraw, Decimal(5))
    step = request.then(Transfer.debited).refused(InsufficientFunds, Transfer.failed)
    assert str(step.request) == "Account 'a-1': withdraw"
    ```
    """
    return Request(target, aggregate_id, Call.of(decide, args, kwargs))


@dataclass(frozen=True, slots=True)
class Deadline(Generic[S_co, E_co]):
    """The time at which a process decides without being asked, made by `after` and `at`.

    It holds only as long as the state of the process returns it.
    """

    call: Call
    when: datetime | None = None
    delay: timedelta | None = None

    def due_at(self, last_event: datetime) -> datetime:
        """Return when the deadline is due, in UTC and within Python's range, after an event recorded at this time."""
        return in_utc(self.when) if self.when is not None else later(last_event, cast("timedelta", self.delay))


@overload
def at(
    when: datetime, decide: Callable[Concatenate[S, P], Sequence[E] | None], /, *args: P.args, **kwargs: P.kwargs
) -> Deadline[S, E]: ...
@overload
def at(
    when: datetime, decide: Callable[Concatenate[S, P], E | Sequence[E] | None], /, *args: P.args, **kwargs: P.kwargs
) -> Deadline[S, E]: ...
def at(when: datetime, decide: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Return a deadline at a time, when the process makes `decide`; raises `ValueError` for a time without a zone.

    ```python
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    assert at(noon, Transfer.gave_up).due_at(datetime(2029, 1, 1, tzinfo=UTC)) == noon
    ```
    """
    if not isinstance(when, datetime) or when.utcoffset() is None:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{when} is no datetime with a time zone. Give one, as in datetime(…, tzinfo=UTC).")
    deadline: Deadline[Any, Any] = Deadline(Call.of(decide, args, kwargs), when=when)
    return deadline


@overload
def after(
    delay: timedelta, decide: Callable[Concatenate[S, P], Sequence[E] | None], /, *args: P.args, **kwargs: P.kwargs
) -> Deadline[S, E]: ...
@overload
def after(
    delay: timedelta, decide: Callable[Concatenate[S, P], E | Sequence[E] | None], /, *args: P.args, **kwargs: P.kwargs
) -> Deadline[S, E]: ...
def after(delay: timedelta, decide: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Return a deadline at a delay after the process's last event, by the log's clock, when it makes `decide`.

    Raises `ValueError` for a delay that is no `timedelta`.

    ```python
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    assert after(timedelta(minutes=15), Transfer.try_again).due_at(noon) == noon + timedelta(minutes=15)
    ```
    """
    if not isinstance(delay, timedelta):  # pyright: ignore[reportUnnecessaryIsInstance]  seconds are easily given
        raise ValueError(f"{delay!r} is no timedelta. Give one, as in timedelta(seconds=30).")
    deadline: Deadline[Any, Any] = Deadline(Call.of(decide, args, kwargs), delay=delay)
    return deadline


class Acts(Protocol):
    """A state of a process."""

    def step(self) -> object: ...


class ProcessType(Protocol[S, E]):  # type: ignore[misc]  # pyright: ignore[reportInvalidTypeVarUse]  variance is of the class object
    """The class object of a process, whose `step` records only events that its `evolve` folds."""

    def evolve(self, instance: S, event: E, /) -> object: ...
    def step(self, instance: S, /) -> Step[S, E] | None: ...


class ListenerDecorator(Protocol[H]):
    """A decorator that declares a listener to the events that its `by` takes."""

    def __call__(self, handler: Callable[[S, Recorded[H]], E], /) -> Callable[[S, Recorded[H]], E]: ...


class AnyListenerDecorator(Protocol):
    """A decorator that declares a listener to the events in the listener's own annotation."""

    def __call__(self, handler: Callable[[S, Recorded[H]], E], /) -> Callable[[S, Recorded[H]], E]: ...


@overload
def listens() -> AnyListenerDecorator: ...
@overload
def listens(by: Callable[[Recorded[H]], str | None], /) -> ListenerDecorator[H]: ...
def listens(by: Any = None, /) -> Any:
    """Make the decorated decision on the process that `by` returns, once for each of these events and in their order.

    `by` is a named, annotated, pure function of the event that returns the id of a process, or None for no process.
    Without `by`, it is the process with the id of the event's aggregate. The decision may return None: then nothing
    follows from that event. Raises `DefinitionError` for a `by` that does not take one argument.

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

    if inspect.isfunction(by) and len(inspect.signature(by).parameters) != 1:  # a listener itself, without parentheses
        fault = "write `@listens()`, or `@listens(by)` with a function of the event that says whose it is"
        raise DefinitionError([f"{getattr(by, '__qualname__', by)}: {fault}"])

    def mark(handler: Any, /) -> Any:
        setattr(handler, LISTENS, by or same_id)
        return handler

    return mark


def same_id(event: Recorded[Any]) -> str:
    """Return the id of the event's aggregate, as `listens()` does without `by`."""
    return event.aggregate_id


@dataclass(frozen=True, slots=True)
class Listener:
    """A decision of a process that events of other aggregates trigger."""

    handler: Callable[[Any, Recorded[Any]], Any]
    by: Callable[[Recorded[Any]], str | None]
    events: tuple[type, ...]

    @property
    def name(self) -> str:
        return str(getattr(self.handler, "__name__", self.handler))


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """The resolved declaration of a process in an app."""

    name: str
    revision: int
    events: tuple[type, ...]
    """The events that the process itself records."""
    listeners: tuple[Listener, ...]
    has_deadlines: bool

    def listener_to(self, event: type) -> Listener | None:
        return next((listener for listener in self.listeners if event in listener.events), None)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def process(name: str, /, *, snapshot_every: int | None = None, revision: int = 1) -> Callable[[type[C]], type[C]]:
    """Make the class a process: an `@aggregate` with a `step`, optionally a `deadline` and methods that `listens`.

    List it in `App(processes=[…])`. `step(self) -> Step[…] | None` returns what to do next, or None for nothing.
    `deadline(self)` returns one `Deadline`, several, or None. Both are pure and may be called at any time. `deadline`
    is called twice on each state; an instance whose deadlines differ then is quarantined. Raises `DefinitionError`
    without a `step`.

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

    check_name(name, "process", "transfer")

    def declare(cls: type[C]) -> type[C]:
        process_class = aggregate(name, snapshot_every=snapshot_every, revision=revision)(cls)
        if not callable(getattr(process_class, "step", None)):
            raise DefinitionError([f"{cls.__qualname__} has no `step(self)`; return None there if it only listens"])
        setattr(process_class, PROCESS, name)
        return process_class

    return declare


def is_process(cls: Any) -> bool:
    """Return whether a class is declared as a process."""
    return getattr(cls, PROCESS, None) is not None


def heard_prefix(name: str) -> str:
    """Return how the command ids begin under which a process records what it hears; a position follows."""
    return f"{name}.heard."


def listeners_of(cls: type) -> list[tuple[str, Callable[..., Any]]]:
    """Return the methods of a process that listen, by name."""
    return [(name, member) for name, member in inspect.getmembers(cls, inspect.isfunction) if hasattr(member, LISTENS)]


def step_of(state: Any) -> Step[Any, Any] | None:
    """Return the next step of a state, or None; raises `UsageError` if its `step` returns something else."""
    step: Any = own_copy(state).step()
    if step is None or isinstance(step, Step):
        return cast("Step[Any, Any] | None", step)
    raise UsageError(
        f"{_function_name(state, 'step')} returned an object of the class {type(step).__qualname__}. Return a step, "
        "`do(…).then(…)`, or None."
    )


def deadlines_of(state: Any) -> tuple[Deadline[Any, Any], ...]:
    """Return the deadlines of a state; empty when its class has no `deadline`.

    `deadline` is called twice on the state. Raises `UsageError` if the answers differ: a deadline that asks the clock
    would be another one at each look, and never come. Raises `UsageError`, too, if it returns something else.
    """
    if getattr(state, "deadline", None) is None:
        return ()
    deadlines, again = _deadlines(state), _deadlines(state)
    if len(deadlines) == len(again) and all(map(_is_equal, deadlines, again)):
        return deadlines
    raise UsageError(
        f"{_function_name(state, 'deadline')} gives another deadline each time it is called on one state, as when it "
        "asks the clock or chance. Have it look at the state alone: keep a time in the state, such as the "
        "`event.recorded_at` of an event that the process listens to, or count from its last event with `after`."
    )


def _deadlines(state: Any) -> tuple[Deadline[Any, Any], ...]:
    answer = own_copy(state).deadline()
    if answer is None:
        return ()
    deadlines: tuple[Any, ...] = tuple(cast("Any", answer)) if isinstance(answer, list | tuple) else (answer,)
    for deadline in deadlines:
        if not isinstance(deadline, Deadline):
            raise UsageError(
                f"{_function_name(state, 'deadline')} returned an object of the class {type(deadline).__qualname__}. "
                "Return what `at` or `after` makes, a list of these, or None."
            )
    return deadlines


def _function_name(state: Any, function: str) -> str:
    cls = cast("type[Any]", type(state))
    return f"{cls.__qualname__}.{function} of the process {getattr(cls, PROCESS, cls.__name__)!r}"


def _is_equal(deadline: Deadline[Any, Any], other: Deadline[Any, Any]) -> bool:
    """Return whether two deadlines are at the same time, with equal arguments; a lambda is another one each time."""
    if (deadline.when, deadline.delay, deadline.call.name) != (other.when, other.delay, other.call.name):
        return False
    values, other_values = (
        [value for value in (*call.args, *dict(call.kwargs).values()) if type(value).__eq__ is not object.__eq__]
        for call in (deadline.call, other.call)
    )
    return values == other_values
