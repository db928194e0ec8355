"""`@event`: an immutable fact with a wire name and a schema; `@aggregate`: a frozen state folded from its events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, dataclass_transform

from eventjet.domain.unique import Unique, uniques_of
from eventjet.errors import DefinitionError

T = TypeVar("T")
S = TypeVar("S")
E = TypeVar("E")

_MARK = "__eventjet__"


@dataclass(frozen=True, slots=True)
class EventInfo:
    """What `@event` was told."""

    name: str
    """The wire name, `account.deposited`."""
    schema: int
    """The number of this shape; raised with an upcaster when the shape changes."""
    formerly: tuple[str, ...] = ()
    """Wire names this event had before; they are read, never written."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def event(name: str, /, *, schema: int = 1, formerly: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """Make the class a frozen, slotted, keyword-only pydantic dataclass known on the wire as `name`.

    Fields are strict: an `int` is not a `str`, a `float` is not a `Decimal`. Nothing is registered; an `App` or a
    `scenario` finds the event through the annotation of the `evolve` that folds it.

    ```python
    @event("account.closed")
    class Closed:
        reason: str

    assert Closed(reason="moved") == Closed(reason="moved")
    ```
    """

    _check_name(name, "event", "account.opened")

    def declare(cls: type[T]) -> type[T]:
        from pydantic.dataclasses import dataclass as pydantic_dataclass

        made = pydantic_dataclass(
            frozen=True, kw_only=True, slots=True, config={"strict": True, "hide_input_in_errors": True}
        )(cls)
        setattr(made, _MARK, EventInfo(name, schema, tuple(formerly)))
        return cast("type[T]", made)

    return declare


@dataclass(frozen=True, slots=True)
class AggregateInfo:
    """What `@aggregate` was told."""

    name: str
    snapshot_every: int | None
    revision: int
    unique: tuple[Unique[Any], ...] = ()
    """Values that no two of them may have at once."""


class AggregateType(Protocol[S, E]):  # type: ignore[misc]  # pyright: ignore[reportInvalidTypeVarUse]  variance is of the class object
    """The class object of an aggregate: ties a state to its events by the signature of `evolve`.

    Matched on the class itself, so that `Repository[Account, Opened | Deposited]` is inferred from `Account`.
    """

    def evolve(self, instance: S, event: E, /) -> object: ...


@dataclass_transform(frozen_default=True, kw_only_default=True)
def aggregate(name: str, /, *, snapshot_every: int | None = None, revision: int = 1) -> Callable[[type[T]], type[T]]:
    """Make the class a frozen, slotted, keyword-only dataclass whose events live at `<app>.<name>.<id>`.

    Raise `revision` when the same events should fold to something else. Its methods that are `unique` tell what no two
    of them may have at once. Slots re-create the class, so zero-argument
    `super()` does not work inside it.

    ```python
    @aggregate("counter")
    class Counter:
        count: int = 0

        def deposit(self, amount: Decimal) -> Deposited:
            return Deposited(amount=amount)

        def evolve(self, event: Deposited) -> Counter:
            return replace(self, count=self.count + 1)

    assert Counter().count == 0
    ```
    """

    _check_name(name, "aggregate", "account")

    def declare(cls: type[T]) -> type[T]:
        made = dataclass(frozen=True, kw_only=True, slots=True)(cls)
        setattr(made, _MARK, AggregateInfo(name, snapshot_every, revision, uniques_of(made)))
        return made

    return declare


def _check_name(name: object, decorator: str, example: str) -> None:
    """Without its name, the decorator is given the class."""
    if not isinstance(name, str):
        what = getattr(name, "__qualname__", type(name).__name__)
        raise DefinitionError([f'@{decorator} of {what} lacks its name; write @{decorator}("{example}")'])


def event_info(cls: Any) -> EventInfo:
    """What `@event` was told; raises `DefinitionError` for a class that is not an event."""
    return _declared(cls, EventInfo, "an event: decorate it with @event")


def is_event(cls: type) -> bool:
    """Whether a class was declared by `@event`."""
    return isinstance(vars(cls).get(_MARK), EventInfo)


def aggregate_info(cls: Any) -> AggregateInfo:
    """What `@aggregate` was told; raises `DefinitionError` for a class that is not an aggregate."""
    return _declared(cls, AggregateInfo, "an aggregate: decorate it with @aggregate")


def _declared(cls: Any, kind: type[T], what: str) -> T:
    info = vars(cls).get(_MARK) if isinstance(cls, type) else None
    if not isinstance(info, kind):
        # Not a value's own words, which may be long, and personal.
        named = cls if isinstance(cls, str) else getattr(cls, "__qualname__", None) or f"a {type(cls).__qualname__}"
        raise DefinitionError([f"{named} is not {what}(…)"])
    return info
