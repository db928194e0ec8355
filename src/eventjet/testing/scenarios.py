"""Tests of decisions: given these events, when this decision is made, then these events are recorded.

The types allow `then` only after `when`. Each test also checks that neither the decision nor `evolve` changes its
arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from eventjet.codec.catalog import Catalog
from eventjet.codec.leaves import in_utc
from eventjet.commands.execute import recorded_events
from eventjet.domain.aggregate import AggregateType, aggregate_info, field_faults
from eventjet.domain.decision import check_decision, decided_on
from eventjet.domain.history import evolved
from eventjet.domain.recorded import Recorded
from eventjet.domain.state import own_copy, state_faults
from eventjet.domain.subscription import events_of, folded_events, shown_name
from eventjet.errors import DefinitionError, UsageError
from eventjet.text import listed

S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Given(Generic[S, E]):
    """An aggregate with its history so far."""

    state: S
    """The folded state."""
    _catalog: Catalog

    def given(self, *events: E) -> Given[S, E]:
        """Return the aggregate with these events added to its history."""
        return Given(folded(self.state, events, self._catalog), self._catalog)

    def when(
        self, decide: Callable[Concatenate[S, P], E | Sequence[E] | None], /, *args: P.args, **kwargs: P.kwargs
    ) -> When[S, E]:
        """Make one decision; an error that it raises is kept for `then_raises`.

        Raises `UsageError` for what is no decision function.
        """
        check_decision(decide, type(self.state))
        name = str(getattr(decide, "__qualname__", decide))
        state = own_copy(self.state)
        with left_as_they_are(name, state):
            try:
                result = decided_on(decide, state, args, kwargs)
                events = as_stored(cast("tuple[E, ...]", recorded_events(result)))
            except UsageError:
                raise  # a mistake in the test, not an answer of the domain
            except Exception as error:
                return When(self, (), error)
            return When(self, events)


@dataclass(frozen=True, slots=True)
class When(Generic[S, E]):
    """A decision that was made, with its events or its error."""

    _given: Given[S, E]
    _events: tuple[E, ...]
    _error: Exception | None = None

    def then(self, *events: E) -> Given[S, E]:
        """Assert that exactly these events were recorded, and continue with them as history.

        Both sides are compared as readers of a log get them, encoded and decoded. A `TypeError` of the decision is
        raised as it is.
        """
        if isinstance(self._error, TypeError):
            raise self._error  # not a refusal: a call with arguments that do not fit
        if self._error is not None:
            raise AssertionError(f"the decision raised {self._error!r}") from self._error
        check_recorded(self._events, events)
        return self._given.given(*events)

    def then_nothing(self) -> Given[S, E]:
        """Assert that the decision was made and recorded nothing."""
        return self.then()

    def then_raises(self, error: type[Exception], *, match: str | None = None) -> None:
        """Assert that the decision raised this error; `match` is a part of its text."""
        if self._error is None:
            raise AssertionError(f"nothing was raised; recorded {_event_list(self._events)}")
        if not isinstance(self._error, error) or (match is not None and match not in str(self._error)):
            raise AssertionError(f"raised {self._error!r}, expected {error.__name__} {match or ''}") from self._error


def scenario(aggregate: AggregateType[S, E], /) -> Given[S, E]:
    """Start a test of one aggregate, with no history yet.

    The static types of state and events are fixed here, before any event is given. Raises `DefinitionError` for a class
    that is not an aggregate, and for a state that can be changed in place.

    ```python
    empty = scenario(Account)
    rich = empty.given(Opened(owner="ada"), Deposited(amount=Decimal(10)))
    rich.when(Account.withdraw, Decimal(4)).then(Withdrawn(amount=Decimal(4)))
    empty.when(Account.withdraw, Decimal(4)).then_raises(InsufficientFunds)
    ```
    """
    cls = cast("Any", aggregate)
    aggregate_info(cls)
    catalog = checked_catalog(cls)
    return Given(cast("S", cls()), catalog)


def checked_catalog(cls: Any) -> Catalog:
    """Return the catalog of an aggregate's events; raises `DefinitionError` for faults of its state and its events."""
    events = folded_events(cls)
    if faults := [*state_faults(cls), *(fault for kind in (cls, *events) for fault in field_faults(kind))]:
        raise DefinitionError(faults)
    return Catalog(events)


def as_stored(events: Sequence[E]) -> tuple[E, ...]:
    """Return events as readers of a log get them, and a value that is no event unchanged; raises `UnencodableEvent`."""
    catalogs = [_catalog_of(type(event)) for event in events]
    return tuple(
        event if catalog is None else catalog.encode(event).event
        for event, catalog in zip(events, catalogs, strict=True)
    )


def as_read(recorded: Recorded[E]) -> Recorded[E]:
    """Return a recorded event, which a test may have made by hand, as readers of a log get it."""
    at = recorded.recorded_at
    return replace(recorded, data=as_stored([recorded.data])[0], recorded_at=at if at.tzinfo is None else in_utc(at))


def check_taken(function: Any, parameter: int, event: object) -> None:
    """Raise `UsageError` unless the annotation of a handler's parameter names the class of an event."""
    events = events_of(function, list(inspect.signature(function).parameters)[parameter])
    if type(event) not in events:
        raise UsageError(
            f"{shown_name(function)} takes {listed(map(shown_name, events))}, so no worker calls it with a "
            f"{type(event).__qualname__}. Give an event that it takes, or change its annotation."
        )


@lru_cache(maxsize=1_000)
def _catalog_of(event_type: type) -> Catalog | None:
    try:
        return Catalog([event_type])
    except DefinitionError:
        return None


def check_recorded(events: Sequence[object], expected: Sequence[object]) -> None:
    """Raise `AssertionError` unless exactly the expected events were recorded, compared as readers get them."""
    expected = as_stored(expected)
    if as_stored(events) != expected:
        raise AssertionError(f"recorded {_event_list(events)}\nexpected {_event_list(expected)}")


def folded(state: S, events: Sequence[E], catalog: Catalog) -> S:
    """Return the state after these events.

    Raises `AssertionError` for an event that the aggregate does not fold and for an `evolve` that changes its
    arguments, and `UnencodableEvent` for an event that could not be stored.
    """
    state = own_copy(state)
    for event in events:
        if type(event) not in catalog:
            description = f"the class {event.__qualname__}" if isinstance(event, type) else repr(event)
            raise AssertionError(
                f"{description} is not an event that this aggregate folds; give its events one by one, in no list"
            )
        # An event that could not be stored must not pass a test, and readers fold the decoded event.
        decoded = catalog.encode(event).event
        with left_as_they_are(f"{type(state).__qualname__}.evolve", state, decoded):
            try:
                state = evolved(state, decoded)
            except DefinitionError as error:
                error.add_note(f"the event: {decoded!r}\nthe state: {state!r}")
                raise
    return state


@contextmanager
def left_as_they_are(name: str, *values: object) -> Generator[None]:
    """Raise `AssertionError` when the block, which calls the function `name`, changed one of these values in place."""
    before = list(map(_picture, values))
    yield
    for value, was in zip(values, before, strict=True):
        if _picture(value) != was:
            raise AssertionError(
                f"{name} changed what it was given, which others hold too: it is now {value!r}. "
                "Leave it as it is, and make a new one."
            )


def _picture(value: Any) -> object:
    """Return a copy of a value's contents, as far as they are accessible, so that a change in place shows."""
    if is_dataclass(value) and not isinstance(value, type):
        return [_picture(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, Mapping):
        return [(_picture(key), _picture(item)) for key, item in cast("Mapping[Any, Any]", value).items()]
    if isinstance(value, list | tuple | AbstractSet):
        return [_picture(item) for item in cast("Sequence[Any]", value)]
    return repr(value)


def _event_list(events: Sequence[object]) -> str:
    return "[" + ", ".join(map(repr, events)) + "]"
