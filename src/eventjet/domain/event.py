"""`@event`: an immutable fact with a wire name and a schema number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast, dataclass_transform

from eventjet.errors import DefinitionError

T = TypeVar("T")

_MARK = "__eventjet_event__"


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
    """

    def declare(cls: type[T]) -> type[T]:
        from pydantic.dataclasses import dataclass as pydantic_dataclass

        made = pydantic_dataclass(frozen=True, kw_only=True, slots=True, config={"strict": True})(cls)
        setattr(made, _MARK, EventInfo(name, schema, tuple(formerly)))
        return cast("type[T]", made)

    return declare


def event_info(cls: Any) -> EventInfo:
    """What `@event` was told; raises `DefinitionError` for a class that is not an event."""
    info = vars(cls).get(_MARK) if isinstance(cls, type) else None
    if not isinstance(info, EventInfo):
        raise DefinitionError([f"{getattr(cls, '__qualname__', cls)!s} is not an event: decorate it with @event(…)"])
    return info
