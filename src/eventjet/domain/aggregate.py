"""`@aggregate`: a frozen state folded from its own events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, dataclass_transform

from eventjet.errors import DefinitionError

T = TypeVar("T")
S = TypeVar("S")
E = TypeVar("E")

_MARK = "__eventjet_aggregate__"


@dataclass(frozen=True, slots=True)
class AggregateInfo:
    """What `@aggregate` was told."""

    name: str
    snapshot_every: int | None
    revision: int


class AggregateType(Protocol[S, E]):  # type: ignore[misc]  # pyright: ignore[reportInvalidTypeVarUse]  variance is of the class object
    """The class object of an aggregate: ties a state to its events by the signature of `evolve`.

    Matched on the class itself, so that `Repository[Account, Opened | Deposited]` is inferred from `Account`.
    """

    def evolve(self, instance: S, event: E, /) -> object: ...


@dataclass_transform(frozen_default=True, kw_only_default=True)
def aggregate(name: str, /, *, snapshot_every: int | None = None, revision: int = 1) -> Callable[[type[T]], type[T]]:
    """Make the class a frozen, slotted, keyword-only dataclass whose events live at `<app>.<name>.<id>`.

    Raise `revision` when the same events should fold to something else. Slots re-create the class, so zero-argument
    `super()` does not work inside it.
    """

    def declare(cls: type[T]) -> type[T]:
        made = dataclass(frozen=True, kw_only=True, slots=True)(cls)
        setattr(made, _MARK, AggregateInfo(name, snapshot_every, revision))
        return made

    return declare


def aggregate_info(cls: Any) -> AggregateInfo:
    """What `@aggregate` was told; raises `DefinitionError` for a class that is not an aggregate."""
    info = vars(cls).get(_MARK) if isinstance(cls, type) else None
    if not isinstance(info, AggregateInfo):
        raise DefinitionError(
            [f"{getattr(cls, '__qualname__', cls)!s} is not an aggregate: decorate it with @aggregate(…)"]
        )
    return info
