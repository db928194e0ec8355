"""Values that no two aggregates of a type may have at once. PURE.

Which values an aggregate has is a function of its state. Each is claimed on a subject of its own, which is named by the
value's digest: `<app>.eventjet_unique.user-email-9f86…`.
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
"""The aggregate that claims are events of; no application may call its own so."""
VALUES_MAX = 100
"""Values that one state may have of one constraint: a save is one batch."""

Scalar: TypeAlias = str | int | UUID | date
Value: TypeAlias = Scalar | tuple[Scalar, ...]
"""What may be unique; a tuple is one value of several parts."""


V = TypeVar("V", bound=Value | AbstractSet[Value] | None)
_MARK = "__eventjet_unique__"
_DIGITS = 32
"""Of a digest: who wanted to block another's value would have to find a second one among 2^128."""


class _Tells(Protocol):
    """Declares a method of a state that tells its values."""

    def __call__(self, by: Callable[[S], V], /) -> Callable[[S], V]: ...


def unique(name: str, /) -> _Tells:
    """No two aggregates of the type may have one value of the decorated method at once.

    The method is a pure function of the state. It returns the value, a set of several, or None for none; values are
    text, whole numbers, UUIDs, dates, and tuples of them, compared as they are: fold case there.

    ```python
    @aggregate("user")
    class User:
        email: str | None = None

        @unique("email")
        def folded_email(self) -> str | None:
            return self.email and self.email.casefold()

    assert User(email="Ada@Example.org").folded_email() == "ada@example.org"
    ```

    A save that would break it raises `NotUnique` and stores nothing. Give it another name when it changes its mind: its
    claims stand in the log (ADR 0032).
    """

    def mark(by: Any, /) -> Any:
        setattr(by, _MARK, name)
        return by

    return mark


@dataclass(frozen=True, slots=True)
class Unique(Generic[S_contra]):
    """A constraint, as `@unique` declares it."""

    name: str
    by: Callable[[S_contra], Value | AbstractSet[Value] | None]


def register_id(aggregate: str, constraint: str) -> str:
    """Where the log says whether every value in use is claimed."""
    return f"{aggregate}-{constraint}"


def claim_id(aggregate: str, constraint: str, value: Value) -> str:
    """Which claim a value has: names, and 128 bits of the SHA-256 of names and value as JSON. Raises `UsageError`.

    Names have no `-`, so it can be taken apart again. The digest hides what cannot be guessed, and nothing else.
    """
    try:
        told = json.dumps([aggregate, constraint, _plain(value)], ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, UnicodeEncodeError):
        raise UsageError(
            f"The constraint {constraint!r} of {aggregate!r} gave a {type(value).__name__} that cannot be unique. Have "
            "it return text, a whole number, a UUID, a date, a tuple of them, a set of such values, or None."
        ) from None
    return f"{register_id(aggregate, constraint)}-{hashlib.sha256(told).hexdigest()[:_DIGITS]}"


def claims_of(aggregate: str, constraint: Unique[S], state: S) -> frozenset[str]:
    """The ids of the claims that a state has to have; raises `UsageError` and `Refused`."""
    return _ids(aggregate, constraint, _values_of(constraint, state))


def changed_claims(aggregate: str, constraint: Unique[S], before: S, after: S) -> tuple[frozenset[str], frozenset[str]]:
    """(ids of the claims that a step gives up, of those that it takes); raises what `claims_of` does."""
    had, has = _values_of(constraint, before), _values_of(constraint, after)
    if had == has:
        return frozenset(), frozenset()
    of_before, of_after = _ids(aggregate, constraint, had), _ids(aggregate, constraint, has)
    return of_before - of_after, of_after - of_before


def _values_of(constraint: Unique[S], state: S) -> Any:
    try:
        return constraint.by(own_copy(state))
    except BaseException as raised:
        error = UnexpectedExit.instead_of(raised)
        if error is raised:
            raise
        raise error from raised


def uniques_of(cls: type) -> tuple[Unique[Any], ...]:
    """The constraints of a class, by name."""
    methods = (by for _, by in inspect.getmembers(cls, inspect.isfunction) if hasattr(by, _MARK))
    return tuple(sorted((Unique(str(getattr(by, _MARK)), by) for by in methods), key=lambda one: one.name))


def unique_faults(aggregate: str, constraints: Sequence[Unique[Any]], is_name: Callable[[str], bool]) -> Iterator[str]:
    """What is wrong with the constraints of an aggregate, each as a sentence."""
    names: set[str] = set()
    for one in constraints:
        where = f"the constraint {one.name!r} of {aggregate!r}"
        if not is_name(one.name):
            yield f"{where} is not called [a-z][a-z0-9_]*"
        if one.name in names:
            yield f"{aggregate!r} has two constraints called {one.name!r}"
        names.add(one.name)
        if len([each for each in inspect.signature(one.by).parameters.values() if each.default is each.empty]) != 1:
            yield f"{where}: {shown_name(one.by)} has to be a method that takes no arguments"


def _ids(aggregate: str, constraint: Unique[Any], told: Value | AbstractSet[Value] | None) -> frozenset[str]:
    if told is None:
        return frozenset()
    values = told if isinstance(told, AbstractSet) else (told,)
    if len(values) > VALUES_MAX:
        raise Refused(
            f"A state of {aggregate!r} with {len(values):,} values of its constraint {constraint.name!r}",
            f"{VALUES_MAX} is the limit",
            "Give each value an aggregate of its own.",
        )
    return frozenset(claim_id(aggregate, constraint.name, value) for value in values)


def _plain(value: Any) -> list[Any]:
    """The value as JSON, with its kind; raises `TypeError`."""
    if isinstance(value, tuple):
        return ["tuple", *map(_scalar, cast("tuple[Any, ...]", value))]
    return _scalar(value)


def _scalar(value: Any) -> list[Any]:
    if isinstance(value, str):
        return ["text", str.__str__(value)]  # the text itself, of a member of an Enum, too
    if isinstance(value, int) and not isinstance(value, bool):
        return ["integer", str(int(value))]  # as text: other languages have no numbers so long
    if isinstance(value, UUID):
        return ["uuid", str(value)]
    if isinstance(value, date) and not isinstance(value, datetime):
        return ["date", value.isoformat()]
    raise TypeError
