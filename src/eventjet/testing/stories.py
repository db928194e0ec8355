"""Tests of a process: given its history, which step it takes next, how the step ended, and what it recorded.

The types allow `then` only after something happened, and `done` and `refused` only after a step was asserted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from eventjet.codec.catalog import Catalog
from eventjet.commands.execute import recorded_events
from eventjet.domain.aggregate import AggregateType, aggregate_info
from eventjet.domain.process import (
    Call,
    Deadline,
    Outcome,
    ProcessType,
    Request,
    Step,
    deadlines_of,
    is_process,
    step_of,
)
from eventjet.domain.recorded import Recorded, own_event
from eventjet.domain.state import own_copy
from eventjet.domain.subscription import shown_name
from eventjet.errors import DefinitionError
from eventjet.testing.scenarios import as_read, as_stored, check_recorded, check_taken, checked_catalog, folded

S = TypeVar("S")
E = TypeVar("E")
T = TypeVar("T")
F = TypeVar("F")
H = TypeVar("H")
P = ParamSpec("P")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Story(Generic[S, E]):
    """A process with its history so far, at rest or about to take a step."""

    state: S
    _catalog: Catalog

    def given(self, *events: E) -> Story[S, E]:
        """Return the process with these events added to its history."""
        return Story(folded(self.state, events, self._catalog), self._catalog)

    def when(
        self, decide: Callable[Concatenate[S, P], E | Sequence[E] | None], /, *args: P.args, **kwargs: P.kwargs
    ) -> Happened[S, E]:
        """Execute one of the process's own decisions."""
        return self._happened(decide(own_copy(self.state), *args, **kwargs))

    def hears(
        self, listener: Callable[[S, Recorded[H]], E | Sequence[E] | None], event: Recorded[H], /
    ) -> Happened[S, E]:
        """Give an event of another aggregate to one of the process's listeners.

        Raises `UsageError` for an event that the listener's annotation does not name.
        """
        check_taken(listener, 1, event.data)
        return self._happened(listener(own_copy(self.state), own_event(as_read(event))))

    def does(
        self,
        target: AggregateType[T, F],
        aggregate_id: str,
        decide: Callable[Concatenate[T, P], F | Sequence[F] | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Doing[S, E]:
        """Assert that the process's next step is this decision of another aggregate."""
        step = step_of(self.state)
        if step is None:
            raise AssertionError(f"it rests in {self.state!r}")
        expected: Request[Any, Any] = Request(cast("Any", target), aggregate_id, Call.of(decide, args, kwargs))
        if step.request != expected:
            raise AssertionError(f"it asks {_request_text(step.request)}\nexpected {_request_text(expected)}")
        return Doing(self, step)

    def rests(self) -> Story[S, E]:
        """Assert that the process has no next step."""
        if (step := step_of(self.state)) is not None:
            raise AssertionError(f"it does not rest: it asks {_request_text(step.request)}")
        return self

    def waits_until(self, when: datetime, *, last_event: datetime | None = None) -> Story[S, E]:
        """Assert that the process's earliest deadline is at this time.

        `last_event` is the time at which its last event was recorded, from which `after` counts.
        """
        due = [at for at, _ in self._deadlines(last_event)]
        if not due or due[0] != when:
            times = ", ".join(at.isoformat() for at in due) or "none"
            raise AssertionError(f"its deadlines: {times}\nexpected the earliest at {when.isoformat()}")
        return self

    def waits_for(self, delay: timedelta) -> Story[S, E]:
        """Assert that the process's earliest deadline is this long after its last event."""
        return self.waits_until(_EPOCH + delay, last_event=_EPOCH)

    def waits_for_nothing(self) -> Story[S, E]:
        """Assert that the process has no deadline."""
        if deadlines := deadlines_of(self.state):
            raise AssertionError(f"it waits: {deadlines!r}")
        return self

    def due(self, at: datetime, *, last_event: datetime | None = None) -> Happened[S, E]:
        """Let time pass until `at`, and make the decision of the earliest deadline, which must be due by then.

        `last_event` is as in `waits_until`.
        """
        deadlines = self._deadlines(last_event)
        if not deadlines or deadlines[0][0] > at:
            raise AssertionError(f"nothing is due at {at.isoformat()}: {[deadline for _, deadline in deadlines]!r}")
        return _called(self, deadlines[0][1].call)

    def due_after(self, delay: timedelta) -> Happened[S, E]:
        """Let this much time pass after the last event, and make the decision of the earliest deadline."""
        return self.due(_EPOCH + delay, last_event=_EPOCH)

    def _deadlines(self, last_event: datetime | None) -> list[tuple[datetime, Deadline[Any, Any]]]:
        """Return each deadline with the time at which it is due, the earliest first."""
        deadlines = deadlines_of(self.state)
        if last_event is None and any(deadline.delay is not None for deadline in deadlines):
            raise AssertionError("`after` counts from its last event: give `last_event=…`, or take `due_after(delay)`")
        due = [(deadline.due_at(last_event or _EPOCH), deadline) for deadline in deadlines]
        return sorted(due, key=lambda pair: pair[0])

    def _happened(self, result: Any) -> Happened[S, E]:
        return Happened(self, as_stored(cast("tuple[E, ...]", recorded_events(result))))


@dataclass(frozen=True, slots=True)
class Doing(Generic[S, E]):
    """A step whose result the test has yet to give."""

    _story: Story[S, E]
    _step: Step[Any, Any]

    def done(self, outcome: Outcome[Any, Any] | None = None) -> Happened[S, E]:
        """Let the other aggregate accept the step; `outcome` is for a step made with `then_with`."""
        if self._step.takes_outcome and outcome is None:
            raise AssertionError(f"{self._step.done.name} wants to know the outcome; give done(Outcome(state, events))")
        if outcome is None or not self._step.takes_outcome:
            return _called(self._story, self._step.done)
        return _called(self._story, self._step.done, replace(outcome, events=as_stored(outcome.events)))

    def refused(self, error: Exception) -> Happened[S, E]:
        """Let the other aggregate's decision raise this error."""
        call = self._step.after_refusal(error)
        if call is None:
            raise AssertionError(f"the step does not say what follows {error!r}: it would be retried, then quarantined")
        return _called(self._story, call, error)


@dataclass(frozen=True, slots=True)
class Happened(Generic[S, E]):
    """A process after something happened to it, with the events that it recorded."""

    _story: Story[S, E]
    _events: tuple[E, ...]

    def then(self, *events: E) -> Story[S, E]:
        """Assert that the process recorded exactly these events, and continue with them as history.

        Both sides are compared as readers of a log get them, encoded and decoded.
        """
        check_recorded(self._events, events)
        return self._story.given(*events)

    def then_nothing(self) -> Story[S, E]:
        """Assert that the process recorded nothing."""
        return self.then()


def story(process: ProcessType[S, E], /) -> Story[S, E]:
    """Start a test of one process, with no history yet; raises `DefinitionError` for a class that is no process.

    The static types of state and events are fixed here: a step that records events of another class does not fit.

    ```python
    from eventjet.examples.transfer.accounts import Account

    asked = Requested(id="t", source="a-1", target="a-2", amount=Decimal(5), until=datetime(2030, 1, 1, tzinfo=UTC))
    withdrawn = story(Transfer).given(asked).does(Account, "a-1", Account.withdraw, Decimal(5), transfer="t")
    withdrawn.done().then(Debited())
    ```
    """
    cls = cast("Any", process)
    aggregate_info(cls)
    if not is_process(cls):
        raise DefinitionError([f"{shown_name(cls)} is not a process: test an aggregate with `scenario`"])
    catalog = checked_catalog(cls)
    return Story(cast("S", cls()), catalog)


def _called(story: Story[S, E], call: Call, *first: Any) -> Happened[S, E]:
    """Make the decision of a step or a deadline; raises `AssertionError` if it records nothing, as a worker refuses."""
    events = as_stored(cast("tuple[E, ...]", recorded_events(call.on(own_copy(story.state), *first))))
    if not events:
        raise AssertionError(f"{call} recorded nothing, so it would be repeated for ever: have it return an event")
    return Happened(story, events)


def _request_text(request: Request[Any, Any]) -> str:
    return f"{shown_name(request.aggregate)} {request.aggregate_id!r}: {request.call.with_arguments()}"
