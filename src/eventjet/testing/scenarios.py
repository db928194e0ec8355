"""Given these events, when this is decided, then these follow: `then` does not exist before `when`.

Whatever is tested here is held to a law as well: neither a decision nor `evolve` changes what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from eventjet.codec.catalog import Catalog
from eventjet.commands.execute import recorded_events
from eventjet.domain.aggregate import AggregateType, aggregate_info, field_faults
from eventjet.domain.decision import check_decision, decided_on
from eventjet.domain.history import evolved
from eventjet.domain.recorded import Recorded
from eventjet.domain.state import own_copy, state_faults
from eventjet.domain.subscription import folded_events
from eventjet.errors import DefinitionError, UsageError

S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Given(Generic[S, E]):
    """An aggregate with a history."""

    state: S
    """The folded state."""
    _catalog: Catalog

    def given(self, *events: E) -> Given[S, E]:
        """The same with these events after what it has."""
        return Given(folded(self.state, events, self._catalog), self._catalog)

    def when(
        self, decide: Callable[Concatenate[S, P], E | Sequence[E] | None], /, *args: P.args, **kwargs: P.kwargs
    ) -> When[S, E]:
        """Make one decision; what it raises is kept for `then_raises`."""
        name = str(getattr(decide, "__qualname__", decide))
        check_decision(type(self.state), decide)
        state = own_copy(self.state)
        with left_as_they_are(name, state):
            try:
                made = decided_on(type(state), decide, state, args, kwargs)
                events = as_stored(cast("tuple[E, ...]", recorded_events(made)))
            except UsageError:
                raise  # of the test, not of the domain
            except Exception as error:
                return When(self, (), error)
            return When(self, events)


@dataclass(frozen=True, slots=True)
class When(Generic[S, E]):
    """A decision that was made."""

    _given: Given[S, E]
    _events: tuple[E, ...]
    _error: Exception | None = None

    def then(self, *events: E) -> Given[S, E]:
        """Exactly these events followed, and each survives the wire; continues with them as history."""
        if isinstance(self._error, TypeError):
            raise self._error  # no refusal: something was called or made with what it does not take
        if self._error is not None:
            raise AssertionError(f"the decision raised {self._error!r}") from self._error
        check_recorded(self._events, events)
        return self._given.given(*events)

    def then_nothing(self) -> Given[S, E]:
        """The decision was made and nothing followed."""
        return self.then()

    def then_raises(self, error: type[Exception], *, match: str | None = None) -> None:
        """The decision was refused with this error (`match`: a part of its text)."""
        if self._error is None:
            raise AssertionError(f"nothing was raised; recorded {_shown(self._events)}")
        if not isinstance(error, type):  # pyright: ignore[reportUnnecessaryIsInstance]  an instance is easily given
            kind = type(error).__name__
            raise UsageError(f"`then_raises` was given an instance. Give the class, {kind}, and its text as `match=`.")
        if not isinstance(self._error, error) or (match is not None and match not in str(self._error)):
            raise AssertionError(f"raised {self._error!r}, expected {error.__name__} {match or ''}") from self._error


def scenario(aggregate: AggregateType[S, E], /) -> Given[S, E]:
    """Start a test of one aggregate, with no history yet. Its types are fixed here, before any event is given.

    Raises `DefinitionError` for a class that is not an aggregate, and for a state that can be changed in place.

    ```python
    empty = scenario(Account)
    rich = empty.given(Opened(owner="ada"), Deposited(amount=Decimal(10)))
    rich.when(Account.withdraw, Decimal(4)).then(Withdrawn(amount=Decimal(4)))
    empty.when(Account.withdraw, Decimal(4)).then_raises(InsufficientFunds)
    ```
    """
    cls = cast("Any", aggregate)
    aggregate_info(cls)
    kinds = (cls, *folded_events(cls))
    if faults := [*state_faults(cls), *(fault for kind in kinds for fault in field_faults(kind))]:
        raise DefinitionError(faults)
    return Given(cast("S", cls()), Catalog(folded_events(cls)))


def as_stored(events: Sequence[E]) -> tuple[E, ...]:
    """Events as readers of a log are given them, and what is no event as it is; raises `UnencodableEvent`."""
    catalogs = [_catalog_of(type(event)) for event in events]
    return tuple(
        event if catalog is None else catalog.encode(event).event
        for event, catalog in zip(events, catalogs, strict=True)
    )


def as_read(recorded: Recorded[E]) -> Recorded[E]:
    """What was recorded, perhaps made by hand, with its event as readers of a log are given it."""
    return replace(recorded, data=as_stored([recorded.data])[0])


@lru_cache(maxsize=1_000)
def _catalog_of(event_type: type) -> Catalog | None:
    try:
        return Catalog([event_type])
    except DefinitionError:
        return None


def check_recorded(events: Sequence[object], expected: Sequence[object]) -> None:
    """Raise `AssertionError` where not exactly the expected events were recorded, as readers are given them."""
    expected = as_stored(expected)
    if as_stored(events) != expected:
        raise AssertionError(f"recorded {_shown(events)}\nexpected {_shown(expected)}")


def folded(state: S, events: Sequence[E], catalog: Catalog) -> S:
    """The state after these events, each of which could be stored and changes nothing that it is given."""
    state = own_copy(state)
    for event in events:
        if type(event) not in catalog:
            told = f"the class {event.__qualname__}" if isinstance(event, type) else repr(event)
            raise AssertionError(
                f"{told} is not an event that this aggregate folds; give its events one by one, in no list"
            )
        # What could not be stored must not pass a test, and what is folded is what comes back.
        read = catalog.encode(event).event
        with left_as_they_are(f"{type(state).__qualname__}.evolve", state, read):
            try:
                state = evolved(state, read)
            except DefinitionError as error:
                error.add_note(f"the event: {read!r}\nthe state: {state!r}")
                raise
    return state


@contextmanager
def left_as_they_are(name: str, *given: object) -> Generator[None]:
    """Raise `AssertionError` when what a function was given is not afterwards what it was."""
    before = list(map(_picture, given))
    yield
    for value, was in zip(given, before, strict=True):
        if _picture(value) != was:
            raise AssertionError(
                f"{name} changed what it was given, which others hold too: it is now {value!r}. "
                "Leave it as it is, and make a new one."
            )


def _picture(value: Any) -> object:
    """What is in a value, as far as it can be looked into, so that a change of it shows."""
    if is_dataclass(value) and not isinstance(value, type):
        return [_picture(getattr(value, one.name)) for one in fields(value)]
    if isinstance(value, Mapping):
        return [(_picture(key), _picture(each)) for key, each in cast("Mapping[Any, Any]", value).items()]
    if isinstance(value, list | tuple | AbstractSet):
        return [_picture(each) for each in cast("Sequence[Any]", value)]
    return repr(value)


def _shown(events: Sequence[object]) -> str:
    return "[" + ", ".join(map(repr, events)) + "]"
