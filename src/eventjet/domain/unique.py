"""Unique constraints: values that no two aggregates of a type may have at once. PURE.

The values of an aggregate are a function of its state. Each value is claimed on a subject of its own, which contains
the value's digest: `<app>.eventjet_unique.user-email-9f86…`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast
from uuid import UUID

from eventjet.domain.state import own_copy
from eventjet.domain.subscription import shown_name
from eventjet.errors import Refused, UnexpectedExit, UsageError

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)

CLAIMS = "eventjet_unique"
"""The name of the aggregate of claims; no aggregate of an application may have it."""
VALUES_MAX = 100
"""Limit of values that one state may have for one constraint, since a save is one batch."""

Scalar: TypeAlias = str | int | UUID | date
Value: TypeAlias = Scalar | tuple[Scalar, ...]
"""The types of unique values; a tuple is one value of several parts."""


V = TypeVar("V", bound=Value | AbstractSet[Value] | None)
_MARK = "__eventjet_unique__"
_DIGITS = 32
"""Hexadecimal digits of a digest: to block the value of another, one has to find a second preimage of 128 bits."""


class _UniqueDecorator(Protocol):
    """A decorator for the method of a state that returns the unique values."""

    def __call__(self, by: Callable[[S], V], /) -> Callable[[S], V]: ...


def unique(name: str, /) -> _UniqueDecorator:
    """Declare that no two aggregates of the type may have the same value of the decorated method at once.

    The method is a pure function of the state. It returns the value, a set of several, or None for none; values are
    text, whole numbers, UUIDs, dates, and tuples of them. They are compared as they are, so fold case in the method.

    ```python
    @aggregate("user")
    class User:
        email: str | None = None

        @unique("email")
        def folded_email(self) -> str | None:
            return self.email and self.email.casefold()

    assert User(email="Ada@Example.org").folded_email() == "ada@example.org"
    ```

    A save that would break the constraint raises `NotUnique` and stores nothing. Rename the constraint when the method
    returns different values for the same state, since the claims of the old values stay in the log (ADR 0032).
    """

    def mark(by: Any, /) -> Any:
        setattr(by, _MARK, name)
        return by

    return mark


@dataclass(frozen=True, slots=True)
class Unique(Generic[S_contra]):
    """A unique constraint, as `@unique` declares it."""

    name: str
    by: Callable[[S_contra], Value | AbstractSet[Value] | None]


def register_id(aggregate: str, constraint: str) -> str:
    """Return the id of the constraint's register, which records whether every value in use is claimed."""
    return f"{aggregate}-{constraint}"


def claim_id(aggregate: str, constraint: str, value: Value) -> str:
    """Return the id of a value's claim: the names, and 128 bits of the SHA-256 of names and value as JSON.

    Names have no `-`, so the id can be split again. The digest hides only values that cannot be guessed. Raises
    `UsageError` for a value that cannot be unique.
    """
    try:
        encoded = json.dumps([aggregate, constraint, _plain(value)], ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, UnicodeEncodeError):
        raise UsageError(
            f"The constraint {constraint!r} of {aggregate!r} gave a {type(value).__name__} that cannot be unique. Have "
            "it return text, a whole number, a UUID, a date, a tuple of them, a set of such values, or None."
        ) from None
    return f"{register_id(aggregate, constraint)}-{hashlib.sha256(encoded).hexdigest()[:_DIGITS]}"


def claims_of(aggregate: str, constraint: Unique[S], state: S) -> frozenset[str]:
    """Return the ids of the claims that a state has to have; raises `UsageError` and `Refused`."""
    return _ids(aggregate, constraint, _values_of(constraint, state))


def changed_claims(aggregate: str, constraint: Unique[S], before: S, after: S) -> tuple[frozenset[str], frozenset[str]]:
    """Return (ids of the claims that a change of state releases, ids it takes); raises what `claims_of` does."""
    values_before, values_after = _values_of(constraint, before), _values_of(constraint, after)
    if values_before == values_after:
        return frozenset(), frozenset()
    claims_before, claims_after = _ids(aggregate, constraint, values_before), _ids(aggregate, constraint, values_after)
    return claims_before - claims_after, claims_after - claims_before


def _values_of(constraint: Unique[S], state: S) -> Any:
    try:
        return constraint.by(own_copy(state))
    except BaseException as raised:
        error = UnexpectedExit.instead_of(raised)
        if error is raised:
            raise
        raise error from raised


def uniques_of(cls: type) -> tuple[Unique[Any], ...]:
    """Return the constraints of a class, sorted by name."""
    methods = (by for _, by in inspect.getmembers(cls, inspect.isfunction) if hasattr(by, _MARK))
    return tuple(
        sorted((Unique(str(getattr(by, _MARK)), by) for by in methods), key=lambda constraint: constraint.name)
    )


def unique_faults(aggregate: str, constraints: Sequence[Unique[Any]], is_name: Callable[[str], bool]) -> Iterator[str]:
    """Yield the faults of an aggregate's constraints, each as a sentence."""
    names: set[str] = set()
    for constraint in constraints:
        where = f"the constraint {constraint.name!r} of {aggregate!r}"
        if not is_name(constraint.name):
            yield f"{where} is not called [a-z][a-z0-9_]*"
        if constraint.name in names:
            yield f"{aggregate!r} has two constraints called {constraint.name!r}"
        names.add(constraint.name)
        if len([arg for arg in inspect.signature(constraint.by).parameters.values() if arg.default is arg.empty]) != 1:
            yield f"{where}: {shown_name(constraint.by)} has to be a method that takes no arguments"


def _ids(aggregate: str, constraint: Unique[Any], values: Value | AbstractSet[Value] | None) -> frozenset[str]:
    if values is None:
        return frozenset()
    distinct_values = values if isinstance(values, AbstractSet) else (values,)
    if len(distinct_values) > VALUES_MAX:
        raise Refused(
            f"A state of {aggregate!r} with {len(distinct_values):,} values of its constraint {constraint.name!r}",
            f"{VALUES_MAX} is the limit",
            "Give each value an aggregate of its own.",
        )
    return frozenset(claim_id(aggregate, constraint.name, value) for value in distinct_values)


def _plain(value: Any) -> list[Any]:
    """Return the value as JSON with its kind; raises `TypeError` for other types."""
    if isinstance(value, tuple):
        return ["tuple", *map(_scalar, cast("tuple[Any, ...]", value))]
    return _scalar(value)


def _scalar(value: Any) -> list[Any]:
    if isinstance(value, str):
        return ["text", str.__str__(value)]  # for a member of a str Enum, its text
    if isinstance(value, int) and not isinstance(value, bool):
        return ["integer", str(int(value))]  # as text, since other languages have no integers this long
    if isinstance(value, UUID):
        return ["uuid", str(value)]
    if isinstance(value, date) and not isinstance(value, datetime):
        return ["date", value.isoformat()]
    raise TypeError
