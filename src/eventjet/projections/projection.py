"""`@projection` declares a read model as a fold of one row; `@entries` declares rows that are made from one event.

Both only keep their arguments. `resolve` resolves and checks the annotations when an `App` is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Concatenate, Generic, Literal, Protocol, TypeAlias, TypeVar, cast, overload

from sqlalchemy import Table

from eventjet.domain.aggregate import check_name
from eventjet.domain.recorded import Recorded
from eventjet.projections.by_state import ByState, KeyValue
from eventjet.projections.row_table import TableSource, table_of

R = TypeVar("R")
E = TypeVar("E")
K_co = TypeVar("K_co", covariant=True)

OnError: TypeAlias = Literal["stop", "quarantine"]
"""What happens to an event that cannot be handled: it stops the projection, or it is quarantined and others go on."""


Key: TypeAlias = Callable[[Recorded[E]], Any] | ByState[Any] | Sequence[ByState[Any] | Callable[[Recorded[Any]], Any]]
"""A function of the event; or `by_state`, alone or in a list with others and with a function for other events."""


@dataclass(frozen=True)
class Projection(Generic[R, E]):
    """A fold of one row, as `@projection` declares it: a pure function that returns the row after an event.

    The fold is given None where there is no row yet, and returns None to delete the row.
    """

    name: str
    source: TableSource | None
    """The table or mapped class that was given; None where the row class declares the table."""
    fold: Callable[..., R | None]
    """Takes `(row, event)`, or `(row, event, key)` when there are `keys`; with `by_state` also states."""
    revision: int = 1
    """Raise it when the same events should give other rows."""
    key: Key[E] | None = None
    """Returns the key of the row that an event changes; the aggregate id when there is neither `key` nor `keys`."""
    keys: Callable[[Recorded[E]], Sequence[Any]] | None = None
    """Returns the keys of the rows that an event changes; the fold is called once for each."""
    on_error: OnError = "stop"
    """What happens to an event that fails; `quarantine` only where the key is the aggregate id."""

    @cached_property
    def table(self) -> Table:
        """The table of the rows, made at the first use where none was given; raises `DefinitionError`."""
        return table_of(self.name, self.source, self.fold, is_list=False)

    def __call__(self, row: R | None, event: Recorded[E], /, *key: Any) -> R | None:
        return self.fold(row, event, *key)


def state_keys(declared: Projection[Any, Any] | Entries[Any, Any]) -> list[ByState[Any]]:
    """Return each `by_state` in the key of a projection."""
    return [part for part in _key_parts(declared) if isinstance(part, ByState)]


def plain_keys(declared: Projection[Any, Any] | Entries[Any, Any]) -> list[Callable[[Recorded[Any]], Any]]:
    """Return the functions of the event in the key of a projection."""
    return [part for part in _key_parts(declared) if not isinstance(part, ByState)]


def _key_parts(
    declared: Projection[Any, Any] | Entries[Any, Any],
) -> Sequence[ByState[Any] | Callable[[Recorded[Any]], Any]]:
    key: Any = declared.key if isinstance(declared, Projection) else None
    if key is None or isinstance(key, Sequence):
        return cast("Sequence[Any]", key or ())
    return [key]


class ByAggregate(Protocol):
    """A decorator of a fold whose key is the aggregate id."""

    def __call__(self, fold: Callable[[R | None, Recorded[E]], R | None], /) -> Projection[R, E]: ...


class ByKey(Protocol[E]):
    """A decorator of a fold with a `key` function."""

    def __call__(self, fold: Callable[[R | None, Recorded[E]], R | None], /) -> Projection[R, E]: ...


class ByKeys(Protocol[E, K_co]):
    """A decorator of a fold with a `keys` function; the fold is called once for each key, and given that key."""

    def __call__(self, fold: Callable[[R | None, Recorded[E], K_co], R | None], /) -> Projection[R, E]: ...


class ByStateOf(Protocol):
    """A decorator of a fold whose key comes from states: it may take the key, and states, as further parameters."""

    def __call__(self, fold: Callable[Concatenate[R | None, Recorded[E], ...], R | None], /) -> Projection[R, E]: ...


@overload
def projection(
    name: str, /, *, table: TableSource | None = None, revision: int = 1, on_error: OnError = "stop"
) -> ByAggregate: ...
@overload
def projection(
    name: str,
    /,
    *,
    table: TableSource | None = None,
    revision: int = 1,
    key: ByState[Any] | Sequence[ByState[Any] | Callable[[Recorded[Any]], KeyValue]],
    on_error: Literal["stop"] = "stop",
) -> ByStateOf: ...
@overload
def projection(
    name: str,
    /,
    *,
    table: TableSource | None = None,
    revision: int = 1,
    key: Callable[[Recorded[E]], KeyValue],
    on_error: Literal["stop"] = "stop",
) -> ByKey[E]: ...
@overload
def projection(
    name: str,
    /,
    *,
    table: TableSource | None = None,
    revision: int = 1,
    keys: Callable[[Recorded[E]], Sequence[K_co]],
    on_error: Literal["stop"] = "stop",
) -> ByKeys[E, K_co]: ...
def projection(
    name: str,
    /,
    *,
    table: TableSource | None = None,
    revision: int = 1,
    key: Key[Any] | None = None,
    keys: Callable[[Recorded[Any]], Sequence[Any]] | None = None,
    on_error: OnError = "stop",
) -> Any:
    """Declare a fold of one row; the annotation of its event is the subscription.

    The row class declares the table: see `Key`. Where it does not, `table` is a `Table` or a mapped class that has one.
    Raise `revision` when the same events should give other rows. `key` and `keys` are named, annotated functions: a
    lambda inside the decorator defeats the type checkers. A key that the event lacks comes from the state of its
    aggregate: see `by_state`. With `on_error="quarantine"` an event that cannot be handled
    is quarantined with its reason, later events of its aggregate wait behind it, and all others go on; only where the
    key is the aggregate id. Raises `DefinitionError` without a name.

    ```python
    @projection("openings")
    def openings(row: Balance | None, event: Recorded[Opened]) -> Balance:
        return Balance(event.aggregate_id, event.data.owner)

    projected(openings, on("a-1", Opened(owner="ada"))).rows(Balance("a-1", "ada"))
    ```
    """

    check_name(name, "projection", "balances")

    def declare(fold: Callable[..., Any], /) -> Projection[Any, Any]:
        return Projection(name, table, fold, revision, key, keys, on_error)

    return declare


@dataclass(frozen=True)
class Entries(Generic[R, E]):
    """A function that makes rows from one event, as `@entries` declares it: pure, and it reads no rows.

    The rows are never changed again. The table's primary key is the event's position, or position and index (0, 1, 2 …
    within the event); the rows have both as fields.
    """

    name: str
    source: TableSource | None
    """The table or mapped class that was given; None where the row class declares the table."""
    rows: Callable[[Recorded[E]], R | Sequence[R] | None]
    revision: int = 1
    on_error: OnError = "stop"
    """Always `stop`; any other value is refused when an `App` is built."""

    @cached_property
    def table(self) -> Table:
        """The table of the rows, made at the first use where none was given; raises `DefinitionError`."""
        return table_of(self.name, self.source, self.rows, is_list=True)

    def __call__(self, event: Recorded[E], /) -> R | Sequence[R] | None:
        return self.rows(event)


class Entering(Protocol):
    """A decorator of a function that makes the rows of one event."""

    def __call__(self, rows: Callable[[Recorded[E]], R | list[R] | None], /) -> Entries[R, E]: ...


def entries(
    name: str, /, *, table: TableSource | None = None, revision: int = 1, on_error: Literal["stop"] = "stop"
) -> Entering:
    """Declare a function that makes rows from one event; the annotation of its event is the subscription.

    The row class declares the table: see `Key`. Where it does not, `table` is a `Table` or a mapped class that has one.
    Raise `revision` when the same events should give other rows. Raises `DefinitionError`
    without a name.

    ```python
    @entries("deposits")
    def deposits(event: Recorded[Deposited]) -> Posting:
        return Posting(event.position, event.aggregate_id, event.data.amount)

    projected(deposits, on("a-1", Deposited(amount=Decimal(9)))).rows(Posting(1, "a-1", Decimal(9)))
    ```
    """

    check_name(name, "entries", "deposits")

    def declare(rows: Callable[[Recorded[E]], R | list[R] | None], /) -> Entries[R, E]:
        return Entries(name, table, rows, revision, on_error)

    return declare
