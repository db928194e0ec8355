"""PURE: what differs between two states, field by field, with what is personal hidden on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias, cast

from eventjet.domain.personal import MASK

Change: TypeAlias = Literal["same", "changed", "added", "removed"]

ROWS_MAX = 200
"""Fields of one comparison."""
_LOOKED_MAX = 20_000
_DEPTH_MAX = 8
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Field:
    """One field, or what a field holds, on both sides."""

    path: str
    """`lines[2].amount`."""
    before: Any
    after: Any
    change: Change


@dataclass(frozen=True, slots=True)
class Beside:
    """Two states side by side."""

    fields: Sequence[Field]
    cut: int
    """How many more there are."""

    @property
    def changed(self) -> int:
        """How many of those here are not the same."""
        return sum(field.change != "same" for field in self.fields)


def compared(before: Any, after: Any, shown_before: Any, shown_after: Any) -> Beside:
    """Two states as JSON, and the same as they may be shown; what is hidden is told to have changed and no more."""
    found = list(islice(_fields("", (before, after), (shown_before, shown_after), 0), _LOOKED_MAX))
    # What changed is not lost among what did not.
    kept = found if len(found) <= ROWS_MAX else [one for one in found if one.change != "same"][:ROWS_MAX]
    return Beside(kept, len(found) - len(kept))


def _fields(path: str, real: tuple[Any, Any], shown: tuple[Any, Any], depth: int) -> Iterator[Field]:
    change = _change(*real)
    is_whole = MASK in (shown[0], shown[1]) if all(isinstance(one, str) or one is _ABSENT for one in shown) else False
    nested = all(isinstance(one, dict) for one in (*real, *shown)) or all(
        isinstance(one, list) for one in (*real, *shown)
    )
    if nested and not is_whole and depth < _DEPTH_MAX and (change == "changed" or depth == 0):
        for name, inner, told in _parts(path, real, shown):
            yield from _fields(name, inner, told, depth + 1)
        return
    before, after = (None if one is _ABSENT else one for one in shown)
    yield Field(path, before, after, change)


def _parts(
    path: str, real: tuple[Any, Any], shown: tuple[Any, Any]
) -> Iterator[tuple[str, tuple[Any, Any], tuple[Any, Any]]]:
    if isinstance(real[0], list):
        sides = [cast("list[Any]", one) for one in (*real, *shown)]
        for index in range(max(len(sides[0]), len(sides[1]))):
            each = [one[index] if index < len(one) else _ABSENT for one in sides]
            yield f"{path}[{index}]", (each[0], each[1]), (each[2], each[3])
        return
    named = [cast("dict[str, Any]", one) for one in (*real, *shown)]
    for name in dict.fromkeys([*named[0], *named[1]]):
        each = [one.get(name, _ABSENT) for one in named]
        yield f"{path}.{name}" if path else name, (each[0], each[1]), (each[2], each[3])


def _change(before: Any, after: Any) -> Change:
    if before is _ABSENT:
        return "added"
    if after is _ABSENT:
        return "removed"
    return "same" if type(before) is type(after) and before == after else "changed"
