"""`@projection`: a read model as a fold of one row; `@entries`: rows out of one event.

Both only keep what they were told. Annotations are resolved and checked by `resolve`, when an `App` is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, overload
from uuid import UUID

from sqlalchemy import Table

from eventjet.domain.recorded import Recorded

R = TypeVar("R")
E = TypeVar("E")
K_co = TypeVar("K_co", covariant=True)

KeyPart: TypeAlias = str | int | UUID | date
Key: TypeAlias = KeyPart | tuple[KeyPart, ...]
"""What names a row: one value, or one for each column of the primary key."""

OnError: TypeAlias = Literal["stop", "quarantine"]
"""What becomes of an event that cannot be taken: it stops the projection, or it is parked and the others go on."""


@dataclass(frozen=True, slots=True)
class Projection(Generic[R, E]):
    """What `@projection` makes of a fold of one row: pure; None in means no row yet, None out deletes it."""

    name: str
    table: Table
    fold: Callable[..., R | None]
    """`(row, event)`, or `(row, event, key)` when there are `keys`."""
    revision: int = 1
    """Raised when the same events should give other rows."""
    key: Callable[[Recorded[E]], Any] | None = None
    """The row an event touches; the aggregate id when there is neither `key` nor `keys`."""
    keys: Callable[[Recorded[E]], Sequence[Any]] | None = None
    """The rows an event touches; the fold is called once for each."""
    on_error: OnError = "stop"
    """`quarantine` only where the key is the aggregate id."""

    def __call__(self, row: R | None, event: Recorded[E], /, *key: Any) -> R | None:
        return self.fold(row, event, *key)


class ByAggregate(Protocol):
    """Declares a fold whose key is the aggregate id."""

    def __call__(self, fold: Callable[[R | None, Recorded[E]], R | None], /) -> Projection[R, E]: ...


class ByKey(Protocol[E]):
    """Declares a fold with a key of its own."""

    def __call__(self, fold: Callable[[R | None, Recorded[E]], R | None], /) -> Projection[R, E]: ...


class ByKeys(Protocol[E, K_co]):
    """Declares a fold that is called once for each key, which it is given."""

    def __call__(self, fold: Callable[[R | None, Recorded[E], K_co], R | None], /) -> Projection[R, E]: ...


@overload
def projection(name: str, /, *, table: Table, revision: int = 1, on_error: OnError = "stop") -> ByAggregate: ...
@overload
def projection(
    name: str,
    /,
    *,
    table: Table,
    revision: int = 1,
    key: Callable[[Recorded[E]], Key],
    on_error: Literal["stop"] = "stop",
) -> ByKey[E]: ...
@overload
def projection(
    name: str,
    /,
    *,
    table: Table,
    revision: int = 1,
    keys: Callable[[Recorded[E]], Sequence[K_co]],
    on_error: Literal["stop"] = "stop",
) -> ByKeys[E, K_co]: ...
def projection(
    name: str,
    /,
    *,
    table: Table,
    revision: int = 1,
    key: Callable[[Recorded[Any]], Any] | None = None,
    keys: Callable[[Recorded[Any]], Sequence[Any]] | None = None,
    on_error: OnError = "stop",
) -> Any:
    """Declare a fold of one row, kept in `table`; the fold's annotation is its subscription.

    `key` and `keys` are named, annotated functions: a lambda inside the decorator defeats the type checkers. With
    `on_error="quarantine"` an event that cannot be taken is parked with its reason, later events of its aggregate wait
    behind it, and all others go on; only where the key is the aggregate id.

    ```python
    @projection("openings", table=balances_table)
    def openings(row: Balance | None, event: Recorded[Opened]) -> Balance:
        return Balance(event.aggregate_id, event.data.owner)

    projected(openings, on("a-1", Opened(owner="ada"))).rows(Balance("a-1", "ada"))
    ```
    """

    def declare(fold: Callable[..., Any], /) -> Projection[Any, Any]:
        return Projection(name, table, fold, revision, key, keys, on_error)

    return declare


@dataclass(frozen=True, slots=True)
class Entries(Generic[R, E]):
    """What `@entries` makes of a function: rows out of one event, never changed again; pure, and it reads nothing.

    The table's primary key is the event's position, or position and index (0, 1, 2 … within the event); the rows carry
    both as their own fields.
    """

    name: str
    table: Table
    rows: Callable[[Recorded[E]], R | Sequence[R] | None]
    revision: int = 1
    on_error: OnError = "stop"
    """Always `stop`; another one is refused when an `App` is built."""

    def __call__(self, event: Recorded[E], /) -> R | Sequence[R] | None:
        return self.rows(event)


class Entering(Protocol):
    """Declares the rows of one event."""

    def __call__(self, rows: Callable[[Recorded[E]], R | list[R] | None], /) -> Entries[R, E]: ...


def entries(name: str, /, *, table: Table, revision: int = 1, on_error: Literal["stop"] = "stop") -> Entering:
    """Declare rows out of one event, kept in `table`; the function's annotation is its subscription.

    ```python
    @entries("deposits", table=postings_table)
    def deposits(event: Recorded[Deposited]) -> Posting:
        return Posting(event.position, event.aggregate_id, event.data.amount)

    projected(deposits, on("a-1", Deposited(amount=Decimal(9)))).rows(Posting(1, "a-1", Decimal(9)))
    ```
    """

    def declare(rows: Callable[[Recorded[E]], R | list[R] | None], /) -> Entries[R, E]:
        return Entries(name, table, rows, revision, on_error)

    return declare
